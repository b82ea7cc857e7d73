"""Which tensors of an adapter's file belong together, and which of the base's tensors they speak of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunable_magmax.checkpoints.layout import Signature

_PREFIX = "base_model.model."
_LINEAR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.(?P<adapter>[^.]+))?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(\.(?P<adapter>[^.]+))?")
_WRAPPERS = re.compile(r"\.(base_layer|modules_to_save\.[^.]+)(?=\.)")
_FOREIGN = re.compile(r"\.(lora_\w+|trainable_tokens_\w+|ia3_l|hada_\w+|lokr_\w+|oft_\w+|boft_\w+|vera_\w+)(\.|$)")


@dataclass(frozen=True, slots=True)
class Pair:
    """The stored names of a module's two factors; `embedding` says that they are of an embedding."""

    a: str
    b: str
    embedding: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """What an adapter's file holds: factors by module, whole tensors by the model's name, and what is wrong with it."""

    pairs: Mapping[str, Pair]
    whole: Mapping[str, str]
    """The stored name of each tensor that is saved in full: a head, biases, an embedding."""
    problems: tuple[str, ...]


def sort_names(stored: Iterable[str]) -> Contents:
    """Sort stored names into factors and whole tensors.

    >>> prefix = "base_model.model."
    >>> found = sort_names([prefix + "q.lora_A.weight", prefix + "q.lora_B.weight", prefix + "head.bias"])
    >>> list(found.pairs), found.whole
    (['q'], {'head.bias': 'base_model.model.head.bias'})
    """
    sides: dict[tuple[str, bool], dict[str, str]] = {}
    whole: dict[str, str] = {}
    adapters: set[str | None] = set()
    problems: list[str] = []
    for name in stored:
        plain = name.removeprefix(_PREFIX)
        linear, embedding = _LINEAR.fullmatch(plain), _EMBEDDING.fullmatch(plain)
        if found := linear or embedding:
            adapters.add(found["adapter"])
            held = sides.setdefault((found["module"], linear is None), {})
            if held.setdefault(found["side"], name) != name:
                problems.append(f"{name!r} is there a second time, as {held[found['side']]!r}")
        elif "lora_magnitude_vector" in plain:
            problems.append(f"{name!r} is a magnitude of DoRA")
        elif _FOREIGN.search(plain):
            problems.append(f"{name!r} is no factor of LoRA")
        elif whole.setdefault(_WRAPPERS.sub("", plain), name) != name:
            problems.append(f"{name!r} is there a second time, as {whole[_WRAPPERS.sub('', plain)]!r}")
    if len(adapters) > 1:
        shown = ", ".join(sorted(repr(name) for name in adapters))
        problems.append(f"there are several adapters in it ({shown}): save one alone")
    pairs: dict[str, Pair] = {}
    for (module, embedding_kind), held in sides.items():
        if missing := {"A", "B"} - held.keys():
            problems.append(f"{module!r} has no lora_{'embedding_' * embedding_kind}{missing.pop()}")
        elif module in pairs:
            problems.append(f"{module!r} has factors both of a layer and of an embedding")
        else:
            pairs[module] = Pair(held["A"], held["B"], embedding_kind)
    return Contents(pairs, whole, tuple(problems))


@dataclass(frozen=True, slots=True)
class Renaming:
    """How an adapter's names become the base's: a prefix dropped, or one added."""

    drop: str = ""
    add: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)

    def __bool__(self) -> bool:
        return bool(self.drop or self.add)

    def words(self) -> str:
        return f"dropping {self.drop!r}" if self.drop else f"adding {self.add!r}"


def find_renaming(names: Iterable[str], base: Signature) -> Renaming:
    """The one prefix that, dropped or added, makes most of an adapter's names the base's; none if that is not clear.

    A model with a head holds the bare model under a prefix: adapters of one are used on checkpoints of the other. Names
    that it does not mend stay unknown to the base, and are refused as such.

    >>> from tunable_magmax.checkpoints.tensors import TensorInfo
    >>> base = Signature({"h.0.w": TensorInfo("h.0.w", "F32", (1,))}, {})
    >>> find_renaming(["transformer.h.0.w"], base)
    Renaming(drop='transformer.', add='')
    """
    names = list(names)
    if any(base.name_of(name) for name in names):
        return Renaming()
    known = [*base.tensors, *base.aliases]
    asked = names[:: 1 + len(names) // 16]  # thousands of experts would make as many choices
    choices = {Renaming(drop=name[: dot.end()]) for name in asked for dot in re.finditer(r"\.", name)}
    endings = {name: f".{name}" for name in asked}
    choices |= {
        Renaming(add=held.removesuffix(name)) for name, end in endings.items() for held in known if held.endswith(end)
    }
    found = {
        choice: sum(name.startswith(choice.drop) and base.name_of(choice(name)) is not None for name in names)
        for choice in choices
    }
    most = max(found.values(), default=0)
    best = [choice for choice, count in found.items() if count == most]
    return best[0] if most and len(best) == 1 else Renaming()
