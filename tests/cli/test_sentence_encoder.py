"""A merged sentence encoder pools as its base does: the folders of its modules come along."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
from models.tiny import build, changed, save

from tunable_magmax.checkpoints.companions import companion_files
from tunable_magmax.models.encoder import load_encoder

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to mend

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
TEXTS = ["hello bills", "pay my card", "good bye"]


@pytest.fixture
def bert(tmp_path):
    """A base whose first token stands for the text, as sentence-transformers saves it, and bare task checkpoints."""
    base = save(build("bert"), tmp_path / "base")
    pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (base / "1_Pooling").mkdir()
    (base / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (base / "2_Normalize").mkdir()
    (base / "modules.json").write_text(json.dumps(MODULES))
    tasks = [save(changed(build("bert"), seed=k), tmp_path / f"task-{k}", companions=False) for k in (1, 2)]
    return base, ["--base", base, "--task", tasks[0], "--task", tasks[1]]


def test_a_merge_pools_as_its_base(tmx, tmp_path, bert):
    base, arguments = bert
    out = tmp_path / "merged"
    assert tmx("merge", *arguments, "-o", out).code == 0
    assert load_encoder(base, "cpu").pooling == "first"
    merged = load_encoder(out, "cpu")
    assert merged.pooling == "first"
    with_assets = load_encoder(out, "cpu", assets=base)
    assert np.array_equal(merged.embed(TEXTS), with_assets.embed(TEXTS))
    for name in ("1_Pooling/config.json", "modules.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    files = json.loads((out / "tmx-report.json").read_text())["files"]
    assert {"1_Pooling/config.json", "modules.json"} <= files.keys()


def test_mean_pooling_without_the_folder(tmx, tmp_path, bert):
    base, arguments = bert
    (base / "1_Pooling" / "config.json").unlink()
    assert tmx("merge", *arguments, "-o", tmp_path / "merged").code == 0
    assert load_encoder(tmp_path / "merged", "cpu").pooling == "mean"
    assert not (tmp_path / "merged" / "1_Pooling").exists()


def test_it_is_verified_and_replaced_like_any_other(tmx, tmp_path, bert):
    _, arguments = bert
    out = tmp_path / "merged"
    assert tmx("merge", *arguments, "-o", out).code == 0
    assert tmx("verify", out, *arguments).code == 0
    assert tmx("merge", *arguments, "--seed", 1, "--overwrite", "-o", out).code == 0
    (out / "1_Pooling" / "config.json").write_text("{}")
    broken = tmx("verify", out)
    assert broken.code == 1
    assert "1_Pooling/config.json has" in broken.out
    (out / "1_Pooling" / "notes.txt").write_text("mine")
    refused = tmx("merge", *arguments, "--overwrite", "-o", out)
    assert "it holds the folder '1_Pooling'" in refused.err
    assert (out / "1_Pooling" / "notes.txt").exists()


@pytest.mark.parametrize("name", ["../base/config.json", "/etc/hostname", "1_Pooling/../config.json", "a/b/c.json"])
def test_a_report_that_leads_elsewhere_is_not_followed(tmx, tmp_path, bert, name):
    _, arguments = bert
    assert tmx("merge", *arguments, "-o", tmp_path / "merged").code == 0
    report = json.loads((tmp_path / "merged" / "tmx-report.json").read_text())
    report["files"][name] = "0" * 64
    (tmp_path / "merged" / "tmx-report.json").write_text(json.dumps(report))
    result = tmx("verify", tmp_path / "merged")
    assert result.code == 1
    assert f"{name!r} is not the name of a file in it" in result.out


def test_points_of_a_sweep_and_their_replacement(tmx, tmp_path, bert):
    _, arguments = bert
    out = tmp_path / "sweep"
    line = ["--from", "1,0", "--to", "0,1"]
    assert tmx("sweep", *arguments, *line, "--steps", 3, "-o", out).code == 0
    assert load_encoder(out / "step-02", "cpu").pooling == "first"
    assert "3 of them made before" in tmx("sweep", *arguments, *line, "--steps", 3, "-o", out).out
    assert tmx("sweep", *arguments, *line, "--steps", 2, "--overwrite", "-o", out).code == 0
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["step-00", "step-01"]


def test_a_conversion_takes_them_along(tmx, tmp_path, bert):
    base, _ = bert
    assert tmx("convert", base, "-o", tmp_path / "new").code == 0
    assert load_encoder(tmp_path / "new", "cpu").pooling == "first"


def test_only_a_little_configuration_comes_along(tmp_path):
    for name, content in {
        "1_Pooling/config.json": "{}",
        "2_Dense/config.json": "{}",
        "2_Dense/model.safetensors": "",
        "3_Big/config.json": " " * 70_000,
        "4_Deep/more/config.json": "{}",
        "5_Normalize/.keep": "",
        "onnx/config.json": "{}",
        "results/scores.json": "{}",
        ".cache/x.json": "{}",
        "config.json": "{}",
        "trainer_state.json": "{}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert dict(companion_files(tmp_path)) == {
        name: tmp_path / name for name in ("1_Pooling/config.json", "config.json")
    }


@pytest.mark.parametrize(
    ("listed", "along"),
    [
        (["", "1_Pooling"], True),
        (["", "1_Pooling", "2_Normalize"], True),
        (["", "1_Pooling", "2_Dense"], False),
        ([3], False),
        ("no list", False),
    ],
)
def test_a_list_of_modules_comes_along_if_all_of_them_do(tmp_path, listed, along):
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    modules = [{"path": path} for path in listed] if isinstance(listed, list) else listed
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert ("modules.json" in dict(companion_files(tmp_path))) == along
