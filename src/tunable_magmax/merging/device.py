"""The engine on a GPU: the same walks as `stream`, with many tensors in one launch and few waits.

Values come from `DeviceVectors`: files chunk by chunk; `resident` has models that lie on the device. Planes, the
auction and its counts stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.merging.auction import Owners
from tunable_magmax.merging.device_auction import (
    SPARE,
    Auction,
    DeviceAuctioneer,
    DevicePlanes,
    Plan,
    Reused,
    plane_rows,
)
from tunable_magmax.merging.kernels import TensorPlace, TensorRange
from tunable_magmax.merging.kernels.cuda import CudaKernels, HostCopy
from tunable_magmax.merging.kernels.launch import ALIGNMENT, Address, Destination, Rows, Sums, Table, Target
from tunable_magmax.merging.kernels.portable import PortableKernels
from tunable_magmax.merging.methods import Method
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.reading import Sources, Vectors, does_not_fit, working_dtype
from tunable_magmax.merging.report import MergeReport, Survey
from tunable_magmax.merging.resources import Limits
from tunable_magmax.merging.stream import Merge

DeviceChunk = Sequence[tuple[TensorRange, Sequence[Tensor]]]
"""Ranges with the base's and all tasks' values on the device, contiguous and as they are stored."""


class DeviceVectors(Vectors, Protocol):
    """Where values come from, for a device. What is `borrowed` is brought to the device chunk by chunk."""

    chunk: int
    """The most elements of a range."""

    def walk(self, places: Sequence[TensorPlace]) -> Iterator[DeviceChunk]:
        """Yields all values of some tensors, in order. A chunk's values hold until the next one is asked for."""


class DeviceMerge(Merge):
    """`Merge` on an NVIDIA GPU. Outputs are brought from there."""

    alignment = ALIGNMENT
    solves = False

    def __init__(
        self,
        sources: Sources,
        options: Options,
        kernels: CudaKernels,
        limits: Limits | None = None,
        method: Method | None = None,
        stash: bool = True,
    ) -> None:
        """The sources' vectors are `DeviceVectors`.

        With `stash`, the merged vector is kept on the device between its measurement and the output.
        """
        self._vectors = cast(DeviceVectors, sources.vectors)
        # The portable kernels look closely at values that are not finite, which is rare.
        plain = PortableKernels(kernels.device)
        plain.chunk = self._vectors.chunk
        super().__init__(sources, options, plain, limits, method)
        self._working = [working_dtype(tensor) for tensor in self.layout.mergeable]
        if not stash:
            self.memory = replace(self.memory, stash=0)
        self._cuda = kernels
        self._bits = self._cuda.planes(0, 0)
        self._plan: Plan | None = None
        self._owners: Owners | None = None
        self._tables: dict[tuple[int, ...], list[list[Table]]] = {}
        self._reused = Reused(kernels)
        # The square of the merged vector, where values did not fit [tensors], and elements given [tensors, tasks].
        tensors = max(1, len(self.layout.mergeable))
        self._all_sums = self._cuda.zeros(1 + tensors + tensors * self.tasks)
        self._noted = self._all_sums[: 1 + tensors]
        given = self._all_sums[1 + tensors :].view(tensors, self.tasks)
        self._sums = Sums(self._all_sums[:1].view(torch.float64), self._all_sums[1 : 1 + tensors], given)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._tables.clear()
        self._plan = None
        self._reused.clear()
        self._bits = self._cuda.planes(0, 0)

    # -- walking -------------------------------------------------------------------------------------------------------

    def _walk_tables(
        self, places: Sequence[TensorPlace], groups: Mapping[int, int] | None = None
    ) -> Iterator[list[Table]]:
        """Yields all values, chunk by chunk, with the group of each tensor where that matters."""
        if self._vectors.borrows:
            for chunk in self._vectors.walk(places):
                yield self._tables_of(chunk, groups)
            return
        # What lies on the device stays where it is, and so do the tables of it.
        key = (*(place.tensor for place in places), *(groups or {}).values())
        if key not in self._tables:
            self._tables[key] = [self._tables_of(chunk, groups) for chunk in self._vectors.walk(places)]
        yield from self._tables[key]

    def _all_tables(self, places: Sequence[TensorPlace], groups: Mapping[int, int] | None = None) -> Iterator[Table]:
        return chain.from_iterable(self._walk_tables(places, groups))

    def _tables_of(self, chunk: DeviceChunk, groups: Mapping[int, int] | None) -> list[Table]:
        """Returns the tables of a chunk, one for each working type."""
        tables = []
        for dtype in (torch.float32, torch.float64):
            chosen = [(bounds, values) for bounds, values in chunk if self._working[bounds.place.tensor] == dtype]
            if chosen:
                ranges, values = [bounds for bounds, _ in chosen], [values for _, values in chosen]
                order = [groups[bounds.place.tensor] if groups else 0 for bounds in ranges]
                tables.append(Table(ranges, values, order, dtype, self._cuda.device))
        return tables

    # -- survey --------------------------------------------------------------------------------------------------------

    def look(self) -> Survey:
        everything = self._everything
        if self.method.plane_rows:
            last = everything[-1] if everything else TensorPlace(0, 0, 0, 0)
            self._bits = self._cuda.planes(plane_rows(self.method), last.slot + last.size)
        self.method.assume(self.layout.elements)
        found = self._marked(everything)
        copy = HostCopy(found)
        self._foresee(found.data_ptr())
        seen = copy.read()
        flags = seen[: len(everything) * self.tasks].reshape(-1, self.tasks)
        survey = Survey.nothing(len(everything), self.tasks)
        survey.changed[:] = flags & 1
        survey.squares[:] = seen[flags.size :].view(np.float64)
        self._settle_suspects(everything, (flags & 2).astype(np.bool_), survey)
        self.progress("survey", self.layout.elements, self.layout.elements)
        return survey

    def _foresee(self, flags: Address) -> None:
        """Orders what is likely to follow while the survey, which writes the flags, is still running."""

    def _mark(self) -> None:
        self._marked(self.places)

    def _marked(self, places: Sequence[TensorPlace]) -> Tensor:
        """Marks candidates; returns flags [tensors, tasks] (changed, not finite), then squares of the last vector.

        All are 64-bit words in one row, so that they travel together.
        """
        self._cuda.follow()
        tensors = len(self.layout.mergeable)
        # One transfer for the zeros to which the kernel adds and for what it reads.
        zeros = np.zeros(tensors * (2 * self.tasks + 1), np.int64)
        marks = zeros[tensors * (self.tasks + 1) :].reshape(tensors, self.tasks)
        if self.options.compare == "active" and self.options.scope == "tensor":
            for k, tensor in enumerate(self.layout.mergeable):
                marks[k] = as_words(*self.method.marks(k, tensor.size))
        else:  # the same for all
            marks[:] = as_words(*self.method.marks(0, 0))
        numbers = self._cuda.numbers(zeros)
        found = numbers[: tensors * (self.tasks + 1)]
        squares = found.data_ptr() + 8 * tensors * self.tasks
        for table in self._all_tables(places):
            self._cuda.survey(table, squares + 8 * tensors, self._bits, found.data_ptr(), squares)
        return found

    # -- decide --------------------------------------------------------------------------------------------------------

    def choose(self) -> None:
        self._cuda.follow()
        auction = self._order(self.places)
        if auction is not None:
            auction.close(self._mark)
            self._plan = auction.plan

    def _order(self, places: Sequence[TensorPlace], guard: Callable[[Address], object] | None = None) -> Auction | None:
        """Orders the method's decision about these tensors. `guard` orders what may call an auction off."""
        auctioneer = DeviceAuctioneer(self._cuda, self._reused, self._planes_of(places), guard)
        self.method.decide(auctioneer)
        auction = auctioneer.ordered
        # The auction itself is not kept: it knows this merge, and would keep its memory alive.
        self._plan, self._owners = (auction.plan, auction.result) if auction is not None else (None, None)
        self._all_sums.zero_()
        return auction

    def _planes_of(self, places: Sequence[TensorPlace]) -> DevicePlanes:
        """Returns what is auctioned: the merged tensors with their planes, and their values where these matter."""

        def walk(groups: Mapping[int, int]) -> Iterator[Table]:
            return self._all_tables(places, groups)

        wide = any(self._working[place.tensor] == torch.float64 for place in places)
        return DevicePlanes(places, Rows(self._bits), plane_rows(self.method) - SPARE, walk, wide)

    # -- merged values -------------------------------------------------------------------------------------------------

    @property
    def merged_square(self) -> float:
        return float(self._sums.square)

    def measure(self, places: Sequence[TensorPlace]) -> None:
        """Makes the merged vectors, kept for rendering, and measures them together."""
        todo = [place for place in places if place.tensor not in self._measured]
        for table in self._all_tables(todo):
            self._combine_table(table, self._taus(table), None)
        self._measured.update(place.tensor for place in todo)

    def render(
        self, into: Callable[[TensorRange], Tensor], places: Sequence[TensorPlace] | None = None
    ) -> Iterator[tuple[TensorRange, Tensor]]:
        """Yields the merged values, range by range in order, each written to the tensor that `into` gives for it."""
        self._cuda.follow()
        total = self.elements
        chosen = self.places if places is None else places
        order = {place.tensor: k for k, place in enumerate(chosen)}
        for tables in self._walk_tables(chosen):
            made: list[tuple[TensorRange, Tensor]] = []
            for table in tables:
                outs = [self._room(bounds) for bounds in table.ranges]
                taus = self._taus(table) if self._stash else None
                self._render_table(table, taus, Destination(outs, self._cuda.device))
                made += zip(table.ranges, outs, strict=True)
            made.sort(key=lambda pair: (order[pair[0].place.tensor], pair[0].start))
            self._check_fit()
            for bounds, values in made:
                self._done["merge"] = self._done.get("merge", 0) + bounds.stop - bounds.start
                self.progress("merge", self._done["merge"], total)
                yield bounds, into(bounds).copy_(values)

    def _render_table(self, table: Table, taus: Destination | None, into: Destination) -> None:
        """Writes the final values of a table, from its merged vectors if they lie ready."""
        if taus is not None:
            self._cuda.step(table, taus, Target(into, self._sums, self.scale))
        else:
            again = table.ranges[0].place.tensor in self._measured
            self._combine_table(table, into, self.scale, again)

    def _taus(self, table: Table) -> Destination:
        """Returns where the merged vectors of some ranges lie, or may be put for the moment."""
        if self._stash:
            taus = [self._stash[bounds.place.tensor][bounds.start : bounds.stop] for bounds in table.ranges]
        else:
            taus = [self._cuda.empty(bounds.stop - bounds.start, table.working) for bounds in table.ranges]
        return Destination(taus, self._cuda.device)

    def _room(self, bounds: TensorRange) -> Tensor:
        """Returns room on the device for output that goes elsewhere."""
        dtype = self.torch_out_dtype(self.layout.mergeable[bounds.place.tensor])
        return self._cuda.empty(bounds.stop - bounds.start, dtype)

    def _check_fit(self, sums: HostCopy | None = None) -> None:
        for k in (sums or HostCopy(self._noted)).read()[1:].nonzero()[0].tolist():
            tensor = self.layout.mergeable[k]
            raise does_not_fit(tensor.name, "merged", self.torch_out_dtype(tensor))

    def _combine_table(self, table: Table, into: Destination, scale: float | None, again: bool = False) -> None:
        """Writes the method's merged vector of a table, or the final values if the scale is given.

        Its square, and what each task gave where that is counted on the way, are added up unless this is done again.
        """
        sums = self._sums
        if again:
            sums = Sums(torch.zeros_like(sums.square), sums.unfit, torch.zeros_like(sums.given))
        target = Target(into, sums, scale, self._plan.state if self._plan is not None else 0)
        self.method.combine(self._cuda, table, table.ranges[0].place.tensor, self._bits, target)

    # -- report --------------------------------------------------------------------------------------------------------

    def report(self) -> MergeReport:
        self.counts = self._owned() if self.method.owns else {}
        return super().report()

    def _owned(self) -> dict[int, NDArray[np.int64]]:
        """Returns how many elements each task gave, by tensor."""
        given = self._sums.given
        if self._owners is not None:
            tasks, rows = self._owners.rows[self.places[0].tensor]
            owned = self._cuda.zeros(len(given), len(tasks))
            table = self._reused.table(self.places, [range(len(self.places))])
            self._cuda.tally(table, rows, self._bits, owned)
            given = self._cuda.zeros(len(given), self.tasks)
            given[:, tasks] = owned
        counts = given.cpu().numpy()
        for place in self.places:
            only = self.method.combined(place.tensor, place.size)
            if self._owners is None and len(only) == 1:  # not counted on the way
                counts[place.tensor, only[0]] = place.size
        return {place.tensor: counts[place.tensor] for place in self.places}


def as_words(compared: Sequence[bool], rows: Sequence[int]) -> NDArray[np.int64]:
    """Returns each task's marks as the survey reads them: twice its row, and 1 if later tasks are compared with it."""
    return 2 * np.array(rows, np.int64) + np.array(compared, np.int64)
