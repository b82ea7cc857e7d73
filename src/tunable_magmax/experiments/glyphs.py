"""The benchmark `glyphs`: characters drawn in several fonts, turned, sheared, shifted, thick or thin, faint and noisy.

No file is needed. Each picture has random numbers of its own (by seed, stream and position), so it does not depend on
what is read before it.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.lottery import GOLDEN, MASK, MIX_A, MIX_B, lottery_state

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
MASK_SIDE, INK_SIDE = 64, 44  # of a mask, and of the longer side of what is drawn in it
POINTS = 72
SMALLEST = 0.3  # of the font's size: a dot made large is no longer a dot
ALIKE, ALIKE_ONCE = 0.92, 0.97  # correlations that are too much: mean over fonts, and in any one font
SIZE = 32  # of a picture
TRAIN_STREAM, TEST_STREAM, BASE_STREAM = 0, 1, 2  # streams of random numbers
SITE_STREAM = 3  # and the numbers after it, one for each site
SLOPE = 0.15  # of the paper's brightness, from left to right
CHOICES = 11  # random numbers of a picture, before its grain
MISSING = 'the glyphs need pillow and the fonts of matplotlib: pip install "tunable-magmax[train,report]"'


@dataclass(frozen=True, eq=False)
class Alphabet:
    """Characters with their drawings: `masks` [characters, fonts, MASK_SIDE, MASK_SIDE], ink 255 on 0."""

    characters: tuple[str, ...]
    masks: NDArray[np.uint8]

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the characters' names, such as `greek small letter alpha`."""
        return tuple(unicodedata.name(character).lower() for character in self.characters)

    def first(self, count: int) -> Alphabet:
        """Returns the first `count` characters; raises an error if there are fewer."""
        if not 2 <= count <= len(self.characters):
            raise InputError(
                f"glyphs: {count} classes asked for, and there are 2 to {len(self.characters)} characters that look "
                "different enough; give a number of classes in between"
            )
        return Alphabet(self.characters[:count], self.masks[:count])


@lru_cache(maxsize=1)
def alphabets() -> tuple[Alphabet, Alphabet]:
    """Returns the characters of the benchmark, five of each script in turn, and those to pre-train on."""
    if find_spec("matplotlib") is None or find_spec("PIL") is None:
        raise InputError(MISSING)
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
    """Returns the characters of some ranges that all fonts hold, without accented and styled forms of others."""
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
    characters: list[str] = []
    for start in range(0, max(map(len, scripts)), ROUND):
        for script in scripts:
            characters += script[start : start + ROUND]
    return characters


def _distinct(masks: NDArray[np.uint8], allowed: Sequence[bool]) -> list[bool]:
    """Says for each character whether it looks unlike all kept before it, by correlations of blurred drawings."""
    count, fonts = masks.shape[:2]
    coarse = masks.reshape(count, fonts, MASK_SIDE // 2, 2, MASK_SIDE // 2, 2).mean(axis=(3, 5), dtype=np.float32)
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


def _file(font: str) -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"


def _held(font: str) -> set[int]:
    """Returns the code points that a font has a drawing for."""
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
    """Draws a character as large as fits; also returns its longer side as a share of the font's size."""
    from PIL import Image, ImageDraw

    opened = _opened(font)
    left, upper, right, lower = opened.getbbox(character)
    drawn = Image.new("L", (right - left + 2, lower - upper + 2))
    ImageDraw.Draw(drawn).text((1 - left, 1 - upper), character, fill=255, font=opened)
    drawn = drawn.crop(drawn.getbbox())
    factor = INK_SIDE / max(drawn.size)
    width, height = (max(1, round(factor * side)) for side in drawn.size)
    canvas = Image.new("L", (MASK_SIDE, MASK_SIDE))
    canvas.paste(
        drawn.resize((width, height), Image.Resampling.BILINEAR), ((MASK_SIDE - width) // 2, (MASK_SIDE - height) // 2)
    )
    return np.asarray(canvas), 1 / factor * INK_SIDE / POINTS


# -- pictures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Distortion:
    """The largest distortions: turn in degrees, shift as a share of the picture, grain in brightness (0 to 1)."""

    turn: float
    shear: float
    zoom: tuple[float, float]
    shift: float
    grain: tuple[float, float]


MILD = Distortion(12.0, 0.15, (0.85, 1.1), 0.05, (0.02, 0.15))  # to pre-train on
STRONG = Distortion(18.0, 0.2, (0.8, 1.1), 0.07, (0.03, 0.2))  # of the benchmark


def glyph_samples(classes: int = 40, train: int = 100, test: int = 50, seed: int = 0) -> tuple[Samples, Samples]:
    """Draws training and test pictures: `train` and `test` of each of the first `classes` characters.

    >>> train, test = glyph_samples(classes=10, train=3, test=2)
    >>> len(train), train.classes[5], next(train.load([0])).size
    (30, 'latin capital letter a', (32, 32))
    """
    for name, count in (("train", train), ("test", test)):
        if count < 1:
            raise InputError(f"glyphs: {name} is {count}, the number of pictures of each class; give 1 or more")
    labels = [[k for k in range(classes) for _ in range(each)] for each in (train, test)]
    return glyph_pictures(labels[0], classes, seed, TRAIN_STREAM), glyph_pictures(labels[1], classes, seed, TEST_STREAM)


def glyph_pictures(labels: Sequence[int], classes: int, seed: int, stream: int) -> Samples:
    """Draws a picture for each label, an index into the first `classes` characters; streams differ in pictures."""
    alphabet = alphabets()[0].first(classes)
    drawing = GlyphDrawing(alphabet, seed, stream, STRONG)

    def load(positions: Sequence[int]) -> Iterator[Any]:
        from PIL import Image

        for position in positions:
            yield Image.fromarray(drawing(labels[position], position)).convert("RGB")

    part = {TRAIN_STREAM: "training", TEST_STREAM: "test"}.get(stream, "further")
    return Samples(f"glyphs, seed {seed}, {part} pictures", "image", len(labels), load, alphabet.names, tuple(labels))


class GlyphDrawing:
    """Draws distorted pictures of an alphabet. Random numbers come from the lottery, so that they never change."""

    def __init__(self, alphabet: Alphabet, seed: int, stream: int, distortion: Distortion) -> None:
        self._masks = _strokes(alphabet.masks)
        self._seed, self._stream, self._distortion = seed & MASK, stream, distortion

    def __call__(self, label: int, position: int) -> NDArray[np.uint8]:
        """Draws the picture [SIZE, SIZE] of a character, number `position` of its stream."""
        from PIL import Image

        numbers = _numbers(lottery_state(self._seed, self._stream, position), CHOICES + SIZE * SIZE // 2)
        font, stroke = int(numbers[0]) % len(FONTS), int(numbers[1]) % len(self._masks)
        turn, shear, zoom, right, down, ink, paper, noise, lean = (2.0**-64 * numbers[2:CHOICES]).tolist()
        mask = Image.fromarray(self._masks[stroke, label, font])
        matrix = _matrix(self._distortion, 2 * turn - 1, 2 * shear - 1, zoom, 2 * right - 1, 2 * down - 1)
        placed = mask.transform((SIZE, SIZE), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
        bright, dark = 0.75 + 0.25 * paper, 0.45 * ink
        slope = np.linspace(-SLOPE, SLOPE, SIZE, dtype=np.float32) * np.float32(2 * lean - 1)
        # The sum of four even numbers from 0 to 255 is nearly normal, with mean 510 and deviation 148.
        grain = numbers[CHOICES:].view(np.uint8).reshape(4, SIZE, SIZE).sum(axis=0, dtype=np.float32) - np.float32(510)
        picture = np.asarray(placed, dtype=np.float32) * np.float32((dark - bright) / 255)
        picture += slope + np.float32(bright)
        low, high = self._distortion.grain
        picture += grain * np.float32((low + (high - low) * noise) / 148)
        return (np.float32(255) * picture.clip(0, 1)).astype(np.uint8)


def _numbers(start: int, count: int) -> NDArray[np.uint64]:
    """Returns the lottery's tickets of elements 0 .. count - 1.

    >>> from tunable_magmax.lottery import ticket
    >>> int(_numbers(7, 3)[2]) == ticket(7, 2)
    True
    """
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    numbers *= np.uint64(GOLDEN)
    numbers += np.uint64(start)
    for shift, factor in ((30, MIX_A), (27, MIX_B)):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def _strokes(masks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns thin, plain and thick versions [3, characters, fonts, MASK_SIDE, MASK_SIDE], smoothed for halving."""

    def near(choose: Callable[..., Any]) -> NDArray[np.uint8]:
        shape = masks
        for axis in (-1, -2):
            shape = choose(shape, choose(np.roll(shape, 1, axis), np.roll(shape, -1, axis)))
        return shape

    def smooth(version: NDArray[np.uint8]) -> NDArray[np.uint8]:
        total = version.astype(np.uint16)
        for axis in (-1, -2):
            total += np.roll(total, 1, axis)
        return (total // 4).astype(np.uint8)

    return np.stack([smooth(version) for version in (near(np.minimum), masks, near(np.maximum))])


def _matrix(most: Distortion, turn: float, shear: float, zoom: float, right: float, down: float) -> tuple[float, ...]:
    """Returns the affine map from picture to mask. `zoom` is in 0 .. 1, the others in -1 .. 1."""
    angle, lean = math.radians(most.turn * turn), most.shear * shear
    low, high = most.zoom
    size = SIZE / MASK_SIDE * (low + (high - low) * zoom)
    a, d = math.cos(angle) / size, math.sin(angle) / size
    b, e = a * lean - d, d * lean + a
    x, y = SIZE * (0.5 + most.shift * right), SIZE * (0.5 + most.shift * down)
    return a, b, MASK_SIDE / 2 - a * x - b * y, d, e, MASK_SIDE / 2 - d * x - e * y


def clean_glyphs(classes: Sequence[str]) -> list[list[Any]]:
    """Draws clean pictures of each class: one in each font, dark on light."""
    known = {name: (alphabet, k) for alphabet in alphabets() for k, name in enumerate(alphabet.names)}
    unknown = [name for name in classes if name not in known]
    if unknown:
        shown = some_of(unknown, show=lambda name: f"{name!r}{closest(name, list(known))}")
        raise InputError(f"{len(unknown)} of the classes are no glyphs, so they cannot be drawn: {shown}")
    return [[clean(alphabet, k, font) for font in range(len(FONTS))] for alphabet, k in (known[c] for c in classes)]


def clean(alphabet: Alphabet, label: int, font: int) -> Any:
    """Draws a character as it is in one font."""
    from PIL import Image, ImageOps

    return ImageOps.invert(Image.fromarray(alphabet.masks[label, font]).reduce(MASK_SIDE // SIZE)).convert("RGB")
