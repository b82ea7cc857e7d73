"""Opens folders of images, and decodes images in several threads."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tunable_magmax.data.samples import Samples, Unreadable
from tunable_magmax.errors import InputError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_SUFFIXES = ", ".join(sorted(IMAGE_SUFFIXES))
# Pillow tries its formats one after the other; asking for the right one first halves the time of a small image.
_SIGNATURES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"RIFF": "WEBP"}
_ORIENTATION = 0x0112
MOST_THREADS = 16
# Encoded bytes of an image from which on threads win. Of smaller ones Python's own work is the larger part, and
# threads that wait for each other's lock are slower than one (measured: 1.5 times for 32 px images).
WORTH_BYTES = 8 << 10
IMAGES_AHEAD = 4  # images in work or ready for each thread
_PROBED = 32  # files whose size decides about threads

# -- folders ----------------------------------------------------------------------------------------------------------


def open_image_folder(path: Path) -> Samples:
    """Opens the images of a folder, in sorted order. Class folders give labels; images outside of them have none."""
    loose, folders = _images(path.iterdir()), class_folders(path)
    labelled = any(images for _, images in folders)
    if loose and labelled:
        raise InputError(
            f"{path} holds {len(loose)} loose images as well as folders of images: put every image into the folder of "
            "its class, or all into one folder"
        )
    if not loose and not labelled:
        raise InputError(f"{path} holds no images ({_SUFFIXES}), neither loose nor in class folders")
    return open_image_files(loose, str(path), path) if loose else image_samples(path, folders)


def open_image_files(files: Sequence[Path], origin: str, root: Path | None = None) -> Samples:
    """Opens image files in the order given, each called by its path, or by that below `root`."""

    def read(file: Path) -> Any:
        return read_picture(file, str(file if root is None else file.relative_to(root)))

    def load(positions: Sequence[int]) -> Iterator[Any]:
        probed = [files[position] for position in positions[:_PROBED]]
        size = sum(file.stat().st_size if file.exists() else 0 for file in probed) / max(1, len(probed))
        return in_order(read, (files[position] for position in positions), threads_for(size))

    return Samples(origin, "image", len(files), load)


def images_below(path: Path) -> list[Path]:
    """Returns all images in a folder and in the folders inside it, sorted."""
    return _images(path.rglob("*"))


def class_folders(path: Path) -> list[tuple[str, list[Path]]]:
    """Returns the name and the images of each folder, both sorted."""
    return [(folder.name, images_below(folder)) for folder in _folders(path)]


def image_samples(root: Path, folders: Sequence[tuple[str, Sequence[Path]]]) -> Samples:
    """Makes samples of image files below `root`: class names with their images. Classes in sorted order."""
    classes = sorted({name for name, _ in folders})
    place = {name: k for k, name in enumerate(classes)}
    labels = tuple(place[name] for name, images in folders for _ in images)
    samples = open_image_files([image for _, images in folders for image in images], str(root), root)
    return replace(samples, classes=tuple(classes), labels=labels)


def _folders(path: Path) -> list[Path]:
    return sorted(item for item in path.iterdir() if item.is_dir() and not item.name.startswith("."))


def _images(items: Iterable[Path]) -> list[Path]:
    return sorted(
        item
        for item in items
        if item.suffix.lower() in IMAGE_SUFFIXES and not item.name.startswith(".") and item.is_file()
    )


# -- decoding ---------------------------------------------------------------------------------------------------------


def pillow() -> Any:
    """Returns Pillow's module `Image`."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError('images need pillow: pip install "tunable-magmax[train]"') from None
    return Image


def read_picture(source: Path | bytes, name: str) -> Any:
    """Decodes an image to RGB, turned as its camera says; returns `Unreadable` if that fails."""
    module = pillow()
    try:
        with _opened(module, source) as image:
            image.load()
            # What the camera says of a PNG is known only when the whole file is read.
            if image.getexif().get(_ORIENTATION, 1) == 1:
                # Not the open file's own image, which is closed on the way out.
                return to_rgb(image, module)
            from PIL import ImageOps

            return to_rgb(ImageOps.exif_transpose(image), module)
    except module.UnidentifiedImageError:
        return Unreadable(name, "not an image")
    except (OSError, ValueError, SyntaxError, EOFError, module.DecompressionBombError) as error:
        return Unreadable(name, str(error).split("\n")[0] or type(error).__name__)


def to_rgb(image: Any, module: Any) -> Any:
    """Converts an image to RGB; of one with more than 8 bits a channel, Pillow itself would make all white."""
    if image.mode.startswith("I;16"):
        return module.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        low, high = image.getextrema()
        if low < 0 or high > 255 or (image.mode == "F" and high <= 1):
            raise ValueError(f"its values are {low:g} to {high:g}, expected 0 to 255: save it with 8 bits a channel")
    return image.convert("RGB")


def _opened(module: Any, source: Path | bytes) -> Any:
    if not isinstance(source, bytes):
        return module.open(source)
    likely = next((name for start, name in _SIGNATURES.items() if source.startswith(start)), None)
    if likely is not None:
        try:
            return module.open(io.BytesIO(source), formats=[likely])
        except module.UnidentifiedImageError:
            pass  # not what it looks like: let every format try
    return module.open(io.BytesIO(source))


def threads_for(encoded_bytes: float) -> int:
    """Returns how many threads should decode images of so many bytes each."""
    if encoded_bytes < WORTH_BYTES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


def in_order(
    work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int, ahead: int | None = None
) -> Iterator[_Result]:
    """Yields `work` of each item, in order, at most `ahead` items (default: a few for each thread) before the reader.

    >>> list(in_order(lambda x: x * x, range(5), 2))
    [0, 1, 4, 9, 16]
    """
    if threads < 2:
        yield from map(work, items)
        return
    source, most = iter(items), threads * IMAGES_AHEAD if ahead is None else ahead
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[_Result]] = deque(pool.submit(work, item) for item in islice(source, most))
        try:
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(work, item) for item in islice(source, 1))
        finally:
            for future in waiting:  # the reader stopped early
                future.cancel()
