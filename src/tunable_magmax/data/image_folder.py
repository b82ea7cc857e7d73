"""A folder of images, or of one folder of images for each class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tunable_magmax.data.pictures import SUFFIXES, read_picture
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError


def open_image_folder(path: Path) -> Samples:
    """Images in sorted order. Class folders give labels; images that lie loose in the folder give none."""
    folders = sorted(item for item in path.iterdir() if item.is_dir() and not item.name.startswith("."))
    loose = _images(path.iterdir())
    classed = [(folder, _images(folder.rglob("*"))) for folder in folders]
    if loose and any(images for _, images in classed):
        raise InputError(
            f"{path} holds {len(loose)} loose images as well as folders of images: put every image into the folder of "
            "its class, or all into one folder"
        )
    if loose:
        return Samples(str(path), "image", len(loose), _loader(path, loose))
    files = [image for _, images in classed for image in images]
    if not files:
        raise InputError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))}), neither loose nor in class folders")
    labels = tuple(k for k, (_, images) in enumerate(classed) for _ in images)
    classes = tuple(folder.name for folder, _ in classed)
    return Samples(str(path), "image", len(files), _loader(path, files), classes, labels)


def _images(items: Any) -> list[Path]:
    return sorted(
        item for item in items if item.suffix.lower() in SUFFIXES and not item.name.startswith(".") and item.is_file()
    )


def _loader(root: Path, files: Sequence[Path]) -> Any:
    def load(positions: Sequence[int]) -> Iterator[Any]:
        for position in positions:
            yield read_picture(files[position], str(files[position].relative_to(root)))

    return load
