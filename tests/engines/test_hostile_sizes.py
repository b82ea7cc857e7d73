"""Small files that ask for much: time, text, memory and disk stay within what their size explains."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError

EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_many_names_that_differ(tmp_path) -> None:
    base, task = (write(tmp_path / f"{k}", {f"block.{j}.{k}.weight": EMPTY for j in range(20_000)}) for k in range(2))
    start = time.monotonic()
    with pytest.raises(InputError) as caught:
        merge_checkpoints(base, [task], tmp_path / "out")
    assert time.monotonic() - start < 30  # it was minutes
    assert len(str(caught.value)) < 10_000
    assert len(caught.value.problems) == 10_001
    assert caught.value.problems[-1] == "and 30,000 more"


def test_many_dimensions(tmp_path) -> None:
    shape = b"[0" + b",1" * 1_000_000 + b"]"
    path = write(tmp_path / "x", b'{"w":{"dtype":"F32","shape":' + shape + b',"data_offsets":[0,0]}}')
    with pytest.raises(InputError, match="'w'"):
        open_checkpoint(path)


def test_a_long_name(tmp_path) -> None:
    path = write(tmp_path / "x", {"w" * 1_000_000: EMPTY})
    with pytest.raises(InputError, match=r"1,000,000 characters") as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < 1000
