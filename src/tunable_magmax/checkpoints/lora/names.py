"""Which tensors of an adapter's file belong together, and which of the base's tensors they speak of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
