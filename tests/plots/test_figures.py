"""What all pictures share: how they refuse, and where they go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.plots.figure import blank_figure, save_figure


def draw(path: Path) -> None:
    save_figure(blank_figure(2, 1), path)


def test_refusals_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/p\.png cannot be written \(.*\): choose another place"):
        draw(tmp_path / "file" / "p.png")
    with pytest.raises(InputError, match=r"p\.xyz: cannot draw this kind of file"):
        draw(tmp_path / "p.xyz")
