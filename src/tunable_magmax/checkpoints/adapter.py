"""A LoRA adapter in PEFT's layout, opened as the model that it makes of a base. No value is computed here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tunable_magmax.checkpoints.checkpoint import Checkpoint, Opened, PositionedFile
from tunable_magmax.checkpoints.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, open_file
from tunable_magmax.checkpoints.tensors import Signature, TensorInfo, find_renaming
from tunable_magmax.errors import InputError, shortened, some_of
from tunable_magmax.files import read_json

Shape: TypeAlias = tuple[int, ...]
_N = TypeVar("_N", int, float)

_MERGE_FIRST = "merge it into its base with PEFT's merge_and_unload, and give the merged checkpoint as the task"

# -- adapter_config.json ----------------------------------------------------------------------------------------------

# Keys about how training was set up. All others but those of AdapterConfig may change what the weights mean.
_ABOUT_RUNS = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision")
_ABOUT_LAYERS = ("exclude_modules", "layers_pattern", "layers_to_transform", "modules_to_save", "target_modules")
_ABOUT_TRAINING = ("bias", "ensure_weight_tying", "lora_dropout", "megatron_core", "qalora_group_size", "task_type")
_ABOUT_STARTS = ("corda_config", "eva_config", "init_lora_weights", "loftq_config", "lora_ga_config", "runtime_config")
_HARMLESS = frozenset((*_ABOUT_RUNS, *_ABOUT_LAYERS, *_ABOUT_TRAINING, *_ABOUT_STARTS))
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
        if min(self.r, *ranks.values(), self.r) < 1:
            raise ValueError(f"r and rank_pattern must be greater than 0, found {self.r} and {ranks}")
        if not all(-_LARGEST <= alpha <= _LARGEST for alpha in (self.lora_alpha, *alphas.values())):
            raise ValueError(f"lora_alpha and alpha_pattern must be finite, found {self.lora_alpha} and {alphas}")
        if unusual := [pattern for pattern in (*ranks, *alphas) if _PLAIN.fullmatch(pattern) is None]:
            shown = some_of(unusual, show=lambda pattern: repr(shortened(pattern)))
            raise ValueError(
                f"rank_pattern and alpha_pattern: only letters, digits, . \\d ^ $ are allowed, found {shown}"
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


def _read_config(path: Path) -> AdapterConfig:
    """Reads a configuration; everything in it that is not supported is named in one `InputError`."""
    from tunable_magmax.config import check  # slow to import, and only adapters need it

    if not path.exists():
        raise InputError(f"{path} is missing, and without it the scaling is not known: put it back")
    content = read_json(path)
    read = {field.name for field in fields(AdapterConfig)}
    # What is null, false or empty is not asked for, also where we do not know what it is.
    refused = {key: value for key, value in content.items() if value and key not in read | _HARMLESS}
    if content.get("peft_type") != "LORA":
        refused["peft_type"] = content.get("peft_type")
    if content.get("init_lora_weights") not in _STARTS:
        refused["init_lora_weights"] = content["init_lora_weights"]
    if refused:
        shown = "; ".join(f"{key} is {shortened(repr(value))}" for key, value in refused.items())
        raise InputError(f"{path}: {shown}: this may change what the weights mean. Not supported: {_MERGE_FIRST}")
    return check(AdapterConfig, {key: value for key, value in content.items() if key in read}, str(path))


# -- the adapter ------------------------------------------------------------------------------------------------------

PREFIX = "base_model.model."
"""What PEFT writes before the names of the adapted modules."""
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.(?P<adapter>[^.]+))?\.weight")
_WRAPPERS = re.compile(r"\.(base_layer|modules_to_save\.[^.]+)(?=\.)")
_FOREIGN = re.compile(r"\.(lora_\w+|trainable_tokens_\w+|ia3_l|hada_\w+|lokr_\w+|oft_\w+|boft_\w+|vera_\w+)(\.|$)")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to the matrix of a linear layer: scaling * B @ A, or its transpose, of stored A [r, in] and B
    [out, r]."""

    module: str
    """The layer, as the adapter calls it."""
    a: TensorInfo
    b: TensorInfo
    scaling: float
    transposed: bool

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> Shape:
        """The shape of the matrix that it is added to."""
        plain = _product_shape(self.a, self.b)
        return plain[::-1] if self.transposed else plain


@dataclass(frozen=True, slots=True)
class Part:
    """What an adapter has for one tensor: a whole tensor in the base's place, a product to be added, or both."""

    whole: TensorInfo | None
    product: LowRank | None


class Adapter(Opened):
    """A LoRA adapter on a base: theta = base + scaling * B @ A on the tensors in `parts`, the base's values elsewhere.

    `tensors` has all of the base's names. A product does not widen a tensor's type, unless a factor is float64.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 6),
    ...            "base_model.model.q.lora_B.weight": torch.ones(4, 2)}, folder / "adapter_model.safetensors")
    >>> _ = (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    >>> adapter = Adapter(folder, Signature({"q.weight": TensorInfo("q.weight", "BF16", (4, 6))}, {}))
    >>> adapter.tensors["q.weight"], adapter.parts["q.weight"].product.scaling
    (TensorInfo(name='q.weight', dtype='BF16', shape=(4, 6)), 2.0)
    """

    def __init__(self, path: Path, base: Signature) -> None:
        self.path = path
        config = _read_config(path / ADAPTER_CONFIG)
        self._config = PositionedFile(path / ADAPTER_CONFIG)
        self.stored = open_stored(path)
        self.files = (*self.stored.files, path / ADAPTER_CONFIG)
        factors, whole = self._sorted_names()
        self.renaming = find_renaming([f"{module}.weight" for module in factors] or list(whole), base)
        self.parts = self._matched(factors, whole, config, base)
        self.tensors = {**base.tensors, **{name: _info(name, part, base) for name, part in self.parts.items()}}
        self.aliases = base.aliases

    def _sorted_names(self) -> tuple[dict[str, tuple[TensorInfo, TensorInfo]], dict[str, TensorInfo]]:
        """Returns what is stored: factors A and B by module, and by the model's name what is saved in full.

        That may be a head, biases, or the layer beneath the factors.
        """
        factors: dict[str, dict[str, str]] = {}
        whole: dict[str, str] = {}
        adapters: set[str | None] = set()
        problems: list[str] = []
        for name in (*self.stored.tensors, *self.stored.aliases):
            plain = name.removeprefix(PREFIX)
            if factor := _FACTOR.fullmatch(plain):
                adapters.add(factor["adapter"])
                first = factors.setdefault(factor["module"], {}).setdefault(factor["side"], name)
            elif _FOREIGN.search(plain):
                problems.append(f"{name!r} is not a factor of a linear layer's LoRA")
                continue
            else:
                first = whole.setdefault(_WRAPPERS.sub("", plain), name)
            if first != name:
                problems.append(f"{name!r} is stored twice, also as {first!r}")
        if len(adapters) > 1:
            problems.append(f"it holds several adapters ({', '.join(sorted(map(repr, adapters)))}): save one alone")
        problems += [
            f"{module!r} has no lora_{side}" for module, both in factors.items() for side in {"A", "B"} - both.keys()
        ]
        self._refuse(problems)
        infos = {alias: self.stored.tensors[name] for alias, name in self.stored.aliases.items()}
        infos |= self.stored.tensors
        pairs = {module: (infos[both["A"]], infos[both["B"]]) for module, both in factors.items()}
        return pairs, {name: infos[stored] for name, stored in whole.items()}

    def _matched(
        self,
        factors: Mapping[str, tuple[TensorInfo, TensorInfo]],
        saved: Mapping[str, TensorInfo],
        config: AdapterConfig,
        base: Signature,
    ) -> dict[str, Part]:
        """Returns what the adapter has for each tensor, by the base's names, or by its own where the base has none."""
        self._refuse([fault for module, (a, b) in factors.items() for fault in _mismatches(module, a, b, config)])

        def target_of(name: str) -> str:
            return base.name_of(name) or base.name_of(self.renaming(name)) or name

        parts: dict[str, Part] = {}
        problems: list[str] = []
        for name, info in saved.items():
            if parts.setdefault(target_of(name), Part(info, None)).whole != info:
                problems.append(f"{info.name!r} and another tensor are both the base's {target_of(name)!r}: drop one")
        targets = {module: target_of(f"{module}.weight") for module in factors}
        known = {module: base.tensors[target] for module, target in targets.items() if target in base.tensors}
        directions = _directions(
            base, [(_product_shape(*factors[module]), info.shape) for module, info in known.items()]
        )
        for module, (a, b) in factors.items():
            target, plain, transposed = targets[module], _product_shape(a, b), False
            if module in known:
                if not known[module].is_float:
                    kind = known[module].dtype
                    problems.append(
                        f"the base's {target!r} is {kind}, as in a quantised model: give one of 16 bits or more"
                    )
                transposed = plain != known[module].shape == plain[::-1]
                if plain[0] == plain[1]:
                    transposed = next(iter(directions), bool(config.fan_in_fan_out))
                    if len(directions) > 1:
                        problems.append(f"{module!r} is square, and the base has both [out, in] and [in, out] layers")
            product, before = LowRank(module, a, b, config.scaling(module), transposed), parts.get(target)
            whole = None if before is None else before.whole
            if before is not None and before.product is not None:
                problems.append(f"{before.product.module!r} and {module!r} are one tensor in the base, {target!r}")
            elif whole is not None and whole.shape != product.shape:
                problems.append(f"{whole.name!r} has shape {list(whole.shape)}, but its product {list(product.shape)}")
            parts[target] = Part(whole, product)
        self._refuse(problems)
        return parts

    def _refuse(self, problems: Sequence[str]) -> None:
        if problems:
            shown = some_of(problems, limit=20, joint="; ")
            raise InputError(f"{self.path}: {shown}. If this can't be fixed, {_MERGE_FIRST}")

    @property
    def products(self) -> list[LowRank]:
        return [part.product for part in self.parts.values() if part.product is not None]

    def describe(self) -> str:
        """Returns a description such as "LoRA adapter (rank 8; 24 tensors by factors, 2 whole)"."""
        ranks = sorted({product.rank for product in self.products})
        shown = "no rank" if not ranks else f"rank {'-'.join(map(str, dict.fromkeys((ranks[0], ranks[-1]))))}"
        whole = sum(part.whole is not None for part in self.parts.values())
        return f"LoRA adapter ({shown}; {len(self.products)} tensors by factors, {whole} whole)"

    def refuse_changed(self) -> None:
        self.stored.refuse_changed()
        self._config.refuse_changed()

    def close(self) -> None:
        self.stored.close()


def open_stored(path: Path) -> Checkpoint:
    """Opens an adapter's weights as they are stored."""
    for name in ADAPTER_WEIGHTS:
        if (path / name).exists():
            return open_file(path / name)
    raise InputError(f"{path} has {ADAPTER_CONFIG}, but no {' or '.join(ADAPTER_WEIGHTS)}: get that as well")


def _info(name: str, part: Part, base: Signature) -> TensorInfo:
    if part.product is None:
        assert part.whole is not None
        return TensorInfo(name, part.whole.dtype, part.whole.shape)
    origin = part.whole or base.tensors.get(name) or part.product.a
    wide = "F64" in (origin.dtype, part.product.a.dtype, part.product.b.dtype)
    return TensorInfo(name, "F64" if wide else origin.dtype, part.product.shape)


def _mismatches(module: str, a: TensorInfo, b: TensorInfo, config: AdapterConfig) -> Iterator[str]:
    for info in (a, b):
        if not info.is_float:
            yield f"{info.name!r} has type {info.dtype}, expected a floating-point type of 16 bits or more"
        if len(info.shape) != 2 or 0 in info.shape:
            yield f"{info.name!r} has shape {list(info.shape)}: it is a shard, or no factor of a linear layer"
            return
    if not a.shape[0] == b.shape[1] == config.rank(module):
        by_config = f"{config.rank(module)} by {ADAPTER_CONFIG} (r, rank_pattern)"
        yield f"{module!r} has ranks {a.shape[0]} (A) and {b.shape[1]} (B), and {by_config}: all must be equal"


def _directions(base: Signature, adapted: Iterable[tuple[Shape, Shape]]) -> set[bool]:
    """Returns whether weights that are not square are [in, out], like GPT-2's Conv1D, or [out, in], like Linear.

    These are the base's weights with a bias; if there are none, those in `adapted`: of each adapted layer the shape of
    B @ A and of the base's weight. Square weights follow them, and only then the configuration: PEFT goes by the class
    of each module, and writes down one `fan_in_fan_out` for all, that of the last module it came to.
    """
    in_base = {
        info.shape[1:] == bias.shape
        for name, info in base.tensors.items()
        if name.endswith(".weight") and _oblong(info.shape)
        if (bias := base.tensors.get(f"{name.removesuffix('.weight')}.bias")) is not None
        if bias.shape in (info.shape[:1], info.shape[1:])
    }
    return in_base or {shape != plain for plain, shape in adapted if _oblong(shape) and shape in (plain, plain[::-1])}


def _product_shape(a: TensorInfo, b: TensorInfo) -> Shape:
    """Returns the shape of B @ A."""
    return b.shape[0], a.shape[1]


def _oblong(shape: Shape) -> bool:
    return len(shape) == 2 and shape[0] != shape[1]
