"""The engine on a GPU: the same walks as `stream`, with whole blocks of tensors in one launch and few waits.

Values come from `Blocks`: a model that lies on the device is one block; files come block by block. Planes, the auction
and its counts stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.checkpoints.layout import Layout, Mergeable
from tunable_magmax.checkpoints.tensors import torch_dtype
from tunable_magmax.merging.casting import does_not_fit
from tunable_magmax.merging.device_auction import SPARE, Auctions, Floor, segment_of
from tunable_magmax.merging.kernels.cuda import (
    ALIGNMENT,
    CudaKernels,
    Destination,
    Table,
    Target,
    signed,
)
from tunable_magmax.merging.kernels.portable import PortableKernels
from tunable_magmax.merging.methods import LastTask, Magmax, Method, RandomMix, TaskArithmetic, Ties, TunableMagmax
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.ownership import Piece, Stretch
from tunable_magmax.merging.reading import Vectors, working_dtype
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.stream import Merge, Progress
from tunable_magmax.merging.survey import Survey

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
        self._auctions = Auctions(kernels)
        self._square = self._cuda.zeros(1, dtype=torch.float64)
        self._unfit = self._cuda.zeros(max(1, len(layout.mergeable)), dtype=torch.int32)
        self._given = self._cuda.zeros(max(1, len(layout.mergeable)), self.tasks)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._tables.clear()
        self._auctions.clear()
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
                segments = [segment_of(p, v, groups[p.stretch.tensor] if groups else 0) for p, v in chosen]
                found.append((Table(segments, dtype, self._cuda.device), [piece for piece, _ in chosen]))
        return found

    # -- survey --------------------------------------------------------------------------------------------------------

    def look(self) -> Survey:
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
        self._cuda.follow()
        tensors = len(self.layout.mergeable)
        if self.options.compare == "active" and self.options.scope == "tensor":
            each = [self.method.marks(k, tensor.size) for k, tensor in enumerate(self.layout.mergeable)]
            marks = np.array(each, np.int64).reshape(tensors, 2, self.tasks)
        else:  # the same for all
            marks = np.broadcast_to(np.array(self.method.marks(0, 0)), (tensors, 2, self.tasks))
        compared, rows = self._cuda.numbers(marks[:, 0], torch.uint8), self._cuda.numbers(marks[:, 1])
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
            self._owners = self._auctions.hold(self.method, self._floor(), self._mark)
        elif isinstance(self.method, Ties):
            self._auctions.trim(self.method, self._floor())

    def _floor(self) -> Floor:
        """What is auctioned: the merged tensors with their planes, and their values where these matter."""

        def walk(groups: Mapping[int, int]) -> Iterator[Table]:
            for found in self._walk_tables(self.stretches, groups):
                yield from (table for table, _ in found)

        wide = any(self._working[stretch.tensor] == torch.float64 for stretch in self.stretches)
        return Floor(self.stretches, self._bits, self._first_spare, walk, wide)

    # -- merged values -------------------------------------------------------------------------------------------------

    def measure(self, stretches: Sequence[Stretch]) -> None:
        """Make the merged vectors, kept for rendering, and measure them together."""
        todo = [stretch for stretch in stretches if stretch.tensor not in self._measured]
        for tables in self._walk_tables(todo):
            for table, found in tables:
                self._combine_block(table, Destination(self._taus(table, found), self._cuda.device), None, self._given)
        self.squares.append(float(self._square))
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
            cuda.combine(table, "gather", target, *arguments, plain=True, shared=8 * len(tasks))
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
            self.squares.append(float(self._square))
        self.counts = self._owned() if self.method.owns else {}
        return super().report()

    def _owned(self) -> dict[int, NDArray[np.int64]]:
        """How many elements each task gave, by tensor."""
        given = self._given
        if isinstance(self.method, TunableMagmax) and self._owners:
            tasks = sorted(self._owners)
            given = self._cuda.zeros(len(given), len(tasks))
            rows = self._cuda.numbers([self._owners[t] for t in tasks])
            table = self._auctions.geometry(self.stretches, [range(len(self.stretches))])
            self._cuda.tally(table, rows, self._bits, given)
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
