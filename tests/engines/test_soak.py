"""Two hundred merges in a row in one process: no growth, no open files, no threads, nothing left on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc tells memory and open files on Linux only"),
]

GROWTH_KIB = 6 << 10
"""More than rounds differ by without a leak (less than 1 MiB), less than 120 leaks of 64 KiB."""
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""With an arena for each thread, the resident set varies by some 40 MiB, whoever leaks."""
OUTPUTS = {"out", "out.log", "out.report.json", "out.safetensors", "out.safetensors.log"}


def soak(folder: Path, *arguments: Any) -> dict[str, Any]:
    script = Path(__file__).with_name("soak.py")
    command = [sys.executable, script, folder / "soak", *map(str, arguments)]
    paths = os.pathsep.join(filter(None, (str(script.parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": paths}
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    sys.stdout.write(f"{found['merges']} merges, KiB after each fifth: {found['resident']}\n")  # pytest -rP shows it
    return found


def problems(found: dict[str, Any]) -> set[str]:
    """What leaks. The first two fifths warm up: by then every kind of merge has been seen."""
    kinds = {
        "memory": found["resident"][-1] - found["resident"][1] > GROWTH_KIB,
        "handle": found["handles"][-1] != found["handles"][1],
        "thread": found["threads"][-1] != found["threads"][1],
        "file": not set(found["left"]) <= OUTPUTS,
    }
    return {kind for kind, leaks in kinds.items() if leaks}


def test_two_hundred_merges_leave_nothing(tmp_path) -> None:
    found = soak(tmp_path, 200)
    assert found["merges"] == 200
    assert problems(found) == set()


@pytest.mark.parametrize("kind", ["memory", "handle", "thread", "file"])
def test_a_leak_would_be_found(tmp_path, kind) -> None:
    assert kind in problems(soak(tmp_path, 200, kind))
