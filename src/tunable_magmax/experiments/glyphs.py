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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.samples import Samples, places_of
from tunable_magmax.errors import InputError, required

FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif", "DejaVuSerif-Bold")
# Characters that all fonts hold and that look different in each: five of a script in turn, for the benchmark, and
# phonetic and African Latin, Armenian, Georgian, currencies, arrows, planets and notes to pre-train on.
CHARACTERS = (
    "01234ABCDEΓΔΞΣΦДЖИЛЦ∀∂∃∇∈56789FGHJKΨΩαβεЧШЩЪЫ∋∏−∓∕LMNOPζηικλЬЮЯлЂ∗√∛∝∞QRSTUμνξςσЉЊЋЏђ∟∠∣∩∸VWXYZτυφχωєћѢѣѳ"
    "∹∺≂≃≐abdefϗϘϚϝϞҐҒҔҖҘ≑≒≓≔≡ikmnpϟϠϡ϶ϺҚңҤҫҬ≤≥⊂⊃⊆qrtuyϻϼϽҲҺӃӇӋ⊇⊍⊏⊐⊑Æ×ØÞßӘӠӶ⊒⊓⊔⊕⊗æð÷þ⊙⊞⊠⊡⊢⊣⊥⋄#$%&:;<=>?@¢£¤¥§©"
    "¬±¶¿"
)
OTHERS = (
    "ħŁłŒœƁƄƇƊƋƑƓƔƕƗƝƢƣƤƦƧƪƫƳƶƸƺƼƽƾǁǂǶȜȡȤȴȵȸȻȾȿɀɁɍɐɑɕɖɗɘɚɝɞɠɡɤɦɧɬɭɮɰɱɲɳɷɹɺɻɼɾɿʁʂʆʇʊʌʍʎʐʑʓʔʕʗʚʛʝʞʣʤʦʧʨʩʪʫʬʭʮʯԱԲ"
    "ԳԴԵԶԷԸԹԺԻԽԾԿՀՁՃՄՅՆՇՉՊՋՌՎՐՒՔՖ՜՞՟զէըլխձճմնչջփֆაბგდეზთიკლმნოჟრსტუფქღყცძჭჯჰჱჲჳჴჵჶჸჹჺ჻₦€₯₴₸₹←↑→↓↖↗↘↙↜↝↢↣↥↦↧↩↪↫"
    "↬↭↯↰↱↲↳↴↵↶↷↸↹↺↻↼↽↾↿⇀⇁⇂⇃⇄⇅⇆⇇⇈⇉⇊⇋⇌⇐⇑⇒⇓⇖⇗⇘⇙⇞⇤⇥⇫⇮⇰⇱⇲⇳⇵⇶⇷⇸⇼☀☸☹☼☿♀♁♂♃♄♅♆♇♠♡♢♤♥♦♧♩♪♫♬♭♮♯"
)
MASK_SIDE, INK_SIDE = 64, 44  # of a mask, and of the longer side of what is drawn in it
POINTS = 72
SIZE = 32  # of a picture
TRAIN_STREAM, TEST_STREAM, BASE_STREAM = 0, 1, 2  # streams of random numbers
SITE_STREAM = 3  # and the numbers after it, one for each site
SLOPE = 0.15  # of the paper's brightness, from left to right


@dataclass(frozen=True, eq=False)
class Alphabet:
    """Characters with their drawings: `masks` [characters, fonts, MASK_SIDE, MASK_SIDE], ink 255 on 0."""

    characters: str
    masks: NDArray[np.uint8]

    @property
    def names(self) -> tuple[str, ...]:
        """The characters' names, such as `greek small letter alpha`."""
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
    """Returns the characters of the benchmark, and those to pre-train on."""
    required("matplotlib")
    required("PIL")
    first, second = (
        Alphabet(text, np.stack([np.stack([_drawn(font, character) for font in FONTS]) for character in text]))
        for text in (CHARACTERS, OTHERS)
    )
    return first, second


@lru_cache(maxsize=len(FONTS))
def _opened(font: str) -> Any:
    import matplotlib
    from PIL import ImageFont

    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    if not file.exists():
        raise InputError(f"{file}: matplotlib came without this font; install matplotlib again with pip")
    # The basic layout: it is in every build of Pillow.
    return ImageFont.truetype(str(file), POINTS, layout_engine=ImageFont.Layout.BASIC)


def _drawn(font: str, character: str) -> NDArray[np.uint8]:
    """Draws a character as large as fits into a mask."""
    from PIL import Image, ImageDraw

    opened = _opened(font)
    left, upper, right, lower = opened.getbbox(character)
    drawn = Image.new("L", (right - left + 2, lower - upper + 2))
    ImageDraw.Draw(drawn).text((1 - left, 1 - upper), character, fill=255, font=opened)
    drawn = drawn.crop(drawn.getbbox())
    factor = INK_SIDE / max(drawn.size)
    width, height = (max(1, round(factor * side)) for side in drawn.size)
    canvas = Image.new("L", (MASK_SIDE, MASK_SIDE))
    drawn = drawn.resize((width, height), Image.Resampling.BILINEAR)
    canvas.paste(drawn, ((MASK_SIDE - width) // 2, (MASK_SIDE - height) // 2))
    return np.asarray(canvas)


# -- pictures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
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
    """Draws distorted pictures of an alphabet; each has random numbers of its own."""

    def __init__(self, alphabet: Alphabet, seed: int, stream: int, distortion: Distortion) -> None:
        self._masks = _strokes(alphabet.masks)
        self._seed, self._stream, self._distortion = seed, stream, distortion

    def __call__(self, label: int, position: int) -> NDArray[np.uint8]:
        """Draws the picture [SIZE, SIZE] of a character, number `position` of its stream."""
        from PIL import Image

        rng = np.random.default_rng([self._seed, self._stream, position])
        font, stroke = int(rng.integers(len(FONTS))), int(rng.integers(len(self._masks)))
        turn, shear, zoom, right, down, ink, paper, noise, lean = rng.random(9).tolist()
        mask = Image.fromarray(self._masks[stroke, label, font])
        matrix = _matrix(self._distortion, 2 * turn - 1, 2 * shear - 1, zoom, 2 * right - 1, 2 * down - 1)
        placed = mask.transform((SIZE, SIZE), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
        bright, dark = 0.75 + 0.25 * paper, 0.45 * ink
        low, high = self._distortion.grain
        picture = np.asarray(placed, dtype=np.float32) * np.float32((dark - bright) / 255) + np.float32(bright)
        picture += np.linspace(-SLOPE, SLOPE, SIZE, dtype=np.float32) * np.float32(2 * lean - 1)
        picture += np.float32(low + (high - low) * noise) * rng.standard_normal((SIZE, SIZE), dtype=np.float32)
        return (np.float32(255) * picture.clip(0, 1)).astype(np.uint8)


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
    places_of(classes, list(known), "some classes are no glyphs, so they cannot be drawn")
    return [[clean(alphabet, k, font) for font in range(len(FONTS))] for alphabet, k in (known[c] for c in classes)]


def clean(alphabet: Alphabet, label: int, font: int) -> Any:
    """Draws a character as it is in one font."""
    from PIL import Image, ImageOps

    return ImageOps.invert(Image.fromarray(alphabet.masks[label, font]).reduce(MASK_SIDE // SIZE)).convert("RGB")
