"""A merged sentence encoder pools as its base does: the folders of its modules come along."""

import json

import numpy as np
import pytest
from models.tiny import build, changed, save

from tunable_magmax.checkpoints.companions import companion_files, companion_notes
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.prepared import embed_inputs

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
    assert np.array_equal(embed_inputs(merged, TEXTS), embed_inputs(with_assets, TEXTS))
    for name in ("1_Pooling/config.json", "modules.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    files = json.loads((out / "tmx-report.json").read_text())["files"]
    assert {"1_Pooling/config.json", "modules.json"} <= files.keys()


@pytest.mark.parametrize(
    ("listed", "missing"),
    [
        (["", "1_Pooling", "2_Dense"], None),
        (["", "1_Pooling", "3_Pickled"], "3_Pickled"),
        ([3], "modules.json"),
        ("no list", "modules.json"),
    ],
)
def test_a_list_of_modules_comes_along_if_all_of_them_do(tmp_path, listed, missing):
    for name in ("config.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "3_Pickled/pytorch_model.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    modules = [{"path": path} for path in listed] if isinstance(listed, list) else listed
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert ("modules.json" in dict(companion_files(tmp_path))) == (missing is None)
    assert missing is None or missing in next(companion_notes(tmp_path))


def test_weights_of_other_modules_are_copied(tmx, tmp_path, bert):
    base, arguments = bert
    (base / "2_Dense").mkdir()
    (base / "2_Dense" / "model.safetensors").write_bytes(b"weights")
    for command in (["merge", *arguments], ["convert", base]):
        out = tmp_path / command[0]
        assert tmx(*command, "-o", out).code == 0
        assert (out / "2_Dense" / "model.safetensors").read_bytes() == b"weights"
        assert load_encoder(out, "cpu").pooling == "first"
