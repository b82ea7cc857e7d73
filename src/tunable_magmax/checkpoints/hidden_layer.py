"""The hidden layer that some classifiers have between encoder and last layer, by model type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunable_magmax.checkpoints.model_config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

_DENSE = ("classifier.dense", "tanh")
# The layer's name and what follows it. Nothing else may lie between it and the last layer, but dropout.
LAYERS = {
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


@dataclass(frozen=True)
class HiddenLayer:
    """The names of the layer's `weight` [units, inputs] and `bias`, and of the classifier's `rows` [labels, units]."""

    weight: str
    bias: str
    rows: str
    activation: str


@dataclass(frozen=True)
class TaskLayer:
    """A task's `weight` [units, inputs] and `bias` [units], and the `rows` [labels, units] of its classifier."""

    weight: Tensor
    bias: Tensor
    rows: Tensor


@dataclass(frozen=True)
class SharedLayer:
    """The `weight` and `bias` of one layer for all tasks, and the `rows` of each task on it."""

    weight: Tensor
    bias: Tensor
    rows: tuple[Tensor, ...]


ShareUnits = Callable[[Sequence[TaskLayer], Sequence[float], str], SharedLayer | None]
"""Makes one layer of the tasks' by weights and activation; None if it has too few units."""


def find_hidden_layer(config: ModelConfig, classifier: Sequence[str], others: Sequence[str]) -> HiddenLayer | None:
    """Returns the hidden layer of a head, from the names of its tensors; None if there is none, or none that we know.

    `classifier`: the tensors of the last layer. `others`: all others of the head, which must be this layer's.
    """
    name, activation = LAYERS.get(config.model_type or "", ("", ""))
    rows = [each for each in classifier if each.endswith(".weight")]
    if len(rows) != 1 or sorted(others) != [f"{name}.bias", f"{name}.weight"]:
        return None
    if config.content.get("pooler_hidden_act", activation) != activation:  # what DeBERTa may change
        return None
    return HiddenLayer(f"{name}.weight", f"{name}.bias", rows[0], activation)
