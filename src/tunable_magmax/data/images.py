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
from tunable_magmax.errors import InputError, required

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
MOST_THREADS = 16
# Encoded bytes of an image from which on threads win. Of smaller ones Python's own work is the larger part, and
# threads that wait for each other's lock are slower than one (measured: 1.5 times for 32 px images).
WORTH_BYTES = 8 << 10
IMAGES_AHEAD = 4  # images in work or ready for each thread

# -- folders ----------------------------------------------------------------------------------------------------------


def open_image_folder(path: Path) -> Samples:
    """Opens the images of a folder, in sorted order. Class folders give labels; images outside of them have none."""
    loose, folders = _images(path.iterdir()), class_folders(path)
    if loose and any(images for _, images in folders):
        raise InputError(
            f"{path} holds {len(loose)} loose images as well as folders of images: put every image into the folder of "
            "its class, or all into one folder"
        )
    return open_image_files(loose, str(path), path) if loose else image_samples(path, folders)


def open_image_files(files: Sequence[Path], origin: str, root: Path | None = None) -> Samples:
    """Opens image files in the order given, each called by its path, or by that below `root`."""

    def read(file: Path) -> Any:
        return read_picture(file, str(file if root is None else file.relative_to(root)))

    def load(positions: Sequence[int]) -> Iterator[Any]:
        sizes = [files[position].stat().st_size for position in positions[:8] if files[position].exists()]
        return map_in_threads(read, (files[position] for position in positions), threads_for(max(sizes, default=0)))

    return Samples(origin, "image", len(files), load)


def images_below(path: Path) -> list[Path]:
    """Returns all images in a folder and in the folders inside it, sorted."""
    return _images(path.rglob("*"))


def class_folders(path: Path) -> list[tuple[str, list[Path]]]:
    """Returns the name and the images of each folder, both sorted."""
    return [
        (item.name, images_below(item))
        for item in sorted(path.iterdir())
        if item.is_dir() and not item.name.startswith(".")
    ]


def image_samples(root: Path, folders: Sequence[tuple[str, Sequence[Path]]]) -> Samples:
    """Makes samples of image files below `root`: class names in sorted order, each with its images."""
    files = [image for _, images in folders for image in images]
    if not files:
        known = ", ".join(sorted(IMAGE_SUFFIXES))
        raise InputError(f"{root} holds no images ({known}), neither loose nor in folders; of texts, give a table")
    samples = open_image_files(files, str(root), root)
    labels = tuple(k for k, (_, images) in enumerate(folders) for _ in images)
    return replace(samples, classes=tuple(name for name, _ in folders), labels=labels)


def _images(items: Iterable[Path]) -> list[Path]:
    return sorted(
        item
        for item in items
        if item.suffix.lower() in IMAGE_SUFFIXES and not item.name.startswith(".") and item.is_file()
    )


# -- decoding ---------------------------------------------------------------------------------------------------------


def pillow() -> Any:
    """Returns Pillow's module `Image`."""
    return required("PIL.Image")


def read_picture(source: Path | bytes, name: str) -> Any:
    """Decodes an image to RGB, turned as its camera says; returns `Unreadable` if that fails."""
    module = pillow()
    from PIL import ImageOps

    try:
        with module.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()  # only then does Pillow know what the camera wrote behind the pixels of a PNG
            ImageOps.exif_transpose(image, in_place=True)
            return to_rgb(image)
    except module.UnidentifiedImageError:
        return Unreadable(name, "not an image")
    except (OSError, ValueError, SyntaxError, EOFError, module.DecompressionBombError) as error:
        return Unreadable(name, str(error).split("\n")[0] or type(error).__name__)


def to_rgb(image: Any) -> Any:
    """Converts an image to RGB; of one with more than 8 bits a channel, Pillow itself would make all white."""
    if image.mode.startswith("I;16"):
        return pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        low, high = image.getextrema()
        if low < 0 or high > 255 or (image.mode == "F" and high <= 1):
            raise ValueError(f"its values are {low:g} to {high:g}, expected 0 to 255: save it with 8 bits a channel")
    return image.convert("RGB")


def threads_for(encoded_bytes: float) -> int:
    """Returns how many threads should decode images of so many bytes each."""
    if encoded_bytes < WORTH_BYTES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


def map_in_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int, ahead: int | None = None
) -> Iterator[_Result]:
    """Yields `work` of each item, in order, at most `ahead` items (default: a few for each thread) before the reader.

    >>> list(map_in_threads(lambda x: x * x, range(5), 2))
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
