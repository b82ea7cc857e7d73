"""Which characters there are to draw: those of matplotlib's fonts, less the ones that look like another.

Two lists that share no character and no look: one for the benchmark `glyphs`, one to pre-train its encoder on.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError

FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif", "DejaVuSerif-Bold")
# The common letters of a script first: few classes should be ones that people know.
SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "digits": ((0x30, 0x39),),
    "latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0xFF)),
    "greek": ((0x391, 0x3C9), (0x3CF, 0x3FF)),
    "cyrillic": ((0x410, 0x44F), (0x400, 0x40F), (0x450, 0x52F)),
    "signs": ((0x2200, 0x22FF), (0x21, 0x2F), (0x3A, 0x40), (0xA1, 0xBF)),
}
# Phonetic and African Latin, Armenian, Georgian, currencies, arrows, planets and notes.
OTHERS = (
    (0x100, 0x2AF),
    (0x531, 0x588),
    (0x10A0, 0x10FF),
    (0x20A0, 0x20BF),
    (0x2190, 0x21FF),
    (0x2600, 0x266F),
)
ROUND = 5  # characters of one script that follow each other
CATEGORIES = ("Lu", "Ll", "Lo", "Nd", "Sm", "Sc", "So", "Po")
SIDE, INK = 64, 44  # of a mask, and of the longer side of what is drawn in it
POINTS = 72
SMALLEST = 0.3  # of the font's size: a dot made large is no longer a dot
ALIKE, ALIKE_ONCE = 0.92, 0.97  # correlations that are too much: mean over fonts, and in any one font
MISSING = 'the glyphs need pillow and the fonts of matplotlib: pip install "tunable-magmax[train,report]"'


@dataclass(frozen=True, eq=False)
class Alphabet:
    """Characters with their drawings: `masks` [characters, fonts, SIDE, SIDE], ink 255 on 0."""

    characters: tuple[str, ...]
    masks: NDArray[np.uint8]

    @property
    def names(self) -> tuple[str, ...]:
        """What the characters are called, as in `greek small letter alpha`."""
        return tuple(unicodedata.name(character).lower() for character in self.characters)

    def first(self, count: int) -> Alphabet:
        """The first `count` characters; an error if there are fewer."""
        if not 2 <= count <= len(self.characters):
            raise InputError(
                f"glyphs: {count} classes asked for, and there are 2 to {len(self.characters)} characters that look "
                "different enough; give a number of classes in between"
            )
        return Alphabet(self.characters[:count], self.masks[:count])


@lru_cache(maxsize=1)
def alphabets() -> tuple[Alphabet, Alphabet]:
    """The characters of the benchmark, five of each script in turn, and the others, in order of code points."""
    _require_extras()
    own = {script: _drawable(ranges) for script, ranges in SCRIPTS.items()}
    others = _drawable(OTHERS)
    characters = [c for script in own.values() for c in script] + others
    drawn = [[_drawn(font, character) for font in FONTS] for character in characters]
    masks = np.stack([np.stack([mask for mask, _ in row]) for row in drawn])
    kept = _distinct(masks, [min(size for _, size in row) >= SMALLEST for row in drawn])
    place = {c: k for k, c in enumerate(characters) if kept[k]}
    taken = _in_turn([[c for c in script if c in place] for script in own.values()])
    rest = [c for c in others if c in place]
    first, second = (Alphabet(tuple(part), masks[[place[c] for c in part]]) for part in (taken, rest))
    return first, second


def _drawable(ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Characters of the ranges that all fonts hold, but none that is another one with an accent or in a style."""
    codes = [code for low, high in ranges for code in range(low, high + 1)]
    held = set.intersection(*(_held(font) for font in FONTS))
    return [
        chr(code)
        for code in codes
        if code in held
        and unicodedata.category(chr(code)) in CATEGORIES
        and not unicodedata.decomposition(chr(code))
        and unicodedata.name(chr(code), None) is not None
    ]


def _in_turn(scripts: Sequence[Sequence[str]]) -> list[str]:
    found: list[str] = []
    for start in range(0, max(map(len, scripts)), ROUND):
        for script in scripts:
            found += script[start : start + ROUND]
    return found


def _distinct(masks: NDArray[np.uint8], allowed: Sequence[bool]) -> list[bool]:
    """Whether each character looks unlike all kept before it, by correlations of blurred drawings in the same font."""
    count, fonts = masks.shape[:2]
    coarse = masks.reshape(count, fonts, SIDE // 2, 2, SIDE // 2, 2).mean(axis=(3, 5), dtype=np.float32)
    for axis in (2, 3):
        # A hat of five cells: strokes of slightly different places still overlap.
        parts = [share * np.roll(coarse, step, axis) for step, share in zip(range(-2, 3), (1, 2, 3, 2, 1), strict=True)]
        coarse = np.sum(parts, axis=0) / 9
    rows = coarse.reshape(count, fonts, -1)
    rows -= rows.mean(axis=2, keepdims=True)
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    alike = np.stack([rows[:, font] @ rows[:, font].T for font in range(fonts)])
    same = (alike.mean(axis=0) >= ALIKE) | (alike.max(axis=0) >= ALIKE_ONCE)
    kept: list[bool] = []
    for k in range(count):
        kept.append(allowed[k] and not (same[k, :k] & np.array(kept, dtype=bool)).any())
    return kept


# -- fonts ------------------------------------------------------------------------------------------------------------


def _require_extras() -> None:
    if find_spec("matplotlib") is None or find_spec("PIL") is None:
        raise InputError(MISSING)


def _file(font: str) -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"


def _held(font: str) -> set[int]:
    """The code points that a font has a drawing for."""
    file = _file(font)
    from matplotlib.ft2font import FT2Font

    if not file.exists():
        raise InputError(f"{file}: matplotlib came without this font; install matplotlib again with pip")
    return set(FT2Font(str(file)).get_charmap())


@lru_cache(maxsize=len(FONTS))
def _opened(font: str) -> Any:
    from PIL import ImageFont

    # The basic layout: it is in every build of Pillow.
    return ImageFont.truetype(str(_file(font)), POINTS, layout_engine=ImageFont.Layout.BASIC)


def _drawn(font: str, character: str) -> tuple[NDArray[np.uint8], float]:
    """A character as large as fits, in the middle; and its longer side in the font, which counts as 1."""
    from PIL import Image, ImageDraw

    opened = _opened(font)
    left, upper, right, lower = opened.getbbox(character)
    drawn = Image.new("L", (right - left + 2, lower - upper + 2))
    ImageDraw.Draw(drawn).text((1 - left, 1 - upper), character, fill=255, font=opened)
    drawn = drawn.crop(drawn.getbbox())
    factor = INK / max(drawn.size)
    width, height = (max(1, round(factor * side)) for side in drawn.size)
    canvas = Image.new("L", (SIDE, SIDE))
    canvas.paste(drawn.resize((width, height), Image.Resampling.BILINEAR), ((SIDE - width) // 2, (SIDE - height) // 2))
    return np.asarray(canvas), 1 / factor * INK / POINTS
