"""ImageNet-R: a folder for each class, named after it or by its WordNet id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tunable_magmax.data.class_names import WORDNET_ID, ClassNames, wordnet_names
from tunable_magmax.data.image_folder import class_folders, picture_loader
from tunable_magmax.data.imagenet_r_names import NAMES
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError

README = "README.txt"


def find_imagenet_r(path: Path) -> Path:
    """The folder that holds the class folders, or train/ and test/: the one given, or `imagenet-r` inside it."""
    inner = path / "imagenet-r"
    return inner if inner.is_dir() and not any(WORDNET_ID.fullmatch(item.name) for item in path.iterdir()) else path


def open_imagenet_r(path: Path, class_names: ClassNames | None = None, root: Path | None = None) -> Samples:
    """All images, by class name and then by file name, so that both ways to name folders give one order.

    WordNet ids get their names from `class_names`, else from the README.txt in `root`, else from the list here.
    """
    folders = class_folders(path)
    ids = [name for name, _ in folders if WORDNET_ID.fullmatch(name)]
    if ids and len(ids) < len(folders):
        others = [name for name, _ in folders if not WORDNET_ID.fullmatch(name)]
        raise InputError(
            f"{path}: {len(ids)} folders are named by WordNet ids, such as {ids[0]}, and {len(others)} are not "
            f"({', '.join(others[:5])}); all must be named the same way"
        )
    if isinstance(class_names, Mapping):
        names: Mapping[str, str] = class_names
    else:
        names = _readable(root or path) if ids else {}
    if names:
        lacking = [name for name, _ in folders if name not in names]
        if lacking:
            raise InputError(
                f"{path}: no class name for the folder {', '.join(lacking[:5])}"
                f"{f' and {len(lacking) - 5} more' if len(lacking) > 5 else ''}; give a class_names file that has it"
            )
    classed = sorted((names.get(name, name), images) for name, images in folders)
    classes = tuple(name for name, _ in classed)
    if len(set(classes)) < len(classes):
        twice = sorted({name for name in classes if classes.count(name) > 1})
        raise InputError(f"{path}: two folders have the class name {twice[0]!r}; class names must differ")
    files = [image for _, images in classed for image in images]
    if not files:
        raise InputError(f"{path}: no images in class folders; expected CLASS/*.jpg, with CLASS a name or a WordNet id")
    labels = tuple(k for k, (_, images) in enumerate(classed) for _ in images)
    return Samples(str(path), "image", len(files), picture_loader(path, files), classes, labels)


def _readable(root: Path) -> Mapping[str, str]:
    readme = root / README
    if readme.is_file():
        found = wordnet_names(readme.read_text(encoding="utf-8", errors="replace"))
        if found:
            return NAMES | found
    return NAMES
