"""Thousands of bad files: each ends in a result or in an error of ours, in little time and memory.

A case is known by its kind and its number: `attempt(folder, kind, number)` runs it again.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import FrameType

import pytest

from fuzz.targets import TARGETS, prepare

SECONDS = 5
MEMORY = 1 << 30
FEW, MANY = 330, 20_000
KINDS = list(TARGETS)


class TooSlowError(Exception):
    """A case that takes longer than it may."""


def _ring(number: int, frame: FrameType | None) -> None:
    raise TooSlowError(f"more than {SECONDS} seconds")


def attempt(folder: Path, kind: str, number: int) -> str | None:
    """Runs one case; returns what is wrong, if something is."""
    target = TARGETS[kind]
    file = folder / target.file
    valid = file.read_bytes()
    before = signal.signal(signal.SIGALRM, _ring)
    file.write_bytes(target.changed(valid, Random(f"{kind} {number}")))
    signal.alarm(SECONDS)
    try:
        target.use(folder)
    except Exception:
        return f"case {kind!r} {number}:\n{traceback.format_exc()}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        file.write_bytes(valid)
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fuzz") / "files"
    prepare(place)
    return place


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_bad_files_end_in_a_result_or_an_error_of_ours(folder: Path, kind: str) -> None:
    TARGETS[kind].use(folder)  # the valid file is fine
    found = [wrong for number in range(FEW // len(KINDS)) if (wrong := attempt(folder, kind, number)) is not None]
    assert not found, f"{len(found)} found; the first:\n{found[0]}"


def attempt_many(kind: str, numbers: range) -> list[str]:
    """Runs many cases in a process of its own, whose memory is bounded once it has warmed up."""
    import warnings

    warnings.simplefilter("ignore")
    os.fsync = lambda descriptor: None  # nothing here has to outlive a crash
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "files"
        prepare(folder)
        TARGETS[kind].use(folder)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, before[1]))
        try:
            return [wrong for number in numbers if (wrong := attempt(folder, kind, number)) is not None]
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.stress
@pytest.mark.skipif(sys.platform != "linux", reason="bounds memory by what /proc says")
def test_many_bad_files() -> None:
    step = MANY // len(KINDS) // 2
    jobs = [(kind, range(1000 + k * step, 1000 + (k + 1) * step)) for kind in KINDS for k in range(2)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = [wrong for wrongs in pool.map(attempt_many, *zip(*jobs, strict=True)) for wrong in wrongs]
    assert not found, f"{len(found)} found; the first of them:\n" + "\n".join(found[:5])
