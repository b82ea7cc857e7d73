"""One image, from a file or from bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from tunable_magmax.data.samples import Unreadable
from tunable_magmax.errors import InputError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})


def read_picture(source: Path | bytes, name: str) -> Any:
    """The image in RGB, turned as its camera says; or `Unreadable`."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise InputError('images need pillow: pip install "tunable-magmax[train]"') from None
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        return Unreadable(name, "not an image")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        return Unreadable(name, str(error).split("\n")[0] or type(error).__name__)
