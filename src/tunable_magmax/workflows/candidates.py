"""`Candidates`: the models that a run offers to a site, each scored on the same labelled samples, all in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import predict
from tunable_magmax.evaluation.evaluator import Evaluator
from tunable_magmax.evaluation.run_models import BuiltinModels, read_each, refuse_too_large
from tunable_magmax.files import Progress
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.runs.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.merging.report import MergeReport

_Content = TypeVar("_Content")
MODELS_BESIDE = 3


@dataclass(frozen=True)
class Candidate:
    """A model that a run offers: a checkpoint as it is (`method` is None), or a merge of all tasks.

    `name`: "base", a task's name, "last", or "average", "magmax", "tsv", "tunable". `checkpoint`: 0 is the base, t the
    t-th task. `scale`: None is the method's default. `weighted`: whether the merge takes the preference's weights.
    """

    name: str
    method: str | None = None
    checkpoint: int | None = None
    scale: float | str | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        if (self.method is None) == (self.checkpoint is None):
            raise InputError(f"candidate {self.name!r}: give either a method or the number of a checkpoint")

    @property
    def title(self) -> str:
        """What tables and sentences call it.

        >>> Candidate("birds", checkpoint=1).title, tunable(0.5).title, Candidate("tsv", "tsv").title
        ('task birds', 'tunable, scale 0.5', 'tsv')
        """
        if self.checkpoint is not None:
            return self.name if self.name in ("base", "last") else f"task {self.name.removeprefix('task ')}"
        if self.name not in ("tunable", "tsv") or self.scale is None:
            return self.name
        return f"{self.name}, {self.scale if isinstance(self.scale, str) else f'scale {self.scale:g}'}"


def merge_by(method: str, scale: float | str | None) -> Candidate:
    """Returns the merge by a method at a scale, with the preference's weights if the method takes weights."""
    name = "tunable" if method == "tunable_magmax" else method
    return Candidate(name, method, None, scale, weighted=METHODS[method].weights != "refused")


def tunable(scale: float | str = "matched") -> Candidate:
    """Returns the Tunable MAGMAX merge with the preference's weights, at a scale."""
    return merge_by("tunable_magmax", scale)


def usual_candidates(run: Run, scales: Sequence[float | str] = ("matched",)) -> tuple[Candidate, ...]:
    """Returns what is worth comparing: base, every task's checkpoint, other merges, Tunable MAGMAX at each scale.

    The last task's checkpoint is called "last". `scales` that are given twice count once.
    """
    names = ["base", *run.labels[:-1], "last"]
    return (
        *(Candidate(name, checkpoint=t) for t, name in enumerate(names)),
        *(merge_by("average", 1.0), merge_by("magmax", "matched"), merge_by("tsv", None)),
        *map(tunable, dict.fromkeys(scales)),
    )


class Merges:
    """The checkpoints of a run and its merges, all in memory. A context manager.

    Base and tasks are read once and task vectors compared once; a candidate then costs a merge.
    """

    def __init__(self, run: Run, *, seed: int = 0, progress: Progress | None = None, own: bool = False) -> None:
        """`seed`: of the lottery. `own`: the models have classifiers of their own, which go along."""
        from tunable_magmax.merging.state_dicts import MergeSession
        from tunable_magmax.models.state import read_tensors

        refuse_too_large(run)
        self.seed = seed
        self.reports: dict[Candidate, MergeReport] = {}
        """The report of the latest merge of each candidate."""
        self._own = BuiltinModels.read(run.base, run.tasks, run.heads, progress) if own else None
        if self._own is None:
            self._states = read_each((run.base, *run.tasks), read_tensors, progress)
        else:
            self._states = list(self._own.states)
        copied = None if self._own is None else self._own.copied or None
        self._session = MergeSession(self._states[0], self._states[1:], exclude=copied)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the task vectors."""
        self._session.close()

    @property
    def elements(self) -> int:
        """d, the number of merged elements."""
        return self._session.elements

    def state(self, candidate: Candidate, weights: Sequence[float | Fraction] | None = None) -> dict[str, Tensor]:
        """Returns the tensors of a candidate; of a merge, its report is put into `reports`."""
        if candidate.checkpoint is not None:
            if not 0 <= candidate.checkpoint < len(self._states):
                raise InputError(f"{candidate.title}: the run has no checkpoint {candidate.checkpoint}")
            if self._own is not None:
                return self._own.of_checkpoint(candidate.checkpoint)
            return self._states[candidate.checkpoint]
        used = None if weights is None or not candidate.weighted else list(weights)
        options: dict[str, Any] = {"weights": used} if candidate.weighted else {}
        merged = self._session.merge(method=candidate.method, scale=candidate.scale, seed=self.seed, **options)
        self.reports[candidate] = merged.report
        return merged.state_dict if self._own is None else self._own.with_heads(merged.state_dict, used)


class Candidates(Merges):
    """Scores candidates of one run on the samples of an evaluator; each costs a merge and a forward pass.

    with Candidates(run, evaluator) as candidates:
        logits = candidates.logits(tunable(), preference.weights)
    right = right_answers(logits, candidates.truth, preference.prior.bias(head.classes))
    """

    def __init__(self, run: Run, evaluator: Evaluator, *, seed: int = 0, progress: Progress | None = None) -> None:
        """`evaluator`: with the encoder of the run's base; its head's bias is not used. `seed`: of the lottery."""
        self.evaluator = evaluator
        super().__init__(run, seed=seed, progress=progress, own=evaluator.head.builtin)

    @property
    def truth(self) -> NDArray[np.int64]:
        """The right class of each sample, as an index into the head's classes."""
        return self.evaluator.truth

    def logits(self, candidate: Candidate, weights: Sequence[float] | None = None) -> NDArray[np.float32]:
        """Returns the scaled cosines [n, classes] of a candidate without any prior: one forward pass."""
        logits: NDArray[np.float32] = self.evaluator.logits(self.state(candidate, weights)).float().cpu().numpy()
        return logits


def right_answers(logits: Any, truth: Any, bias: Any = None) -> NDArray[np.bool_]:
    """Returns which samples are right: their class has the largest logit, after a `bias` [classes] is added.

    >>> right_answers([[2.0, 1.0], [2.0, 1.0]], [0, 1], bias=[0.0, 3.0]).tolist()
    [False, True]
    """
    scores = np.asarray(logits, dtype=np.float32)
    if bias is not None:
        scores = scores + np.asarray(bias, dtype=np.float32)
    predicted, _ = predict(scores, np.full(len(scores), -1), [])
    right: NDArray[np.bool_] = predicted == np.asarray(truth)
    return right
