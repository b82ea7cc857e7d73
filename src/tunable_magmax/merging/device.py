"""The engine on a GPU: the same walks as `stream`, with whole blocks of tensors in one launch and few waits.

Values come from `Blocks`: files block by block; `resident` has models that lie on the device. Planes, the auction and
its counts stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.checkpoints.layout import Layout
from tunable_magmax.files import Progress
from tunable_magmax.merging.auction import TensorPlace, TensorRange
from tunable_magmax.merging.device_auction import SPARE, Auction, Auctions, Floor, Plan, segment_of
from tunable_magmax.merging.kernels.cuda import CudaKernels, Letter, signed
from tunable_magmax.merging.kernels.launch import ALIGNMENT, Address, Destination, Table, Target, row_of
from tunable_magmax.merging.kernels.portable import PortableKernels
from tunable_magmax.merging.methods import LastTask, Magmax, Method, RandomMix, TaskArithmetic, Ties, TunableMagmax
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.reading import Vectors, does_not_fit, working_dtype
from tunable_magmax.merging.report import MergeReport, Survey
from tunable_magmax.merging.stream import Merge

Block = Sequence[tuple[TensorRange, Sequence[Tensor]]]
"""Ranges with the base's and all tasks' values on the device, contiguous and as they are stored."""


class Load(NamedTuple):
    """Values of one working type: their table, and the ranges that it lists."""

    table: Table
    ranges: list[TensorRange]


class Blocks(Vectors, Protocol):
    """Where values come from, for a device. What is `borrowed` is brought to the device block by block."""

    chunk: int
    """The most elements of a range."""

    def walk(self, places: Sequence[TensorPlace]) -> Iterator[Block]:
        """All values of some tensors, in order. A block's values hold until the next one is asked for."""


class DeviceMerge(Merge):
    """`Merge` on an NVIDIA GPU. Outputs are brought from there."""

    alignment = ALIGNMENT

    def __init__(
        self,
        layout: Layout,
        blocks: Blocks,
        options: Options,
        kernels: CudaKernels,
        *,
        labels: Sequence[str],
        progress: Progress | None = None,
        notes: tuple[str, ...] = (),
        method: Method | None = None,
        stash: bool = True,
    ) -> None:
        """With `stash`, the merged vector is kept on the device between its measurement and the output."""
        # The portable kernels look closely at values that are not finite, which is rare.
        plain = PortableKernels(kernels.device)
        plain.chunk = blocks.chunk
        super().__init__(layout, blocks, options, plain, labels=labels, progress=progress, notes=notes, method=method)
        self._blocks = blocks
        self._working = [working_dtype(tensor) for tensor in layout.mergeable]
        if not stash:
            self.memory = replace(self.memory, stash=0)
        self._cuda = kernels
        self._bits = self._cuda.planes(0, 0)
        self._plan: Plan | None = None
        self._owning: Tensor | None = None  # tasks that own something, and the rows of it
        self._loads: dict[tuple[int, ...], list[list[Load]]] = {}
        self._auctions = Auctions(kernels)
        # The square of the merged vector, where values did not fit [tensors], and elements given [tensors, tasks].
        tensors = max(1, len(layout.mergeable))
        self._sums = self._cuda.zeros(1 + tensors + tensors * self.tasks)
        self._square = self._sums[:1].view(torch.float64)
        self._unfit = self._sums[1 : 1 + tensors]
        self._noted = self._sums[: 1 + tensors]
        self._given = self._sums[1 + tensors :].view(tensors, self.tasks)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._loads.clear()
        self._plan = None
        self._auctions.clear()
        self._bits = self._cuda.planes(0, 0)

    # -- walking -------------------------------------------------------------------------------------------------------

    def _walk_loads(
        self, places: Sequence[TensorPlace], groups: Mapping[int, int] | None = None
    ) -> Iterator[list[Load]]:
        """All values, block by block, with the group of each tensor where that matters."""
        if self._blocks.borrows:
            for block in self._blocks.walk(places):
                yield self._loaded(block, groups)
            return
        # What lies on the device stays where it is, and so do the tables of it.
        key = (*(place.tensor for place in places), *(groups or {}).values())
        if key not in self._loads:
            self._loads[key] = [self._loaded(block, groups) for block in self._blocks.walk(places)]
        yield from self._loads[key]

    def _all_loads(self, places: Sequence[TensorPlace], groups: Mapping[int, int] | None = None) -> Iterator[Load]:
        return chain.from_iterable(self._walk_loads(places, groups))

    def _loaded(self, block: Block, groups: Mapping[int, int] | None) -> list[Load]:
        """The tables of a block, one for each working type."""
        found = []
        for dtype in (torch.float32, torch.float64):
            chosen = [(p, v) for p, v in block if self._working[p.place.tensor] == dtype]
            if chosen:
                segments = [segment_of(p, v, groups[p.place.tensor] if groups else 0) for p, v in chosen]
                found.append(Load(Table(segments, dtype, self._cuda.device), [bounds for bounds, _ in chosen]))
        return found

    # -- survey --------------------------------------------------------------------------------------------------------

    def look(self) -> Survey:
        everything = self._everything
        self._first_spare = plane_rows(self.method) - SPARE
        if self.method.plane_rows:
            last = everything[-1] if everything else TensorPlace(0, 0, 0, 0)
            self._bits = self._cuda.planes(plane_rows(self.method), last.slot + last.size)
        self.method.assume(self.layout.elements)
        found = self._marked(everything)
        letter = Letter(found)
        self._foresee(found.data_ptr())
        seen = letter.read()
        flags = seen[: len(everything) * self.tasks].reshape(-1, self.tasks)
        survey = Survey.nothing(len(everything), self.tasks)
        survey.changed[:] = flags & 1
        survey.squares[:] = seen[flags.size :].view(np.float64)
        self._settle_suspects(everything, (flags & 2).astype(np.bool_), survey)
        self.progress("survey", self.layout.elements, self.layout.elements)
        return survey

    def _foresee(self, flags: Address) -> None:
        """Order what is likely to come while the survey, which writes the flags, is under way."""

    def _mark(self) -> None:
        self._marked(self.places)

    def _marked(self, places: Sequence[TensorPlace]) -> Tensor:
        """Mark candidates; flags [tensors, tasks] for what changed or is not finite, then squares of the last vector.

        All are 64-bit words in one row, so that they travel together.
        """
        self._cuda.follow()
        tensors = len(self.layout.mergeable)
        # One transfer for the zeros to which the kernel adds and for what it reads.
        sheet = np.zeros(tensors * (2 * self.tasks + 1), np.int64)
        marks = sheet[tensors * (self.tasks + 1) :].reshape(tensors, self.tasks)
        if self.options.compare == "active" and self.options.scope == "tensor":
            for k, tensor in enumerate(self.layout.mergeable):
                marks[k] = as_words(*self.method.marks(k, tensor.size))
        else:  # the same for all
            marks[:] = as_words(*self.method.marks(0, 0))
        numbers = self._cuda.numbers(sheet)
        found = numbers[: tensors * (self.tasks + 1)]
        squares = found.data_ptr() + 8 * tensors * self.tasks
        for load in self._all_loads(places):
            self._cuda.survey(load.table, squares + 8 * tensors, self._bits, found.data_ptr(), squares)
        return found

    # -- decide --------------------------------------------------------------------------------------------------------

    def choose(self) -> None:
        self._cuda.follow()
        auction = self._order(self.places)
        if auction is not None:
            auction.close(self._mark)
            self._plan = auction.plan

    def _order(self, places: Sequence[TensorPlace], guard: Callable[[Address], object] | None = None) -> Auction | None:
        """Order the method's decision about these tensors. `guard` orders what may call an auction off."""
        auction = self._plan = None
        if isinstance(self.method, TunableMagmax):
            self.method.leftovers = 0
            groups, budgets = self.method.groups(places)
            if places:
                self._plan = self._auctions.plan(self.method, places, groups, budgets)
                if guard is not None:
                    guard(self._plan.sheet.state)
                auction = self._auctions.open(self._plan, self._floor(places))
        elif isinstance(self.method, Ties):
            self._auctions.trim(self.method, self._floor(places))
        owners = sorted(auction.owners.items()) if auction is not None else []
        self._owning = self._cuda.numbers(np.array(owners).T) if owners else None
        self._sums.zero_()
        return auction

    def _floor(self, places: Sequence[TensorPlace]) -> Floor:
        """What is auctioned: the merged tensors with their planes, and their values where these matter."""

        def walk(groups: Mapping[int, int]) -> Iterator[Table]:
            return (load.table for load in self._all_loads(places, groups))

        wide = any(self._working[place.tensor] == torch.float64 for place in places)
        return Floor(places, self._bits, self._first_spare, walk, wide)

    # -- merged values -------------------------------------------------------------------------------------------------

    @property
    def merged_square(self) -> float:
        return float(self._square)

    def measure(self, places: Sequence[TensorPlace]) -> None:
        """Make the merged vectors, kept for rendering, and measure them together."""
        todo = [place for place in places if place.tensor not in self._measured]
        for load in self._all_loads(todo):
            self._combine_load(load.table, self._taus(load), None)
        self._measured.update(place.tensor for place in todo)

    def render(
        self, into: Callable[[TensorRange], Tensor], places: Sequence[TensorPlace] | None = None
    ) -> Iterator[tuple[TensorRange, Tensor]]:
        """The merged values, range by range in order, each written to the tensor that `into` gives for it."""
        self._cuda.follow()
        total = self.elements
        chosen = self.places if places is None else places
        place = {place.tensor: k for k, place in enumerate(chosen)}
        for loads in self._walk_loads(chosen):
            made: list[tuple[TensorRange, Tensor]] = []
            for load in loads:
                outs = [self._room(bounds) for bounds in load.ranges]
                taus = self._taus(load) if self._stash else None
                self._render_load(load, taus, Destination(outs, self._cuda.device))
                made += zip(load.ranges, outs, strict=True)
            made.sort(key=lambda pair: (place[pair[0].place.tensor], pair[0].start))
            self._check_fit()
            for bounds, values in made:
                self._done["merge"] = self._done.get("merge", 0) + bounds.stop - bounds.start
                self.progress("merge", self._done["merge"], total)
                yield bounds, into(bounds).copy_(values)

    def _render_load(self, load: Load, taus: Destination | None, into: Destination) -> None:
        """The final values of a load, from its merged vectors if they lie ready."""
        if taus is not None:
            target = Target(into, self._square, self._unfit, self.scale)
            self._cuda.combine(load.table, "step", target, taus.addresses, plain=True)
        else:
            again = load.ranges[0].place.tensor in self._measured
            self._combine_load(load.table, into, self.scale, again)

    def _taus(self, load: Load) -> Destination:
        """Where the merged vectors of some ranges lie, or may be put for the moment."""
        if self._stash:
            taus = [self._stash[bounds.place.tensor][bounds.start : bounds.stop] for bounds in load.ranges]
        else:
            taus = [self._cuda.empty(bounds.stop - bounds.start, load.table.working) for bounds in load.ranges]
        return Destination(taus, self._cuda.device)

    def _room(self, bounds: TensorRange) -> Tensor:
        """Room on the device for output that goes elsewhere."""
        dtype = self.torch_out_dtype(self.layout.mergeable[bounds.place.tensor])
        return self._cuda.empty(bounds.stop - bounds.start, dtype)

    def _check_fit(self, sums: Letter | None = None) -> None:
        for k in (sums or Letter(self._noted)).read()[1:].nonzero()[0].tolist():
            tensor = self.layout.mergeable[k]
            raise does_not_fit(tensor.name, "merged", self.torch_out_dtype(tensor))

    def _combine_load(self, table: Table, into: Destination, scale: float | None, again: bool = False) -> None:
        """The method's merged vector of a load, or the final values if the scale is given.

        Its square, and what each task gave where that is found out on the way, are added up unless this is done again.
        """
        cuda, method, bits = self._cuda, self.method, self._bits
        given = torch.zeros_like(self._given) if again else self._given
        square = torch.zeros_like(self._square) if again else self._square
        target = Target(into, square, self._unfit, scale, self._plan.sheet.state if self._plan else 0)
        if isinstance(method, TunableMagmax):
            assert self._owning is not None
            tasks, rows, owners = row_of(self._owning, 0), row_of(self._owning, 1), self._owning.shape[1]
            arguments = (tasks, rows, owners, bits, bits.stride(0))
            cuda.combine(table, "gather", target, *arguments, plain=True, shared=8 * owners)
        elif isinstance(method, Magmax):
            cuda.combine(table, "largest", target, given, plain=True, shared=4 * self.tasks)
        elif isinstance(method, LastTask):
            cuda.combine(table, "single", target, self.tasks - 1, plain=False)
        elif isinstance(method, RandomMix):
            tops = cuda.numbers([signed(top) for top in method.tops])
            lottery_state = signed(lottery.lottery_state(method.options.seed, lottery.RANDOM_MIX, 0))
            drawn = cuda.numbers(method.drawn)
            cuda.combine(table, "mixed", target, drawn, tops, lottery_state, given, plain=False, shared=4 * self.tasks)
        elif isinstance(method, Ties):
            voters = cuda.numbers(method.voters)
            factors = cuda.numbers([method.factors()[t] for t in method.voters], torch.float64)
            terms = len(method.voters)
            cuda.combine(table, "elected", target, voters, factors, voters, terms, bits, bits.stride(0), plain=False)
        else:
            assert isinstance(method, TaskArithmetic)
            kept = [k for k, factor in enumerate(method.factors()) if factor]
            factors = cuda.numbers([method.factors()[k] for k in kept], torch.float64)
            cuda.combine(table, "weighted", target, cuda.numbers(kept), factors, len(kept), plain=False)

    # -- report --------------------------------------------------------------------------------------------------------

    def report(self) -> MergeReport:
        self.counts = self._owned() if self.method.owns else {}
        return super().report()

    def _owned(self) -> dict[int, NDArray[np.int64]]:
        """How many elements each task gave, by tensor."""
        given = self._given
        if isinstance(self.method, TunableMagmax) and self._owning is not None:
            tasks, rows = self._owning
            given = self._cuda.zeros(len(given), len(tasks))
            table = self._auctions.geometry(self.places, [range(len(self.places))])
            self._cuda.tally(table, rows, self._bits, given)
            wide = self._cuda.zeros(len(given), self.tasks)
            wide[:, tasks] = given
            given = wide
        counts = given.cpu().numpy()
        if isinstance(self.method, LastTask):
            counts[:, -1] = [tensor.size for tensor in self.layout.mergeable]
        return {place.tensor: counts[place.tensor] for place in self.places}


def as_words(compared: Sequence[bool], rows: Sequence[int]) -> NDArray[np.int64]:
    """Each task's marks as the survey reads them: twice its row, and 1 if later tasks are compared with it."""
    return 2 * np.array(rows, np.int64) + np.array(compared, np.int64)


def plane_rows(method: Method) -> int:
    """Rows of planes on a device: marks of tasks, their elements where marks are kept for another merge, and spare."""
    if isinstance(method, TunableMagmax):
        return max(method.rows) + 1 + (method.tasks if method.reusable else 0) + SPARE
    return method.tasks + SPARE
