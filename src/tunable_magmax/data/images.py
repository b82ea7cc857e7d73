"""A folder of images, of one folder of images for each class, or of such folders for each domain."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tunable_magmax.data.samples import Samples, Unreadable
from tunable_magmax.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_THREADS = 16
# Encoded bytes of an image from which on threads win. Of smaller ones Python's own work is the larger part, and
# threads that wait for each other's lock are slower than one (measured: 1.5 times for 32 px images).
WORTH_BYTES = 8 << 10
AHEAD = 4  # images in work or ready for each thread


def threads_for(encoded_bytes: float) -> int:
    """How many threads to decode images with that are so many bytes each."""
    if encoded_bytes < WORTH_BYTES:
        return 1
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    return min(cores, MOST_THREADS)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, ahead: int | None = None
) -> Iterator[Result]:
    """`work` of each item, in order, at most `ahead` items (default: a few for each thread) before the reader.

    >>> list(in_order(lambda x: x * x, range(5), 2))
    [0, 1, 4, 9, 16]
    """
    if threads < 2:
        yield from map(work, items)
        return
    source, most = iter(items), threads * AHEAD if ahead is None else ahead
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Result]] = deque(pool.submit(work, item) for item in islice(source, most))
        try:
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(work, item) for item in islice(source, 1))
        finally:
            for future in waiting:  # the reader stopped early
                future.cancel()


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


_PROBED = 32


def open_image_folder(path: Path) -> Samples:
    """Images in sorted order. Class folders give labels; images that lie loose in the folder give none."""
    loose = _images(path.iterdir())
    classed = class_folders(path)
    if loose and any(images for _, images in classed):
        raise InputError(
            f"{path} holds {len(loose)} loose images as well as folders of images: put every image into the folder of "
            "its class, or all into one folder"
        )
    if loose:
        return Samples(str(path), "image", len(loose), picture_loader(path, loose))
    files = [image for _, images in classed for image in images]
    if not files:
        raise InputError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))}), neither loose nor in class folders")
    labels = tuple(k for k, (_, images) in enumerate(classed) for _ in images)
    return Samples(
        str(path), "image", len(files), picture_loader(path, files), tuple(name for name, _ in classed), labels
    )


def open_domain_folders(path: Path) -> Samples:
    """DOMAIN/CLASS/images: domains and classes in sorted order, every sample with its domain."""
    classed = [(domain, class_folders(domain)) for domain in _folders(path)]
    classes = sorted({name for _, folders in classed for name, _ in folders})
    files: list[Path] = []
    labels: list[int] = []
    domains: list[str] = []
    place = {name: k for k, name in enumerate(classes)}
    for domain, folders in classed:
        loose = _images(domain.iterdir())
        if loose:
            raise InputError(
                f"{domain} holds {len(loose)} loose images: with domains every image lies in DOMAIN/CLASS/, so put "
                "them into folders of their classes"
            )
        for name, images in folders:
            files += images
            labels += [place[name]] * len(images)
            domains += [domain.name] * len(images)
    if not files:
        raise InputError(f"{path} holds no images in DOMAIN/CLASS/ folders ({', '.join(sorted(SUFFIXES))})")
    return Samples(
        str(path), "image", len(files), picture_loader(path, files), tuple(classes), tuple(labels), tuple(domains)
    )


def class_folders(path: Path) -> list[tuple[str, list[Path]]]:
    """The name and the images of each folder, both sorted."""
    return [(folder.name, _images(folder.rglob("*"))) for folder in _folders(path)]


def picture_loader(root: Path, files: Sequence[Path]) -> Callable[[Sequence[int]], Iterator[Any]]:
    """What `Samples.load` must be for image files."""

    def load(positions: Sequence[int]) -> Iterator[Any]:
        probed = [files[position] for position in positions[:_PROBED]]
        size = sum(file.stat().st_size if file.exists() else 0 for file in probed) / max(1, len(probed))
        chosen = (files[position] for position in positions)
        return in_order(lambda file: read_picture(file, str(file.relative_to(root))), chosen, threads_for(size))

    return load


def _folders(path: Path) -> list[Path]:
    return sorted(item for item in path.iterdir() if item.is_dir() and not item.name.startswith("."))


def _images(items: Iterable[Path]) -> list[Path]:
    return sorted(
        item for item in items if item.suffix.lower() in SUFFIXES and not item.name.startswith(".") and item.is_file()
    )
