"""Merges of LoRA adapters: equal to merges of the dense models that they stand for, to the byte, however they run."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import factors, moved, rslora, save_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sequences import digests, raw
from torch import Tensor

from tunable_magmax.engines.inputs import Inputs, add_product, file_sources
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.merging.kernels.numba_ops import NumbaKernels
from tunable_magmax.merging.methods import read_options

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

SHAPES = {
    "body.q.weight": (301, 257),
    "body.q.bias": (301,),
    "body.k.weight": (128, 128),
    "body.v.weight": (257, 301),
    "body.norm.weight": (257,),
    "embed.weight": (333, 40),
    "frozen.weight": (64, 33),
    "head.weight": (5, 40),
}


def base_of(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()}


def sequence(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Path, list[Path], list[Path]]:
    """A base, three tasks of which two are adapters, and the same tasks as dense checkpoints."""
    base = base_of(dtype)
    save_file(base, folder / "base.safetensors")
    random = torch.Generator().manual_seed(2)
    full = {
        n: (v + torch.randn(v.shape, generator=random) * 0.05 * ("frozen" not in n)).to(dtype) for n, v in base.items()
    }
    save_file(full, folder / "full.safetensors")

    q, k = factors(301, 257, 7, 3), factors(128, 128, 4, 4)
    head, bias = torch.ones(5, 40, dtype=dtype), torch.full((301,), 0.5, dtype=dtype)
    first = save_adapter(
        folder / "first",
        {"body.q": q, "body.k": k},
        whole={"head.weight": head, "body.q.base_layer.bias": bias},
        r=4,
        rank_pattern={"q": 7},
        lora_alpha=2,
        alpha_pattern={"body.k": 3},
        use_rslora=True,
    )
    dense_first = {
        **base,
        "body.q.weight": moved(base["body.q.weight"], q, rslora(2, 7)),
        "body.k.weight": moved(base["body.k.weight"], k, rslora(3, 4)),
        "head.weight": head,
        "body.q.bias": bias,
    }
    q2, v = factors(301, 257, 5, 6, torch.bfloat16), factors(301, 257, 5, 7)  # v lies the other way round in the base
    last = save_adapter(folder / "last", {"body.q": q2, "body.v": v}, lora_alpha=1, torch_file=True)
    dense_last = {
        **base,
        "body.q.weight": moved(base["body.q.weight"], q2, 1 / 5),
        "body.v.weight": moved(base["body.v.weight"], v, 1 / 5, transposed=True),
    }
    dense = [folder / "dense-first.safetensors", folder / "full.safetensors", folder / "dense-last.safetensors"]
    save_file(dense_first, dense[0])
    save_file(dense_last, dense[2])
    return folder / "base.safetensors", [first, dense[1], last], dense


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, list[Path], list[Path]]:
    return sequence(tmp_path_factory.mktemp("adapters"))


OPTIONS: list[dict[str, Any]] = [
    {"weights": [3, 1, 2]},
    {"weights": [3, 1, 2], "scope": "tensor", "scale": 0.3},
    {"weights": [0, 1, 2], "compare": "active"},
    {"method": "magmax"},
    {"method": "average", "scale": 0.5},
    {"method": "random_mix"},
    {"method": "ties"},
    {"method": "task_arithmetic"},
    {"method": "last_task"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_merge_of_the_dense_models(files, tmp_path, options) -> None:
    base, tasks, dense = files
    report = merge_checkpoints(base, tasks, tmp_path / "out", **options)
    wanted = merge_checkpoints(base, dense, tmp_path / "dense", **options)
    assert digests(tmp_path / "out")["model.safetensors"] == digests(tmp_path / "dense")["model.safetensors"]
    assert (report.counts, report.scale, report.tensors, report.copied) == (
        wanted.counts,
        wanted.scale,
        wanted.tensors,
        wanted.copied,
    )


# -- the same bytes ---------------------------------------------------------------------------------------------------


def test_every_way_of_running(files, tmp_path, monkeypatch) -> None:
    base, tasks, _ = files
    merge_checkpoints(base, tasks, tmp_path / "plain")
    wanted = digests(tmp_path / "plain")

    def same(name: str, **way: Any) -> None:
        merge_checkpoints(base, tasks, tmp_path / name, **way)
        assert digests(tmp_path / name) == wanted, name

    same("threads-1", threads=1)
    same("threads-3", threads=3)
    same("little-memory", memory="9MiB", threads=1)
    for chunk in (4096, 8192 + 64):
        with monkeypatch.context() as patch:
            patch.setattr(NumbaKernels, "chunk", chunk)
            same(f"chunk-{chunk}", threads=2)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with pytest.raises(InputError, match="NUMBA_DISABLE_JIT"):
        merge_checkpoints(base, tasks, tmp_path / "interpreted")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_of_any_product(data) -> None:
    """Ranges that cover a tensor give what the whole gives, bit by bit."""
    out, inner = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    rank, transposed, scaling = data.draw(st.integers(1, 9)), data.draw(st.booleans()), data.draw(st.floats(-4, 4))
    kind = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    pair = factors(out, inner, rank, data.draw(st.integers(0, 99)), kind)
    origin = torch.randn((inner, out) if transposed else (out, inner), dtype=kind if kind.itemsize > 2 else None)
    wanted = moved(origin, pair, scaling, transposed)
    a, b = (each.double().numpy() for each in pair)
    left, right = (np.ascontiguousarray(each) for each in ((a.T, b.T) if transposed else (b, a)))
    cuts = sorted({0, out * inner, *data.draw(st.lists(st.integers(0, out * inner), max_size=4))})
    found = origin.clone().flatten()
    for start, stop in pairwise(cuts):
        add_product(left, right, scaling, found[start:stop], start)
    assert raw({"w": found.reshape(origin.shape)}) == raw({"w": wanted})


def test_values_do_not_depend_on_what_was_read_before(files) -> None:
    """The base's values are taken as they were read last only if they are those of the same place."""
    base, tasks, dense = files
    with Inputs(base, tasks, read_options(3)) as inputs:
        base_source, source, *_ = file_sources(inputs.checkpoints)
        for tensor in inputs.layout.mergeable:
            wanted = load_file(dense[0])[tensor.name].flatten()
            size = tensor.size // 2
            for elsewhere in (None, 0, 1, tensor.size - size):
                if elsewhere is not None:
                    base_source.read(tensor.name, elsewhere, elsewhere + size, torch.empty(size))
                found = source.read(tensor.name, 1, 1 + size, torch.empty(size))
                assert torch.equal(found, wanted[1 : 1 + size])


# -- types ------------------------------------------------------------------------------------------------------------


def test_factors_do_not_widen_a_base_of_16_bits(tmp_path) -> None:
    """The output has the base's type, yet nothing is lost on the way: as if the dense models were float32."""
    base, tasks, dense = sequence(tmp_path, torch.bfloat16)
    report = merge_checkpoints(base, tasks, tmp_path / "out.safetensors")
    merge_checkpoints(base, dense, tmp_path / "dense.safetensors", out_dtype="bfloat16")
    assert {tensor.dtype for tensor in report.tensors.values()} == {"BF16"}
    assert raw(load_file(tmp_path / "out.safetensors")) == raw(load_file(tmp_path / "dense.safetensors"))


def test_a_saved_layer_with_factors_on_it(tmp_path) -> None:
    """PEFT saves an adapted head whole as well: the product is added to that, not to the base's."""
    base, saved, pair = {"e.weight": torch.zeros(8, 6)}, torch.randn(8, 6), factors(8, 6, 2, 0)
    save_file(base, tmp_path / "base.safetensors")
    save_adapter(tmp_path / "task", {"e": pair}, whole={"e.base_layer.weight": saved}, lora_alpha=2, r=2)
    out = tmp_path / "out.safetensors"
    merge_checkpoints(tmp_path / "base.safetensors", [tmp_path / "task"], out, scale=1)
    assert torch.equal(load_file(out)["e.weight"], moved(saved, pair, 1.0))


# -- what is bad is named ---------------------------------------------------------------------------------------------


def test_all_problems_of_the_adapters_at_once(tmp_path) -> None:
    save_file({"w.weight": torch.zeros(9, 7)}, tmp_path / "base.safetensors")
    one = save_adapter(tmp_path / "one", {"w": factors(9, 8, 2, 0)})
    two = save_adapter(tmp_path / "two", {"w": factors(9, 7, 2, 0), "x": factors(9, 7, 2, 0)})
    with pytest.raises(InputError) as caught:
        merge_checkpoints(tmp_path / "base.safetensors", [one, two], tmp_path / "out")
    assert f"task 1 ({one}): 'w.weight' has shape [9, 8], the base [9, 7]" in str(caught.value)
    assert f"task 2 ({two}) has, and the base lacks, 'x.weight'" in str(caught.value)
    for folder in (one, two):
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(InputError, match=r"(?s)task 1: .*use_dora.*task 2: .*use_dora"):
        merge_checkpoints(tmp_path / "base.safetensors", [one, two], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_values_that_are_not_finite(tmp_path, bad) -> None:
    save_file({"w.weight": torch.zeros(9, 7)}, tmp_path / "base.safetensors")
    a, b = factors(9, 7, 2, 0)
    b[4, 1] = bad
    save_adapter(tmp_path / "task", {"w": (a.abs() + 1, b)}, lora_alpha=1000)
    with pytest.raises(InputError, match=r"task 1: 'w\.weight' has 7 values that are NaN or infinite"):
        merge_checkpoints(tmp_path / "base.safetensors", [tmp_path / "task"], tmp_path / "out")


def test_an_adapter_is_no_base(files, tmp_path) -> None:
    base, tasks, _ = files
    for start in (tasks[0], tasks[0] / "adapter_model.safetensors"):
        with pytest.raises(InputError) as error:
            merge_checkpoints(start, tasks, tmp_path / "out")
        # Of tasks that are adapters nothing can be said without a base.
        assert str(error.value).startswith(f"base: {start} ")
        assert "task 1" not in str(error.value)
    with pytest.raises(InputError, match=r"base: .*\n?.*task 2: .*nowhere does not exist"):
        merge_checkpoints(tasks[0], [*tasks[:1], tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(InputError, match="would replace task 1"):
        merge_checkpoints(base, tasks, tasks[0], overwrite=True)


# -- around a merge ---------------------------------------------------------------------------------------------------


def test_report_and_card_name_the_adapters(files, tmp_path) -> None:
    base, tasks, _ = files
    report = merge_checkpoints(base, tasks, tmp_path / "out", names=["birds", "cars", "boats"])
    assert report.adapters == {
        "task 1": "LoRA adapter (rank 4-7; 2 tensors by factors, 2 whole)",
        "task 3": "LoRA adapter (rank 5; 2 tensors by factors, 0 whole)",
    }
    assert "| task 1: birds (LoRA adapter (rank 4-7; " in (tmp_path / "out" / "README.md").read_text()
    assert report.inputs["task 1"] < report.inputs["task 2"] == report.inputs["base"]
