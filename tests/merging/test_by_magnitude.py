"""Exactly the n largest magnitudes, equal ones by lottery: by a sort, however many of them fit in a list."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import lottery, naive_merge
from strategies import FEW_TASKS, merges
from test_exact import assert_equals_oracle, assert_same_bytes, examples, merge

from tunable_magmax import lottery as numbers
from tunable_magmax.errors import InputError
from tunable_magmax.merging import stream
from tunable_magmax.merging.auction import Cut, Selection, SpareRows
from tunable_magmax.merging.group_planes import BATCH, GroupPlanes
from tunable_magmax.merging.kernels import Chunk, TensorPlace
from tunable_magmax.merging.kernels.native import NativeKernels
from tunable_magmax.merging.kernels.torch_ops import TorchKernels

KERNELS = {"native": NativeKernels(), "portable": TorchKernels(torch.device("cpu"))}
SIZES = (1, 64, 700, 65, 5000)
"""Of the tensors, in slots and elements that are not next to each other."""
GAP = 128
SEED = 7


def steps(random: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """As in a checkpoint of bfloat16: few different magnitudes, and many zeros."""
    values = torch.randint(-6, 7, (sum(SIZES),), generator=random) * 2.0**-7
    return torch.where(torch.rand(values.shape, generator=random) < 0.4, 0.0, values).to(dtype)


def crowd(random: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes that differ in their last bits only, many of them equal: one bin holds nearly all."""
    last = torch.finfo(dtype).eps
    close = 1 + torch.randint(0, 97, (sum(SIZES),), generator=random).to(dtype) * last
    far = torch.randn(close.shape, generator=random).to(dtype)
    return torch.where(torch.rand(close.shape, generator=random) < 0.95, close, far)


def ladder(random: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes that share more and more of their leading bits, so that each digit leaves a crowd."""
    bits = torch.finfo(dtype).bits
    shared = torch.randint(0, bits - 9, (sum(SIZES),), generator=random).double()
    return ((1 + 2.0**-shared) * (1 - 2 * (torch.rand(shared.shape, generator=random) < 0.5).double())).to(dtype)


def smooth(random: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(sum(SIZES), generator=random, dtype=torch.float64).to(dtype)


def equal(random: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((sum(SIZES),), -0.25, dtype=dtype)


VALUES = [steps, crowd, ladder, smooth, equal]


class Room:
    """Tensors of `SIZES`, the free elements among them, and one task's vector."""

    def __init__(self, tau: torch.Tensor, kernels: str, room: int, share: float = 1.0, chunk: int = 640) -> None:
        self.tau, self.kernels = tau, KERNELS[kernels]
        begins = np.cumsum([0, *SIZES])
        slots = np.cumsum([0, *(-(-size // 64) * 64 + GAP for size in SIZES)])
        self.places = [TensorPlace(k, int(slots[k]), int(begins[k]) + GAP * k, size) for k, size in enumerate(SIZES)]
        self._begins = begins
        self.planes = self.kernels.planes(6, int(slots[-1]), None)
        self.looked = 0
        each = lambda work, items: [work(item) for item in items]  # noqa: E731
        self.group = GroupPlanes(
            self.kernels, self.planes, self.places, each, self._pair, chunk, tau.dtype == torch.float64, room
        )
        self.selection = Selection(self.group, SpareRows.after(1, by_magnitude=True))
        self.selection.open()
        self.group.claim(self.selection.free, self.selection.free, 0)
        if share < 1:
            chosen = int(share * tau.numel())
            self.selection.take(0, chosen, tau.numel(), numbers.lottery_state(SEED, 0, 9))
            self.group.claim(self.selection.won, self.selection.won, 0)
        self.candidates = self.selection.count(0)

    def _pair(self, task, bounds):
        self.looked += bounds.stop - bounds.start
        begin = int(self._begins[bounds.place.tensor])
        values = self.tau[begin + bounds.start : begin + bounds.stop]
        return torch.zeros_like(values), values

    def holds(self, row: int) -> list[int]:
        """The elements of a row, counted over all tensors."""
        found = []
        for place, begin in zip(self.places, self._begins, strict=False):
            part = self.planes.part(row, place.slot, place.slot + place.size)
            native = not isinstance(part, torch.Tensor)
            bits = np.unpackbits(part.view(np.uint8), bitorder="little") if native else part.numpy()
            found += (np.flatnonzero(bits[: place.size]) + begin).tolist()
        return found

    def take_largest(self, n: int) -> list[int]:
        self.looked = 0
        self.selection.take_largest(0, 0, n, self.candidates, numbers.lottery_state(SEED, 3, 1))
        return self.holds(self.selection.won)

    @property
    def looks(self) -> float:
        return self.looked / sum(SIZES)


KEYS = [lottery(SEED, 3, 1, p + GAP * k) for k in range(len(SIZES)) for p in range(sum(SIZES[:k]), sum(SIZES[: k + 1]))]


def by_a_sort(room: Room) -> list[int]:
    """The candidates, largest magnitudes first, equal ones by lottery."""
    magnitudes = room.tau.double().abs().tolist()
    return sorted(room.holds(0), key=lambda p: (-magnitudes[p], KEYS[p]))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_the_largest_by_a_sort(values, dtype, kernels) -> None:
    tau = values(torch.Generator().manual_seed(1), dtype)
    for room, share in product((0, 3, 10**9), (1.0, 0.3)):
        found = Room(tau, kernels, room, share)
        order = by_a_sort(found)
        for n in (0, 1, len(order) // 5, len(order) // 2, len(order) - 1, len(order)):
            assert found.take_largest(n) == sorted(order[:n]), (room, share, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_at_the_bound_of_the_list(values, dtype) -> None:
    tau = values(torch.Generator().manual_seed(2), dtype)
    n = tau.numel() // 5
    wide = dtype == torch.float64
    codes = tau.abs().numpy().view(np.int64 if wide else np.int32) >> (47 if wide else 15)
    crowded = int((codes == np.sort(codes)[-n]).sum())  # in the bin of the n-th largest
    for room, few in ((crowded - 1, False), (crowded, True), (crowded + 1, True)):
        found = Room(tau, "native", room)
        assert found.take_largest(n) == sorted(by_a_sort(found)[:n]), room
        assert found.looks == 2 if few else 2 <= found.looks <= (5 if wide else 3), room


@pytest.mark.parametrize(
    ("values", "dtype", "looks"),
    [
        (smooth, torch.float32, 3),
        (crowd, torch.float32, 3),
        (steps, torch.float32, 2),  # all in the bin are equal: nothing is left to cut
        (equal, torch.float32, 2),
        (equal, torch.float64, 4),
        (crowd, torch.float64, 5),
    ],
)
def test_how_often_a_crowd_is_looked_at(values, dtype, looks) -> None:
    tau = values(torch.Generator().manual_seed(3), dtype)
    found = Room(tau, "native", room=0)
    found.take_largest(tau.numel() // 5)
    assert found.looks == looks


def test_histograms_are_few_however_many_ranges() -> None:
    tau = smooth(torch.Generator().manual_seed(4), torch.float32)
    asked = []
    for chunk in (64, 640, 1 << 19):
        room = Room(tau, "native", 0, chunk=chunk)
        room.group.each = lambda work, items: [work(item) for item in asked.append(len(items)) or items]
        counts = room.group.histogram(0, 0, room.selection.free, 15, 16, 0)
        assert counts.sum() == tau.numel()
        wanted = np.bincount(tau.abs().numpy().view(np.int32) >> 15, minlength=1 << 16)
        assert np.array_equal(counts, wanted)
    assert max(asked) <= BATCH


def test_numba_and_torch_lists_hold_the_same() -> None:
    tau = crowd(torch.Generator().manual_seed(5), torch.float32)
    found = {}
    for name in KERNELS:
        room = Room(tau, name, 10**9, share=0.4)
        free = room.selection.free
        codes, keys = room.group.sift(Cut(0, 0, free, 0, 2**31 - 1, room.selection.won, room.selection.level), 12345)
        found[name] = sorted(zip(codes.tolist(), keys.tolist(), strict=True))
    assert found["native"] == found["portable"]
    assert len(found["native"]) == int(0.4 * tau.numel())


@pytest.mark.parametrize("room", [0, 2, 40])
@examples(40)
@given(data=st.data())
def test_merges_with_little_room_for_lists(room, data) -> None:
    call = data.draw(st.sampled_from(["ties", "tunable_magmax"]).flatmap(lambda m: merges(m, tasks=FEW_TASKS)))
    options = call.options if call.options.get("method") == "ties" else {**call.options, "keep": "magnitude"}
    with pytest.MonkeyPatch.context() as patch:
        plan = stream.plan_memory
        patch.setattr(stream, "plan_memory", lambda *given, **named: replace(plan(*given, **named), room=room))
        assert_equals_oracle(call.base, call.tasks, options)


# -- TIES' vote -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 2, 7, 70])
def test_ties_where_signs_cancel_and_zeros_have_signs(tasks) -> None:
    # Two thousand elements: more than a block, and no whole number of words.
    random = torch.Generator().manual_seed(tasks)
    base = {"w": torch.randint(-2, 3, (2003,), generator=random) * 0.5}
    moves = torch.randint(-2, 3, (tasks, 2003), generator=random) * 0.5
    states = [{"w": torch.where(move == 0, -0.0, base["w"] + move)} for move in moves]
    for density, weights in ((0.3, None), (1, [1 + t % 3 for t in range(tasks)])):
        options = {"method": "ties", "density": density, "scale": 1, "weights": weights}
        expected = naive_merge(base, states, **options)
        assert_same_bytes(merge(base, states, **options).state_dict, expected.state_dict)


@pytest.mark.parametrize("shares", [[1.0, 1.0, 1.0], [0.3, 0.1, 0.2], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("factor", [1.0, -1.0, 1e308, 5e-324])
def test_votes_that_overflow_or_vanish(factor, shares) -> None:
    values = torch.tensor(
        [[1e10, -1e10, 3.0, -0.0, 1e-10], [-1e10, -1e10, 0.0, 0.0, 1e-10], [1e10, 1.0, 0.0, 0.0, 0.0]]
    )
    out = {}
    for name, kernels in KERNELS.items():
        planes = kernels.planes(3, 64, None)
        for row in range(3):
            kernels.fill(planes.part(row, 0, 64), 5)
        out[name] = torch.empty(5, dtype=torch.float64)
        chunk = Chunk(torch.zeros(5, dtype=torch.float64), list(values.double()), 0, 0)
        kernels.elect(chunk, [0, 1, 2], [factor, factor, -factor], shares, [0, 1, 2], planes, out[name])
    assert_same_bytes({"w": out["native"]}, {"w": out["portable"]})


def test_a_density_for_each_task_in_every_tensor() -> None:
    base = {"a": torch.zeros(10), "b": torch.zeros(2)}
    tasks = [{"a": torch.arange(1.0, 11), "b": torch.tensor([1.0, 2.0])}, {"a": torch.ones(10), "b": torch.ones(2)}]
    options = {"method": "ties", "density": [0.3, 0], "scope": "tensor", "scale": 1}
    merged = merge(base, tasks, **options)
    assert merged.state_dict["a"].tolist() == [0.0] * 7 + [8.0, 9.0, 10.0]
    assert merged.state_dict["b"].tolist() == [0.0, 2.0]  # 0.6 of an element, and one at least
    assert merged.report.options["density"] == ["0.3", "0"]
    both = merge(base, tasks, **{**options, "density": 1, "weights": [3, 1], "normalize": True}).state_dict["b"]
    assert both.tolist() == [1.0, 1.75]
    alone = merge(base, tasks, **{**options, "density": 1, "weights": [3, 1], "normalize": False}).state_dict["b"]
    assert alone.tolist() == [4.0, 7.0]
    with pytest.raises(InputError, match="3 densities for 2 tasks"):
        merge(base, tasks, **{**options, "density": [1, 1, 1]})
