"""What a transformers config.json says of a model: its architecture, and the labels of its classifier."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.companions import MODEL_CONFIG, leads_outside, transformer_folder
from tunable_magmax.errors import InputError
from tunable_magmax.files import read_json

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
        folder = transformer_folder(checkpoint) if checkpoint.is_dir() else checkpoint.parent
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


def model_type(checkpoint: Path) -> str | None:
    """Returns the architecture that the config.json of a checkpoint names, such as bert, if there is one."""
    config = ModelConfig.of(checkpoint)
    return None if config is None else config.model_type


def are_generic(labels: Sequence[str]) -> bool:
    """Whether labels are the names that transformers makes up: LABEL_0, LABEL_1, ...

    >>> are_generic(["LABEL_0", "LABEL_1"]), are_generic(["cat", "dog"])
    (True, False)
    """
    return all(_GENERIC.fullmatch(label) is not None for label in labels)
