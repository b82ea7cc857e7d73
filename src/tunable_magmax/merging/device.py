"""The engine on a GPU: the same walks as `stream`, with whole blocks of tensors in one launch and few waits.

Values come from `Blocks`: a model that lies on the device is one block; files come block by block. Planes, the auction
and its counts stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tunable_magmax.merging.kernels.cuda import ALIGNMENT, CudaKernels, Destination, Drawing, Segment, Table, Target
from tunable_magmax.merging.kernels.portable import PortableKernels
from tunable_magmax.merging.methods import LastTask, Magmax, Method, RandomMix, TaskArithmetic, Ties, TunableMagmax
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.ownership import Piece, Stretch
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.stream import Merge, Progress, Vectors, does_not_fit, working_dtype
from tunable_magmax.merging.survey import Survey

SPARE = 4
"""Rows of the planes beyond the tasks': what is free, two that selection works in, and equal magnitudes."""
TRIES = 4

Block = Sequence[tuple[Piece, Sequence[Tensor]]]
"""Pieces with the base's and all tasks' values on the device, flat and as they are stored."""


class Blocks(Vectors, Protocol):
    """Where values come from, for a device."""

    def walk(self, stretches: Sequence[Stretch]) -> Iterator[Block]:
        """All values of some tensors, in order. A block's values hold until the next one is asked for."""


class ResidentBlocks:
    """Dicts of tensors on the device, or brought there: one block."""

    borrows = False

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

    def __init__(
        self,
        layout: Layout,
        blocks: Blocks,
        options: Options,
        device: torch.device,
        *,
        labels: Sequence[str],
        progress: Progress | None = None,
        notes: tuple[str, ...] = (),
        method: Method | None = None,
    ) -> None:
        # The portable kernels look closely at values that are not finite, which is rare.
        plain = PortableKernels(device)
        super().__init__(layout, blocks, options, plain, labels=labels, progress=progress, notes=notes, method=method)
        self._blocks = blocks
        self._cuda = CudaKernels(device)
        self._bits = self._cuda.planes(0, 0)
        self._owners: dict[int, int] = {}
        self._tables: dict[tuple[int, ...], list[tuple[Table, list[Piece]]]] = {}
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

    def _walk_tables(self, stretches: Sequence[Stretch]) -> Iterator[tuple[Table, list[Piece]]]:
        """Tables of all values, one for each block and working type."""
        if self._blocks.borrows:
            for block in self._blocks.walk(stretches):
                yield from self._tabled(block)
            return
        # What lies on the device stays where it is, and so do the tables of it.
        key = tuple(stretch.tensor for stretch in stretches)
        if key not in self._tables:
            self._tables[key] = [table for block in self._blocks.walk(stretches) for table in self._tabled(block)]
        yield from self._tables[key]

    def _tabled(self, block: Block, groups: Mapping[int, int] | None = None) -> Iterator[tuple[Table, list[Piece]]]:
        for dtype in (torch.float32, torch.float64):
            chosen = [(p, v) for p, v in block if working_dtype(self.layout.mergeable[p.stretch.tensor]) == dtype]
            if chosen:
                segments = [_segment(p, v, groups[p.stretch.tensor] if groups else 0) for p, v in chosen]
                yield Table(segments, dtype, self._cuda.device), [piece for piece, _ in chosen]

    # -- survey --------------------------------------------------------------------------------------------------------

    def look(self) -> Survey:
        everything = self._everything()
        self._first_spare = self._rows_of_tasks()
        if self.method.plane_rows:
            last = everything[-1] if everything else Stretch(0, 0, 0, 0)
            self._bits = self._cuda.planes(self._first_spare + SPARE, last.slot + last.size)
        self.method.assume(self.layout.elements)
        flags, squares = self._marked(everything)
        seen = flags.cpu().numpy()
        found = Survey.nothing(len(everything), self.tasks)
        found.changed[:] = seen & 1
        found.squares[:] = squares.cpu().numpy()
        self._settle_suspects(everything, (seen & 2).astype(np.bool_), found)
        self.progress("survey", self.layout.elements, self.layout.elements)
        return found

    def _everything(self) -> list[Stretch]:
        everything, slot = [], 0
        for k, tensor in enumerate(self.layout.mergeable):
            everything.append(Stretch(k, slot, tensor.element, tensor.size))
            slot += -(-tensor.size // ALIGNMENT) * ALIGNMENT
        return everything

    def _mark(self) -> None:
        self._marked(self.stretches)

    def _marked(self, stretches: Sequence[Stretch]) -> tuple[Tensor, Tensor]:
        """Mark candidates; what changed and what is not finite [tensors, tasks], squares of the last vector."""
        marks = [self.method.marks(k, tensor.size) for k, tensor in enumerate(self.layout.mergeable)]
        compared = self._cuda.numbers([row for row, _ in marks], torch.uint8)
        rows = self._cuda.numbers([row for _, row in marks])
        flags = self._cuda.zeros(len(marks), self.tasks, dtype=torch.int32)
        squares = self._cuda.zeros(len(marks), dtype=torch.float64)
        for table, _ in self._walk_tables(stretches):
            self._cuda.survey(table, compared, rows, self._bits, flags, squares)
        return flags, squares

    def _rows_of_tasks(self) -> int:
        """Rows of the planes that tasks need: for marks, and for owners where marks are kept for another merge."""
        if isinstance(self.method, TunableMagmax):
            return max(self.method.rows) + 1 + (self.tasks if self.method.reusable else 0)
        return self.tasks

    # -- decide --------------------------------------------------------------------------------------------------------

    def choose(self) -> None:
        self._given.zero_()
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

    def _row(self, row: int) -> Tensor:
        return self._bits[row]

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
            counts, unowned = self._bid(method, tables, wanted, drawing)
            method.leftovers = int(unowned.sum())
            self._share_out(method, tables, wanted - counts, unowned, drawing)
            if not bool(drawing.failed):
                return
            self._mark()  # the auction may have written over the marks
        raise ExactnessError("the lottery's threshold was not found; please report this")

    def _bid(
        self, method: TunableMagmax, tables: list[Table], wanted: NDArray[np.int64], drawing: Drawing
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rules 4 and 5; how many elements each task got [tasks, groups], and how many nobody owns [groups]."""
        cuda, options = self._cuda, method.options
        free, level, drawn = (self._row(self._first_spare + k) for k in range(3))
        marked = method.rows
        asked = cuda.numbers(wanted)
        counts = cuda.zeros(*wanted.shape)
        candidates = cuda.zeros(wanted.shape[1])
        won: Tensor | None = None
        cuda.open(tables, free)
        for t in reversed(range(self.tasks)):
            if not wanted[t].any():
                continue
            self._owners[t] = self._first_spare - self.tasks + t if method.reusable else marked[t]
            plane, owned = self._row(marked[t]), self._row(self._owners[t])
            drum = lottery.drum(options.seed, lottery.KEEP, t + 1)
            cuda.count(tables, plane, free, won, candidates)
            if options.keep == "magnitude":
                torch.minimum(asked[t], candidates, out=counts[t])
                self._cut(tables, t, plane, free, asked[t], candidates, owned, level, drawn, drum, drawing)
            else:
                cuda.pick(tables, plane, free, owned, drum, drawing, asked[t], candidates, counts[t])
            won = owned
        unowned = cuda.zeros(wanted.shape[1])
        cuda.count(tables, free, free, won, unowned)
        both = torch.cat([counts, unowned[None]]).cpu().numpy()
        return both[:-1], both[-1]

    def _cut(
        self, tables: list[Table], task: int, plane: Tensor, free: Tensor, wanted: Tensor, candidates: Tensor,
        owned: Tensor, level: Tensor, drawn: Tensor, drum: int, drawing: Drawing,
    ) -> None:  # fmt: skip
        """The wanted candidates of largest magnitude go to `owned`, equal ones by lottery; resets `candidates`."""
        cuda = self._cuda
        wide = any(self.layout.mergeable[stretch.tensor].working == "F64" for stretch in self.stretches)
        walk = partial(self._values_by_group, tables)
        codes, left = cuda.threshold(walk, task, wide, plane, free, wanted, candidates)
        left = torch.where(wanted >= candidates, 0, left)
        cuda.sever(walk, task, wide, plane, free, wanted, candidates, codes, owned, level)
        candidates.zero_()
        cuda.count(tables, level, free, None, candidates)
        cuda.pick(tables, level, free, drawn, drum, drawing, left, candidates, None)
        cuda.unite(tables, owned, drawn, None)

    def _values_by_group(self, tables: Sequence[Table]) -> Iterator[Table]:
        """Tables of values that know the groups of the auction."""
        groups = {segment.tensor: segment.group for table in tables for segment in table.segments}
        for block in self._blocks.walk(self.stretches):
            for table, _ in self._tabled(block, groups):
                yield table

    def _share_out(
        self,
        method: TunableMagmax,
        tables: list[Table],
        left: NDArray[np.int64],
        unowned: NDArray[np.int64],
        drawing: Drawing,
    ) -> None:
        """Rule 6: what nobody owns, by lottery, to the tasks with budget left."""
        free, drawn = self._row(self._first_spare), self._row(self._first_spare + 2)
        for t in range(self.tasks):
            more = np.minimum(left[t], unowned)
            if more.any():
                drum = lottery.drum(method.options.seed, lottery.LEFTOVERS, t + 1)
                asked, candidates = self._cuda.numbers(more), self._cuda.numbers(unowned)
                self._cuda.pick(tables, free, free, drawn, drum, drawing, asked, candidates, None)
                self._cuda.unite(tables, self._row(self._owners[t]), drawn, free)
                unowned = unowned - more

    def _trim(self, method: Ties) -> None:
        """Keep each task's largest elements."""
        if not self.stretches:
            return
        elements = self.elements
        tables = self._geometry([range(len(self.stretches))])
        free, level, drawn = (self._row(self._first_spare + k) for k in range(3))
        wanted = self._cuda.numbers([int(method.options.density * elements)])
        for tries in range(TRIES):
            drawing = self._drawing([elements], tries)
            self._cuda.open(tables, free)
            for t in method.voters:
                drum = lottery.drum(method.options.seed, lottery.TIES_CUT, t + 1)
                candidates = self._cuda.numbers([elements])
                self._cut(tables, t, free, free, wanted, candidates, self._row(t), level, drawn, drum, drawing)
            if not bool(drawing.failed):
                return
        raise ExactnessError("the lottery's threshold was not found; please report this")

    # -- merged values -------------------------------------------------------------------------------------------------

    def measure(self, stretches: Sequence[Stretch]) -> None:
        """Make the merged vectors, kept for rendering, and measure them together."""
        todo = [stretch for stretch in stretches if stretch.tensor not in self._measured]
        self._square.zero_()
        for table, found in self._walk_tables(todo):
            taus = [self._stash[piece.stretch.tensor][piece.start : piece.stop] for piece in found]
            self._combine_block(table, Destination(taus, self._cuda.device), None)
        self._merged_squares = [float(self._square)]
        self._measured.update(stretch.tensor for stretch in todo)

    def render(
        self, into: Callable[[Piece], Tensor], stretches: Sequence[Stretch] | None = None
    ) -> Iterator[tuple[Piece, Tensor]]:
        """The merged values, piece by piece in order, each written to the tensor that `into` gives for it."""
        self._unfit.zero_()
        if self.options.scale is not None:
            self._square.zero_()
        done = 0
        for table, found in self._walk_tables(self.stretches if stretches is None else stretches):
            outs = [into(piece) for piece in found]
            device = self._cuda.device
            near = [out if out.device == device else torch.empty_like(out, device=device) for out in outs]
            if self._stash:
                taus = [self._stash[piece.stretch.tensor][piece.start : piece.stop] for piece in found]
                self._step(table, Destination(near, device), Destination(taus, device))
            else:
                self._combine_block(table, Destination(near, device), self.scale)
            for piece, out, made in zip(found, outs, near, strict=True):
                if out is not made:
                    out.copy_(made)
                done += piece.stop - piece.start
                self.progress("merge", done, self.elements)
                yield piece, out
        self._check_fit()

    def _check_fit(self) -> None:
        for k in self._unfit.nonzero().flatten().tolist():
            tensor = self.layout.mergeable[k]
            dtype = torch_dtype(self.out_dtype(tensor))
            assert dtype is not None
            raise does_not_fit(tensor.name, "merged", dtype)

    def _step(self, table: Table, into: Destination, taus: Destination) -> None:
        target = Target(into, self._square, self._unfit, self.scale)
        self._cuda.combine(table, "step", target, taus.addresses, plain=True)

    def _combine_block(self, table: Table, into: Destination, scale: float | None) -> None:
        """The method's merged vector of a block, or the final values if the scale is given."""
        cuda, method, bits = self._cuda, self.method, self._bits
        target = Target(into, self._square, self._unfit, scale)
        if isinstance(method, TunableMagmax):
            tasks = sorted(self._owners)
            rows = cuda.numbers([self._owners[t] for t in tasks])
            cuda.combine(
                table, "gather", target, cuda.numbers(tasks), rows, len(tasks), bits, bits.stride(0), plain=True
            )
        elif isinstance(method, Magmax):
            cuda.combine(table, "largest", target, self._given, plain=True, shared=4 * self.tasks)
        elif isinstance(method, LastTask):
            cuda.combine(table, "single", target, self.tasks - 1, plain=False)
        elif isinstance(method, RandomMix):
            tops = cuda.numbers([_signed(top) for top in method.tops])
            drum = _signed(lottery.drum(method.options.seed, lottery.RANDOM_MIX, 0))
            drawn = cuda.numbers(method.drawn)
            cuda.combine(table, "mixed", target, drawn, tops, drum, self._given, plain=False, shared=4 * self.tasks)
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
            self._merged_squares = [float(self._square)]
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


def _segment(piece: Piece, values: Sequence[Tensor], group: int = 0) -> Segment:
    stretch, start = piece.stretch, piece.start
    return Segment(values, piece.stop - start, stretch.slot + start, stretch.element + start, stretch.tensor, group)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
