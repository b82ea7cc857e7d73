"""Reads an adapter's adapter_config.json. Whatever is not plain LoRA is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tunable_magmax.errors import InputError, shortened
from tunable_magmax.files import read_json

_N = TypeVar("_N", int, float)

CONFIG_NAME = "adapter_config.json"
MERGE_FIRST = "merge it into its base with PEFT's merge_and_unload, and give the merged checkpoint as the task"

# Keys that change what the weights mean, and what they ask for.
_REFUSED = {
    "use_dora": "DoRA",
    "layer_replication": "layer replication",
    "trainable_token_indices": "trainable tokens",
    "lora_bias": "LoRA with a bias of its own",
    "target_parameters": "LoRA on bare parameters (mixtures of experts)",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "use_qalora": "QALoRA, which is for quantised bases",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing between adapters",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "megatron_config": "Megatron's parallel layers",
    "quantization_config": "a quantised base",
}
# Keys about how training was set up, or read below.
_HARMLESS = frozenset(
    [
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    ]
)
# Starts that leave the base as it is. All others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take a part out of the base.
_STARTS: tuple[Any, ...] = (None, True, False, "gaussian", "eva", "orthogonal", "mica")

_LARGEST = 1e300  # so that no quotient overflows


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Rank and scaling of each adapted module.

    >>> config = AdapterConfig(8, 16, {}, {"q_proj": 4}, rslora=False, fan_in_fan_out=False)
    >>> config.scaling("layers.0.q_proj"), config.scaling("layers.0.v_proj")
    (0.5, 2.0)
    """

    r: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    fan_in_fan_out: bool

    def rank(self, module: str) -> int:
        return _matching(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        """Returns the factor of the product B @ A."""
        rank = self.rank(module)
        return _matching(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def _matching(patterns: Mapping[str, _N], module: str, default: _N) -> _N:
    """PEFT's rule: the first pattern that matches the module's whole name, or all of it after some dot."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_adapter_config(path: Path) -> AdapterConfig:
    """Reads a configuration; everything in it that is not supported is named in one `InputError`."""
    if not path.exists():
        raise InputError(f"{path} is missing, and without it the scaling is not known: put it back")
    content = read_json(path)
    if content.get("peft_type") != "LORA":
        raise InputError(
            f"{path}: peft_type is {content.get('peft_type')!r}, and only 'LORA' can be merged as it is: {MERGE_FIRST}"
        )
    if refused := list(_refused(content)):
        raise InputError(f"{path}: {'; '.join(refused)}. Not supported: {MERGE_FIRST}")
    if wrong := list(_wrong(content)):
        raise InputError(f"{path}: {'; '.join(wrong)}: correct the configuration")
    return AdapterConfig(
        content["r"],
        content["lora_alpha"],
        content.get("rank_pattern") or {},
        content.get("alpha_pattern") or {},
        bool(content.get("use_rslora")),
        bool(content.get("fan_in_fan_out")),
    )


def _refused(content: Mapping[str, Any]) -> Iterator[str]:
    for key, value in content.items():
        if not value:  # null, false or empty: not asked for, also where we do not know what it is
            continue
        if key in _REFUSED:
            yield f"{key} asks for {_REFUSED[key]}"
        elif key not in _HARMLESS:
            yield f"{key} is {shortened(repr(value))}, a key unknown here, which may change what the weights mean"
    start = content.get("init_lora_weights")
    if start not in _STARTS:
        yield f"init_lora_weights is {shortened(repr(start))}, which starts from a changed base, not from the one given"


def _wrong(content: Mapping[str, Any]) -> Iterator[str]:
    if not _is_rank(content.get("r")):
        yield f"r is {shortened(repr(content.get('r')))}, expected a whole number above 0"
    if not _is_number(content.get("lora_alpha")):
        yield f"lora_alpha is {shortened(repr(content.get('lora_alpha')))}, expected a number"
    for key, fits in (("rank_pattern", _is_rank), ("alpha_pattern", _is_number)):
        patterns = content.get(key) or {}
        if not isinstance(patterns, dict) or not all(map(fits, patterns.values())):
            yield f"{key} is {shortened(repr(patterns))}, expected a number for each pattern"
        else:
            yield from (
                f"{key} has {pattern!r}, which is no regular expression"
                for pattern in patterns
                if not _compiles(pattern)
            )
    for key in ("use_rslora", "fan_in_fan_out"):
        if not isinstance(content.get(key, False), bool | None):
            yield f"{key} is {shortened(repr(content[key]))}, expected true or false"


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _compiles(pattern: str) -> bool:
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        return False
    return True
