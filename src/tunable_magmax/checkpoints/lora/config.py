"""Reads an adapter's adapter_config.json. Whatever is not plain LoRA is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tunable_magmax.errors import InputError, shortened, some_of
from tunable_magmax.files import read_json

_N = TypeVar("_N", int, float)

CONFIG_NAME = "adapter_config.json"
MERGE_FIRST = "merge it into its base with PEFT's merge_and_unload, and give the merged checkpoint as the task"

# Keys about how training was set up, or read below. All others may change what the weights mean, and are refused.
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

# Patterns without choices and repetitions: no other ones take time that grows faster than the name.
_PLAIN = re.compile(r"\^?(?:[\w.\-]|\\[.d]){1,1000}\$?")
_LARGEST = 1e300  # so that no quotient overflows


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Rank and scaling of each adapted module, under the names of adapter_config.json.

    >>> config = AdapterConfig(r=8, lora_alpha=16, alpha_pattern={"q_proj": 4})
    >>> config.scaling("layers.0.q_proj"), config.scaling("layers.0.v_proj")
    (0.5, 2.0)
    """

    __pydantic_config__ = {"strict": True}  # noqa: RUF012 - read by pydantic, not a field

    r: int
    lora_alpha: float
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None
    use_rslora: bool | None = None
    fan_in_fan_out: bool | None = None

    def __post_init__(self) -> None:
        ranks, alphas = self.rank_pattern or {}, self.alpha_pattern or {}
        if (rank := min(self.r, *ranks.values(), self.r)) < 1:
            raise ValueError(f"r and rank_pattern must be greater than 0, found {rank}")
        for alpha in (self.lora_alpha, *alphas.values()):
            if not -_LARGEST <= alpha <= _LARGEST:
                raise ValueError(f"lora_alpha and alpha_pattern must be finite numbers, found {alpha}")
        if unusual := [pattern for pattern in (*ranks, *alphas) if _PLAIN.fullmatch(pattern) is None]:
            raise ValueError(
                "names in rank_pattern and alpha_pattern may have letters, digits, dots, \\d, ^ and $ only, "
                f"found {some_of(unusual, show=lambda pattern: repr(shortened(pattern)))}"
            )

    def rank(self, module: str) -> int:
        return _matching(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        """Returns the factor of the product B @ A."""
        rank = self.rank(module)
        return _matching(self.alpha_pattern, module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _matching(patterns: Mapping[str, _N] | None, module: str, default: _N) -> _N:
    """Returns the value of the first pattern that is the module's name, or all of it after some dot, as in PEFT."""
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_adapter_config(path: Path) -> AdapterConfig:
    """Reads a configuration; everything in it that is not supported is named in one `InputError`."""
    from tunable_magmax import config  # slow to import, and only adapters need it

    if not path.exists():
        raise InputError(f"{path} is missing, and without it the scaling is not known: put it back")
    content = read_json(path)
    if content.get("peft_type") != "LORA":
        raise InputError(
            f"{path}: peft_type is {content.get('peft_type')!r}, and only 'LORA' can be merged as it is: {MERGE_FIRST}"
        )
    if refused := list(_refused(content)):
        raise InputError(f"{path}: {'; '.join(refused)}. Not supported: {MERGE_FIRST}")
    names = {field.name for field in fields(AdapterConfig)}
    return config.check(AdapterConfig, {key: value for key, value in content.items() if key in names}, str(path))


def _refused(content: Mapping[str, Any]) -> Iterator[str]:
    for key, value in content.items():
        if not value:  # null, false or empty: not asked for, also where we do not know what it is
            continue
        if key not in _HARMLESS:  # such as use_dora
            yield f"{key} is {shortened(repr(value))}, which may change what the weights mean"
    start = content.get("init_lora_weights")
    if start not in _STARTS:
        yield f"init_lora_weights is {shortened(repr(start))}, which starts from a changed base, not from the one given"
