"""Names on the Hugging Face hub: `org/name@revision` becomes a directory in the hub's own cache.

This is the only place that turns names into directories. What exists here always comes first, then the cache, and only
then the network. Of a repository the weights, configuration and tokenizer are fetched, and never code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path

from tunable_magmax.checkpoints.companions import CARD, MODEL_CONFIG, REPORT, is_companion
from tunable_magmax.checkpoints.safetensors_file import INDEX
from tunable_magmax.checkpoints.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHT_SUFFIXES
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import read_json
from tunable_magmax.version import __version__

_NAME = re.compile(r"(?P<scheme>hf:/{1,2})?(?P<repo>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>\w[\w./-]*))?")
_FILES = WEIGHT_SUFFIXES | {".json", ".jsonl", ".yaml", ".yml", ".txt", ".csv", ".png", ".jpg"}
_WEIGHTS = (
    (INDEX, "model-*.safetensors"),
    ("model.safetensors", ""),
    ("pytorch_model.bin.index.json", "pytorch_model-*.bin"),
    ("pytorch_model.bin", ""),
    *((file, "") for file in ADAPTER_WEIGHTS),
)
"""A file that a model's weights are found by, and the files that it lists; in order of preference."""
_OWN = ("tmx-*.json", "tmx-*.yaml", "head.safetensors", "classifier-head.safetensors", "preference.json")
_SMALL = ("config.json", "*config*.json", "token*", "vocab*", "merges.txt", "*.model", "*.jinja", *_OWN)
_REFUSALS = {
    "RepositoryNotFoundError": "the hub has no such model, or it is private: `hf auth login` makes yours known",
    "GatedRepoError": "the hub asks to accept the model's terms first",
    "RevisionNotFoundError": "the model has no such revision",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and the hub's cache does not hold it",
}


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub: repository, and a branch, a tag or a commit."""

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def hub_name(text: str | Path, root: Path | None = None) -> HubName | None:
    """Returns the model that a text names, `org/name`, `org/name@revision` or either behind hf://, else None.

    Names of files are none, and neither are paths whose first folder is there (from `root`): those are mistyped paths.

    >>> hub_name("org/name@v1"), hub_name("hf://name"), hub_name("./some/where/else"), hub_name("a/b.safetensors")
    (HubName(repo='org/name', revision='v1'), HubName(repo='name', revision='main'), None, None)
    """
    match = _NAME.fullmatch(str(text))
    if match is None:
        return None
    repo = match["repo"]
    if match["scheme"] is None:
        owner, _, name = repo.partition("/")
        if not name or Path(name).suffix in _FILES or ((root or Path()) / owner).exists():
            return None
    return HubName(repo, match["revision"] or "main")


def place_of(text: str | Path, root: Path) -> Path:
    """Returns what a file in `root` means by a text: a path from there, or a hub name, which stays one."""
    return Path(text) if not _exists(root / text) and hub_name(text, root) is not None else root / text


def located(path: str | PathLike[str], root: Path | None = None) -> Path:
    """Returns a checkpoint's path: as it is if it exists or is no hub name, else the model's directory in the cache.

    Relative paths count from `root`. A model that is not in the cache is downloaded.
    """
    local = Path(path) if root is None else root / path
    if _exists(local):
        return local
    name = hub_name(Path(path), root)
    return local if name is None else fetched(name, local)


def fetched(name: HubName, local: Path) -> Path:
    """Returns a model's directory in the cache, downloaded if it is not complete there; `local` is what errors name."""
    with _explained(name, local):
        if (folder := _cached(name)) is not None:
            return folder
        from huggingface_hub import HfApi, snapshot_download

        listed = HfApi(library_name="tunable-magmax", library_version=__version__).list_repo_files(
            name.repo, revision=name.revision
        )
        needed = needed_files(listed)
        if not {MODEL_CONFIG, ADAPTER_CONFIG} & set(needed) or not any(file in needed for file, _ in _WEIGHTS):
            held = some_of(sorted(needed)) or "nothing"
            raise InputError(
                f"the hub's {str(name)!r} holds {held}: expected {MODEL_CONFIG} and weights, as of transformers"
            )
        patterns = [re.sub(r"([\[*?])", r"[\1]", file) for file in needed]
        hide_bars_unseen()
        return Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=patterns))


def pinned(path: Path) -> str | None:
    """Returns `org/name@commit` of a path in the hub's cache; None of any other.

    >>> pinned(Path("/cache/models--org--name/snapshots/0123abc")), pinned(Path("/models/base"))
    ('org/name@0123abc', None)
    """
    parts = path.absolute().parts
    for folder, kind, commit in zip(parts, parts[1:], parts[2:], strict=False):
        if folder.startswith("models--") and kind == "snapshots":
            return f"{folder.removeprefix('models--').replace('--', '/')}@{commit}"
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # whoever opens it says what is wrong with it


def _cached(name: HubName) -> Path | None:
    """Returns a model's directory in the cache, if all that is needed of it is there."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name.repo,
            revision=name.revision,
            local_files_only=True,
            allow_patterns=list(_SMALL),
            ignore_patterns="*.py",
        )
    except OSError:  # not there, or not all of it
        return None
    return Path(found) if _complete(Path(found)) else None


def _complete(folder: Path) -> bool:
    """Whether a directory holds all files of a model's weights."""
    for file, listed in _WEIGHTS:
        if not (folder / file).exists():
            continue
        try:
            shards = set(read_json(folder / file).get("weight_map", {}).values()) if listed else set()
        except (InputError, AttributeError, TypeError):
            return True  # whoever opens it says what is wrong with it
        config = ADAPTER_CONFIG if file.startswith("adapter") else MODEL_CONFIG
        return (folder / config).exists() and all((folder / str(shard)).exists() for shard in shards)
    return False


def needed_files(names: Sequence[str]) -> list[str]:
    """Returns the files of a repository that are fetched: one kind of weights, and the small files beside them.

    >>> needed_files(["config.json", "model.safetensors", "pytorch_model.bin", "modeling.py", "onnx/model.onnx"])
    ['config.json', 'model.safetensors']
    """
    weights = next(((file, listed) for file, listed in _WEIGHTS if file in names), ())
    own = (*_OWN, CARD) if REPORT in names else _OWN  # a merge's report lists the card, too
    return [
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in weights)
        or any(fnmatchcase(name, pattern) for pattern in own)
        or (is_companion(name) and not name.endswith(".py"))
    ]


# -- errors and progress ----------------------------------------------------------------------------------------------


@contextmanager
def _explained(name: HubName, local: Path) -> Iterator[None]:
    """Turns what goes wrong with the hub into one paragraph."""
    try:
        yield
    except InputError:
        raise
    except ImportError:
        raise InputError(
            f'{local} does not exist, and models of the hub need huggingface_hub: pip install "tunable-magmax[hub]"'
        ) from None
    # What a failed download raises differs between versions: errors of requests, of httpx, of the hub itself.
    except Exception as error:
        raise InputError(
            f"{local} does not exist, and {str(name)!r} could not be fetched from the Hugging Face hub "
            f"({refusal(error)}); check the name and the network, or give a directory"
        ) from None


def refusal(error: Exception) -> str:
    """Returns why the hub refused something, in a few words."""
    if (known := _REFUSALS.get(type(error).__name__)) is not None:
        return known
    if isinstance(error.__cause__, Exception):  # such as the file that was being sent
        return refusal(error.__cause__)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def hide_bars_unseen() -> None:
    """Turns off the hub's progress bars where nobody watches them."""
    if not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
