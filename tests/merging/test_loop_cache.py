"""Compiled loops are kept for the next run, in a directory that is the user's alone; without one, loops still work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import numpy as np
from tunable_magmax.merging.kernels import loops
plane = np.array([7, 1], np.uint64)
assert loops.count_common(plane, plane) == 4
print(sum(loops.count_common.stats.cache_hits.values()))
"""


def run(folder: Path) -> tuple[int, str]:
    """Returns how many loops came from the directory, and what was said."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout), done.stderr


@pytest.mark.parametrize("kind", ["nbc", *(pytest.param(kind, marks=pytest.mark.stress) for kind in ("nbi", "json"))])
def test_a_loop_is_kept_for_the_user_alone_and_compiled_again_if_a_file_is_damaged(tmp_path: Path, kind: str) -> None:
    assert run(tmp_path) == (0, "")
    [own] = tmp_path.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    assert run(tmp_path) == (1, "")
    [file] = own.rglob(f"*.{kind}")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + bytes(5) + whole[-4:])
    assert run(tmp_path) == (0, "")


@pytest.mark.parametrize("harm", ["open to others", "a link", "a file"])
def test_nothing_of_a_place_that_is_not_the_users_alone_is_run(tmp_path: Path, harm: str) -> None:
    own = tmp_path / "cache" / "tunable-magmax"
    own.parent.mkdir()
    if harm == "open to others":
        run(own.parent)
        own.chmod(0o777)
    elif harm == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.write_bytes(b"")
    hits, said = run(own.parent)
    assert hits == 0
    assert "note:" in said
