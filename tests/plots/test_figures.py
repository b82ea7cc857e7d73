"""What all pictures share: how they refuse, and where they go."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.plots.charts import save_chart
from tunable_magmax.plots.figure import LONGEST_NAME, short
from tunable_magmax.preference.preference import Preference

NAMES = ("$a", "\U0001f600", "x" * 60)


def draw(path: Path) -> None:
    save_chart(Preference((3, 1, 2), tasks=NAMES), path)


def test_any_name_is_drawn_into_a_new_folder(tmp_path: Path) -> None:
    draw(tmp_path / "new" / "p.svg")
    text = (tmp_path / "new" / "p.svg").read_text()
    assert "x" * (LONGEST_NAME + 1) not in text
    assert "x" * (LONGEST_NAME - 3) + "..." in text


def test_refusals_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/p\.png cannot be written \(.*\): choose another place"):
        draw(tmp_path / "file" / "p.png")
    with pytest.raises(InputError, match=r"p\.xyz: cannot draw this kind of file"):
        draw(tmp_path / "p.xyz")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def lacking(name: str, *rest: object, **named: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(InputError, match=r'pip install "tunable-magmax\[report\]"'):
        draw(tmp_path / "p.png")


def test_a_short_name_stays_as_it_is() -> None:
    assert short("x" * LONGEST_NAME) == "x" * LONGEST_NAME
    assert len(short("x" * 99)) == LONGEST_NAME
