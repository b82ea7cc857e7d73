"""Opens ImageNet-R: a folder for each class, named after it or by its WordNet id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from tunable_magmax.data.class_names import WORDNET_ID, read_class_names, wordnet_names
from tunable_magmax.data.images import class_folders, image_samples
from tunable_magmax.data.options import DataOptions, Split, drawn_split, folders_split
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError, some_of

README = "README.txt"


def open_imagenet_r(options: DataOptions) -> Split:
    """Opens ImageNet-R: a folder of class folders, or its train/ and test/, also inside a folder `imagenet-r`."""
    path = options.path
    inner = path / "imagenet-r"
    if inner.is_dir() and not any(WORDNET_ID.fullmatch(item.name) for item in path.iterdir()):
        path = inner
    if not path.is_dir():
        raise InputError(f"{path}: expected a folder of class folders; unpack the archive first")
    names = None if options.class_names is None else read_class_names(Path(options.class_names))
    chosen = names if isinstance(names, Mapping) else None
    split = folders_split(path, lambda folder: _read(folder, chosen, path))
    split = split or drawn_split(_read(path, chosen, path), options, by_class=False)
    return replace(split, renamed=chosen is not None)


def _read(path: Path, names: Mapping[str, str] | None, root: Path) -> Samples:
    """Reads all images, by class name and then by file name: both ways to name folders give one order.

    WordNet ids get their names from `names`, else from the README.txt that the archive has in `root`.
    """
    folders = class_folders(path)
    if names is None:
        readme = root / README
        by_id = any(WORDNET_ID.fullmatch(name) for name, _ in folders)
        listed = readme.read_text(encoding="utf-8", errors="replace") if by_id and readme.is_file() else ""
        names = wordnet_names(listed) if by_id else {name: name for name, _ in folders}
    lacking = [name for name, _ in folders if name not in names]
    if lacking:
        raise InputError(
            f"{path}: no class name for the folder {some_of(lacking)}: keep the archive's {README}, which names every "
            "WordNet id, beside the folders, or give a class_names file"
        )
    renamed = sorted((names[name], images) for name, images in folders)
    twice = [one for (one, _), (other, _) in pairwise(renamed) if one == other]
    if twice:
        raise InputError(f"{path}: two folders have the class name {twice[0]!r}; class names must differ")
    if not any(images for _, images in renamed):
        raise InputError(f"{path}: no images in class folders; expected CLASS/*.jpg, with CLASS a name or a WordNet id")
    return image_samples(path, renamed)
