"""One image, from a file or from bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from tunable_magmax.data.samples import Unreadable
from tunable_magmax.errors import InputError

# Pillow tries its formats one after the other; asking for the right one first halves the time of a small image.
_SIGNATURES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"RIFF": "WEBP"}
_ORIENTATION = 0x0112
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})


def read_picture(source: Path | bytes, name: str) -> Any:
    """The image in RGB, turned as its camera says; or `Unreadable`."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise InputError('images need pillow: pip install "tunable-magmax[train]"') from None
    try:
        with _opened(Image, source) as image:
            image.load()
            # What the camera says of a PNG is known only when the whole file is read.
            turned = image if image.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)
            # Not the open file's own image, which is closed on the way out.
            return turned.convert("RGB")
    except UnidentifiedImageError:
        return Unreadable(name, "not an image")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        return Unreadable(name, str(error).split("\n")[0] or type(error).__name__)


def _opened(module: Any, source: Path | bytes) -> Any:
    if not isinstance(source, bytes):
        return module.open(source)
    told = next((name for start, name in _SIGNATURES.items() if source.startswith(start)), None)
    if told is not None:
        try:
            return module.open(io.BytesIO(source), formats=[told])
        except module.UnidentifiedImageError:
            pass  # not what it looks like: let every format try
    return module.open(io.BytesIO(source))
