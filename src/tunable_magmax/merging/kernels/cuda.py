"""The primitives on NVIDIA GPUs: each works on whole tables of tensors with one launch, and nothing waits for the host.

Results stay on the device until somebody looks at them. Planes are bit sets in 32-bit words, as in cuda.cu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.merging.auction import NARROW_DIGITS, WIDE_DIGITS
from tunable_magmax.merging.kernels.launch import ALIGNMENT, Address, Module, Table, Target, row_of

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


class Letter:
    """What the device tells the host: written when its work has come so far, read without waiting for what follows."""

    def __init__(self, values: Tensor) -> None:
        self._told: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._told = torch.cuda.current_stream(values.device).record_event()
        else:
            self._values = values.clone()

    def read(self) -> NDArray[Any]:
        """Waits until it is written."""
        if self._told is not None:
            self._told.synchronize()
        return self._values.numpy()


class Launcher(Protocol):
    """What kernels are launched with: an `nvrtc.Module`, or what stands in for one."""

    device: torch.device
    blocks: int
    """That share all tiles where sums are kept."""

    def stream(self) -> int: ...
    def launch(
        self, name: str, grid: tuple[int, int], threads: int, stream: int, *arguments: object, shared: int = 0
    ) -> None: ...


def kernel_source() -> str:
    """cuda.cu with the lottery's constants."""
    constants = {"GOLDEN": lottery.GOLDEN, "MIX_A": lottery.MIX_A, "MIX_B": lottery.MIX_B}
    head = "".join(f"#define {name} {value:#x}ull\n" for name, value in constants.items())
    source = files("tunable_magmax.merging.kernels").joinpath("cuda.cu").read_text(encoding="utf-8")
    return f'{head}#line 1 "cuda.cu"\n{source}'


@cache
def _module(index: int) -> Module:
    return Module(kernel_source(), torch.device("cuda", index), ("--fmad=false",))


def kernels_on(device: torch.device) -> CudaKernels:
    """The kernels for a GPU; torch's current one if the device has no number."""
    return CudaKernels(_module(torch.cuda.current_device() if device.index is None else device.index))


def signed(value: int) -> int:
    """The 64-bit pattern of an unsigned integer as the kernels' arguments hold it."""
    return value - (1 << 64) if value >= 1 << 63 else value


class CudaKernels:
    """What a GPU does for a merge. Launches go to the stream that was torch's when `follow` was last called."""

    def __init__(self, module: Launcher) -> None:
        self.device = module.device
        self._module, self._blocks = module, module.blocks
        self.follow()

    def follow(self) -> None:
        """Launch on torch's current stream from now on."""
        self._stream = self._module.stream()

    def _launch(self, name: str, grid: tuple[int, int], *arguments: object, shared: int = 0) -> None:
        self._module.launch(name, grid, THREADS, self._stream, *arguments, shared=shared)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def numbers(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        """A small table of numbers on the device, in memory of its own: kernels may write to it."""
        return torch.tensor(np.ascontiguousarray(values), dtype=dtype).to(self.device, non_blocking=True)

    def planes(self, rows: int, slots: int) -> Tensor:
        """Rows of bits [rows, words] that hold anything."""
        return torch.empty(rows, -(-slots // ALIGNMENT) * ALIGNMENT // 32, dtype=torch.int32, device=self.device)

    # -- survey --------------------------------------------------------------------------------------------------------

    def survey(self, table: Table, marks: Address, planes: Tensor, flags: Address, squares: Address) -> None:
        """Mark candidates in the planes; flags[tensor, task]: 1 changed, 2 not finite; squares of the last vector.

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
        """Call an auction off that was ordered as if all tensors were merged, if the flags say otherwise."""
        self._launch("unexpected", (1, 1), table.structure, flags, state)

    # -- the auction ---------------------------------------------------------------------------------------------------

    def open(self, table: Table, free: Address) -> None:
        """Every element is free."""
        self._launch("open_free", (table.tiles, 1), table.structure, free)

    def count(self, table: Table, plane: Address, free: Address, won: Address, candidates: Address) -> None:
        """Winners are no longer free; add what the plane has in common with the free elements to candidates[group]."""
        self._launch("count", (self._shares(table), 1), table.structure, plane, free, won, candidates)

    def tally(self, table: Table, rows: Tensor, planes: Tensor, counts: Tensor) -> None:
        """counts[tensor, k] += elements of rows[k]."""
        grid = (self._shares(table), len(rows))
        self._launch("tally", grid, table.structure, rows, planes, planes.stride(0), counts)

    def pick(
        self, table: Table, plane: Address, free: Address, won: Address, lottery_state: int, drawing: Drawing,
        wanted: Address, candidates: Address, counts: Address, state: Address, then: Sequel,
    ) -> None:  # fmt: skip
        """Of each group's free candidates, the wanted number with the smallest lottery numbers are `won`.

        Resets `candidates`; writes to counts[group] how many were taken, and to `state` if a threshold was missed: if
        that is not 0, nothing is drawn. `then` says what else becomes of the winners.
        """
        draw = drawing.structure(wanted, candidates, state)
        grid = (self._shares(table), 1)
        self._launch("pick", grid, table.structure, plane, free, won, signed(lottery_state), draw, then)
        self._launch("settle", (drawing.groups, drawing.blocks), won, draw, drawing.rest, then)
        self._launch("finish", (drawing.groups, 1), won, draw, drawing.rest, then, candidates, counts)

    def divide(
        self, tasks: int, groups: int, wanted: Address, got: Address, unowned: Address, portions: Address,
        remaining: Address, at_once: bool, state: Address,
    ) -> None:  # fmt: skip
        """Rule 6: each task's portion of what nobody owns, and how much there is before it [tasks, groups].

        If there is anything and it is not drawn `at_once`, that is a state in which what follows is not done.
        """
        self._launch("divide", (1, 1), tasks, groups, wanted, got, unowned, portions, remaining, int(at_once), state)

    def _shares(self, table: Table) -> int:
        """Blocks that share a table's tiles."""
        return min(self._blocks, table.tiles)

    # -- by magnitude --------------------------------------------------------------------------------------------------

    def threshold(
        self, walk: Walk, task: int, wide: bool, plane: Address, free: Address, wanted: Tensor,
        candidates: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The code of each group's n-th largest magnitude, and how many equal to it are wanted [groups]."""
        groups = len(wanted)
        codes, left = self.zeros(groups), wanted.clone()
        for shift, bits in WIDE_DIGITS if wide else NARROW_DIGITS:
            histogram = self.zeros(groups, 1 << bits)
            cut = _cut(task, wide, plane, free, wanted, candidates, codes)
            for table in walk():
                self._launch(table.name("magnitudes"), (table.tiles, 1), table.structure, cut, shift, bits, histogram)
            from_top = histogram.flip(1).cumsum(1)
            place = torch.searchsorted(from_top, left[:, None]).clamp_(max=(1 << bits) - 1)
            above = torch.where(place > 0, from_top.gather(1, (place - 1).clamp(min=0)), 0)
            left = left - above[:, 0]
            codes = (codes << bits) | ((1 << bits) - 1 - place[:, 0])
        return codes, left

    def sever(
        self, walk: Walk, task: int, wide: bool, plane: Address, free: Address, wanted: Tensor,
        candidates: Tensor, codes: Tensor, won: Address, level: Address,
    ) -> None:  # fmt: skip
        """Free candidates above their group's threshold win; those that equal it go to `level`."""
        cut = _cut(task, wide, plane, free, wanted, candidates, codes)
        for table in walk():
            self._launch(table.name("sever"), (table.tiles, 1), table.structure, cut, won, level)

    # -- merged values -------------------------------------------------------------------------------------------------

    def combine(
        self, table: Table, kernel: str, into: Target, *arguments: object, plain: bool, shared: int = 0
    ) -> None:
        """Run one of the kernels that make merged vectors: gather, largest, mixed, weighted, single, elected, step."""
        name = table.name(kernel, plain=plain)
        self._launch(name, (table.tiles, 1), table.structure, into.structure, *arguments, shared=shared)


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
            winners=row_of(self._tallies, 0),
            undecided=row_of(self._tallies, 1),
            keys=row_of(self._lists, 0),
            places=row_of(self._lists, 1),
            first=self._first.data_ptr(),
            room=self._room.data_ptr(),
            histogram=self._histogram.data_ptr(),
            close_keys=row_of(self._close_lists, 0),
            close_places=row_of(self._close_lists, 1),
            close=self._close.data_ptr(),
            deviations=deviations,
            groups=self.groups,
        )

    def structure(self, wanted: Address, candidates: Address, state: Address) -> _Draw:
        """What the kernels read; it changes with the next call."""
        self._structure.wanted, self._structure.candidates, self._structure.state = wanted, candidates, state
        return self._structure


def _cut(
    task: int, wide: bool, plane: Address, free: Address, wanted: Tensor, candidates: Tensor, codes: Tensor
) -> _Cut:
    return _Cut(task, int(wide), plane, free, *(tensor.data_ptr() for tensor in (wanted, candidates, codes)))
