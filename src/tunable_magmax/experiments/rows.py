"""The rows of a table: each is a way to make one model, for an environment or for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

Scale: TypeAlias = float | str
Baseline: TypeAlias = Literal["zero-shot", "single-best", "sequential", "random_mix", "average", "ties", "magmax"]
Source: TypeAlias = Literal["label", "ot", "cosine", "mmd", "shift", "pseudo", "probe", "auto", "search"]
"""Where a preference may come from."""
Option: TypeAlias = Literal["scope", "compare", "keep"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
MERGED = {
    "sequential": "last_task",
    "random_mix": "random_mix",
    "average": "average",
    "ties": "ties",
    "magmax": "magmax",
}
"""Baselines that are merges, by the name they have in tables."""
CHOSEN = "matched"
"""The scale that is recommended, and that sentences and leads are about."""
LABEL, AUTO, TRANSPORT = (f"tunable:{name}@{CHOSEN}" for name in ("label", "auto", "ot"))
DEFAULTS: Mapping[Option, str] = {"scope": "model", "compare": "all", "keep": "random"}


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
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        scale = "" if self.scale is None else f"@{self.scale if isinstance(self.scale, str) else f'{self.scale:g}'}"
        changed = "".join(f",{key}={value}" for key, value in self.options.items())
        return f"{self.base}{f':{self.preference}' if self.preference else ''}{scale}{changed}"

    @property
    def tailored(self) -> bool:
        """Says whether each environment gets a model of its own."""
        return self.preference is not None or self.base == "single-best"


def plan_rows(
    baselines: Sequence[str],
    preferences: Sequence[str],
    scales: Sequence[Scale],
    variations: Sequence[Mapping[Option, str]] = (),
) -> list[Row]:
    """Returns all rows: baselines at each scale, the last checkpoint unchanged, preferences at all but `best`."""
    rows: list[Row] = []
    for name in baselines:
        if name in MERGED:
            chosen: list[Scale] = [1.0, *(s for s in scales if s != "matched")] if name == "sequential" else [*scales]
            rows += [Row(name, MERGED[name], None, scale) for scale in dict.fromkeys(chosen)]
        else:
            rows.append(Row(name, None))
    own = [scale for scale in scales if scale != "best"]
    rows += [Row("tunable", "tunable_magmax", name, scale) for name in preferences for scale in own]
    rows += [
        Row("tunable", "tunable_magmax", "label", "matched", {str(key): value for key, value in each.items()})
        for each in variations
    ]
    return rows


_SCALES = ("", "1", "0.5", "matched", "best")
_MEANINGS: Mapping[str, str] = {
    "zero-shot": "the base, before any task",
    "sequential": "the last task's checkpoint: fine-tuning on one task after the other",
    "single-best": "the task checkpoint that gets most of the environment's labelled meta samples right",
    "random_mix": "each element from a random task",
    "average": "the mean of the task vectors",
    "ties": "the mean of the trimmed task vectors that agree in sign",
    "magmax": "each element from the task of largest magnitude, whatever the environment",
    "tunable": "Tunable MAGMAX: each task gives as many elements as the environment's preference grants it",
    ":cosine": "preference from unlabelled meta samples: cosine of mean embeddings",
    ":mmd": "preference from unlabelled meta samples: mean discrepancy of embeddings",
    ":ot": "preference from unlabelled meta samples: optimal transport (the paper's)",
    ":shift": "preference from unlabelled meta samples: shift of the base's predicted classes",
    ":pseudo": "preference from unlabelled meta samples: the base's predicted classes, counted",
    ":probe": "preference from unlabelled meta samples: a discriminant on the base's embeddings",
    ":auto": "preference from unlabelled meta samples: probe where it can be trusted, else shift, else ot",
    ":label": "preference from the labels of the meta samples",
    ":search": "preference that does best on the labelled meta samples, found by trials",
    "@matched": "the step from the base is as long as the last task's",
    "@best": "the step's factor does best on held-out training samples of all tasks",
}


def meanings(rows: Iterable[str]) -> dict[str, str]:
    """Explains the parts of some rows' names: methods, then preferences, then scales.

    >>> list(meanings(["magmax@best", "tunable:label@0.5"]))
    ['magmax', 'tunable', ':label', '@best', '@0.5']
    """
    parts: set[str] = set()
    numbers: dict[str, str] = {}
    for row in rows:
        base, preference, scale, _ = row_parts(row)
        parts |= {base, f":{preference}", f"@{scale}"}
        if scale and f"@{scale}" not in _MEANINGS:
            numbers[f"@{scale}"] = f"the step from the base is multiplied by {scale}"
    return {name: text for name, text in _MEANINGS.items() if name in parts} | numbers


def row_parts(row: str) -> tuple[str, str, str, str]:
    """Splits a row's name into its base, preference, scale and changed options.

    >>> row_parts("tunable:label@matched,compare=active")
    ('tunable', 'label', 'matched', 'compare=active')
    """
    name, _, options = row.partition(",")
    name, _, scale = name.partition("@")
    base, _, preference = name.partition(":")
    return base, preference, scale, options


def row_order(row: str) -> tuple[int, bool, int, int, str]:
    """Returns a sort key that puts rows in the order of the tables: baselines, preferences, variations."""
    base, preference, scale, options = row_parts(row)
    names = list(_MEANINGS)
    place = {name: k for k, name in enumerate(names)}
    return (
        place.get(base, len(names)),
        bool(options),
        place.get(f":{preference}", len(names)) if preference else -1,
        _SCALES.index(scale) if scale in _SCALES else len(_SCALES),
        row,
    )
