"""The files beside the weights of a checkpoint: their names, and those that go along from the base."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.tensors import FLOATS
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import load_json, open_regular, read_json

REPORT = "tmx-report.json"
CONFIG = "tmx-config.yaml"
CARD = "README.md"
MODEL_CONFIG = "config.json"
"""Without it, transformers does not load a directory."""

_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
_NOT_COPIED = ("*.index.json", "trainer_state.json", "all_results.json", "preference.json", "run.json", "tmx-*", ".*")
_TOOLS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "preprocessor_config.json",
    "processor_config.json",
)
_MODULES = "modules.json"
_USUAL = (
    *_TOOLS,
    MODEL_CONFIG,
    _MODULES,
    "generation_config.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "chat_template*",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
    CARD,
    ".gitattributes",
)
_MODULE_FOLDER = re.compile(r"[0-9]+_\w+")  # 1_Pooling, 2_Normalize: one for each module of a sentence encoder
_SMALL = 1 << 16
_BLOCK = 1 << 20


def companion_files(base: Path) -> Iterator[tuple[str, Path]]:
    """Yields the files of a Hugging Face directory that a merged model needs: configuration, tokenizer, processor.

    Each comes with its name beneath the directory. A sentence encoder's modules are folders of their own,
    such as `1_Pooling/config.json`, without which a model would pool in another way than it was trained to.
    """
    if not base.is_dir():
        return
    for path in sorted(base.iterdir()):
        if is_module_folder(path):
            yield from ((f"{path.name}/{file.name}", file) for file in sorted(path.iterdir()))
        elif not path.is_file() or not _wanted(path.name) or leads_outside(path):
            continue
        elif path.name != _MODULES or _complete(path):
            yield path.name, path


def leads_outside(path: Path) -> bool:
    """Whether a file of a model's directory is a link to somewhere else.

    A downloaded model could so carry a private file of the user's into a model that is then published. A hub's cache is
    made of links, snapshots/COMMIT/NAME to blobs/DIGEST, and is one place.
    """
    if not path.is_symlink():
        return False
    folder, target = path.parent.resolve(), path.resolve()
    snapshots = next((each for each in folder.parents if each.name == "snapshots"), None)
    places = [folder] if snapshots is None else [folder, snapshots.parent / "blobs"]
    return not any(place in target.parents for place in places)


def links_note(source: Path) -> str | None:
    """Returns a note about files that do not go along, because they are links that lead outside."""
    if not source.is_dir():
        return None
    left = [path.name for path in sorted(source.iterdir()) if _wanted(path.name) and leads_outside(path)]
    if not left:
        return None
    return (
        f"{some_of(left)} of {source} {'is a link' if len(left) == 1 else 'are links'} to another place and so not "
        "copied into the output: what it leads to may be private; copy it there if it belongs to the model"
    )


def is_companion(name: str) -> bool:
    """Whether a file with this name beneath a model's directory may be one of `companion_files`.

    >>> is_companion("tokenizer.json"), is_companion("1_Pooling/config.json"), is_companion("onnx/config.json")
    (True, True, False)
    """
    folder, _, file = name.rpartition("/")
    return _MODULE_FOLDER.fullmatch(folder) is not None and file.endswith(".json") if folder else _wanted(name)


def is_module_folder(path: Path) -> bool:
    """Whether this is a folder of a sentence encoder's module that holds only a little configuration."""
    if not path.is_dir() or path.is_symlink() or _MODULE_FOLDER.fullmatch(path.name) is None:
        return False
    return all(
        file.is_file() and not leads_outside(file) and file.suffix == ".json" and file.stat().st_size <= _SMALL
        for file in path.iterdir()
    )


def _wanted(name: str) -> bool:
    wanted = any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)
    return wanted and not any(fnmatchcase(name, pattern) for pattern in _NOT_COPIED)


def _complete(modules: Path) -> bool:
    """Whether all listed modules are copied: those with weights of their own are not, and no list may name them."""
    try:
        listed = [modules.parent / module["path"] for module in load_json(modules)]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all(place == modules.parent or not place.exists() or is_module_folder(place) for place in listed)


def missing_config_note(source: Path, target: Path, instead: str) -> str:
    """Returns a note about an output that got no config.json from its source; `instead`: how to give a directory.

    >>> missing_config_note(Path("old.pt"), Path("new"), "convert")
    "new has no config.json, which it needs to be loaded by transformers: there was none beside the weights; put the \
model's own there"
    """
    home = source if source.is_dir() else source.parent
    what = f"{target} has no {MODEL_CONFIG}, which it needs to be loaded by transformers"
    if (home / MODEL_CONFIG).is_file():
        return f"{what}: files are copied from directories only; {instead} {home}, or copy them from there"
    return f"{what}: there was none beside the weights; put the model's own there"


def prepares_inputs(name: str) -> bool:
    """Whether a file belongs to a tokenizer or an image processor.

    >>> prepares_inputs("tokenizer_config.json"), prepares_inputs("config.json")
    (True, False)
    """
    return any(fnmatchcase(name, pattern) for pattern in _TOOLS)


def is_usual(name: str) -> bool:
    """Whether a file of a model's directory has a name that only files of models have, so that it may be published.

    >>> is_usual("tokenizer.json"), is_usual("1_Pooling/config.json"), is_usual("passwords.json")
    (True, True, False)
    """
    return is_companion(name) if "/" in name else any(fnmatchcase(name, pattern) for pattern in _USUAL)


def check_companion(name: str, path: Path) -> None:
    """Reads a file that is to go along, so that one that is broken costs no merge."""
    if name == MODEL_CONFIG:
        read_json(path)
        return
    try:
        with open_regular(path) as file:
            while file.read(_BLOCK):
                pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"{path} cannot be read ({why}), but goes along into the output: check its permissions, or move it away"
        ) from error


def retyped_config(name: str, path: Path, dtype: str | None, content: Mapping[str, Any] | None = None) -> bytes | None:
    """Returns a config.json that names the output's type; None if the file can stay as it is.

    `content`: what it is to hold besides, if that is not what the file holds.
    """
    if name != MODEL_CONFIG or (dtype is None and content is None):
        return None
    config = read_json(path) if content is None else dict(content)
    named = None if dtype is None else FLOATS[dtype]
    wrong = [key for key in ("torch_dtype", "dtype") if named is not None and config.get(key, named) != named]
    if not wrong and content is None:
        return None
    config |= dict.fromkeys(wrong, named)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
