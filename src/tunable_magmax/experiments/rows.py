"""The rows of a table: each is a way to make one model, for an environment or for all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from tunable_magmax.errors import InputError, closest

Scale: TypeAlias = float | str
Baseline: TypeAlias = Literal["zero-shot", "single-best", "sequential", "random_mix", "average", "ties", "magmax"]
Source: TypeAlias = Literal["label", "ot", "ot-raw", "cosine", "mmd", "probe", "auto", "both", "search", "wrong"]
"""Where a preference may come from; `both` are labels and inputs."""
SOURCES: tuple[Source, ...] = get_args(Source)
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
TAILORED = {"tunable": "tunable_magmax", "tsv": "tsv", "average": "average"}
"""Merges with an environment's preference, by the name they have in tables."""
RECOMMENDED, BY_RULE = "tailor:auto", "tailor:auto+prior"
"""What `tmx tailor` makes by default from unlabelled inputs; and what it made before heads were fitted."""
CHOSEN = "matched"
"""The scale that is recommended, and that sentences and leads are about."""
LABEL, AUTO, TRANSPORT = (f"tunable:{name}@{CHOSEN}" for name in ("label", "auto", "ot"))
DEFAULTS: Mapping[Option, str] = {"scope": "model", "compare": "all", "keep": "random"}


_NAME = re.compile(
    r"(?P<base>[a-z_-]+)(:(?P<preference>[a-z-]+))?(@(?P<scale>[a-z0-9.]+))?"
    r"(?P<options>(,[a-z]+=[a-z0-9.]+)*)(?P<fit>\+fit)?(?P<prior>\+prior(:(?P<source>[a-z-]+))?(@(?P<eps>[0-9.]+))?)?"
)


_TUNABLE = ("scope", "compare", "keep")
_SHAPES: Mapping[str, tuple[bool | None, bool, tuple[str, ...]]] = {
    **dict.fromkeys(("zero-shot", "single-best", "joint"), (False, False, ())),
    **dict.fromkeys(("sequential", "random_mix", "ties", "magmax"), (False, True, ())),
    "average": (None, True, ()),
    "tunable": (True, True, _TUNABLE),
    "tsv": (True, True, ()),
    "likeliest": (True, False, ()),
    "tailor": (True, False, ()),
    "logistic": (None, False, ()),
}
"""What a row of each kind has: a preference (None: perhaps), a scale, and which options."""


@dataclass(frozen=True)
class Row:
    """One way to make a model, and to read its answers. `preference` is None for what does not look at the environment.

    `prior`: the source of the site prior that the head gets, None for none. `eps`: that of the prior, None for the one
    that follows the expected error. `fit`: whether the head is fitted to the model.

    >>> Row("tunable", "tunable_magmax", "label", "matched", {"compare": "active"}).name
    'tunable:label@matched,compare=active'
    >>> Row("magmax", "magmax", None, "best", prior="auto", eps=0.02).name
    'magmax@best+prior:auto@0.02'
    """

    base: str
    method: str | None
    preference: str | None = None
    scale: Scale | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    prior: str | None = None
    eps: float | None = None
    fit: bool = False

    @property
    def name(self) -> str:
        scale = "" if self.scale is None else f"@{self.scale if isinstance(self.scale, str) else f'{self.scale:g}'}"
        changed = "".join(f",{key}={value}" for key, value in self.options.items())
        name = f"{self.base}{f':{self.preference}' if self.preference else ''}{scale}{changed}"
        if self.base == "tailor":
            return name if self.fit else f"{name}+prior"
        if self.prior is None:
            return name
        name = f"{name}{'+fit' if self.fit else ''}"
        source = "" if self.prior == self.preference else f":{self.prior}"
        return f"{name}+prior{source}{'' if self.eps is None else f'@{self.eps:g}'}"

    @classmethod
    def parse(cls, name: str) -> Row:
        """Returns the row of a name.

        >>> Row.parse("tunable:auto@1,scope=tensor+prior").prior
        'auto'
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise InputError(
                f"{name!r} is no row; rows look like magmax@best, tsv:auto@1 or tunable:label@matched+prior"
            )
        base, preference, scale = match["base"], match["preference"], match["scale"]
        if base not in _SHAPES:
            raise InputError(f"{name!r}: unknown method {base!r}{closest(base, list(_SHAPES))}")
        prior = (match["source"] or preference) if match["prior"] else None
        options = dict(part.split("=") for part in match["options"].split(",") if part)
        for problem in cls._problems(base, preference, scale, options):
            raise InputError(f"{name!r}: {problem}")
        if match["prior"] and prior is None:
            raise InputError(f"{name!r}: a prior needs a source here, such as +prior:auto")
        for source in filter(None, (preference, prior)):
            if source not in SOURCES:
                raise InputError(f"{name!r}: unknown preference {source!r}{closest(source, SOURCES)}")
        fit = bool(match["fit"])
        if base == "tailor":
            if match["fit"] or match["eps"] or match["source"]:
                raise InputError(f"{name!r}: tailor fits a head with its own prior; with +prior it has the old head")
            fit, prior = not match["prior"], preference
        elif fit and (prior is None or match["eps"]):
            raise InputError(f"{name!r}: a head is fitted for a site: end it with +fit+prior:auto")
        if base == "logistic" and (prior is None or prior != preference or fit):
            raise InputError(f"{name!r}: logistic regression has a prior by a preference: logistic:auto+prior")
        if "both" in (preference, prior) and not (base == "tailor" and fit):
            raise InputError(f"{name!r}: inputs with their labels are for tailor:both")
        if match["eps"] and not 0 < float(match["eps"]) <= 1:
            raise InputError(f"{name!r}: the eps of a prior must be above 0 and at most 1")
        method = TAILORED.get(base) if preference is not None else MERGED.get(base)
        number = scale if scale in (None, "matched", "best") else float(scale)
        eps = float(match["eps"]) if match["eps"] else None
        return cls(base, method, preference, number, options, prior, eps, fit)

    @staticmethod
    def _problems(base: str, preference: str | None, scale: str | None, options: Mapping[str, str]) -> Iterator[str]:
        """Yields what a name says that its row cannot do, or leaves out."""
        needs, scaled, known = _SHAPES[base]
        if needs and preference is None:
            yield f"which preference? For example {base}:auto"
        if needs is False and preference is not None:
            yield f"{base} looks at no environment, so it has no preference"
        if scaled and scale is None:
            yield f"at which scale? For example {base}@matched"
        if not scaled and scale is not None:
            yield f"{base} has no scale"
        if scale == "best" and preference is not None:
            yield "the best scale is searched for baselines only, on training data"
        if scale not in (None, "matched", "best") and re.fullmatch(r"[0-9]+(\.[0-9]+)?", str(scale)) is None:
            yield f"the scale {scale!r} is none; give matched, best or a number"
        for option in options:
            if option not in known:
                yield f"{base} has no option {option!r}{closest(option, known)}"

    @property
    def tailored(self) -> bool:
        """Says whether each environment gets a model of its own."""
        return self.preference is not None or self.base == "single-best"


def plan_rows(
    baselines: Sequence[str],
    preferences: Sequence[str],
    scales: Sequence[Scale],
    variations: Sequence[Mapping[Option, str]] = (),
    more: Sequence[str] = (),
) -> list[Row]:
    """Returns all rows: baselines at each scale, the last checkpoint unchanged, preferences at all but `best`.

    `more`: names of further rows.
    """
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
    named = {row.name: row for row in rows}
    return [*rows, *(row for row in map(Row.parse, more) if row.name not in named)]


_SCALES = ("", "1", "0.5", "matched", "best")
_MEANINGS: Mapping[str, str] = {
    "zero-shot": "the base, before any task",
    "sequential": "the last task's checkpoint: fine-tuning on one task after the other",
    "single-best": "the task checkpoint that gets most of the environment's labelled meta samples right",
    "random_mix": "each element from a random task",
    "average": "the mean of the task vectors",
    "ties": "the mean of the trimmed task vectors that agree in sign",
    "magmax": "each element from the task of largest magnitude, whatever the environment",
    "likeliest": "the checkpoint of the one task that the preference ranks first",
    "tsv": "the largest singular vectors of each task, as many as the preference grants it",
    "tunable": "Tunable MAGMAX: each task gives as many elements as the environment's preference grants it",
    "tailor": "what `tmx tailor` makes by default: the merge that kept samples choose, with a head fitted to it",
    "logistic": "no merge: scikit-learn's logistic regression on the base's embeddings of the kept samples",
    "joint": "not continual: the base, fine-tuned once on all tasks' data together, with as many steps",
    ":cosine": "preference from unlabelled meta samples: cosine of mean embeddings",
    ":mmd": "preference from unlabelled meta samples: mean discrepancy of embeddings",
    ":ot": "preference from unlabelled meta samples: optimal transport of normalised embeddings",
    ":ot-raw": "preference from unlabelled meta samples: optimal transport of raw embeddings (the paper's)",
    ":shift": "preference from unlabelled meta samples: shift of the base's predicted classes",
    ":pseudo": "preference from unlabelled meta samples: the base's predicted classes, counted",
    ":probe": "preference from unlabelled meta samples: a discriminant on the base's embeddings",
    ":auto": "preference from unlabelled meta samples: probe where it can be trusted, else shift, else ot",
    ":label": "preference from the labels of the meta samples",
    ":wrong": "preference for tasks that the environment does not have, given by hand",
    ":both": "labels and inputs of the meta samples",
    ":search": "preference that does best on the labelled meta samples, found by trials",
    "@matched": "the step from the base is as long as the last task's",
    "@best": "the step's factor does best on held-out training samples of all tasks",
    "+fit": "the head is fitted to the model, from kept samples, for the site",
    "+prior": "the head knows the site prior: how often each class occurs, by the row's own preference",
    "+prior:auto": "the same by a preference from unlabelled meta samples, which the model itself does not use",
    "+prior:label": "the same by a preference from labels of the meta samples, which the model itself does not use",
    "+prior:ot-raw": "the same by raw transport of unlabelled meta samples, which the model itself does not use",
    "+prior:wrong": "the same by a preference for tasks that the environment does not have",
}


def recommended_row(rows: Iterable[str]) -> str:
    """Returns the row that `tmx tailor` makes by default, or made, where only older records are there."""
    return BY_RULE if RECOMMENDED not in (known := set(rows)) and BY_RULE in known else RECOMMENDED


def meanings(rows: Iterable[str]) -> dict[str, str]:
    """Explains the parts of some rows' names: methods, then preferences, then scales.

    >>> list(meanings(["magmax@best", "tunable:label@0.5"]))
    ['magmax', 'tunable', ':label', '@best', '@0.5']
    """
    parts: set[str] = set()
    numbers: dict[str, str] = {}
    for row in rows:
        base, preference, scale, options = row_parts(row)
        prior = re.search(r"\+prior(:[a-z-]+)?", options)
        parts |= {base, f":{preference}", f"@{scale}", *([prior[0]] if prior else [])}
        parts |= {"+fit"} if "+fit" in options else set()
        if scale and f"@{scale}" not in _MEANINGS:
            numbers[f"@{scale}"] = f"the step from the base is multiplied by {scale}"
    return {name: text for name, text in _MEANINGS.items() if name in parts} | numbers


def row_parts(row: str) -> tuple[str, str, str, str]:
    """Splits a row's name into its base, preference, scale, and changed options with the prior.

    >>> row_parts("tunable:label@matched,compare=active")
    ('tunable', 'label', 'matched', 'compare=active')
    >>> row_parts("magmax@best+prior:auto")
    ('magmax', '', 'best', '+prior:auto')
    """
    end = min((row.find(mark) for mark in ",+" if mark in row), default=len(row))
    name, _, scale = row[:end].partition("@")
    base, _, preference = name.partition(":")
    return base, preference, scale, row[end:].removeprefix(",")


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
