"""The CUDA kernels and what drives them, on an emulated device: the bits and reports of the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import emulated
import pytest
import torch
from device_cases import OPTIONS, MissesAtFirst, State, assert_same, given, sequence
from emulated import EmulatedModule, Library

import tunable_magmax as tmx
from tunable_magmax.errors import InputError
from tunable_magmax.merging import device, session, state_dicts
from tunable_magmax.merging.device import Block, DeviceMerge, ResidentBlocks
from tunable_magmax.merging.kernels import cuda
from tunable_magmax.merging.kernels.cuda import CudaKernels, kernel_source
from tunable_magmax.merging.kernels.portable import PortableKernels
from tunable_magmax.merging.ownership import Stretch, pieces

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))
# Several tiles, a tile that ends inside a word, and tensors smaller than one.
SHAPES = {"a": (100, 201), "b": (65,), "c": (1,), "d": (93, 97), "e": (), "f": (128,), "z": (0, 4)}
PLAIN = tuple(torch.float64 if name == "d" else torch.float32 for name in SHAPES)
HOST = torch.device("cpu")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return emulated.compiled(kernel_source(), tmp_path_factory.mktemp("kernels"))


class LentBlocks(ResidentBlocks):
    """Blocks of at most two pieces, whose values are gone when the next block is asked for."""

    borrows = True
    chunk = 4096

    def walk(self, stretches: Sequence[Stretch]) -> Iterator[Block]:
        todo = pieces(stretches, self.chunk)
        for k in range(0, len(todo), 2):
            block = [
                (piece, [values[piece.stretch.tensor][piece.start : piece.stop].clone() for values in self._flat])
                for piece in todo[k : k + 2]
            ]
            yield block
            for _, lent in block:
                for values in lent:
                    values.fill_(torch.nan)


@contextmanager
def on(module: EmulatedModule, blocks: type[ResidentBlocks] = ResidentBlocks, **options: Any) -> Iterator[None]:
    """Merges of tensors go to the emulated device, where memory that nobody has written holds NaN."""

    def engine(layout, base, tasks, read, labels, threads, method=None):
        sources = blocks(layout, [base, *tasks], HOST)
        return DeviceMerge(layout, sources, read, CudaKernels(module), labels=labels, method=method, **options)

    def poisoned(self, elements, dtype):
        return torch.full((elements,), torch.nan, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_dicts, "merge_in_memory", engine)
        patch.setattr(session, "merge_in_memory", engine)
        patch.setattr(PortableKernels, "empty", poisoned)
        yield


def check(states: list[State], module: EmulatedModule, choices: Sequence[dict[str, Any]], **where: Any) -> None:
    base, *tasks = states
    for options in choices:
        asked = given(options, len(tasks))
        with on(module, **where):
            ours = tmx.merge_state_dicts(base, tasks, **asked)
        assert_same(ours, tmx.merge_state_dicts(base, tasks, **asked), options)


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


def test_every_kernel_gives_the_bits_of_the_cpu(library: Library) -> None:
    module = EmulatedModule(library)
    check(mixture(4), module, OPTIONS)
    check(sequence(SHAPES, 5, kinds=PLAIN), module, OPTIONS)
    assert module.launched == library.kernels


@pytest.mark.parametrize("stash", [True, False])
def test_blocks_that_are_lent_give_the_bits_of_the_cpu(library: Library, stash: bool) -> None:
    check(sequence(SHAPES, 4), EmulatedModule(library), OPTIONS, blocks=LentBlocks, direct=False, stash=stash)


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
    drawings = MissesAtFirst(device.Drawing)
    monkeypatch.setattr(device, "Drawing", drawings)
    generator = torch.Generator().manual_seed(6)
    base = {"w": torch.zeros(40_000)}
    tasks = [{"w": torch.randint(-1, 2, (40_000,), generator=generator).float()} for _ in range(3)]
    check([base, *tasks], EmulatedModule(library), [{"keep": keep}])
    assert len(drawings.made) == 2


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
    found = dict(re.findall(r"constexpr int (\w+) = (\d+);", kernel_source()))
    assert {name: int(found[name]) for name in ("TILE", "BINS", "CLOSE", "THREADS", "ROW")} == {
        "TILE": cuda.TILE, "BINS": cuda.BINS, "CLOSE": cuda.CLOSE, "THREADS": cuda.THREADS, "ROW": cuda.ALIGNMENT
    }  # fmt: skip
