"""Opens ImageNet-R: a folder for each class, named after it or by its WordNet id."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tunable_magmax.data.class_names import WORDNET_ID
from tunable_magmax.data.images import class_folders, image_samples
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import Split, open_split
from tunable_magmax.errors import InputError, some_of

README = "README.txt"


def open_imagenet_r(path: Path, draw: Callable[[Samples], Split]) -> Split:
    """Opens the train/ and test/ of a folder, or draws from its class folders."""
    if not path.is_dir():
        raise InputError(f"{path}: expected a folder of class folders; unpack the archive first")
    return open_split(path, lambda part: _read(path / part, path)) or draw(_read(path, path))


def _read(path: Path, root: Path) -> Samples:
    """Reads all images, by class name and then by file name: both ways to name folders give one order.

    WordNet ids get their names from the README.txt that the archive has in `root`.
    """
    folders = class_folders(path)
    names = {name: name for name, _ in folders}
    if any(map(WORDNET_ID.fullmatch, names)):
        readme = root / README
        names = wordnet_names(readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else "")
    lacking = [name for name, _ in folders if name not in names]
    if lacking:
        raise InputError(
            f"{path}: no class name for the folder {some_of(lacking)}: keep the archive's {README}, which names every "
            "WordNet id, beside the folders"
        )
    named = sorted((names[name], images) for name, images in folders)
    if len({name for name, _ in named}) < len(named):
        raise InputError(f"{path}: two folders have the same class name; class names must differ")
    if not any(images for _, images in named):
        raise InputError(f"{path}: no images in class folders; expected CLASS/*.jpg, with CLASS a name or a WordNet id")
    return image_samples(path, named)


def wordnet_names(content: str) -> dict[str, str]:
    """Maps WordNet ids to names, from the lines of a text that hold just these two; other lines are left out.

    >>> wordnet_names("ImageNet-R\\n\\nn01443537 goldfish\\n")
    {'n01443537': 'goldfish'}
    """
    matches = (re.fullmatch(rf"({WORDNET_ID.pattern})\s+(\S.*?)\s*", line) for line in content.splitlines())
    return {match[1]: match[2].replace(" ", "_") for match in matches if match}
