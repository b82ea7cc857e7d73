"""What goes beside the weights: the base's own files, a model card, and the configuration that was used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError

REPORT = "tmx-report.json"
CONFIG = "tmx-config.yaml"
CARD = "README.md"

_TAG_ALONG = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
_NOT_ALONG = ("*.index.json", "trainer_state.json", "all_results.json", "modules.json", "tmx-*", ".*")
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def tag_along(base: Path) -> Iterator[Path]:
    """Files of a Hugging Face directory that a merged model needs as well: configuration, tokenizer, processor."""
    if base.is_dir():
        for path in sorted(base.iterdir()):
            wanted = any(fnmatchcase(path.name, pattern) for pattern in _TAG_ALONG)
            if path.is_file() and wanted and not any(fnmatchcase(path.name, pattern) for pattern in _NOT_ALONG):
                yield path


def retyped_config(path: Path, dtype: str | None) -> bytes | None:
    """A config.json that names the output's type, if one was asked for; None if the file can stay as it is."""
    if path.name != "config.json" or dtype is None:
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
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
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


def model_card(base: str, method: str, shares: list[tuple[str, str]], config: str) -> str:
    """The model card with its front matter; `shares` are rows of (task, what it gave)."""
    front = f"---\nbase_model: {json.dumps(base)}\ntags:\n- merge\n- tunable-magmax\nlibrary_name: transformers\n---\n"
    rows = "".join(f"| {task} | {share} |\n" for task, share in shares)
    return (
        f"{front}\n# A merge of {len(shares)} task checkpoints into {base}\n\n"
        f"Made with tunable-magmax, method `{method}`.\n\n"
        f"| task | gave |\n| --- | --- |\n{rows}\n"
        f"The configuration that was used (also in `{CONFIG}`; what came out of it is in `{REPORT}`):\n\n"
        f"```yaml\n{config}```\n"
    )
