"""What lies beside merged weights: the card names the tasks, config.json the type, and nothing leads elsewhere."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sequences import SMALL, save_sequence, sequence

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.workflows.convert import convert_checkpoint


@pytest.fixture
def files(tmp_path):
    return save_sequence(tmp_path / "in", *sequence(3, SMALL))


def checkpoint(folder: Path, kind: torch.dtype, value: float, **config: str) -> Path:
    """A weight of a type beside a norm of float32."""
    folder.mkdir()
    tensors = {"w": torch.full((4, 4), value, dtype=kind), "norm": torch.ones(4)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", **config}))
    return folder


def test_the_card_holds_names_whatever_they_look_like(files, tmp_path) -> None:
    merge_checkpoints(*files, tmp_path / "out", names=("birds", "a|b\n`c`", "birds"))
    rows = [row for row in (tmp_path / "out" / "README.md").read_text().splitlines() if row.startswith("| task ")]
    told = ["| task", "| task 1: birds", r"| task 2: a\|b \`c\`", "| task 3: birds"]
    assert [row.split(" | ")[0] for row in rows] == told


@pytest.mark.parametrize(("names", "found"), [(["a", "b"], "2 names"), ("abc", "list"), (["a", "b", 3], "list")])
def test_names_that_do_not_fit_are_refused_beforehand(files, tmp_path, names, found) -> None:
    with pytest.raises(InputError, match=found):
        merge_checkpoints(*files, tmp_path / "out", names=names)
    assert not (tmp_path / "out").exists()


def test_a_base_is_not_named_after_what_it_was_made_of(tmp_path) -> None:
    """A configuration may still have the name of an ancestor, whose weights are others."""
    base = checkpoint(tmp_path / "base", torch.float32, 0.0, _name_or_path="someone/ancestor")
    merge_checkpoints(base, [checkpoint(tmp_path / "task", torch.float32, 1.0)], tmp_path / "out")
    for name in ("README.md", "tmx-config.yaml"):
        assert "ancestor" not in (tmp_path / "out" / name).read_text()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_bfloat16_base_with_float32_tasks_is_float32(tmp_path: Path, key: str) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16, 0.0, **{key: "bfloat16"})
    task = checkpoint(tmp_path / "task", torch.float32, 1.0)
    report = merge_checkpoints(base, [task], tmp_path / "out", scale=1)
    assert report.tensors["w"].dtype == "F32"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "toy", key: "float32"}
    assert not report.warnings


def test_mixed_types_are_told(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16, 0.0, dtype="bfloat16")
    task = checkpoint(tmp_path / "task", torch.bfloat16, 1.0)
    (warning,) = merge_checkpoints(base, [task], tmp_path / "out", scale=1).warnings
    assert "several types (bfloat16, float32)" in warning
    assert not merge_checkpoints(base, [task], tmp_path / "half", scale=1, out_dtype="bfloat16").warnings
    for out in ("out", "half"):
        assert json.loads((tmp_path / out / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_leads_outside_stays_outside(tmp_path: Path) -> None:
    """A base with links to a private file, and one to a file of its own."""
    base, task = checkpoint(tmp_path / "base", torch.float32, 0.0), checkpoint(tmp_path / "task", torch.float32, 1.0)
    (tmp_path / "private.json").write_text('{"token": "secret"}')
    (base / "1_Pooling").mkdir()
    (base / "config.json").unlink()
    for name in ("config.json", "tokenizer.json", "1_Pooling/config.json"):
        (base / name).symlink_to(tmp_path / "private.json")
    (base / "tokenizer_config.json").write_text("{}")
    (base / "special_tokens_map.json").symlink_to("tokenizer_config.json")
    notes: list[str] = []
    merge_checkpoints(base, [task], tmp_path / "out", notify=notes.append)
    notes += convert_checkpoint(base, tmp_path / "converted").notes
    for out in (tmp_path / "out", tmp_path / "converted"):
        assert not any("secret" in path.read_text() for path in out.rglob("*.json"))
        assert (out / "special_tokens_map.json").read_text() == "{}"
    assert len([note for note in notes if note.startswith(f"config.json, tokenizer.json of {base}: not copied")]) == 2
