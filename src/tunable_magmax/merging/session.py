"""Many merges of one sequence: the vectors stay in memory and candidates are marked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tunable_magmax.checkpoints.layout import build_layout
from tunable_magmax.errors import InputError
from tunable_magmax.merging.methods import METHODS, Method, TunableMagmax
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.state_dicts import (
    Merged,
    StateDict,
    assemble,
    merge_in_memory,
    merge_state_dicts,
    signature_of,
)


class MergeSession:
    """Merge one base and its tasks again and again, with other weights, scales and methods. A context manager.

    Each merge equals `merge_state_dicts` with the same options, to the bit, but compares the task vectors only once.
    Tensors may be shared with the dicts given, so leave those alone while the session is open.

    >>> import torch
    >>> base, tasks = {"w": torch.zeros(4)}, [{"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)}]
    >>> with MergeSession(base, tasks) as session:
    ...     [session.merge(weights=[share, 1 - share], scale=1).report.counts for share in (0.25, 0.5)]
    [(1, 3), (2, 2)]
    """

    def __init__(
        self,
        base: StateDict,
        tasks: Sequence[StateDict],
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        threads: int | None = None,
    ) -> None:
        self._base, self._tasks, self._threads = base, tasks, threads
        self._patterns: dict[str, Any] = {"include": include, "exclude": exclude}
        options = Options.read(len(tasks), **self._patterns)
        labels = ["base", *(f"task {t}" for t in range(1, len(tasks) + 1))]
        signatures = [signature_of(tensors, label) for tensors, label in zip([base, *tasks], labels, strict=True)]
        layout = build_layout(signatures, labels, options.include, options.exclude)
        method = TunableMagmax(options, len(tasks), reusable=True)
        self._merge = merge_in_memory(layout, base, tasks, options, labels, threads, method)
        self._marked: tuple[Sequence[bool], ...] | None = None
        with torch.no_grad():
            self._merge.survey()

    def __enter__(self) -> MergeSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the vectors and planes."""
        self._merge.__exit__()

    @property
    def elements(self) -> int:
        """d, the number of merged elements."""
        return self._merge.elements

    @torch.no_grad()
    def merge(self, **given: Any) -> Merged:
        """One merge; the options are those of `merge_state_dicts`, less include and exclude."""
        if given.keys() & self._patterns.keys():
            raise InputError("include and exclude are fixed when a session is opened")
        if given.get("method") == "ties":  # trims with planes of its own
            return merge_state_dicts(self._base, self._tasks, threads=self._threads, **self._patterns, **given)
        options = Options.read(len(self._tasks), **self._patterns, **given)
        method = self._method(options)
        self._merge.restart(options, method, mark=self._needs_marks(method))
        self._merge.decide()
        values = self._merge.values()
        report = self._merge.report()
        report = replace(report, warnings=(*options.idle(), *report.warnings))
        return Merged(assemble(self._base, self._merge.layout, values, options), report)

    def _method(self, options: Options) -> Method:
        if options.method == "tunable_magmax":
            return TunableMagmax(options, len(self._tasks), reusable=True)
        return METHODS[options.method](options, len(self._tasks))

    def _needs_marks(self, method: Method) -> bool:
        """Whether candidates must be marked again, because other tasks are compared than last time."""
        if not isinstance(method, TunableMagmax):
            return False
        method.assume(self.elements)
        everyone = [True] * len(self._tasks)
        compared = tuple(tuple(method.marks(s.tensor, s.size)[0]) for s in self._merge.stretches)
        known = self._marked or tuple(tuple(everyone) for _ in self._merge.stretches)
        self._marked = compared
        return compared != known
