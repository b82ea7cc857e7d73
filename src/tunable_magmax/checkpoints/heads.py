"""What becomes of the heads of merged models: a classifier over all labels, and layers made of the tasks' own.

A classifier whose labels differ between tasks gets a row for each label, of the task that has it; layers that only the
tasks have are means by weight. The base has no such tensors, so there is no step to merge. docs/merge.md has the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.tensors import TensorInfo, torch_dtype
from tunable_magmax.checkpoints.views import View

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

MERGED, STACKED, OF_BASE = "merge", "stack", "base"
"""What becomes of heads: merged like any tensor, stacked, or only the base has one, which stays."""


@dataclass(frozen=True, eq=False)
class FittedTensors:
    """Tensors of a head that was fitted to the merged encoder, by name: they take the place of those of the tasks."""

    tensors: Mapping[str, NDArray[Any]]

    @property
    def digest(self) -> str:
        """A SHA-256 of names, shapes and values."""
        digest = sha256()
        for name in sorted(self.tensors):
            values = self.tensors[name]
            digest.update(f"{name} {values.shape} {values.dtype}\n".encode())
            digest.update(values.tobytes())
        return f"sha256:{digest.hexdigest()}"

    def __str__(self) -> str:
        return self.digest


@dataclass(frozen=True, eq=False)
class Heads:
    """How the models of a merge fit together, and what becomes of their heads.

    `views` are base (without tensors that are made) and tasks under the output's names; `copied` are names that are not
    merged, but read from the base. Of these, `classifier` (a row for each of `labels`) and `mean` are made of `values`,
    those of the tasks.
    """

    rule: str
    views: tuple[View, ...]
    copied: tuple[str, ...]
    left_out: tuple[str, ...]
    labels: tuple[str, ...] | None
    classifier: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()
    infos: Mapping[str, TensorInfo] | None = None
    """The tensors that are made."""
    values: tuple[Mapping[str, Tensor], ...] = ()
    task_labels: tuple[tuple[str, ...] | None, ...] = ()
    """What the labels of each task's own classifier are called in this one; None: it has none."""
    config: Mapping[str, Any] | None = None
    """The output's config.json; None: the base's."""
    giver: int | None = None
    """The task, from 0, whose files come with those of the base if the base lacks them; None: no task's."""
    fitted: FittedTensors | None = None
    notes: tuple[str, ...] = ()

    @property
    def made(self) -> tuple[str, ...]:
        """All tensors that are made or written over rather than merged or copied."""
        return tuple(dict.fromkeys((*(self.infos or ()), *(self.fitted.tensors if self.fitted else ()))))

    def state(self, weights: Sequence[float]) -> dict[str, Tensor]:
        """Returns all made tensors by name, from those of the tasks by their weights."""
        import torch

        fitted = {} if self.fitted is None else self.fitted.tensors
        state = {}
        for name, info in (self.infos or {}).items():
            dtype = torch_dtype(info.dtype)
            assert dtype is not None
            if name in fitted:
                state[name] = torch.from_numpy(fitted[name]).to(dtype)
                continue
            holders = {t: held[name] for t, held in enumerate(self.values) if name in held}
            if name in self.classifier:
                state[name] = torch.stack(list(self._rows(holders, weights, dtype)))
            else:
                state[name] = _weighted(list(holders.values()), [weights[t] for t in holders], dtype)
        return state

    def _rows(self, holders: Mapping[int, Tensor], weights: Sequence[float], dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields a row for each label: of the task that has it, or the mean of several tasks' by weight."""
        places = {t: {label: row for row, label in enumerate(self.task_labels[t] or ())} for t in holders}
        for label in self.labels or ():
            having = [t for t in holders if label in places[t]]
            rows = [holders[t][places[t][label]] for t in having]
            yield _weighted(rows, [weights[t] for t in having], dtype)

    def base(self, weights: Sequence[float]) -> View:
        """Returns the base, with heads that are made by these weights."""
        return self.views[0].with_made(self.state(weights))

    def identity(self) -> dict[str, Any]:
        """Returns what the heads of a merge are recognised by, beside their files: what the configurations say."""
        return {**self.describe(), "task_labels": self.task_labels, "config": self.config}

    def describe(self) -> dict[str, Any]:
        """Returns what a report says of heads."""
        fitted = self.fitted and {"tensors": list(self.fitted.tensors), "digest": self.fitted.digest}
        return {
            "rule": self.rule,
            "labels": None if self.labels is None else list(self.labels),
            "classifier": list(self.classifier),
            "mean": list(self.mean),
            "left_out": list(self.left_out),
            "fitted": fitted,
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
