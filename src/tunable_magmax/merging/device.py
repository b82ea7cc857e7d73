"""The engine on a GPU: the same walks as `stream`, with whole blocks of tensors in one launch and few waits.

Values come from `Blocks`: a model that lies on the device is one block; files come block by block. Planes, the auction
and its counts stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.checkpoints.layout import Layout, Mergeable
from tunable_magmax.checkpoints.tensors import torch_dtype
from tunable_magmax.errors import ExactnessError
from tunable_magmax.merging.kernels.cuda import (
    ALIGNMENT,
    Address,
    CudaKernels,
    Destination,
    Drawing,
    Segment,
    Sequel,
    Table,
    Target,
    row_of,
    signed,
)
from tunable_magmax.merging.kernels.portable import PortableKernels
from tunable_magmax.merging.methods import LastTask, Magmax, Method, RandomMix, TaskArithmetic, Ties, TunableMagmax
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.ownership import Piece, Stretch
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.stream import Merge, Progress, Vectors, does_not_fit, working_dtype
from tunable_magmax.merging.survey import Survey

SPARE = 2
"""Rows of the planes beyond the tasks': what is free, and equal magnitudes."""
TRIES = 4

Block = Sequence[tuple[Piece, Sequence[Tensor]]]
"""Pieces with the base's and all tasks' values on the device, flat and as they are stored."""


Tables = list[tuple[Table, list[Piece]]]


class Blocks(Vectors, Protocol):
    """Where values come from, for a device. What is `borrowed` is brought to the device block by block."""

    chunk: int
    """The most elements of a piece."""

    def walk(self, stretches: Sequence[Stretch]) -> Iterator[Block]:
        """All values of some tensors, in order. A block's values hold until the next one is asked for."""


class ResidentBlocks:
    """Dicts of tensors on the device, or brought there: one block."""

    borrows = False
    chunk = 1 << 24

    def __init__(self, layout: Layout, sources: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        self._layout = layout
        self._flat = [
            [source[tensor.infos[k].name].detach().to(device).reshape(-1).contiguous() for tensor in layout.mergeable]
            for k, source in enumerate(sources)
        ]

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        place = next(k for k, other in enumerate(self._layout.mergeable) if other is tensor)
        return scratch.copy_(self._flat[source][place][start:stop])

    def walk(self, stretches: Sequence[Stretch]) -> Iterator[Block]:
        yield [
            (Piece(stretch, 0, stretch.size), [values[stretch.tensor] for values in self._flat])
            for stretch in stretches
            if stretch.size
        ]


class DeviceMerge(Merge):
    """`Merge` on an NVIDIA GPU."""

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
        direct: bool = True,
        stash: bool = True,
    ) -> None:
        """With `direct`, outputs lie on the device; else they are brought from there.

        With `stash`, the merged vector is kept there between its measurement and the output.
        """
        # The portable kernels look closely at values that are not finite, which is rare.
        plain = PortableKernels(kernels.device)
        plain.chunk = blocks.chunk
        super().__init__(layout, blocks, options, plain, labels=labels, progress=progress, notes=notes, method=method)
        self._blocks, self._direct = blocks, direct
        self._working = [working_dtype(tensor) for tensor in layout.mergeable]
        if not stash:
            self.memory = replace(self.memory, stash=0)
        self._cuda = kernels
        self._bits = self._cuda.planes(0, 0)
        self._owners: dict[int, int] = {}
        self._tables: dict[tuple[int, ...], list[Tables]] = {}
        self._places: dict[tuple[int, int], list[Table]] = {}
        self._drawings: dict[tuple[int, ...], Drawing] = {}
        self._square = self._cuda.zeros(1, dtype=torch.float64)
        self._unfit = self._cuda.zeros(max(1, len(layout.mergeable)), dtype=torch.int32)
        self._given = self._cuda.zeros(max(1, len(layout.mergeable)), self.tasks)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for kept in (self._tables, self._places, self._drawings):
            kept.clear()
        self._bits = self._cuda.planes(0, 0)

    # -- walking -------------------------------------------------------------------------------------------------------

    def _walk_tables(self, stretches: Sequence[Stretch], groups: Mapping[int, int] | None = None) -> Iterator[Tables]:
        """Tables of all values, block by block, with the group of each tensor where that matters."""
        if self._blocks.borrows:
            for block in self._blocks.walk(stretches):
                yield self._tabled(block, groups)
            return
        # What lies on the device stays where it is, and so do the tables of it.
        key = (*(stretch.tensor for stretch in stretches), *(groups or {}).values())
        if key not in self._tables:
            self._tables[key] = [self._tabled(block, groups) for block in self._blocks.walk(stretches)]
        yield from self._tables[key]

    def _tabled(self, block: Block, groups: Mapping[int, int] | None) -> Tables:
        """The tables of a block, one for each working type."""
        found = []
        for dtype in (torch.float32, torch.float64):
            chosen = [(p, v) for p, v in block if self._working[p.stretch.tensor] == dtype]
            if chosen:
                segments = [_segment(p, v, groups[p.stretch.tensor] if groups else 0) for p, v in chosen]
                found.append((Table(segments, dtype, self._cuda.device), [piece for piece, _ in chosen]))
        return found

    # -- survey --------------------------------------------------------------------------------------------------------

    def look(self) -> Survey:
        self._cuda.follow()
        everything = self._everything
        self._first_spare = plane_rows(self.method) - SPARE
        if self.method.plane_rows:
            last = everything[-1] if everything else Stretch(0, 0, 0, 0)
            self._bits = self._cuda.planes(plane_rows(self.method), last.slot + last.size)
        self.method.assume(self.layout.elements)
        seen = self._marked(everything).cpu().numpy()
        flags = seen[: len(everything) * self.tasks].reshape(-1, self.tasks)
        found = Survey.nothing(len(everything), self.tasks)
        found.changed[:] = flags & 1
        found.squares[:] = seen[flags.size :].view(np.float64)
        self._settle_suspects(everything, (flags & 2).astype(np.bool_), found)
        self.progress("survey", self.layout.elements, self.layout.elements)
        return found

    def _mark(self) -> None:
        self._marked(self.stretches)

    def _marked(self, stretches: Sequence[Stretch]) -> Tensor:
        """Mark candidates; flags [tensors, tasks] for what changed or is not finite, then squares of the last vector.

        All are 64-bit words in one row, so that they travel together.
        """
        tensors = len(self.layout.mergeable)
        if self.options.compare == "active" and self.options.scope == "tensor":
            marks = [self.method.marks(k, tensor.size) for k, tensor in enumerate(self.layout.mergeable)]
        else:  # the same for all
            marks = [self.method.marks(0, 0)] * tensors
        compared = self._cuda.numbers([row for row, _ in marks], torch.uint8)
        rows = self._cuda.numbers([row for _, row in marks])
        found = self._cuda.zeros(tensors * (self.tasks + 1))
        squares = found.data_ptr() + 8 * tensors * self.tasks
        for tables in self._walk_tables(stretches):
            for table, _ in tables:
                self._cuda.survey(table, compared, rows, self._bits, found.data_ptr(), squares)
        return found

    # -- decide --------------------------------------------------------------------------------------------------------

    def choose(self) -> None:
        self._cuda.follow()
        self._given.zero_()
        self._square.zero_()
        if isinstance(self.method, TunableMagmax):
            self._auction(self.method)
        elif isinstance(self.method, Ties):
            self._trim(self.method)

    def _geometry(self, groups: Sequence[Sequence[int]]) -> list[Table]:
        """Where the merged tensors lie, without their values, with the group of each."""
        key = (len(groups), len(self.stretches))
        if key not in self._places:
            group_of = {k: g for g, members in enumerate(groups) for k in members}
            segments = [
                _segment(Piece(stretch, 0, stretch.size), (), group_of[k]) for k, stretch in enumerate(self.stretches)
            ]
            self._places[key] = [Table(segments, torch.float32, self._cuda.device)]
        return self._places[key]

    def _drawing(self, sizes: Sequence[int], tries: int) -> Drawing:
        key = (*sizes, tries)
        if key not in self._drawings:
            self._drawings[key] = Drawing(self._cuda, sizes, deviations=5.0 * 4**tries)
        self._drawings[key].failed.zero_()
        return self._drawings[key]

    def _row(self, row: int) -> Address:
        return row_of(self._bits, row)

    def _auction(self, method: TunableMagmax) -> None:
        """Rules 4 to 6 for all groups together."""
        groups, budgets = method.groups(self.stretches)
        method.leftovers = 0
        self._owners = {}
        if not self.stretches:
            return
        tables = self._geometry(groups)
        sizes = [sum(self.stretches[k].size for k in group) for group in groups]
        wanted = np.array(budgets, np.int64).T.copy()
        for tries in range(TRIES):
            drawing = self._drawing(sizes, tries)
            counts, unowned, missed = self._bid(method, tables, wanted, drawing)
            method.leftovers = int(unowned.sum())
            if method.leftovers and not missed:
                self._share_out(method, tables, wanted - counts, unowned, drawing)
                missed = bool(drawing.failed)
            if not missed:
                return
            self._mark()  # the auction may have written over the marks
        raise ExactnessError("the lottery's threshold was not found; please report this")

    def _bid(
        self, method: TunableMagmax, tables: list[Table], wanted: NDArray[np.int64], drawing: Drawing
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
        """Rules 4 and 5: how many elements each task got [tasks, groups], how many nobody owns [groups], and a miss."""
        free = self._row(self._first_spare)
        asked = self._cuda.numbers(wanted)
        # What the host looks at is in one table: the counts, what is left, and whether a draw has missed.
        told = self._cuda.zeros(self.tasks + 2, wanted.shape[1])
        bidders = [t for t in reversed(range(self.tasks)) if wanted[t].any()]
        for t in bidders:
            self._owners[t] = self._first_spare - self.tasks + t if method.reusable else method.rows[t]
        self._cuda.open(tables, free)
        bid = self._bid_largest if method.options.keep == "magnitude" else self._bid_lottery
        bid(method, tables, bidders, asked, told, drawing)
        told[-1] = drawing.failed
        found = told.cpu().numpy()
        return found[:-2], found[-2], bool(found[-1].any())

    def _bid_lottery(
        self, method: TunableMagmax, tables: list[Table], bidders: list[int], asked: Tensor, told: Tensor,
        drawing: Drawing,
    ) -> None:  # fmt: skip
        """Draw for one task after the other; each draw also counts the next task's candidates, or what is left."""
        cuda, free = self._cuda, self._row(self._first_spare)
        planes = [*(self._row(method.rows[t]) for t in bidders), free]
        candidates = cuda.zeros(2, asked.shape[1])
        counted = [*(row_of(candidates, k % 2) for k in range(len(bidders))), row_of(told, self.tasks)]
        cuda.count(tables, planes[0], free, 0, counted[0])
        for k, t in enumerate(bidders):
            drum = lottery.drum(method.options.seed, lottery.KEEP, t + 1)
            owned, sequel = self._row(self._owners[t]), Sequel(False, free, planes[k + 1], counted[k + 1])
            wish, got = row_of(asked, t), row_of(told, t)
            cuda.pick(tables, planes[k], free, owned, drum, drawing, wish, counted[k], got, sequel)

    def _bid_largest(
        self, method: TunableMagmax, tables: list[Table], bidders: list[int], asked: Tensor, told: Tensor,
        drawing: Drawing,
    ) -> None:  # fmt: skip
        """Take the largest magnitudes for one task after the other."""
        cuda = self._cuda
        free, level = (self._row(self._first_spare + k) for k in range(SPARE))
        candidates, won = cuda.zeros(asked.shape[1]), 0
        for t in bidders:
            drum = lottery.drum(method.options.seed, lottery.KEEP, t + 1)
            plane, owned = self._row(method.rows[t]), self._row(self._owners[t])
            cuda.count(tables, plane, free, won, candidates.data_ptr())
            told[t] = torch.minimum(asked[t], candidates)
            self._cut(tables, t, plane, free, asked[t], candidates, owned, level, drum, drawing)
            won = owned
        cuda.count(tables, free, free, won, row_of(told, self.tasks))

    def _cut(
        self, tables: list[Table], task: int, plane: Address, free: Address, wanted: Tensor, candidates: Tensor,
        owned: Address, level: Address, drum: int, drawing: Drawing,
    ) -> None:  # fmt: skip
        """The wanted candidates of largest magnitude go to `owned`, equal ones by lottery; resets `candidates`."""
        cuda = self._cuda
        wide = any(self._working[stretch.tensor] == torch.float64 for stretch in self.stretches)
        walk = partial(self._values_by_group, tables)
        codes, left = cuda.threshold(walk, task, wide, plane, free, wanted, candidates)
        left = torch.where(wanted >= candidates, 0, left)
        cuda.sever(walk, task, wide, plane, free, wanted, candidates, codes, owned, level)
        candidates.zero_()
        cuda.count(tables, level, free, 0, candidates.data_ptr())
        counted = candidates.data_ptr()
        cuda.pick(tables, level, free, owned, drum, drawing, left.data_ptr(), counted, 0, Sequel(True))

    def _values_by_group(self, tables: Sequence[Table]) -> Iterator[Table]:
        """Tables of values that know the groups of the auction."""
        groups = {segment.tensor: segment.group for table in tables for segment in table.segments}
        for found in self._walk_tables(self.stretches, groups):
            yield from (table for table, _ in found)

    def _share_out(
        self,
        method: TunableMagmax,
        tables: list[Table],
        left: NDArray[np.int64],
        unowned: NDArray[np.int64],
        drawing: Drawing,
    ) -> None:
        """Rule 6: what nobody owns, by lottery, to the tasks with budget left."""
        free = self._row(self._first_spare)
        portions, remaining = [], [unowned]
        for rest in left:
            portions.append(np.minimum(rest, remaining[-1]))
            remaining.append(remaining[-1] - portions[-1])
        asked, candidates = self._cuda.numbers(portions), self._cuda.numbers(remaining)
        for t, portion in enumerate(portions):
            if portion.any():
                drum = lottery.drum(method.options.seed, lottery.LEFTOVERS, t + 1)
                wish, counted, owned = row_of(asked, t), row_of(candidates, t), self._row(self._owners[t])
                self._cuda.pick(tables, free, free, owned, drum, drawing, wish, counted, 0, Sequel(True, free))

    def _trim(self, method: Ties) -> None:
        """Keep each task's largest elements."""
        if not self.stretches:
            return
        elements = self.elements
        tables = self._geometry([range(len(self.stretches))])
        free, level = (self._row(self._first_spare + k) for k in range(SPARE))
        wanted = self._cuda.numbers([int(method.options.density * elements)])
        for tries in range(TRIES):
            drawing = self._drawing([elements], tries)
            self._cuda.open(tables, free)
            for t in method.voters:
                drum = lottery.drum(method.options.seed, lottery.TIES_CUT, t + 1)
                candidates = self._cuda.numbers([elements])
                self._cut(tables, t, free, free, wanted, candidates, self._row(t), level, drum, drawing)
            if not bool(drawing.failed):
                return
        raise ExactnessError("the lottery's threshold was not found; please report this")

    # -- merged values -------------------------------------------------------------------------------------------------

    def measure(self, stretches: Sequence[Stretch]) -> None:
        """Make the merged vectors, kept for rendering, and measure them together."""
        todo = [stretch for stretch in stretches if stretch.tensor not in self._measured]
        for tables in self._walk_tables(todo):
            for table, found in tables:
                self._combine_block(table, Destination(self._taus(table, found), self._cuda.device), None, self._given)
        self._merged_squares.append(float(self._square))
        self._square.zero_()
        self._measured.update(stretch.tensor for stretch in todo)

    def render(
        self, into: Callable[[Piece], Tensor], stretches: Sequence[Stretch] | None = None
    ) -> Iterator[tuple[Piece, Tensor]]:
        """The merged values, piece by piece in order, each written to the tensor that `into` gives for it."""
        self._unfit.zero_()
        self._cuda.follow()
        total = self.elements
        chosen = self.stretches if stretches is None else stretches
        place = {stretch.tensor: k for k, stretch in enumerate(chosen)}
        for tables in self._walk_tables(chosen):
            made: list[tuple[Piece, Tensor]] = []
            for table, found in tables:
                outs = [into(piece) if self._direct else self._room(piece) for piece in found]
                self._render_block(table, found, Destination(outs, self._cuda.device))
                made += zip(found, outs, strict=True)
            made.sort(key=lambda pair: (place[pair[0].stretch.tensor], pair[0].start))
            if not self._direct:
                self._check_fit()
            for piece, values in made:
                self._done["merge"] = self._done.get("merge", 0) + piece.stop - piece.start
                self.progress("merge", self._done["merge"], total)
                yield piece, values if self._direct else into(piece).copy_(values)
        self._check_fit()

    def _render_block(self, table: Table, found: Sequence[Piece], into: Destination) -> None:
        if self._stash:
            taus = Destination(self._taus(table, found), self._cuda.device)
            target = Target(into, self._square, self._unfit, self.scale)
            self._cuda.combine(table, "step", target, taus.addresses, plain=True)
        else:
            again = found[0].stretch.tensor in self._measured
            self._combine_block(table, into, self.scale, torch.zeros_like(self._given) if again else self._given)

    def _taus(self, table: Table, found: Sequence[Piece]) -> list[Tensor]:
        """Where the merged vectors of some pieces lie, or may be put for the moment."""
        if self._stash:
            return [self._stash[piece.stretch.tensor][piece.start : piece.stop] for piece in found]
        return [self.kernels.empty(piece.stop - piece.start, table.working) for piece in found]

    def _room(self, piece: Piece) -> Tensor:
        """Room on the device for output that goes elsewhere."""
        dtype = torch_dtype(self.out_dtype(self.layout.mergeable[piece.stretch.tensor]))
        assert dtype is not None
        return self.kernels.empty(piece.stop - piece.start, dtype)

    def _check_fit(self) -> None:
        for k in self._unfit.cpu().numpy().nonzero()[0]:
            tensor = self.layout.mergeable[k]
            dtype = torch_dtype(self.out_dtype(tensor))
            assert dtype is not None
            raise does_not_fit(tensor.name, "merged", dtype)

    def _combine_block(self, table: Table, into: Destination, scale: float | None, given: Tensor) -> None:
        """The method's merged vector of a block, or the final values if the scale is given.

        What each task gave is added to `given` by methods that find it out on the way.
        """
        cuda, method, bits = self._cuda, self.method, self._bits
        target = Target(into, self._square, self._unfit, scale)
        if isinstance(method, TunableMagmax):
            tasks = sorted(self._owners)
            rows = cuda.numbers([self._owners[t] for t in tasks])
            arguments = (cuda.numbers(tasks), rows, len(tasks), bits, bits.stride(0))
            cuda.combine(table, "gather", target, *arguments, plain=True, shared=16 * len(tasks))
        elif isinstance(method, Magmax):
            cuda.combine(table, "largest", target, given, plain=True, shared=4 * self.tasks)
        elif isinstance(method, LastTask):
            cuda.combine(table, "single", target, self.tasks - 1, plain=False)
        elif isinstance(method, RandomMix):
            tops = cuda.numbers([signed(top) for top in method.tops])
            drum = signed(lottery.drum(method.options.seed, lottery.RANDOM_MIX, 0))
            drawn = cuda.numbers(method.drawn)
            cuda.combine(table, "mixed", target, drawn, tops, drum, given, plain=False, shared=4 * self.tasks)
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
        if self.options.scale is not None:
            self._merged_squares.append(float(self._square))
        self._counts = self._owned() if self.method.owns else {}
        return super().report()

    def _owned(self) -> dict[int, NDArray[np.int64]]:
        """How many elements each task gave, by tensor."""
        given = self._given
        if isinstance(self.method, TunableMagmax) and self._owners:
            tasks = sorted(self._owners)
            given = self._cuda.zeros(len(given), len(tasks))
            rows = self._cuda.numbers([self._owners[t] for t in tasks])
            self._cuda.tally(self._geometry([range(len(self.stretches))]), rows, self._bits, given)
            wide = self._cuda.zeros(len(given), self.tasks)
            wide[:, tasks] = given
            given = wide
        counts = given.cpu().numpy()
        if isinstance(self.method, LastTask):
            counts[:, -1] = [tensor.size for tensor in self.layout.mergeable]
        return {stretch.tensor: counts[stretch.tensor] for stretch in self.stretches}


def plane_rows(method: Method) -> int:
    """Rows of planes on a device: marks of tasks, their elements where marks are kept for another merge, and spare."""
    if isinstance(method, TunableMagmax):
        return max(method.rows) + 1 + (method.tasks if method.reusable else 0) + SPARE
    return method.tasks + SPARE


def _segment(piece: Piece, values: Sequence[Tensor], group: int = 0) -> Segment:
    stretch, start = piece.stretch, piece.start
    return Segment(values, piece.stop - start, stretch.slot + start, stretch.element + start, stretch.tensor, group)
