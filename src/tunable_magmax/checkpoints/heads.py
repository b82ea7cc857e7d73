"""What becomes of the heads of merged models: a classifier over all labels, and layers made of the tasks' own.

Tensors of heads are made of the tasks' own, because the base has none to measure a step from (docs/heads.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.hidden_layer import HiddenLayer, SharedLayer, ShareUnits, TaskLayer
from tunable_magmax.checkpoints.model_config import ModelConfig
from tunable_magmax.checkpoints.tensors import TensorInfo, torch_dtype
from tunable_magmax.checkpoints.views import Make, View, read_tensor
from tunable_magmax.errors import InputError, some_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STACK, LAST, DROP = "stack", "last", "drop"
CHOICES = (STACK, LAST, DROP)
"""What may be done with heads, beside the number of the task that gives its own: "task 2"."""
MERGED, BASE = "merge", "base"
"""What is done if nothing else is asked for: heads are merged like any tensor, or only the base has one."""
APART = 0.2
"""Layers of two tasks with a smaller cosine were not trained from the same beginning."""


@dataclass(frozen=True)
class HeadedModel:
    """A checkpoint with its configuration; `names` are its own names by those that all models have in common."""

    opened: Checkpoint
    config: ModelConfig
    names: Mapping[str, str]
    values: Mapping[str, Tensor] | None = None
    """Tensors that are in memory, by the common names; None: they are read from the files."""

    def info(self, name: str) -> TensorInfo:
        own = self.names[name]
        return self.opened.tensors[self.opened.aliases.get(own, own)]

    def read(self, name: str) -> Tensor:
        return read_tensor(self.opened, self.names[name]) if self.values is None else self.values[name]


@dataclass(frozen=True, eq=False)
class Heads:
    """How the models of a merge fit together, and what becomes of their heads.

    `views` are base and tasks under the output's names; `copied` are names that are not merged, but read from the first
    view. Of these, `classifier` (a row for each of `labels`) and `mean` are made of the tasks' tensors.
    """

    rule: str
    views: tuple[View, ...]
    copied: tuple[str, ...]
    labels: tuple[str, ...] | None
    classifier: tuple[str, ...]
    mean: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    config: Mapping[str, Any] | None
    """The output's config.json; None: the base's."""
    giver: int | None
    """The task, from 0, whose files come with those of the base if the base lacks them; None: no task's."""
    task_labels: tuple[tuple[str, ...] | None, ...]
    """What the labels of each task's own classifier are called in this one; None: it has none."""
    _tasks: tuple[HeadedModel, ...]
    _class_bias: Mapping[str, float] | None
    hidden: HiddenLayer | None = None
    """The layer whose units tasks can share; None: there is none, or it is not known what it does."""
    _share_units: ShareUnits | None = None
    _kept: list[tuple[tuple[float, ...], SharedLayer | None]] = field(default_factory=list, init=False)

    @property
    def takes_prior(self) -> bool:
        """Whether the classifier has a bias, to which the log of a prior can be added."""
        return any(name.endswith(".bias") for name in self.classifier)

    def make(self, weights: Sequence[float]) -> Make:
        """Returns what makes tensors of heads, from those of the tasks by their weights."""
        import torch

        def made(name: str) -> Tensor:
            dtype = torch_dtype(self.views[0].tensors[name].dtype)
            assert dtype is not None
            hidden, layer = self.hidden, self._shared(weights) if self.hidden is not None else None
            if hidden is not None and layer is not None and name in (hidden.weight, hidden.bias):
                values = layer.weight if name == hidden.weight else layer.bias
            elif name in self.classifier:
                rows = None if hidden is None or layer is None or name != hidden.rows else layer.rows
                values = self._stacked(name, weights, dtype, rows)
            else:
                values = self._mean(name, weights, dtype)
            if self._class_bias and name in self.classifier and name.endswith(".bias"):
                prior = [self._class_bias.get(label, 0.0) for label in self.labels or ()]
                values = values.double() + values.new_tensor(prior, dtype=torch.float64)
            return values.to(dtype)

        return made

    def state(self, weights: Sequence[float]) -> dict[str, Tensor]:
        """Returns all made tensors by name."""
        make = self.make(weights)
        return {name: make(name) for name in (*self.classifier, *self.mean)}

    def kept_in_memory(self) -> Heads:
        """Returns the same with the tasks' heads in memory, to be used when their files are closed."""
        made = (*self.classifier, *self.mean)
        tasks = (
            replace(task, values={name: task.read(name) for name in made if name in task.names}) for task in self._tasks
        )
        return replace(self, _tasks=tuple(tasks))

    def base(self, weights: Sequence[float]) -> View:
        """Returns the base, with heads that are made by these weights."""
        return self.views[0].making(self.make(weights))

    def _holders(self, name: str) -> list[int]:
        """Returns the tasks whose tensor of this name counts: all that have it, or the one that gives its head."""
        if self.rule.startswith("task") and self.giver is not None:
            return [self.giver]
        return [t for t, task in enumerate(self._tasks) if name in task.names]

    def _mean(self, name: str, weights: Sequence[float], dtype: torch.dtype) -> Tensor:
        holders = self._holders(name)
        return _weighted([self._read(t, name) for t in holders], [weights[t] for t in holders], dtype)

    def _stacked(
        self, name: str, weights: Sequence[float], dtype: torch.dtype, rows_of: Sequence[Tensor] | None
    ) -> Tensor:
        """Returns a row for each label: of the task that has it, or the mean of several tasks' by weight.

        `rows_of`: the rows of each task that has this tensor, if they are not those of its checkpoint.
        """
        import torch

        holders = self._holders(name)
        tensors = dict(zip(holders, rows_of or [self._read(t, name) for t in holders], strict=True))
        places = {t: {label: row for row, label in enumerate(self.task_labels[t] or ())} for t in tensors}
        rows = []
        for label in self.labels or ():
            having = [t for t in tensors if label in places[t]]
            rows.append(_weighted([tensors[t][places[t][label]] for t in having], [weights[t] for t in having], dtype))
        return torch.stack(rows)

    def _shared(self, weights: Sequence[float]) -> SharedLayer | None:
        """Returns the layer whose units the tasks share; None if its mean by weight is as good, or it can't be made.

        The last one is kept: a merge asks for its tensors, then for what to say of it.
        """
        last = self._kept[-1] if self._kept else None
        if last is None or last[0] != tuple(weights):
            last = (tuple(weights), self._make_shared(weights))
            self._kept[:] = [last]
        return last[1]

    def _make_shared(self, weights: Sequence[float]) -> SharedLayer | None:
        hidden = self.hidden
        if hidden is None or self._share_units is None or self.rule != STACK or not self._apart(hidden.weight, weights):
            return None
        names = (hidden.weight, hidden.bias, hidden.rows)
        holders = self._holders(hidden.rows)  # a bare model may have the layer, but has no labels for it
        if not all(name in self._tasks[t].names for t in holders for name in names):
            return None
        layers = [TaskLayer(*(self._read(t, name) for name in names)) for t in holders]
        return self._share_units(layers, [weights[t] for t in holders], hidden.activation)

    def _read(self, task: int, name: str) -> Tensor:
        import torch

        values = self._tasks[task].read(name)
        if not torch.isfinite(values).all():
            raise InputError(f"task {task + 1}: {name!r} has values that are NaN or infinite: mend this checkpoint")
        return values

    def doubts(self, weights: Sequence[float]) -> list[str]:
        """Returns warnings, for which values of heads are read: means of layers that have no common beginning."""
        if self.rule != STACK:
            return []
        matrices = [name for name in self.mean if len(self.views[0].tensors[name].shape) > 1]
        apart = [name for name in matrices if self._apart(name, weights)]
        if not apart:
            return []
        what = f"{some_of(apart, show=repr)} of the tasks have nothing in common: each task began with random numbers"
        chains = "tasks that are trained one after the other, each from the last one's whole checkpoint, have layers"
        if self._shared(weights) is not None:
            return [
                f"{what} of its own. So each gives a part of its units, which costs some accuracy, more the more tasks "
                f"there are (docs/heads.md). Measure the result (`tmx eval`); {chains} that need not be divided"
            ]
        return [
            f"{what} of its own, and their mean by weight costs accuracy, more so the more tasks there are. Measure "
            "the result (`tmx eval`); heads of one task (--heads NAME) stay as they were trained, and "
            f"{chains} that can be averaged"
        ]

    def _apart(self, name: str, weights: Sequence[float]) -> bool:
        holders = self._holders(name)
        counted = [t for t in holders if weights[t] > 0] or holders
        flat = [self._read(t, name).double().reshape(-1) for t in counted]
        return any(
            float(one @ other) < APART * float(one.norm() * other.norm())
            for k, one in enumerate(flat)
            for other in flat[:k]
        )

    def identity(self) -> dict[str, Any]:
        """Returns what the heads of a merge are recognised by, beside their files: what the configurations say."""
        return {**self.describe(), "task_labels": self.task_labels, "config": self.config}

    def describe(self, weights: Sequence[float] | None = None) -> dict[str, Any]:
        """Returns what a report says of heads; with weights, also which layers are made of units of each task."""
        shared = None if weights is None else self._shared(weights)
        divided = [] if shared is None or self.hidden is None else [self.hidden.weight, self.hidden.bias]
        return {
            "rule": self.rule,
            "labels": None if self.labels is None else list(self.labels),
            "classifier": list(self.classifier),
            "mean": [name for name in self.mean if name not in divided],
            **({"divided": divided} if divided else {}),
            "left_out": list(self.left_out),
            "prior": self._class_bias is not None,
        }


def _weighted(tensors: Sequence[Tensor], weights: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Returns the mean by weight, computed in float64; by equal weights where all are 0."""
    total = sum(weights)
    shares = [weight / total for weight in weights] if total > 0 else [1 / len(tensors)] * len(tensors)
    used = [(tensor, share) for tensor, share in zip(tensors, shares, strict=True) if share > 0]
    if len(used) == 1:
        return used[0][0].to(dtype)
    first, *others = (tensor.double() * share for tensor, share in used)
    for other in others:
        first += other
    return first.to(dtype)
