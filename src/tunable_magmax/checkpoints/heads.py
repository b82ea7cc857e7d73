"""What becomes of the heads of merged models: a classifier over all labels, and layers made of the tasks' own.

Tensors of heads are made of the tasks' own, because the base has none to measure a step from (docs/merge.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.model_config import ModelConfig
from tunable_magmax.checkpoints.tensors import TensorInfo, torch_dtype
from tunable_magmax.checkpoints.views import Make, View, read_tensor
from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

STACK, LAST, DROP = "stack", "last", "drop"
CHOICES = (STACK, LAST, DROP)
"""What may be done with heads, beside the number of the task that gives its own: "task 2"."""
MERGED, BASE = "merge", "base"
"""What is done if nothing else is asked for: heads are merged like any tensor, or only the base has one."""


@dataclass(frozen=True, eq=False)
class FittedTensors:
    """Tensors of a head that was fitted to the merged encoder, by name: they take the place of those of the tasks."""

    tensors: Mapping[str, NDArray[Any]]

    @property
    def digest(self) -> str:
        """A SHA-256 of names, shapes and values."""
        found = sha256()
        for name in sorted(self.tensors):
            values = self.tensors[name]
            found.update(f"{name} {values.shape} {values.dtype}\n".encode())
            found.update(values.tobytes())
        return f"sha256:{found.hexdigest()}"

    def __str__(self) -> str:
        return self.digest


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
    fitted: FittedTensors | None = None
    """What takes the place of tensors of the tasks; None: nothing does."""

    def make(self, weights: Sequence[float]) -> Make:
        """Returns what makes tensors of heads, from those of the tasks by their weights."""
        import torch

        def made(name: str) -> Tensor:
            dtype = torch_dtype(self.views[0].tensors[name].dtype)
            assert dtype is not None
            if self.fitted is not None and name in self.fitted.tensors:
                return torch.from_numpy(self.fitted.tensors[name]).to(dtype)
            values = (
                self._stacked(name, weights, dtype) if name in self.classifier else self._mean(name, weights, dtype)
            )
            return values.to(dtype)

        return made

    def state(self, weights: Sequence[float]) -> dict[str, Tensor]:
        """Returns all made tensors by name."""
        make = self.make(weights)
        return {name: make(name) for name in self.made}

    @property
    def made(self) -> tuple[str, ...]:
        """All tensors that are made rather than merged or copied."""
        others = () if self.fitted is None else tuple(self.fitted.tensors)
        return tuple(dict.fromkeys((*self.classifier, *self.mean, *others)))

    def kept_in_memory(self) -> Heads:
        """Returns the same with the tasks' heads in memory, to be used when their files are closed."""
        made = self.made
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

    def _stacked(self, name: str, weights: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Returns a row for each label: of the task that has it, or the mean of several tasks' by weight."""
        import torch

        holders = self._holders(name)
        tensors = {t: self._read(t, name) for t in holders}
        places = {t: {label: row for row, label in enumerate(self.task_labels[t] or ())} for t in tensors}
        rows = []
        for label in self.labels or ():
            having = [t for t in tensors if label in places[t]]
            rows.append(_weighted([tensors[t][places[t][label]] for t in having], [weights[t] for t in having], dtype))
        return torch.stack(rows)

    def _read(self, task: int, name: str) -> Tensor:
        import torch

        values = self._tasks[task].read(name)
        if not torch.isfinite(values).all():
            raise InputError(f"task {task + 1}: {name!r} has values that are NaN or infinite: mend this checkpoint")
        return values

    def identity(self) -> dict[str, Any]:
        """Returns what the heads of a merge are recognised by, beside their files: what the configurations say."""
        return {**self.describe(), "task_labels": self.task_labels, "config": self.config}

    def describe(self) -> dict[str, Any]:
        """Returns what a report says of heads."""
        return {
            "rule": self.rule,
            "labels": None if self.labels is None else list(self.labels),
            "classifier": list(self.classifier),
            "mean": list(self.mean),
            "left_out": list(self.left_out),
            "fitted": None
            if self.fitted is None
            else {"tensors": list(self.fitted.tensors), "digest": str(self.fitted)},
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
