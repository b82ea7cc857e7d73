"""The CUDA kernels and what drives them, on an emulated device: the bits and reports of the CPU."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import emulated
import pytest
import torch
from device_cases import OPTIONS, MissesAtFirst, State, assert_same, coarse, given, sequence, shrinking
from emulated import EmulatedModule, Library
from emulated.merges import SHAPES, check, on

import tunable_magmax as tmx
from tunable_magmax.errors import InputError
from tunable_magmax.merging import device_auction
from tunable_magmax.merging.device import DeviceChunk, DeviceMerge
from tunable_magmax.merging.device_auction import Auction
from tunable_magmax.merging.kernels import TensorPlace, cuda, launch, split_ranges
from tunable_magmax.merging.kernels.cuda import kernel_source
from tunable_magmax.merging.resident import ResidentChunks, ResidentMerge

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))
PLAIN = tuple(torch.float64 if name == "d" else torch.float32 for name in SHAPES)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return emulated.compiled(kernel_source(), tmp_path_factory.mktemp("kernels"))


class LentChunks(ResidentChunks):
    """Blocks of at most two ranges, whose values are gone when the next block is asked for."""

    borrows = True
    chunk = 4096

    def walk(self, places: Sequence[TensorPlace]) -> Iterator[DeviceChunk]:
        todo = split_ranges(places, self.chunk)
        for k in range(0, len(todo), 2):
            block = [
                (
                    bounds,
                    [
                        values[bounds.place.tensor].view(-1)[bounds.start : bounds.stop].clone()
                        for values in self._values
                    ],
                )
                for bounds in todo[k : k + 2]
            ]
            yield block
            for _, lent in block:
                for values in lent:
                    values.fill_(torch.nan)


def mixture(tasks: int) -> list[State]:
    """Every source stores a tensor in another type."""
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return [
        {
            name: tensor if name == "b" else tensor.to(kinds[(k + at) % (5 if name == "d" else 4)])
            for at, (name, tensor) in enumerate(state.items())
        }
        for k, state in enumerate(sequence(SHAPES, tasks, kinds=PLAIN))
    ]


@pytest.mark.parametrize(("tasks", "blocks", "backwards"), [(1, 1, False), (4, 1, True), (33, 3, False)])
def test_every_method_and_option_gives_the_bits_of_the_cpu(
    library: Library, tasks: int, blocks: int, backwards: bool
) -> None:
    check(sequence(SHAPES, tasks, seed=tasks), EmulatedModule(library, blocks=blocks, backwards=backwards), OPTIONS)


@pytest.mark.parametrize(("tasks", "backwards"), [(2, True), (9, False)])
def test_what_is_ordered_in_advance_gives_the_bits_of_the_cpu(
    library: Library, tasks: int, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor is changed, as most often: nothing is called off, and nothing is ordered twice."""
    ordered = []
    real = ResidentMerge._order
    monkeypatch.setattr(ResidentMerge, "_order", lambda *given: ordered.append(given) or real(*given))
    states = sequence(SHAPES, tasks, seed=tasks, still="")
    check(states, EmulatedModule(library, backwards=backwards), OPTIONS)
    assert len(ordered) == len(OPTIONS)


@pytest.mark.parametrize("still", ["", "b"])
def test_budgets_and_merges_that_fail_in_between(library: Library, still: str) -> None:
    base, *tasks = sequence(SHAPES, 3, still=still)
    budget = [7, 0, sum(tensor.numel() for name, tensor in base.items() if name != still) - 7]
    made: list[tuple[float | str, tmx.Merged]] = []
    with on(EmulatedModule(library)), tmx.MergeSession(base, tasks) as session:
        for scale in (0.5, "matched", 0.5):
            for merge in (partial(tmx.merge_state_dicts, base, tasks), session.merge):
                with pytest.raises(InputError, match="the budget sums to"):
                    merge(budget=[1, 2, 3])
                with pytest.raises(InputError, match="does not fit"):
                    merge(scale=1e38, out_dtype="float16")
                made.append((scale, merge(budget=budget, scale=scale)))
    for scale, merged in made:
        assert_same(merged, tmx.merge_state_dicts(base, tasks, budget=budget, scale=scale), scale)


def test_elements_are_shared_out_again_if_a_draw_misses(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow windows: sometimes the bids hit and the host's sharing out misses, so that all is done again."""
    begun: list[list[int]] = []
    begin = Auction._begin
    monkeypatch.setattr(Auction, "_begin", lambda self, tries: begun[-1].append(tries) or begin(self, tries))
    shared: list[int] = []
    share_out = Auction._share_out
    monkeypatch.setattr(Auction, "_share_out", lambda self, tasks: shared.append(len(begun)) or share_out(self, tasks))
    real = device_auction.Drawing
    monkeypatch.setattr(
        device_auction, "Drawing", lambda kernels, sizes, deviations: real(kernels, sizes, 0.16 * deviations)
    )
    base, *tasks = shrinking(7, 30_001)
    module = EmulatedModule(library)
    for seed in range(25):
        begun.append([])
        check([base, *tasks], module, [{"seed": seed}])
    both = [k for k, tries in enumerate(begun, start=1) if len(tries) > 1 and shared.count(k) > 1]
    assert both, "no seed has reached it"


def test_every_kernel_gives_the_bits_of_the_cpu(library: Library) -> None:
    module = EmulatedModule(library)
    check(mixture(4), module, OPTIONS)
    check(sequence(SHAPES, 5, kinds=PLAIN), module, OPTIONS)
    assert module.launched == library.kernels


@pytest.mark.parametrize("backwards", [False, True])
def test_equal_magnitudes_and_lone_changes_give_the_bits_of_the_cpu(library: Library, backwards: bool) -> None:
    check(coarse(3), EmulatedModule(library, backwards=backwards), OPTIONS[:-1])


@pytest.mark.parametrize("stash", [True, False])
def test_blocks_that_are_lent_give_the_bits_of_the_cpu(library: Library, stash: bool) -> None:
    check(sequence(SHAPES, 4), EmulatedModule(library), OPTIONS, chunks=LentChunks, engine=DeviceMerge, stash=stash)


def test_a_session_gives_the_bits_of_single_merges(library: Library) -> None:
    base, *tasks = sequence(SHAPES, 6)
    module = EmulatedModule(library)
    with on(module):
        merges = tmx.MergeSession(base, tasks)
    for options in OPTIONS[:-1]:
        with on(module):
            ours = merges.merge(**given(options, 6))
        assert_same(ours, tmx.merge_state_dicts(base, tasks, **given(options, 6)), options)
    merges.close()


@pytest.mark.parametrize("keep", ["random", "magnitude"])
def test_a_missed_threshold_is_drawn_again(library: Library, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawings = MissesAtFirst(device_auction.Drawing)
    monkeypatch.setattr(device_auction, "Drawing", drawings)
    check(coarse(3, elements=40_000), EmulatedModule(library), [{"keep": keep}])
    assert len(drawings.made) == 2


@pytest.mark.parametrize("tasks", [2, 3, 7])
@pytest.mark.parametrize("keep", ["random", "magnitude"])
def test_elements_that_nobody_has_are_shared_out(library: Library, tasks: int, keep: str) -> None:
    """With few bidders by the device alone, with many after the host has looked."""
    base, *vectors = shrinking(tasks, 30_001)
    ours, theirs = [], tmx.merge_state_dicts(base, vectors, keep=keep, weights=range(1, tasks + 1))
    with on(EmulatedModule(library)):
        ours.append(tmx.merge_state_dicts(base, vectors, keep=keep, weights=range(1, tasks + 1)))
        with tmx.MergeSession(base, vectors) as merges:
            ours.append(merges.merge(keep=keep, weights=range(1, tasks + 1)))
    assert theirs.report.leftovers
    for merged in ours:
        assert_same(merged, theirs, tasks)


@pytest.mark.parametrize("odd", [False, True])
def test_tensors_that_turn_out_not_to_be_merged_are_copied(
    library: Library, odd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was ordered in the belief that all are merged is called off, and nothing of it remains."""
    drawings = MissesAtFirst(device_auction.Drawing, misses=0)
    monkeypatch.setattr(device_auction, "Drawing", drawings)
    base, *tasks = sequence(SHAPES, 4)
    for state in (base, *tasks) if odd else ():
        state["b"] = torch.full((65,), -torch.inf)
    module = EmulatedModule(library)
    check([base, *tasks], module, [{"scale": scale, "weights": True} for scale in (0.5, "matched")])
    assert "unexpected" in module.launched
    assert set(drawings.made) == {5.0}, "marks were spoiled, and made again"


def test_room_that_is_not_there_in_advance(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may suffice for what is merged though it does not for everything."""
    make_room = ResidentMerge._make_room
    failed = []

    def scarce(self: ResidentMerge, places: Sequence[TensorPlace]) -> None:
        if not self.places:  # nothing is known yet
            failed.append(places)
            raise torch.OutOfMemoryError
        make_room(self, places)

    monkeypatch.setattr(ResidentMerge, "_make_room", scarce)
    check(sequence(SHAPES, 4), EmulatedModule(library), [{"weights": True, "scale": 0.5}, {"scale": "matched"}])
    assert len(failed) == 2


def test_a_session_that_is_dropped_leaves_nothing_behind(library: Library) -> None:
    base, *tasks = sequence(SHAPES, 3, still="")
    gc.disable()
    try:
        with on(EmulatedModule(library)):
            merges = tmx.MergeSession(base, tasks)
            merges.merge(weights=[1, 2, 3])
        engine = weakref.ref(merges._merge)
        del merges
        assert engine() is None
    finally:
        gc.enable()


def test_values_that_cannot_be_merged_are_named_as_on_the_cpu(library: Library) -> None:
    base, *tasks = sequence(SHAPES, 3)
    tasks[1]["a"][7, 7] = float("inf")
    tasks[2]["d"][0, 0] = float("nan")
    with on(EmulatedModule(library)), pytest.raises(InputError) as ours:
        tmx.merge_state_dicts(base, tasks)
    with pytest.raises(InputError) as theirs:
        tmx.merge_state_dicts(base, tasks)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("scale", [100, "matched"])
def test_merged_values_that_do_not_fit_are_refused(library: Library, scale: float | str) -> None:
    base, task = {"w": torch.full((100,), 60000.0)}, {"w": torch.full((100,), 65000.0)}
    task["w"][99] = 70000.0
    with on(EmulatedModule(library)), pytest.raises(InputError, match="a merged value does not fit in float16"):
        tmx.merge_state_dicts(base, [task], scale=scale, out_dtype="float16")


def test_every_half_float_is_read_and_written(library: Library) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    base = {"w": halves[halves.isfinite()]}
    tasks = [{"w": base["w"].flip(0)}, {"w": (base["w"].float() * 1.0009765625).clamp(-65504, 65504)}]
    for out_dtype in ("float16", "bfloat16"):
        check([base, *tasks], EmulatedModule(library), [{"scale": 0.7, "out_dtype": out_dtype}])


def test_python_and_the_kernels_agree_on_sizes() -> None:
    assert f"LEFT_OVER = {cuda.LEFT_OVER};" in kernel_source()
    found = dict(re.findall(r"constexpr int (\w+) = (\d+);", kernel_source()))
    assert {name: int(found[name]) for name in ("TILE", "BINS", "CLOSE", "THREADS", "ROW")} == {
        "TILE": launch.TILE, "BINS": cuda.BINS, "CLOSE": cuda.CLOSE, "THREADS": cuda.THREADS, "ROW": launch.ALIGNMENT
    }  # fmt: skip
