"""Small files that ask for much: time, text, memory and disk stay within what their size explains."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.workflows.convert import convert_checkpoint
from tunable_magmax.workflows.merge import MergeOptions, check_merge
from tunable_magmax.workflows.options import Checkpoints

EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def planned_problems(base: Path, task: Path) -> tuple[str, ...]:
    start = time.monotonic()
    with pytest.raises(InputError) as caught:
        merge_checkpoints(base, [task], base.with_name("out"))
    assert time.monotonic() - start < 30  # it was minutes
    assert len(str(caught.value)) < 10_000
    return caught.value.problems


# -- headers ----------------------------------------------------------------------------------------------------------


def test_many_names_that_differ(tmp_path) -> None:
    base, task = (write(tmp_path / f"{k}", {f"block.{j}.{k}.weight": EMPTY for j in range(20_000)}) for k in range(2))
    problems = planned_problems(base, task)
    assert len(problems) == 10_001
    assert problems[-1] == "and 30,000 more"


def test_many_tied_names_that_only_one_side_has(tmp_path) -> None:
    tensor = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    base, task = (
        write(tmp_path / f"{k}", {"__metadata__": {f"{k}.{j}": "w" for j in range(20_000)}, **tensor}, bytes(4))
        for k in range(2)
    )
    start = time.monotonic()
    check_merge(None, MergeOptions(tmp_path / "out", Checkpoints(base, [str(task)])))
    assert time.monotonic() - start < 10


def test_many_dimensions(tmp_path) -> None:
    shape = b"[0" + b",1" * 1_000_000 + b"]"
    path = write(tmp_path / "x", b'{"w":{"dtype":"F32","shape":' + shape + b',"data_offsets":[0,0]}}')
    with pytest.raises(InputError, match=r"'w' has 1,000,001 dimensions, at most 64 are allowed"):
        open_checkpoint(path)


def test_a_long_name(tmp_path) -> None:
    path = write(tmp_path / "x", {"w" * 1_000_000: EMPTY})
    with pytest.raises(InputError, match=r"1,000,000 characters") as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < 1000


def test_an_index_of_many_missing_shards(tmp_path) -> None:
    weight_map = {f"w{k}": f"{k}.safetensors" for k in range(20_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match="and 19,980 more") as caught:
        open_checkpoint(tmp_path)
    assert len(str(caught.value)) < 5000


# -- files beside the weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_side_file_that_cannot_be_read_is_found_before_the_merge(tmp_path, monkeypatch, name) -> None:
    for folder, value in (("base", 0.0), ("task", 1.0)):
        (tmp_path / folder).mkdir()
        save_file({"w": torch.full((4,), value)}, tmp_path / folder / "model.safetensors")
    (tmp_path / "base" / name).write_text("[1")
    if name != "config.json":  # whose content is nobody's business here
        monkeypatch.setattr("tunable_magmax.checkpoints.companions.open_regular", unreadable)
    for work in (
        lambda: merge_checkpoints(tmp_path / "base", [tmp_path / "task"], tmp_path / "out"),
        lambda: convert_checkpoint(tmp_path / "base", tmp_path / "out"),
    ):
        with pytest.raises(InputError, match=name):
            work()
        assert not list(tmp_path.glob("out*"))


def unreadable(path: Path) -> None:
    raise PermissionError(13, "Permission denied", str(path))
