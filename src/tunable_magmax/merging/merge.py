"""One merge: walks over base and tasks chunk by chunk, under a memory bound, and hands the chunks to a method.

Walk 1 surveys: which tensors changed, is everything finite, who is a candidate where. Then the method decides. Where
the scale is `matched`, a second walk measures the merged vector (and keeps it if memory allows); methods that have
nothing to decide are measured in walk 1. The last walk renders; a matrix that the method merges whole is made before
its ranges are rendered. While some threads work on chunks, others read the next ones. Nothing here depends on where
values come from (`Source`) or where results go.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.checkpoints.tensors import torch_dtype
from tunable_magmax.errors import ExactnessError
from tunable_magmax.merging.kernels import (
    Chunk,
    Counts,
    Kernels,
    Planes,
    TensorPlace,
    TensorRange,
    padded,
)
from tunable_magmax.merging.layout import Mergeable
from tunable_magmax.merging.methods import Method, method_class, unused_options
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.owners import MergedElements, Part
from tunable_magmax.merging.report import MergeReport, Survey, TensorReport, matched_scale, options_used, significant
from tunable_magmax.merging.walker import (
    Limits,
    MemoryPlan,
    Sources,
    TasksRead,
    Walker,
    Work,
    before_cast,
    does_not_fit,
    plan_memory,
)

STRETCHED = 2.0
"""A matched scale above this is worth a warning. In experiments (docs/results.md) it was rare, and fatal in some."""


Findings: TypeAlias = dict[int, list[tuple[Counts, float]]]
"""Of each tensor's ranges: elements that each task gave, and the squared length of the merged vector."""


class Merge:
    """One merge: `survey`, `decide`, then `values` or `render`; `report` at the end. A context manager."""

    def __init__(
        self,
        sources: Sources,
        options: Options,
        kernels: Kernels,
        limits: Limits | None = None,
        kept: dict[type[Method], dict[tuple[int, int], Any]] | None = None,
    ) -> None:
        """`kept` is what several merges share, one after the other (`restart`); None: there is one merge."""
        layout, limits = sources.layout, limits or Limits()
        here = range(len(layout.mergeable)) if limits.tensors is None else limits.tensors
        own = replace(layout, mergeable=tuple(layout.mergeable[k] for k in here))
        self.layout, self.options, self.kernels = layout, options, kernels
        self.labels, self.notes, self.tasks = sources.labels, sources.notes, len(sources.labels) - 1
        self._kept = kept
        self.method = self._new_method()
        reads = not sources.in_memory
        self.memory: MemoryPlan = plan_memory(own, options, kernels, limits.threads, limits.memory, reads)
        self.walker = Walker(sources, self.memory, kernels, own.wide)
        self.progress = limits.progress or (lambda phase, done, total: None)
        self._done: dict[str, int] = {}
        self._spill = limits.spill if self.memory.spill else None
        self._planes: Planes | None = None
        self._compared: dict[int, list[bool]] = {}
        """Of each tensor, the tasks that were compared when the planes were marked."""
        self._cached_delta: dict[int, Tensor] = {}
        self._everything = _places(layout.mergeable, here)
        self.places: tuple[TensorPlace, ...] = ()
        self.elements = own.elements
        """d, the number of merged elements, and where they are; all that are mergeable before `survey`."""
        self.scale = 1.0
        self.last_square = 0.0
        self.found: Findings = {}
        self.unchanged: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.walker.close()
        if self._planes is not None:
            self._planes.close()
        if self._kept is not None:
            self._kept.clear()

    def _new_method(self) -> Method:
        kind = method_class(self.options.method)
        return kind(self.options, self.tasks, None if self._kept is None else self._kept.setdefault(kind, {}))

    # -- walking ------------------------------------------------------------------------------------------------------

    def _walk(
        self, phase: str, work: Work, places: Sequence[TensorPlace], tasks: TasksRead | None = None
    ) -> Iterator[tuple[TensorRange, Any]]:
        """Applies `work` to all ranges of some tensors; yields results in order."""
        for bounds, result in self.walker.walk(work, places, tasks):
            # Before the yield: a consumer that has what it wants does not come back after its last range.
            self._done[phase] = min(self.elements, self._done.get(phase, 0) + bounds.stop - bounds.start)
            self.progress(phase, self._done[phase], self.elements)
            yield bounds, result

    def _tasks_read(self, place: TensorPlace) -> Collection[int]:
        return self.method.tasks_read(place.size)

    # -- survey -------------------------------------------------------------------------------------------------------

    def survey(self) -> None:
        """Reads all values once: finds what changed, refuses what is not finite, and marks candidates."""
        self.apply(self.scan(self.layout.elements))

    def scan(self, elements: int) -> Survey:
        """Walks over all tensors and returns what they hold; marks candidates as if all `elements` were merged.

        Methods that have nothing to decide are measured on the way.
        """
        everything = self._everything
        if self.method.rows is not None:
            slots = sum(padded(place.size) for place in everything)
            self._planes = self.kernels.planes(self.method.rows.count, slots, self._spill)
        self.method.elements = elements
        self._compared = self._compared_in(everything)
        survey = Survey.nothing(len(self.layout.mergeable), self.tasks)
        suspect = np.zeros_like(survey.changed)
        decides = type(self.method).decide is not Method.decide
        early = self.options.matched and not decides and not self.method.merges_matrices
        if early:
            self._make_room([place for place in everything if place.size])

        def work(ranges: Sequence[TensorRange], chunks: Sequence[Chunk]) -> list[tuple[Any, Any]]:
            measured = self._measure_batch(ranges, chunks) if early else [None] * len(ranges)
            return list(zip(self._survey_batch(ranges, chunks), measured, strict=True))

        for bounds, ((moved, nonfinite, square), noted) in self._walk("survey", work, everything):
            k = bounds.place.tensor
            survey.changed[k] |= moved
            suspect[k] |= nonfinite
            survey.squares[k] += square
            if noted:
                self._note(bounds, *noted)
        looked_at = [place for place in everything if suspect[place.tensor].any()]
        survey.changed[[place.tensor for place in looked_at]] = False
        for bounds, (moved, nonfinite) in self.walker.walk_chunks(_look_closely, looked_at):
            survey.changed[bounds.place.tensor] |= moved
            survey.nonfinite[bounds.place.tensor] += nonfinite
        return survey

    def apply(self, survey: Survey, elements: int | None = None) -> None:
        """Takes from a survey what is merged; values that can't be are an `InputError`.

        `elements` are those that are merged here and elsewhere.
        """
        survey.refuse([tensor.name for tensor in self.layout.mergeable], self.labels)
        merged = np.asarray(survey.changed.any(axis=1))
        self.places = tuple(place for place in self._everything if merged[place.tensor])
        self.elements = sum(place.size for place in self.places)
        self.unchanged = [int(t) + 1 for t in np.flatnonzero(~survey.changed.any(axis=0))]
        self.last_square = math.fsum(survey.squares[merged])
        for k in np.flatnonzero(~merged).tolist():  # what was measured of them means nothing
            self._cached_delta.pop(k, None)
            self.found.pop(k, None)
        self._mark_again(self.elements if elements is None else elements)

    def restart(self, options: Options) -> None:
        """Begins another merge of what was surveyed, of which candidates and what methods kept can be used again."""
        self.options = options
        self.method = self._new_method()
        self.found, self._cached_delta = {}, {}
        self._mark_again(self.elements)

    def _mark_again(self, elements: int) -> None:
        """Marks candidates again if other tasks are compared, now that so many elements are merged."""
        self.method.elements = elements
        compared = self._compared_in(self.places)
        marked = self._planes is not None and self.method.rows is not None
        if marked and any(compared[k] != self._compared[k] for k in compared):
            deque(self._walk("survey", self._survey_batch, self.places), maxlen=0)
            self._compared = compared

    def _compared_in(self, places: Iterable[TensorPlace]) -> dict[int, list[bool]]:
        """Returns which tasks the method compares, by tensor."""
        return {place.tensor: list(self.method.compared(place.size)) for place in places}

    def _survey_batch(
        self, ranges: Sequence[TensorRange], chunks: Sequence[Chunk]
    ) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_], float]]:
        compared = [self.method.compared(bounds.place.size) for bounds in ranges]
        rows = [-1] * self.tasks if self.method.rows is None else self.method.rows.candidates
        return self.kernels.survey(chunks, compared, rows, self._planes)

    # -- decide -------------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Lets the method decide, and finds the scale."""
        self.choose()
        if not self.options.matched:
            self.scale = self.options.scale
            return
        self.measure()
        self.scale = matched_scale(self.last_square, self.merged_square)

    @property
    def _keeps_vectors(self) -> bool:
        """Whether merged vectors are kept from the walk that measures them to the one that renders."""
        return self.options.matched and self.memory.cached_delta > 0

    def _make_room(self, places: Sequence[TensorPlace]) -> None:
        """Makes room for the merged vectors of some tensors, if they are kept."""
        for place in places if self._keeps_vectors else ():
            if not self._is_matrix(place):
                working = self.layout.mergeable[place.tensor].working
                self._cached_delta[place.tensor] = self.kernels.empty(place.size, working)

    def choose(self) -> None:
        """Lets the method decide what concerns all elements."""
        part = self.part()
        here = dict.fromkeys((place.tensor for place in self.places), 0)
        calls = lambda todo: [getattr(part, call.name)(*call.arguments) for call in todo]  # noqa: E731
        self.method.decide(MergedElements(self.places, here, calls))

    def part(self) -> Part:
        """Returns the merged elements that are here."""
        return Part(self.kernels, self._planes, self.places, self.walker.walk_chunks, self.walker.each)

    def measure(self) -> None:
        """Counts owners and measures the merged vector of tensors that were not measured yet; keeps it if it fits."""
        places = [place for place in self.places if place.tensor not in self.found]
        self._make_room(places)
        for alike in self._with_matrices(places):
            for bounds, noted in self._walk("measure", self._measure_batch, alike, self._tasks_read):
                self._note(bounds, *noted)

    @property
    def merged_square(self) -> float:
        """The squared length of the merged vector, as far as it was measured."""
        return math.fsum(square for notes in self.found.values() for _, square in notes)

    def _measure_batch(self, ranges: Sequence[TensorRange], chunks: Sequence[Chunk]) -> list[tuple[Counts, float]]:
        taus, counts = self._combine(ranges, chunks)
        return list(zip(counts, self.kernels.squares(taus), strict=True))

    def _combine(
        self, ranges: Sequence[TensorRange], chunks: Sequence[Chunk], measured: bool = False
    ) -> tuple[list[Tensor], list[Counts]]:
        """Returns the merged vector in some ranges, and what each task gave, unless that is `measured` already."""
        kept, tensors = self._deltas(ranges), [bounds.place.tensor for bounds in ranges]
        if kept and (measured or self._is_matrix(ranges[0].place)):  # which was merged before the walk
            return kept, [None] * len(kept)
        taus = kept or self._scratch("tau", chunks)
        if self.method.owned:
            assert self._planes is not None
            rows = [self.method.owned[tensor] for tensor in tensors]
            return taus, self.kernels.gather(chunks, rows, self._planes, taus)
        return taus, [self.method.combine(self.kernels, *each) for each in zip(chunks, tensors, taus, strict=True)]

    def _deltas(self, ranges: Sequence[TensorRange]) -> list[Tensor]:
        """Returns the room for the merged vector in some ranges, if it is kept: in all ranges of a walk, or in none."""
        kept = self._cached_delta
        return [kept[each.place.tensor][each.start : each.stop] for each in ranges if each.place.tensor in kept]

    def _scratch(self, name: str, chunks: Sequence[Chunk]) -> list[Tensor]:
        sizes = [chunk.base.numel() for chunk in chunks]
        return list(torch.split(self.walker.buffer(name, sum(sizes), chunks[0].base.dtype), sizes))

    def _is_matrix(self, place: TensorPlace) -> bool:
        """Whether the method merges a tensor whole."""
        return self.method.merges_matrices and len(self.layout.mergeable[place.tensor].shape) == 2

    def _merge_matrix(self, place: TensorPlace) -> Tensor:
        """Returns the merged vector of a matrix that is merged whole."""
        tensor = self.layout.mergeable[place.tensor]
        (rows, columns), dtype = tensor.shape, tensor.working
        base = self.walker.whole(0, place, self.kernels.empty(place.size, dtype))
        scratch = self.kernels.empty(place.size, dtype)

        def vector(task: int) -> Tensor:
            return torch.sub(self.walker.whole(task + 1, place, scratch), base, out=scratch).view(rows, columns)

        return self.method.matrix(place.tensor, (rows, columns), vector).to(dtype).reshape(-1)

    def _note(self, bounds: TensorRange, counts: Counts, square: float) -> None:
        self.found.setdefault(bounds.place.tensor, []).append((counts, square))

    # -- render -------------------------------------------------------------------------------------------------------

    def render(
        self,
        into: Callable[[TensorRange], Tensor],
        places: Sequence[TensorPlace] | None = None,
        steps: bool = False,
    ) -> Iterator[tuple[TensorRange, Tensor]]:
        """Yields the merged values, range by range in order, each written to the tensor that `into` returns for it.

        `steps`: of the values, what they are more than the base's.
        """

        def work(ranges: Sequence[TensorRange], chunks: Sequence[Chunk]) -> list[tuple[Tensor, Counts, float]]:
            return self._render_batch(ranges, chunks, [into(bounds) for bounds in ranges], steps)

        def tasks(place: TensorPlace) -> Collection[int]:
            return () if place.tensor in self._cached_delta else self._tasks_read(place)

        measured = set(self.found)
        for alike in self._with_matrices(self.places if places is None else places):
            for bounds, (out, counts, square) in self._walk("merge", work, alike, tasks):
                if bounds.place.tensor not in measured:
                    self._note(bounds, counts, square)
                yield bounds, out

    def _with_matrices(self, places: Sequence[TensorPlace]) -> Iterator[Sequence[TensorPlace]]:
        """Yields the tensors in order: a matrix that is merged whole alone, with its vector at hand; others together.

        A vector that is not kept is let go when the next tensors are asked for.
        """
        for whole, alike in groupby(places, self._is_matrix):
            if not whole:
                yield list(alike)
                continue
            for place in alike:
                if place.tensor not in self._cached_delta:
                    self._cached_delta[place.tensor] = self._merge_matrix(place)
                yield [place]
                if not self._keeps_vectors:
                    del self._cached_delta[place.tensor]

    def _render_batch(
        self, ranges: Sequence[TensorRange], chunks: Sequence[Chunk], outs: list[Tensor], steps: bool
    ) -> list[tuple[Tensor, Counts, float]]:
        bases = [chunk.base for chunk in chunks]
        taus, counts = self._combine(ranges, chunks, measured=True)
        squares = [0.0] * len(ranges) if self.options.matched else self.kernels.squares(taus)
        direct = all(
            (out.dtype, out.device) == (base.dtype, base.device) for out, base in zip(outs, bases, strict=True)
        )
        targets = outs if direct else self._scratch("out", chunks)
        starts = [torch.zeros_like(base) for base in bases] if steps else bases
        finite = self.kernels.step(starts, taus, self.scale, targets)
        for k, (bounds, out, target) in enumerate(zip(ranges, outs, targets, strict=True)):
            if not direct:
                out.copy_(before_cast(target, out.dtype))
                # Rounding keeps order: all values fit if the smallest and the largest do.
                ends = torch.stack(target.aminmax())
                finite[k] = finite[k] and bool(before_cast(ends, out.dtype).to(out.dtype).isfinite().all())
            if not finite[k]:
                raise does_not_fit(self.layout.mergeable[bounds.place.tensor].name, "merged", out.dtype)
        return list(zip(outs, counts, squares, strict=True))

    def values(self) -> dict[str, Tensor]:
        """Returns the merged tensors by name. Call it once: vectors that were kept become the output."""
        out: dict[int, Tensor] = {}
        for k in (place.tensor for place in self.places):
            dtype = self.torch_out_dtype(self.layout.mergeable[k])
            delta = self._cached_delta.get(k)
            if delta is None or delta.dtype != dtype:
                delta = self.kernels.empty(self.layout.mergeable[k].size, dtype)
            out[k] = delta
        for _ in self.render(lambda bounds: out[bounds.place.tensor][bounds.start : bounds.stop]):
            pass
        mergeable = self.layout.mergeable
        return {mergeable[k].name: tensor.view(mergeable[k].shape) for k, tensor in out.items()}

    # -- report -------------------------------------------------------------------------------------------------------

    def out_dtype(self, tensor: Mergeable) -> str:
        """Returns the output type of a merged tensor."""
        return self.options.out_dtype or tensor.widest

    def torch_out_dtype(self, tensor: Mergeable) -> torch.dtype:
        """Returns `out_dtype` as a torch type."""
        dtype = torch_dtype(self.out_dtype(tensor))
        assert dtype is not None
        return dtype

    def report(self) -> MergeReport:
        """Returns the report. Call it after rendering.

        If tasks own other numbers of elements than their budget says, that is an `ExactnessError`.
        """
        mergeable, method = self.layout.mergeable, self.method
        merged = {place.tensor for place in self.places}
        counts = self._counts(merged) or (0,) * self.tasks if method.owns else None
        tensors = {
            tensor.name: TensorReport(tensor.shape, self.out_dtype(tensor), self._counts([k]))
            for k, tensor in enumerate(mergeable)
            if k in merged
        }
        exact = [("all tensors", counts, method.budget)]
        if self.options.scope == "tensor":
            own = [mergeable[k] for k in merged]
            exact += [(each.name, tensors[each.name].counts, method.expected_budget(each.size)) for each in own]
        for where, found, budget in exact:
            if budget is not None and found != budget:
                raise ExactnessError(f"of {where}, the tasks own {found} elements, not {budget}; please report this")
        unmerged = [tensor.name for k, tensor in enumerate(mergeable) if k not in merged]
        return MergeReport(
            method=self.options.method,
            tasks=self.tasks,
            elements=self.elements,
            budget=method.budget,
            counts=counts,
            leftovers=method.leftovers,
            scale=self.scale,
            seed=self.options.seed,
            options=options_used(self.options, method.reads),
            last_length=significant(math.sqrt(self.last_square)),
            merged_length=significant(math.sqrt(self.merged_square)),
            tensors=tensors,
            copied=tuple(sorted(unmerged + [info.name for info in self.layout.copied])),
            warnings=tuple(dict.fromkeys(self._warnings())),
        )

    def _counts(self, tensors: Iterable[int]) -> tuple[int, ...] | None:
        """Returns how many elements of some tensors each task gave, where they have owners."""
        found = [counts for k in tensors for counts, _ in self.found.get(k, ()) if counts is not None]
        return tuple(np.sum(found, axis=0).tolist()) if found else None

    def _warnings(self) -> Iterator[str]:
        yield from self.notes
        yield from unused_options(self.options)
        yield from self.layout.warnings
        if not self.places:
            yield "no task changed any mergeable tensor: the result is a copy of the base"
            return
        if any(map(self._is_matrix, self.places)):
            yield (
                f"{self.options.method} works with singular vectors, which differ in their last bits between devices "
                "and libraries: another machine gives this result within a tolerance, not to the bit"
            )
        for t in self.unchanged:
            yield f"{self.labels[t]} is identical to the base"
        matched = self.options.matched
        if matched and self.tasks in self.unchanged:
            yield "the last task vector is zero, so the matched scale is 0 and the result equals the base; give a scale"
        if matched and self.scale > STRETCHED:
            yield (
                f"the matched scale is {self.scale:g}: the chosen tasks moved far less than the last one, and their "
                "step is stretched to its length, which may gain much or spoil the model; try the result on a few "
                "samples, and if it is poor, give 1 as scale"
            )


def _look_closely(bounds: TensorRange, chunk: Chunk) -> tuple[list[bool], list[int]]:
    """Returns which tasks changed a chunk, and how many values of base and tasks are not finite.

    Equal infinities and NaN are no change.
    """
    base = chunk.base
    same = [(values == base) | (values.isnan() & base.isnan()) for values in chunk.tasks]
    finite = [values.isfinite() & ((values - base).isfinite() | ~base.isfinite()) for values in chunk.tasks]
    nonfinite = [int((~each).sum()) for each in (base.isfinite(), *finite)]
    return [not bool(each.all()) for each in same], nonfinite


def _places(tensors: Sequence[Mergeable], here: Sequence[int]) -> list[TensorPlace]:
    """Returns where some of the tensors lie in the planes, one after the other."""
    slots = accumulate((padded(tensors[k].size) for k in here), initial=0)
    return [TensorPlace(k, slot, tensors[k].element, tensors[k].size) for k, slot in zip(here, slots, strict=False)]
