"""On a GPU: every method and option gives the CPU's bits and report, from tensors there and from files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from device_cases import OPTIONS, MissesAtFirst, State, assert_same, bits, given, sequence, shrinking
from safetensors.torch import save_file

import tunable_magmax as tmx
from tunable_magmax.errors import InputError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine")
SHAPES = {"a": (300, 777), "b": (65,), "c": (1,), "d": (513, 211), "e": (), "f": (128,), "z": (0, 4)}


def there(states: list[State]) -> list[State]:
    return [{name: tensor.cuda() for name, tensor in state.items()} for state in states]


def poison() -> None:
    """Whatever memory a merge is given next holds NaN."""
    torch.full((1 << 24,), float("nan"), device="cuda")


@needs_gpu
@pytest.mark.parametrize(("tasks", "still"), [(1, "b"), (4, ""), (33, "b"), (33, ""), (70, "b")])
def test_tensors_on_the_device_give_the_bits_of_the_cpu(tasks: int, still: str) -> None:
    here = sequence(SHAPES, tasks, seed=tasks, still=still)
    near = there(here)
    for options in OPTIONS:
        poison()
        ours = tmx.merge_state_dicts(near[0], near[1:], **given(options, tasks))
        theirs = tmx.merge_state_dicts(here[0], here[1:], **given(options, tasks))
        assert_same(ours, theirs, options)
        assert all(tensor.is_cuda for tensor in ours.state_dict.values())


@needs_gpu
def test_a_session_on_the_device_gives_the_bits_of_single_merges() -> None:
    here = sequence(SHAPES, 6)
    near = there(here)
    with tmx.MergeSession(near[0], near[1:]) as session:
        for options in OPTIONS[:-1] * 2:
            poison()
            ours = session.merge(**given(options, 6))
            theirs = tmx.merge_state_dicts(here[0], here[1:], **given(options, 6))
            assert_same(ours, theirs, options)


@needs_gpu
def test_matrices_that_are_merged_whole_are_the_cpu_s_within_a_tolerance() -> None:
    here = sequence(SHAPES, 6, kinds=(torch.float32,) * len(SHAPES))
    near = there(here)
    with tmx.MergeSession(near[0], near[1:]) as session:
        for weights in ([1, 0, 2, 0, 0, 1], [0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]):
            theirs = tmx.merge_state_dicts(here[0], here[1:], method="tsv", weights=weights)
            for ours in (
                session.merge(method="tsv", weights=weights),
                tmx.merge_state_dicts(near[0], near[1:], method="tsv", weights=weights),
            ):
                assert ours.report.warnings == theirs.report.warnings
                for name, wanted in theirs.state_dict.items():
                    found = ours.state_dict[name]
                    assert found.is_cuda
                    assert torch.allclose(found.cpu(), wanted, rtol=0, atol=1e-5), name


@needs_gpu
def test_a_large_tensor_with_few_leftovers_and_many() -> None:
    for weights in ([1, 1, 1], [0, 1, 9], [1, 0, 0], [0.001, 0.001, 0.998], [1, 2, 3, 4, 5, 6, 7]):
        base, *tasks = shrinking(len(weights), 3_000_017)
        near = there([base, *tasks])
        ours = tmx.merge_state_dicts(near[0], near[1:], weights=weights)
        theirs = tmx.merge_state_dicts(base, tasks, weights=weights)
        assert_same(ours, theirs)


@needs_gpu
def test_a_missed_threshold_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunable_magmax.merging import device_auction

    drawings = MissesAtFirst(device_auction.Drawing)
    monkeypatch.setattr(device_auction, "Drawing", drawings)
    generator = torch.Generator().manual_seed(6)
    base = {"w": torch.zeros(2_000_000)}
    tasks = [{"w": torch.randn(2_000_000, generator=generator)} for _ in range(3)]
    near = there([base, *tasks])
    ours = tmx.merge_state_dicts(near[0], near[1:])
    assert len(drawings.made) == 2
    assert bits(ours) == bits(tmx.merge_state_dicts(base, tasks))


@needs_gpu
def test_values_that_cannot_be_merged_are_named_as_on_the_cpu() -> None:
    here = sequence(SHAPES, 3)
    here[2]["a"][7, 7] = float("inf")
    here[3]["d"][0, 0] = float("nan")
    near = there(here)
    with pytest.raises(InputError) as ours:
        tmx.merge_state_dicts(near[0], near[1:])
    with pytest.raises(InputError) as theirs:
        tmx.merge_state_dicts(here[0], here[1:])
    assert str(ours.value) == str(theirs.value)
    far = [{"w": torch.full((100,), 60000.0).cuda()}, {"w": torch.full((100,), 65000.0).cuda()}]
    with pytest.raises(InputError, match="a merged value does not fit in float16"):
        tmx.merge_state_dicts(far[0], far[1:], scale=100, out_dtype="float16")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{k}.safetensors" for k in range(6)]
    for path, state in zip(paths, sequence(SHAPES, 5), strict=True):
        save_file(state, path)
    return paths


@needs_gpu
@pytest.mark.parametrize("room", ["everything", "blocks", "blocks without the merged vector"])
def test_files_through_the_device_give_the_files_of_the_cpu(
    files: list[Path], tmp_path: Path, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunable_magmax.engines import on_device

    if room != "everything":
        real = on_device.OnDevice._room
        monkeypatch.setattr(on_device, "BLOCK", 1 << 16)
        monkeypatch.setattr(on_device, "SMALLEST_BLOCK", 1 << 10)

        def less(self: Any, *arguments: Any) -> tuple[int, bool, bool]:
            block, _, stash = real(self, *arguments)
            return block, False, stash and room == "blocks"

        monkeypatch.setattr(on_device.OnDevice, "_room", less)
    for k, options in enumerate(OPTIONS):
        found = []
        for device in ("cpu", "cuda"):
            out = tmp_path / f"{device}-{k}"
            tmx.merge_checkpoints(files[0], files[1:], out, device=device, shard_size="1MB", **given(options, 5))
            found.append({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(out.iterdir())})
        assert found[0] == found[1], options


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_the_error_says_what_to_do(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"device 'cuda' can't be used: torch sees no CUDA device.*on the CPU"):
        tmx.merge_checkpoints(files[0], files[1:], tmp_path / "out", device="cuda")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu', expected 'cpu', 'cuda' or 'cuda:1'"),
        ({"device": "mps"}, "merges run on 'cpu' and on NVIDIA GPUs"),
        ({"device": "cuda", "engine": "ray"}, "whose workers merge on CPUs"),
    ],
)
def test_devices_that_are_none(files: list[Path], tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tmx.merge_checkpoints(files[0], files[1:], tmp_path / "out", **options)


@pytest.mark.parametrize("tasks", [1, 2, 5, 6, 7, 20, 33])
def test_blocks_begin_where_the_kernels_can(tmp_path: Path, tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tunable_magmax.engines import on_device
    from tunable_magmax.engines.inputs import Inputs
    from tunable_magmax.merging.kernels.launch import ALIGNMENT
    from tunable_magmax.merging.methods import read_options

    save_file({"w": torch.zeros(64)}, tmp_path / "w.safetensors")
    monkeypatch.setattr(on_device, "free_memory", lambda device: 1 << 40)
    place = on_device.OnDevice(torch.device("cpu"), None)
    with Inputs(tmp_path / "w.safetensors", [tmp_path / "w.safetensors"] * tasks, read_options(tasks)) as inputs:
        for memory in (1 << 30, 10**9, 123_456_789):
            block, _, _ = place._room(inputs, read_options(tasks), memory)
            assert block // 8 % ALIGNMENT == 0
            assert block * (2 * (tasks + 1) + 4) <= memory
