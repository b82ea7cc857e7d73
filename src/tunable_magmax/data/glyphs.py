"""The benchmark `glyphs`: characters drawn in several fonts, turned, sheared, shifted, thick or thin, faint and noisy.

No file is needed. Each picture has random numbers of its own (by seed, stream and position), so it does not depend on
what is read before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.alphabet import FONTS, SIDE, Alphabet, alphabets
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError, closest
from tunable_magmax.lottery import GOLDEN, MASK, MIX_A, MIX_B, drum

SIZE = 32
TRAIN, TEST, BASE, SITE = 0, 1, 2, 3  # streams of random numbers; from the last on, one for each site
SLOPE = 0.15  # of the paper's brightness, from left to right
CHOICES = 11  # random numbers of a picture, before its grain


@dataclass(frozen=True, slots=True)
class Distortion:
    """How much at most: turn in degrees, shift in pictures, grain as a deviation of brightness between 0 and 1."""

    turn: float
    shear: float
    zoom: tuple[float, float]
    shift: float
    grain: tuple[float, float]


MILD = Distortion(12.0, 0.15, (0.85, 1.1), 0.05, (0.02, 0.15))  # to pre-train on
STRONG = Distortion(18.0, 0.2, (0.8, 1.1), 0.07, (0.03, 0.2))  # of the benchmark


def glyph_samples(classes: int = 40, train: int = 100, test: int = 50, seed: int = 0) -> tuple[Samples, Samples]:
    """Training and test pictures: `train` and `test` of each of the first `classes` characters.

    >>> train, test = glyph_samples(classes=10, train=3, test=2)
    >>> len(train), train.classes[5], next(train.load([0])).size
    (30, 'latin capital letter a', (32, 32))
    """
    for name, count in (("train", train), ("test", test)):
        if count < 1:
            raise InputError(f"glyphs: {name} is {count}, the number of pictures of each class; give 1 or more")
    labels = [[k for k in range(classes) for _ in range(each)] for each in (train, test)]
    return glyph_pictures(labels[0], classes, seed, TRAIN), glyph_pictures(labels[1], classes, seed, TEST)


def glyph_pictures(labels: Sequence[int], classes: int, seed: int, stream: int) -> Samples:
    """A picture for each label, an index into the first `classes` characters; other streams hold other pictures."""
    alphabet = alphabets()[0].first(classes)
    drawing = Drawing(alphabet, seed, stream, STRONG)

    def load(positions: Sequence[int]) -> Iterator[Any]:
        from PIL import Image

        for position in positions:
            yield Image.fromarray(drawing(labels[position], position)).convert("RGB")

    part = {TRAIN: "training", TEST: "test"}.get(stream, "further")
    return Samples(f"glyphs, seed {seed}, {part} pictures", "image", len(labels), load, alphabet.names, tuple(labels))


class Drawing:
    """Distorted pictures of an alphabet. Random numbers come from the lottery, so that they never change."""

    def __init__(self, alphabet: Alphabet, seed: int, stream: int, distortion: Distortion) -> None:
        self._masks = _strokes(alphabet.masks)
        self._seed, self._stream, self._distortion = seed & MASK, stream, distortion

    def __call__(self, label: int, position: int) -> NDArray[np.uint8]:
        """The picture [SIZE, SIZE] of a character, number `position` of its stream."""
        from PIL import Image

        numbers = _numbers(drum(self._seed, self._stream, position), CHOICES + SIZE * SIZE // 2)
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
    """The lottery's tickets of elements 0 .. count - 1.

    >>> from tunable_magmax.lottery import ticket
    >>> int(_numbers(7, 3)[2]) == ticket(7, 2)
    True
    """
    found = np.arange(1, count + 1, dtype=np.uint64)
    found *= np.uint64(GOLDEN)
    found += np.uint64(start)
    for shift, factor in ((30, MIX_A), (27, MIX_B)):
        found ^= found >> np.uint64(shift)
        found *= np.uint64(factor)
    found ^= found >> np.uint64(31)
    return found


def _strokes(masks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Thin, plain and thick versions [3, characters, fonts, SIDE, SIDE], smoothed for reading every other pixel."""

    def near(choose: Callable[..., Any]) -> NDArray[np.uint8]:
        found = masks
        for axis in (-1, -2):
            found = choose(found, choose(np.roll(found, 1, axis), np.roll(found, -1, axis)))
        return found

    def smooth(version: NDArray[np.uint8]) -> NDArray[np.uint8]:
        total = version.astype(np.uint16)
        for axis in (-1, -2):
            total += np.roll(total, 1, axis)
        return (total // 4).astype(np.uint8)

    return np.stack([smooth(version) for version in (near(np.minimum), masks, near(np.maximum))])


def _matrix(most: Distortion, turn: float, shear: float, zoom: float, right: float, down: float) -> tuple[float, ...]:
    """From places of the picture to places of the mask. `zoom` in 0 .. 1, the others in -1 .. 1."""
    angle, lean = math.radians(most.turn * turn), most.shear * shear
    low, high = most.zoom
    size = SIZE / SIDE * (low + (high - low) * zoom)
    a, d = math.cos(angle) / size, math.sin(angle) / size
    b, e = a * lean - d, d * lean + a
    x, y = SIZE * (0.5 + most.shift * right), SIZE * (0.5 + most.shift * down)
    return a, b, SIDE / 2 - a * x - b * y, d, e, SIDE / 2 - d * x - e * y


def clean_glyphs(classes: Sequence[str]) -> list[list[Any]]:
    """For each class name, its clean pictures: one for each font, dark on light."""
    known = {name: (alphabet, k) for alphabet in alphabets() for k, name in enumerate(alphabet.names)}
    unknown = [name for name in classes if name not in known]
    if unknown:
        shown = ", ".join(f"{name!r}{closest(name, list(known))}" for name in unknown[:5])
        raise InputError(f"{len(unknown)} of the classes are no glyphs, so they cannot be drawn: {shown}")
    return [[clean(alphabet, k, font) for font in range(len(FONTS))] for alphabet, k in (known[c] for c in classes)]


def clean(alphabet: Alphabet, label: int, font: int) -> Any:
    """A character as it is in one font."""
    from PIL import Image, ImageOps

    return ImageOps.invert(Image.fromarray(alphabet.masks[label, font]).reduce(SIDE // SIZE)).convert("RGB")
