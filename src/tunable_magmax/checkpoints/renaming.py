"""One prefix, dropped or added, by which a model's names become another's: so a model with a head holds a bare one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunable_magmax.checkpoints.layout import Signature


@dataclass(frozen=True, slots=True)
class Renaming:
    """How a task's names become the base's: a prefix dropped, or one added."""

    drop: str = ""
    add: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)

    def back(self, name: str) -> str:
        """The task's name for a name of the base."""
        return self.drop + name.removeprefix(self.add)

    def __bool__(self) -> bool:
        return bool(self.drop or self.add)

    def words(self) -> str:
        return f"dropping {self.drop!r}" if self.drop else f"adding {self.add!r}"


def find_renaming(names: Iterable[str], base: Signature) -> Renaming:
    """The one prefix that, dropped or added, makes most of a task's names the base's; none if that is not clear.

    A model with a head holds the bare model under a prefix: adapters of one are used on checkpoints of the other. Names
    that it does not mend stay unknown to the base, and are refused as such.

    >>> from tunable_magmax.checkpoints.layout import Signature
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
