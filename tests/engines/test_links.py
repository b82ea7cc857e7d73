"""Links in a checkpoint's directory: what leads outside is not copied into an output, and a hub's cache works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.workflows.convert import convert_checkpoint

SECRET = '{"token": "secret"}'


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base with links to a private file, and one to a file of its own."""
    (tmp_path / "private.json").write_text(SECRET)
    folder = tmp_path / "base"
    (folder / "1_Pooling").mkdir(parents=True)
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    save_file({"w": torch.ones(4)}, tmp_path / "task.safetensors")
    for name in ("config.json", "tokenizer.json", "1_Pooling/config.json"):
        (folder / name).symlink_to(tmp_path / "private.json")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "special_tokens_map.json").symlink_to("tokenizer_config.json")
    return folder


def test_what_leads_outside_stays_outside(base: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    merge_checkpoints(base, [tmp_path / "task.safetensors"], tmp_path / "out", notify=notes.append)
    notes += convert_checkpoint(base, tmp_path / "converted").notes
    for out in (tmp_path / "out", tmp_path / "converted"):
        assert not any("secret" in path.read_text() for path in out.rglob("*.json"))
        assert (out / "special_tokens_map.json").read_text() == "{}"
    assert len([note for note in notes if note.startswith(f"config.json, tokenizer.json of {base}: not copied")]) == 2
