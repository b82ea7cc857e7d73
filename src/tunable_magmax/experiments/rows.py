"""The rows of a table: each is a way to make one model, for an environment or for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Scale: TypeAlias = float | str
MERGED = {
    "sequential": "last_task",
    "random_mix": "random_mix",
    "average": "average",
    "ties": "ties",
    "magmax": "magmax",
}
"""Baselines that are merges, by the name they have in tables."""
BASELINES = ("zero-shot", "single-best", *MERGED)
PREFERENCES = ("label", "ot", "cosine", "mmd", "shift", "pseudo", "probe", "auto", "search")
DEFAULTS = {"scope": "model", "compare": "all", "keep": "random"}


@dataclass(frozen=True)
class Row:
    """One way to make a model. `preference` is None for what does not look at the environment.

    >>> Row("tunable", "tunable_magmax", "label", "matched", {"compare": "active"}).name
    'tunable:label@matched,compare=active'
    """

    base: str
    method: str | None
    preference: str | None = None
    scale: Scale | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        scale = "" if self.scale is None else f"@{self.scale if isinstance(self.scale, str) else f'{self.scale:g}'}"
        changed = "".join(f",{key}={value}" for key, value in self.options.items())
        return f"{self.base}{f':{self.preference}' if self.preference else ''}{scale}{changed}"

    @property
    def tailored(self) -> bool:
        """Whether each environment gets a model of its own."""
        return self.preference is not None or self.base == "single-best"


def plan_rows(
    baselines: Sequence[str],
    preferences: Sequence[str],
    scales: Sequence[Scale],
    variations: Sequence[Mapping[str, Any]] = (),
) -> list[Row]:
    """All rows: baselines at each scale, sequential fine-tuning also as it is, and preferences at each but `best`."""
    rows: list[Row] = []
    for name in baselines:
        if name in MERGED:
            chosen: list[Scale] = [1.0, *(s for s in scales if s != "matched")] if name == "sequential" else [*scales]
            rows += [Row(name, MERGED[name], None, scale) for scale in dict.fromkeys(chosen)]
        else:
            rows.append(Row(name, None))
    own = [scale for scale in scales if scale != "best"]
    rows += [Row("tunable", "tunable_magmax", name, scale) for name in preferences for scale in own]
    rows += [Row("tunable", "tunable_magmax", "label", "matched", dict(changed)) for changed in variations]
    return rows
