"""The primitives on NVIDIA GPUs: each works on whole tables of tensors with one launch, and nothing waits for the host.

Results stay on the device until somebody looks at them. Planes are bit sets in 32-bit words, as in cuda.cu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.merging.kernels import NARROW_DIGITS, WIDE_DIGITS, Formula
from tunable_magmax.merging.kernels.launch import ALIGNMENT, Address, Destination, Module, Rows, Table, Target
from tunable_magmax.merging.kernels.portable import signed

THREADS, BINS, CLOSE = 256, 4096, 4096
LEFT_OVER = 4
"""The state of an auction in which elements that nobody owns must be shared out before anything else is done."""

Walk = Callable[[], Iterable[Table]]
"""Tables of all values, again and again: those of a model in memory, or of one block of files after the other."""


class _Draw(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("wanted", "candidates", "winners", "undecided", "keys", "places")),
        *((name, ctypes.c_void_p) for name in ("first", "room", "histogram", "close_keys", "close_places", "close")),
        ("state", ctypes.c_void_p),
        ("deviations", ctypes.c_double),
        ("groups", ctypes.c_int64),
    )


class Sequel(ctypes.Structure):
    """What becomes of winners: whether they join what their row holds or take its place, the free elements that they
    leave (0: they stay), and the next task's plane with the number of its candidates, counted along the way."""

    _fields_ = (("join", ctypes.c_int64), *((name, ctypes.c_void_p) for name in ("free", "plane", "candidates")))


class _Cut(ctypes.Structure):
    _fields_ = (
        ("task", ctypes.c_int64),
        ("wide", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("plane", "free", "wanted", "candidates", "codes")),
    )


class HostCopy:
    """A copy of a device's values on the host, made when its work has come so far; read without waiting for more."""

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.current_stream(values.device).record_event()
        else:
            self._values = values.clone()

    def read(self) -> NDArray[Any]:
        """Waits until the values are copied, and returns them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.numpy()


@dataclass(frozen=True, slots=True)
class Pick:
    """A draw among the free elements of a plane, by group: the `wanted` number with the smallest lottery numbers win.

    `wanted`, `candidates` and `counts` (0: none) are rows of numbers [groups]. A pick resets `candidates`, and writes
    how many were taken to `counts`. `then` says what else becomes of the winners.
    """

    plane: Address
    won: Address
    lottery_state: int
    wanted: Address
    candidates: Address
    then: Sequel
    counts: Address = 0


@dataclass(frozen=True, slots=True)
class Ranking:
    """The free candidates of a plane that are ranked by magnitude in a task's vector, and how many are wanted [groups].

    `wide` says that magnitudes are compared as float64.
    """

    walk: Walk
    task: int
    wide: bool
    plane: Address
    free: Address
    wanted: Tensor
    candidates: Tensor

    def structure(self, codes: Tensor) -> _Cut:
        """Returns what the kernels read, with the codes of the thresholds so far."""
        numbers = (tensor.data_ptr() for tensor in (self.wanted, self.candidates, codes))
        return _Cut(self.task, int(self.wide), self.plane, self.free, *numbers)


def kernel_source() -> str:
    """Returns cuda.cu with the lottery's constants."""
    constants = {"GOLDEN": lottery.GOLDEN, "MIX_A": lottery.MIX_A, "MIX_B": lottery.MIX_B}
    head = "".join(f"#define {name} {value:#x}ull\n" for name, value in constants.items())
    source = files("tunable_magmax.merging.kernels").joinpath("cuda.cu").read_text(encoding="utf-8")
    return f'{head}#line 1 "cuda.cu"\n{source}'


@cache
def _module(index: int) -> Module:
    return Module(kernel_source(), torch.device("cuda", index), ("--fmad=false",))


def kernels_on(device: torch.device) -> CudaKernels:
    """Returns the kernels for a GPU: torch's current one if the device has no number."""
    return CudaKernels(_module(torch.cuda.current_device() if device.index is None else device.index))


class CudaKernels:
    """What a GPU does for a merge. Launches go to the stream that was torch's when `follow` was last called."""

    def __init__(self, module: Module) -> None:
        self.device = module.device
        self._module, self._blocks = module, module.blocks
        self.follow()

    def follow(self) -> None:
        """Launches on torch's current stream from now on."""
        self._stream = self._module.stream()

    def _launch(self, name: str, grid: tuple[int, int], *arguments: object, shared: int = 0) -> None:
        self._module.launch(name, grid, THREADS, self._stream, *arguments, shared=shared)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def numbers(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        """Returns a small table of numbers on the device, in memory of its own: kernels may write to it."""
        return torch.tensor(np.ascontiguousarray(values), dtype=dtype).to(self.device, non_blocking=True)

    def planes(self, rows: int, slots: int) -> Tensor:
        """Returns rows of bits [rows, words], not yet set."""
        return torch.empty(rows, -(-slots // ALIGNMENT) * ALIGNMENT // 32, dtype=torch.int32, device=self.device)

    # -- survey --------------------------------------------------------------------------------------------------------

    def survey(self, table: Table, marks: Address, planes: Tensor, flags: Address, squares: Address) -> None:
        """Marks candidates in the planes; writes flags[tensor, task] (1 changed, 2 not finite) and the last squares.

        marks[tensor, task]: twice the row for the task's candidates, and 1 if later tasks are compared with it.
        """
        tasks = table.structure.tasks
        self._launch(
            table.name("survey", plain=True),
            (table.tiles, 1),
            table.structure,
            marks,
            planes,
            planes.stride(0),
            flags,
            squares,
            shared=4 * tasks,
        )

    def unexpected(self, table: Table, flags: Address, state: Address) -> None:
        """Calls off an auction that was ordered as if all tensors were merged, if the flags say otherwise."""
        self._launch("unexpected", (1, 1), table.structure, flags, state)

    # -- the auction ---------------------------------------------------------------------------------------------------

    def open(self, table: Table, free: Address) -> None:
        """Makes every element free."""
        self._launch("open_free", (table.tiles, 1), table.structure, free)

    def count(self, table: Table, plane: Address, free: Address, won: Address, candidates: Address) -> None:
        """Takes winners out of the free elements; adds how many of the plane are free to candidates[group]."""
        self._launch("count", (self._shares(table), 1), table.structure, plane, free, won, candidates)

    def tally(self, table: Table, rows: Tensor, planes: Tensor, counts: Tensor) -> None:
        """Adds the elements of rows[k] to counts[tensor, k]."""
        grid = (self._shares(table), len(rows))
        self._launch("tally", grid, table.structure, rows, planes, planes.stride(0), counts)

    def pick(self, table: Table, free: Address, drawing: Drawing, state: Address, pick: Pick) -> None:
        """Draws. Writes to `state` if a threshold was missed; does nothing if that is not 0."""
        draw = drawing.structure(pick.wanted, pick.candidates, state)
        arguments = (pick.plane, free, pick.won, signed(pick.lottery_state), draw, pick.then)
        self._launch("pick", (self._shares(table), 1), table.structure, *arguments)
        self._launch("settle", (drawing.groups, drawing.blocks), pick.won, draw, drawing.rest, pick.then)
        last = (drawing.rest, pick.then, pick.candidates, pick.counts)
        self._launch("finish", (drawing.groups, 1), pick.won, draw, *last)

    def divide(self, shape: tuple[int, int], rows: Sequence[Address], at_once: bool, state: Address) -> None:
        """Divides what nobody owns among the tasks (rule 6); `shape` is [tasks, groups].

        The rows are what tasks wanted and got, what nobody owns, portions, and what remains before each. If nobody
        owns something and it is not drawn `at_once`, that is a state in which what follows is not done.
        """
        self._launch("divide", (1, 1), *shape, *rows, int(at_once), state)

    def _shares(self, table: Table) -> int:
        """Returns how many blocks share a table's tiles."""
        return min(self._blocks, table.tiles)

    # -- by magnitude --------------------------------------------------------------------------------------------------

    def threshold(self, ranking: Ranking) -> tuple[Tensor, Tensor]:
        """Returns the code of each group's n-th largest magnitude, and how many equal to it are wanted [groups]."""
        groups = len(ranking.wanted)
        codes, left = self.zeros(groups), ranking.wanted.clone()
        for shift, bits in WIDE_DIGITS if ranking.wide else NARROW_DIGITS:
            histogram = self.zeros(groups, 1 << bits)
            cut = ranking.structure(codes)
            for table in ranking.walk():
                self._launch(table.name("magnitudes"), (table.tiles, 1), table.structure, cut, shift, bits, histogram)
            from_top = histogram.flip(1).cumsum(1)
            place = torch.searchsorted(from_top, left[:, None]).clamp_(max=(1 << bits) - 1)
            above = torch.where(place > 0, from_top.gather(1, (place - 1).clamp(min=0)), 0)
            left = left - above[:, 0]
            codes = (codes << bits) | ((1 << bits) - 1 - place[:, 0])
        return codes, left

    def cut(self, ranking: Ranking, codes: Tensor, won: Address, level: Address) -> None:
        """Lets free candidates above their group's threshold win; those that equal it go to `level`."""
        cut = ranking.structure(codes)
        for table in ranking.walk():
            self._launch(table.name("sever"), (table.tiles, 1), table.structure, cut, won, level)

    # -- merged vectors: the `VectorKernels`, for a table of many tensors ----------------------------------------------

    def apply(self, chunk: Table, formula: Formula, out: Target) -> None:
        taus = []
        for values in chunk.values:
            base, *tasks = (stored.detach().reshape(-1).to(chunk.working) for stored in values)
            taus.append(formula([own - base for own in tasks]))
            out.sums.square.add_(taus[-1].double().square().sum())
        if out.scale is not None:
            self.step(chunk, Destination(taus, self.device), out)
            return
        for tau, place in zip(taus, out.into.outs, strict=True):
            place.view(-1).copy_(tau)

    def gather(self, chunk: Table, rows: Tensor, planes: Tensor, out: Target) -> None:
        owners = rows.shape[1]
        arguments = (Rows(rows)(0), Rows(rows)(1), owners, planes, planes.stride(0))
        self._combine(chunk, "gather", out, *arguments, plain=True, shared=8 * owners)

    def largest(self, chunk: Table, out: Target) -> None:
        self._combine(chunk, "largest", out, out.sums.given, plain=True, shared=4 * chunk.structure.tasks)

    def single(self, chunk: Table, task: int, out: Target) -> None:
        self._combine(chunk, "single", out, task)

    def draw(self, chunk: Table, tasks: Sequence[int], tops: Sequence[int], lottery_state: int, out: Target) -> None:
        limits, drawn = self.numbers([signed(top) for top in tops]), self.numbers(tasks)
        arguments = (drawn, limits, signed(lottery_state), out.sums.given)
        self._combine(chunk, "mixed", out, *arguments, shared=4 * chunk.structure.tasks)

    def weighted_sum(self, chunk: Table, tasks: Sequence[int], factors: Sequence[float], out: Target) -> None:
        weights = self.numbers(factors, torch.float64)
        self._combine(chunk, "weighted", out, self.numbers(tasks), weights, len(tasks))

    def elect(
        self,
        chunk: Table,
        tasks: Sequence[int],
        factors: Sequence[float],
        shares: Sequence[float],
        rows: Sequence[int],
        planes: Tensor,
        out: Target,
    ) -> None:
        numbers, weights = self.numbers([tasks, rows]), self.numbers([factors, shares], torch.float64)
        voters, kept = Rows(numbers)(0), Rows(numbers)(1)
        arguments = (voters, Rows(weights)(0), Rows(weights)(1), kept, len(tasks), planes, planes.stride(0))
        self._combine(chunk, "elected", out, *arguments)

    def step(self, chunk: Table, taus: Destination, out: Target) -> None:
        """Writes base + scale * tau, for merged vectors that lie ready."""
        self._combine(chunk, "step", out, taus.addresses, plain=True)

    def _combine(
        self, table: Table, kernel: str, out: Target, *arguments: object, plain: bool = False, shared: int = 0
    ) -> None:
        name = table.name(kernel, plain=plain)
        self._launch(name, (table.tiles, 1), table.structure, out.structure, *arguments, shared=shared)


class Drawing:
    """Lists and histograms of undecided lottery numbers, for groups of given sizes."""

    def __init__(self, kernels: CudaKernels, sizes: Sequence[int], deviations: float) -> None:
        # Twice the number expected in the window is never reached by chance.
        room = [int(4 * (deviations * np.sqrt(size / 4) + 16)) + 256 for size in sizes]
        self.groups, self.deviations = len(sizes), deviations
        self.blocks = max(1, min(64, max(room) // 2048))
        self._room = kernels.numbers(room)
        self._first = kernels.numbers(np.concatenate([[0], np.cumsum(room)[:-1]]))
        self._lists = kernels.zeros(2, sum(room))
        self._histogram = kernels.zeros(self.groups, BINS, dtype=torch.int32)
        self._close = kernels.zeros(self.groups, dtype=torch.int32)
        self._close_lists = kernels.zeros(2, self.groups, CLOSE)
        self._tallies = kernels.zeros(2, self.groups)
        self.rest = kernels.zeros(self.groups)
        self._structure = _Draw(
            winners=Rows(self._tallies)(0),
            undecided=Rows(self._tallies)(1),
            keys=Rows(self._lists)(0),
            places=Rows(self._lists)(1),
            first=self._first.data_ptr(),
            room=self._room.data_ptr(),
            histogram=self._histogram.data_ptr(),
            close_keys=Rows(self._close_lists)(0),
            close_places=Rows(self._close_lists)(1),
            close=self._close.data_ptr(),
            deviations=deviations,
            groups=self.groups,
        )

    def structure(self, wanted: Address, candidates: Address, state: Address) -> _Draw:
        """Returns what the kernels read; it changes with the next call."""
        self._structure.wanted, self._structure.candidates, self._structure.state = wanted, candidates, state
        return self._structure
