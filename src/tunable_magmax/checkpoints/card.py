"""What goes beside the weights: the base's own files, a model card, and the configuration that was used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError

REPORT = "tmx-report.json"
CONFIG = "tmx-config.yaml"
CARD = "README.md"
MODEL_CONFIG = "config.json"
"""Without it, transformers does not load a directory."""

_TAG_ALONG = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
_NOT_ALONG = ("*.index.json", "trainer_state.json", "all_results.json", "tmx-*", ".*")
_MODULES = "modules.json"
_MODULE_FOLDER = re.compile(r"[0-9]+_\w+")  # 1_Pooling, 2_Normalize: one for each module of a sentence encoder
_SMALL = 1 << 16
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def tag_along(base: Path) -> Iterator[tuple[str, Path]]:
    """Files of a Hugging Face directory that a merged model needs as well: configuration, tokenizer, processor.

    Of each, its name beneath the directory and its place. A sentence encoder's modules are folders of their own,
    such as `1_Pooling/config.json`, without which a model would pool in another way than it was trained to.
    """
    if not base.is_dir():
        return
    for path in sorted(base.iterdir()):
        if is_module_folder(path):
            yield from ((f"{path.name}/{file.name}", file) for file in sorted(path.iterdir()))
        elif path.is_file() and _wanted(path.name) and (path.name != _MODULES or _complete(path)):
            yield path.name, path


def is_module_folder(path: Path) -> bool:
    """Whether this is a folder of a sentence encoder's module that holds only a little configuration."""
    if not path.is_dir() or path.is_symlink() or _MODULE_FOLDER.fullmatch(path.name) is None:
        return False
    return all(file.is_file() and file.suffix == ".json" and file.stat().st_size <= _SMALL for file in path.iterdir())


def _wanted(name: str) -> bool:
    along = any(fnmatchcase(name, pattern) for pattern in _TAG_ALONG)
    return along and not any(fnmatchcase(name, pattern) for pattern in _NOT_ALONG)


def _complete(modules: Path) -> bool:
    """Whether all modules listed come along: those with weights of their own do not, and a list must not name them."""
    try:
        listed = [modules.parent / module["path"] for module in json.loads(modules.read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all(place == modules.parent or not place.exists() or is_module_folder(place) for place in listed)


def without_config(source: Path, target: Path, instead: str) -> str:
    """What a directory lacks that got no configuration from its source; `instead`: what to do with a directory.

    >>> without_config(Path("old.pt"), Path("new"), "convert")
    "new has no config.json, which it needs to be loaded by transformers: there was none beside the weights; put the \
model's own there"
    """
    home = source if source.is_dir() else source.parent
    what = f"{target} has no {MODEL_CONFIG}, which it needs to be loaded by transformers"
    if (home / MODEL_CONFIG).is_file():
        return f"{what}: only a directory's files go along; {instead} {home}, or copy them from there"
    return f"{what}: there was none beside the weights; put the model's own there"


def retyped_config(name: str, path: Path, dtype: str | None) -> bytes | None:
    """A config.json that names the output's type, if one was asked for; None if the file can stay as it is."""
    if name != MODEL_CONFIG or dtype is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error}): mend it or leave it out") from None
    named = [key for key in ("torch_dtype", "dtype") if isinstance(config, dict) and key in config]
    if not named:
        return None
    config |= dict.fromkeys(named, _DTYPE_NAMES[dtype])
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def base_name(base: Path, given: str | None) -> str:
    """What the card calls the base: the name given, or the hub name that the base's configuration holds.

    Never its path: equal merges must give equal bytes wherever they are made.
    """
    if given:
        return given
    try:
        config = json.loads((base / MODEL_CONFIG).read_text(encoding="utf-8"))
        name = config.get("_name_or_path", "")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError):
        name = ""
    is_hub_name = isinstance(name, str) and name and not name.startswith((".", "/", "~")) and name.count("/") <= 1
    return name if is_hub_name else "base"


def effective_config(options: Mapping[str, Any], method: str, tasks: int, base: str) -> dict[str, Any]:
    """The merge as a configuration of the shape that `tmx merge config.yml` reads; models are named, not located."""
    weights = options.get("weights")
    models: list[dict[str, Any]] = [{"model": f"task-{t}"} for t in range(1, tasks + 1)]
    if weights is not None:
        for model, weight in zip(models, weights, strict=True):
            exact = Fraction(weight)
            short = float(exact)
            model["parameters"] = {"weight": short if Fraction(str(short)) == exact else weight}
    kept = {"scale", "scope", "compare", "keep", "density", "seed", "budget", "include", "exclude"}
    parameters = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if name in kept and value is not None
    }
    config: dict[str, Any] = {"merge_method": method, "base_model": base, "models": models, "parameters": parameters}
    if options.get("out_dtype"):
        config["dtype"] = _DTYPE_NAMES[options["out_dtype"]]
    return config


def model_card(base: str, method: str, shares: list[tuple[str, str]], config: str, library: str | None) -> str:
    """The model card with its front matter; `shares` are rows of (task, what it gave), `library` is what loads it."""
    loaded = "" if library is None else f"library_name: {library}\n"
    front = f"---\nbase_model: {json.dumps(base)}\ntags:\n- merge\n- tunable-magmax\n{loaded}---\n"
    rows = "".join(f"| {_cell(task)} | {share} |\n" for task, share in shares)
    return (
        f"{front}\n# A merge of {len(shares)} task checkpoints into {base}\n\n"
        f"Made with tunable-magmax, method `{method}`.\n\n"
        f"| task | gave |\n| --- | --- |\n{rows}\n"
        f"The configuration that was used (also in `{CONFIG}`; what came out of it is in `{REPORT}`):\n\n"
        f"```yaml\n{config}```\n"
    )


def _cell(text: str) -> str:
    """Text that neither ends a table's cell nor starts markup."""
    return "".join(f"\\{letter}" if letter in "\\|<[*`" else letter for letter in text)
