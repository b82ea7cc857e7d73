"""Finds a model by its name: a directory, or a repository of the Hugging Face hub, which is fetched."""

from __future__ import annotations

import re
from pathlib import Path

from tunable_magmax.errors import InputError
from tunable_magmax.models.pretrained import IMAGE_FILES, TEXT_FILES, first_line

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*|\w[\w.-]*")
_SMALL = ("config.json", *IMAGE_FILES, *TEXT_FILES)
_SAFETENSORS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_TORCH = ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json")
_REFUSALS = {
    "RepositoryNotFoundError": "the hub has no such model, or it is private",
    "GatedRepoError": "the hub asks to accept the model's terms first",
}


def is_hub_name(name: str) -> bool:
    """Returns whether a text may be a name on the hub; a path upwards or of several folders is none.

    >>> is_hub_name("openai/clip-vit-base-patch16"), is_hub_name("../models/clip")
    (True, False)
    """
    return _HUB_NAME.fullmatch(name) is not None


def fetch_note(name: str, root: Path) -> str | None:
    """Returns a note that a model would be fetched from the hub, without asking it; None if the model is here.

    >>> fetch_note("openai/clip-vit-base-patch16", Path("/none"))  # doctest: +ELLIPSIS
    "the model 'openai/clip-vit-base-patch16' is not here (/none/openai/clip-vit-base-patch16 does not exist): ..."
    """
    local = root / Path(name).expanduser()
    if local.exists() or not is_hub_name(name):
        return None
    return (
        f"the model {name!r} is not here ({local} does not exist): it would be fetched from the Hugging Face hub, or "
        "taken from its cache; whether there is such a model was not asked"
    )


def resolve_model(name: str | Path, root: Path) -> Path:
    """Returns the checkpoint that `name` means: a path, where relative ones count from `root`, else a name on the hub.

    Of a hub model only weights, configuration, processor and tokenizer are fetched, into the hub's own cache; models
    that are there already need no network. Weights in torch's format are fetched only where there are no safetensors,
    and are read without running any code.
    """
    text = str(name).strip()
    if not text:
        raise InputError("the model's name is empty: give a directory or a name on the Hugging Face hub")
    local = root / Path(text).expanduser()
    if local.exists():
        return local
    if isinstance(name, Path) or not is_hub_name(text):
        raise InputError(f"{local} does not exist: give a directory with config.json and weights, or a hub name")
    folder = _fetch(text, (*_SMALL, *_SAFETENSORS), local)
    if not _holds(folder, _SAFETENSORS):
        folder = _fetch(text, (*_SMALL, *_TORCH), local)
    if not _holds(folder, ("config.json",)) or not _holds(folder, (*_SAFETENSORS, *_TORCH)):
        present = ", ".join(sorted(file.name for file in folder.iterdir())) if folder.is_dir() else ""
        raise InputError(
            f"the hub model {text!r} has no config.json with model.safetensors or pytorch_model.bin beside it (found "
            f"{present or 'nothing'}): it is no model of transformers, or its download is not complete"
        )
    return folder


def _fetch(name: str, patterns: tuple[str, ...], local: Path) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(
            f'{local} does not exist, and models of the hub need transformers: pip install "tunable-magmax[train]"'
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    # What a failed download raises differs between versions: errors of requests, of httpx, of the hub itself.
    except Exception as error:
        why = _REFUSALS.get(type(error).__name__, f"{type(error).__name__}: {first_line(error)}")
        raise InputError(
            f"the model {name!r} is neither here ({local} does not exist) nor could it be fetched from the Hugging "
            f"Face hub ({why}); check the name and the network, or download the model elsewhere and give its directory"
        ) from None


def _holds(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))
