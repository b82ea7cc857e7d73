"""A merge of LoRA adapters that stays an adapter: the step of each matrix, reduced to a rank, in PEFT's layout."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import torch
from torch import Tensor

from tunable_magmax.checkpoints.adapter import PREFIX, LowRank
from tunable_magmax.checkpoints.safetensors_file import plan_shards
from tunable_magmax.checkpoints.source import ADAPTER_CONFIG
from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.outputs import Job
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import read_json
from tunable_magmax.merging.kernels import TensorPlace, TensorRange
from tunable_magmax.merging.merge import Merge
from tunable_magmax.merging.report import MergeReport, significant

_INHERITED = ("base_model_name_or_path", "revision", "task_type", "auto_mapping")
"""What the output's configuration says as the tasks' do, if they agree."""


def adapted_matrices(inputs: Inputs, rank: int) -> dict[str, LowRank]:
    """Returns a product of some task for each adapted matrix, by the base's names; refuses what can't stay an adapter.

    Tensors that are not merged do not matter.
    """
    merged = {tensor.name for tensor in inputs.layout.mergeable}
    problems = [
        f"{label} is no LoRA adapter" for k, label in enumerate(inputs.labels) if k and k not in inputs.adapters
    ]
    products: dict[str, LowRank] = {}
    for k, adapter in inputs.adapters.items():
        for name, part in adapter.parts.items():
            if name in merged and part.whole is not None:
                problems.append(f"{inputs.labels[k]} has {name!r} whole, and not as factors")
            elif name in merged and part.product is not None:
                products.setdefault(name, part.product)
    if len({adapter.renaming for adapter in inputs.adapters.values()}) > 1:
        problems.append("the tasks are adapters of different classes of models: a prefix of their names differs")
    most = min((min(product.shape) for product in products.values()), default=0)
    if rank > most and not problems:
        problems.append(f"the rank is {rank}, but the smallest adapted matrix has at most rank {most}, so give no more")
    if problems:
        shown = some_of(problems, joint="; ")
        raise InputError(f"the merge can't stay an adapter: {shown}. Exclude such tensors, or leave out adapter")
    return products


def adapter_bytes(inputs: Inputs, rank: int) -> int:
    """Returns the bytes of the adapter's factors, if all matrices changed."""
    return 4 * rank * sum(sum(product.shape) for product in adapted_matrices(inputs, rank).values())


def write_adapter(merge: Merge, job: Job, rank: int) -> MergeReport:
    """Writes the adapter of a decided merge: factors B and A of each changed matrix, whose product is near its step."""
    products, squares = adapted_matrices(job.inputs, rank), {}
    factors: dict[str, Tensor] = {}
    for place in merge.places:
        tensor = merge.layout.mergeable[place.tensor]
        product, step = products[tensor.name], _step(merge, place).view(tensor.shape).double()
        step = step.T if product.transposed else step
        left, values, right = torch.linalg.svd(step, full_matrices=False)
        root = values[:rank].sqrt()
        b, a = (left[:, :rank] * root).float(), (root[:, None] * right[:rank]).float()
        squares[tensor.name] = _square(step - b.double() @ a.double()), _square(step)
        factors |= {f"{PREFIX}{product.module}.lora_{side}.weight": each for side, each in (("A", a), ("B", b))}
    if not factors:
        raise InputError("no task changed a matrix, so that there is no adapter to write")
    infos = [TensorInfo(name, "F32", tuple(each.shape)) for name, each in sorted(factors.items())]
    [shard] = plan_shards(infos, stem="adapter_model")
    data = (factors[info.name].cpu().contiguous().view(-1).view(torch.uint8).numpy().data for info in infos)
    files = {shard.name: job.output.write_shard(shard, data)}
    files[ADAPTER_CONFIG] = job.output.write_file(ADAPTER_CONFIG, _config(job.inputs, products, list(squares), rank))
    errors = {name: math.sqrt(lost / whole) for name, (lost, whole) in squares.items() if whole}
    worst = max(errors, key=errors.__getitem__)
    lost, whole = map(math.fsum, zip(*squares.values(), strict=True))
    reduced = {
        "rank": rank,
        "error": significant(math.sqrt(lost / whole)),
        "worst": worst,
        "worst_error": significant(errors[worst]),
    }
    report = merge.report()
    note = "the factors are singular vectors, which differ in their last bits between devices and libraries"
    return replace(report, files=files, reduced=reduced, warnings=(*report.warnings, note))


def _step(merge: Merge, place: TensorPlace) -> Tensor:
    """Returns what the merge adds to a tensor of the base."""
    step = merge.kernels.empty(place.size, merge.layout.mergeable[place.tensor].working)

    def into(bounds: TensorRange) -> Tensor:
        return step[bounds.start : bounds.stop]

    for _ in merge.render(into, [place], steps=True):
        pass
    return step


def _square(matrix: Tensor) -> float:
    return float(matrix.square().sum())


def _config(inputs: Inputs, products: dict[str, LowRank], changed: list[str], rank: int) -> bytes:
    """Returns the adapter_config.json."""
    theirs = [read_json(adapter.path / ADAPTER_CONFIG) for adapter in inputs.adapters.values()]
    alike = {key: theirs[0].get(key) for key in _INHERITED if len({str(each.get(key)) for each in theirs}) == 1}
    content = {
        **dict.fromkeys(_INHERITED),
        **alike,
        "peft_type": "LORA",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(products[name].transposed for name in changed),
        "target_modules": sorted(products[name].module for name in changed),
    }
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
