"""Claims a directory for a training run: its config.yaml is written, or must be the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunable_magmax.config import parse_yaml
from tunable_magmax.errors import InputError, StorageError, bulleted
from tunable_magmax.files import read_whole, write_atomic

CONFIG_FILE = "config.yaml"
# What `write_atomic` calls a file until it is complete.
UNFINISHED = re.compile(r"\..+\.(json|jsonl|safetensors|yaml)\.[0-9a-f]{8}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lists what two records differ in, a line each.

    >>> differences({"seed": 0, "train": {"lr": 1.0}}, {"seed": 0, "train": {"lr": 2.0}})
    ['train.lr: 1.0 there, 2.0 now']
    """
    lines = []
    for key in dict.fromkeys([*old, *new]):
        one, other = old.get(key), new.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            lines += differences(one, other, f"{prefix}{key}.")
        elif one != other:
            lines.append(f"{prefix}{key}: {one} there, {other} now")
    return lines


def remove_unfinished(items: Iterable[Path]) -> None:
    """Removes those files that a process which was killed had not finished."""
    for item in list(items):
        if UNFINISHED.fullmatch(item.name) and item.is_file():
            item.unlink(missing_ok=True)


def claim(path: Path, config: Mapping[str, Any], base: str) -> None:
    """Writes config.yaml into a new directory, or checks that it is the same; removes files that a kill left.

    `base`: the folder whose presence says that training has begun.
    """
    import yaml

    file = path / CONFIG_FILE
    content = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).encode()
    if not file.exists() and path.exists():
        foreign = not path.is_dir() or any(UNFINISHED.fullmatch(item.name) is None for item in path.iterdir())
        if foreign:
            raise InputError(f"{path} exists and is no training run; choose another directory with -o")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be made ({error.strerror or error})") from error
    remove_unfinished(path.rglob(".*"))
    if not file.exists():
        write_atomic(file, content)
        return
    try:
        before = parse_yaml(read_whole(file))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error}); choose another directory with -o") from None
    changed = differences(before if isinstance(before, dict) else {}, config)
    if changed and not (path / base).exists():
        write_atomic(file, content)  # nothing was made yet: the first try failed, and the configuration was corrected
    elif changed:
        raise InputError(
            f"{path} is a run of another configuration; choose another directory with -o, or undo this:\n"
            f"{bulleted(changed)}"
        )
