"""Thousands of bad files: each ends in a result or in an error of ours, in little time and memory.

A case is known by its kind and its number: `attempt(folder, kind, number)` runs it again.
"""

import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType

import pytest

from fuzz.targets import TARGETS, prepare

SECONDS = 5
MEMORY = 1 << 30


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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A valid file of every kind, each used once; from then on memory is bounded."""
    place = tmp_path_factory.mktemp("fuzz") / "files"
    prepare(place)
    for target in TARGETS.values():
        target.use(place)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, before[1]))
    yield place
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize("cases", [range(30), pytest.param(range(1000, 2800), marks=pytest.mark.stress)])
@pytest.mark.parametrize("kind", TARGETS)
def test_bad_files_end_in_a_result_or_an_error_of_ours(folder: Path, kind: str, cases: range) -> None:
    found = [wrong for number in cases if (wrong := attempt(folder, kind, number)) is not None]
    assert not found, f"{len(found)} found; the first:\n{found[0]}"
