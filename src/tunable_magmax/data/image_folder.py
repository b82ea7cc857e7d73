"""A folder of images, of one folder of images for each class, or of such folders for each domain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tunable_magmax.data.decoding import in_order, threads_for
from tunable_magmax.data.pictures import SUFFIXES, read_picture
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError

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
