"""The files beside the weights of a checkpoint: their names, what config.json says, and those that go along.

A sentence encoder's directory lists its modules in modules.json: the transformer, whose files are at the top, and
others with a folder for each, such as `1_Pooling`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
MODULES = "modules.json"

_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
_NOT_COPIED = ("*.index.json", "trainer_state.json", "all_results.json", "preference.json", "run.json", "tmx-*", ".*")
_TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
_TOOLS = (*_TOKENIZER, "preprocessor_config.json", "processor_config.json")
_CONFIGURATIONS = (
    MODEL_CONFIG,
    MODULES,
    "generation_config.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
)
_USUAL = (*_TOOLS, *_CONFIGURATIONS, "chat_template*", "*.tiktoken", "LICENSE*", "NOTICE*", CARD, ".gitattributes")
_MODULE_FOLDER = re.compile(r"[0-9]+_\w+")
_MODULE_SUFFIXES = (".json", ".model", ".safetensors")
_DENSE = ("classifier.dense", "tanh")
HIDDEN_LAYERS = {
    "bert": ("bert.pooler.dense", "tanh"),
    "camembert": _DENSE,
    "deberta": ("pooler.dense", "gelu"),
    "deberta-v2": ("pooler.dense", "gelu"),
    "distilbert": ("pre_classifier", "relu"),
    "electra": ("classifier.dense", "gelu"),
    "longformer": _DENSE,
    "mpnet": _DENSE,
    "roberta": _DENSE,
    "xlm-roberta": _DENSE,
}
"""The hidden layer that classifiers have between encoder and last layer, and its activation, by model type.

Nothing else lies between the two but dropout.
"""
_GENERIC = re.compile(r"LABEL_[0-9]+")


def companion_files(base: Path) -> Iterator[tuple[str, Path]]:
    """Yields the files of a directory that a merged model needs: configuration, tokenizer, processor, modules.

    Each comes with its name in the output. The weights of other modules than the transformer are copied, not merged.
    """
    if not base.is_dir():
        return
    for path in sorted(base.iterdir()):
        if is_module_folder(path):
            yield from ((f"{path.name}/{file.name}", file) for file in sorted(path.iterdir()))
        elif path.name == MODULES and _missing(base):
            continue
        elif path.is_file() and is_companion(path.name) and not leads_outside(path):
            yield path.name, path


def companion_notes(source: Path) -> Iterator[str]:
    """Yields notes about files of a directory that do not go along as one might expect."""
    if not source.is_dir():
        return
    links = [path.name for path in sorted(source.iterdir()) if is_companion(path.name) and leads_outside(path)]
    if links:
        yield f"{some_of(links)} of {source}: not copied, links to another place; copy what belongs to the model"
    if missing := _missing(source):
        kinds = ", ".join(_MODULE_SUFFIXES)
        yield f"{some_of(missing)} of {source} and {MODULES} are not copied: modules may hold {kinds} files only"
    names = {name for name, _ in companion_files(source)}
    if weights := sorted(name for name in names if name.endswith(".safetensors")):
        yield f"{some_of(weights)} of {source} are copied: weights of other modules than the transformer are not merged"


def _missing(folder: Path) -> list[str]:
    """Returns the modules of a sentence encoder's list that are not copied: no list may name them.

    A broken list names itself.
    """
    if not (folder / MODULES).is_file():
        return []
    try:
        places = [folder / module["path"] for module in load_json(folder / MODULES)]
    except (OSError, ValueError, KeyError, TypeError):
        return [MODULES]
    return [place.name for place in places if place != folder and place.exists() and not is_module_folder(place)]


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


def is_companion(name: str) -> bool:
    """Whether a file with this name beneath a model's directory may be one of `companion_files`.

    >>> is_companion("tokenizer.json"), is_companion("1_Pooling/config.json"), is_companion("onnx/config.json")
    (True, True, False)
    """
    folder, _, file = name.rpartition("/")
    if folder:
        return _MODULE_FOLDER.fullmatch(folder) is not None and file.endswith(_MODULE_SUFFIXES)
    return _matches(name, _COMPANIONS) and not _matches(name, _NOT_COPIED)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_module_folder(path: Path) -> bool:
    """Whether this is the folder of a sentence encoder's module, with no other files than modules have."""
    if not path.is_dir() or path.is_symlink() or _MODULE_FOLDER.fullmatch(path.name) is None:
        return False
    return all(
        file.is_file() and not leads_outside(file) and file.name.endswith(_MODULE_SUFFIXES) for file in path.iterdir()
    )


def missing_config_note(target: Path) -> str:
    """Returns a note about an output that got no config.json, because its source is a file or has none."""
    return f"{target} has no {MODEL_CONFIG}, which transformers needs to load it: put the model's own files there"


def prepares_inputs(name: str) -> bool:
    """Whether a file belongs to a tokenizer or an image processor.

    >>> prepares_inputs("tokenizer_config.json"), prepares_inputs("config.json")
    (True, False)
    """
    return _matches(name, _TOOLS)


def is_usual(name: str) -> bool:
    """Whether a file of a model's directory has a name that only files of models have, so that it may be published.

    >>> is_usual("tokenizer.json"), is_usual("1_Pooling/config.json"), is_usual("passwords.json")
    (True, True, False)
    """
    return is_companion(name) if "/" in name else _matches(name, _USUAL)


def check_companion(name: str, path: Path) -> None:
    """Opens a file that is to go along, so that one that is broken costs no merge."""
    if name == MODEL_CONFIG:
        read_json(path)
        return
    try:
        open_regular(path).close()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} goes along into the output, but cannot be read ({error}): move it away") from error


def changed_companion(
    name: str, path: Path, dtype: str | None = None, config: Mapping[str, Any] | None = None
) -> bytes | None:
    """Returns what a file is to hold in the output; None if it can stay as it is.

    A config.json names the output's type, and holds `config` if that is given.
    """
    if name != MODEL_CONFIG or (dtype is None and config is None):
        return None
    content = read_json(path) if config is None else dict(config)
    named = None if dtype is None else FLOATS[dtype]
    wrong = [key for key in ("torch_dtype", "dtype") if named is not None and content.get(key, named) != named]
    if not wrong and config is None:
        return None
    content |= dict.fromkeys(wrong, named)
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


# -- config.json ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    """The config.json of a checkpoint's directory. `labels` are those of its classifier, None if it has none."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def of(cls, checkpoint: Path) -> ModelConfig | None:
        """Reads the config.json beside a checkpoint's weights; None if there is none that can be read.

        A link that leads outside of the directory is not followed: what it holds may come to be in the output.
        """
        folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
        if leads_outside(folder / MODEL_CONFIG):
            return None
        try:
            return cls(folder / MODEL_CONFIG, read_json(folder / MODEL_CONFIG))
        except InputError:
            return None

    @property
    def model_type(self) -> str | None:
        named = self.content.get("model_type")
        return named if isinstance(named, str) else None

    @property
    def architecture(self) -> str:
        """The name of the model's class, such as BertForSequenceClassification; empty if it is not said."""
        named = self.content.get("architectures")
        return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""

    @property
    def is_headed(self) -> bool:
        """Whether the class is one with a head, which keeps the bare model under a prefix."""
        return "For" in self.architecture

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of the classifier's rows; None if this is no classifier."""
        if "Classification" not in self.architecture:
            return None
        by_index = self.content.get("id2label")
        if not isinstance(by_index, dict) or not by_index:
            # transformers leaves its defaults out: two labels that have no name.
            count = self.content.get("num_labels", 2)
            return tuple(f"LABEL_{k}" for k in range(count)) if isinstance(count, int) and count > 0 else None
        try:
            ordered = sorted((int(index), str(name)) for index, name in by_index.items())
        except ValueError:
            raise InputError(f"{self.path}: id2label must map whole numbers to names; correct it") from None
        if [index for index, _ in ordered] != list(range(len(ordered))):
            raise InputError(f"{self.path}: id2label must have every number from 0 to {len(ordered) - 1}; correct it")
        names = tuple(name for _, name in ordered)
        if len(set(names)) < len(names):
            raise InputError(f"{self.path}: id2label gives two classes the same name; make the names differ")
        return names


def are_generic(labels: Sequence[str]) -> bool:
    """Whether labels are the names that transformers makes up: LABEL_0, LABEL_1, ...

    >>> are_generic(["LABEL_0", "LABEL_1"]), are_generic(["cat", "dog"])
    (True, False)
    """
    return all(_GENERIC.fullmatch(label) is not None for label in labels)


def same_classes(labels: Sequence[str] | None, others: Sequence[str] | None) -> bool:
    """Whether rows of two classifiers mean the same, as far as is known: LABEL_0 may be any class."""
    if labels is None or others is None or labels == others:
        return True
    return len(labels) == len(others) and (are_generic(labels) or are_generic(others))
