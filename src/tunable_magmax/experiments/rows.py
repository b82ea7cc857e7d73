"""The rows of a table: a name says how one model is made, for an environment or for all, and which head answers.

BASE[:PREFERENCE][@SCALE][,option=value...][+fit][+prior[:SOURCE]]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from tunable_magmax.errors import InputError, closest

Scale: TypeAlias = float | str
HeadKind: TypeAlias = Literal["old", "prior", "fitted"]
"""Which head answers: the one that training used; the same with the site's class shares; one fitted to the model."""
Source: TypeAlias = Literal["label", "auto", "both", "ot", "ot-raw", "cosine", "mmd", "search", "wrong"]
SOURCES: tuple[Source, ...] = get_args(Source)
METHODS = {
    "sequential": "last_task",
    "tunable": "tunable_magmax",
    **{name: name for name in ("random_mix", "average", "ties", "magmax", "tsv")},
}
"""Merges, by the name they have in tables."""
SAMPLES, KEPT = "samples", "kept"
"""The options of rows that know fewer samples of the environment, or have fewer kept samples of each class."""
RECOMMENDED, BY_RULE = "tailor:auto", "tailor:auto+prior"
"""What `tmx tailor` makes by default from unlabelled inputs, with the head fitted to it and with the old one."""
CHOSEN = "matched"
"""The scale that plain merges are shown at in the summary."""

_NAME = re.compile(
    r"(?P<base>[a-z_-]+)(:(?P<preference>[a-z-]+))?(@(?P<scale>[a-z0-9.]+))?"
    r"(?P<options>(,[a-z]+=[a-z0-9.]+)*)(?P<fit>\+fit)?(?P<prior>\+prior(:(?P<site>[a-z-]+))?)?"
)
_SHAPES: Mapping[str, tuple[bool | None, bool]] = {
    **dict.fromkeys(("zero-shot", "single-best", "joint"), (False, False)),
    **dict.fromkeys(("sequential", "random_mix", "ties", "magmax"), (False, True)),
    "average": (None, True),
    **dict.fromkeys(("tunable", "tsv"), (True, True)),
    **dict.fromkeys(("likeliest", "tailor", "logistic"), (True, False)),
}
"""Whether a base has a preference (None: perhaps), and whether it has a scale."""


@dataclass(frozen=True)
class Row:
    """One way to make a model and to read its answers.

    `preference`: None for what does not look at the environment. `site`: the source of the class shares that the head
    knows; None for the old head.

    >>> Row.parse("tunable:label@matched,compare=active").options
    {'compare': 'active'}
    >>> Row.parse("magmax@best+fit+prior:auto").head
    'fitted'
    """

    base: str
    preference: str | None = None
    scale: Scale | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    head: HeadKind = "old"
    site: str | None = None

    @property
    def name(self) -> str:
        scale = "" if self.scale is None else f"@{self.scale if isinstance(self.scale, str) else f'{self.scale:g}'}"
        changed = "".join(f",{key}={value}" for key, value in self.options.items())
        name = f"{self.base}{f':{self.preference}' if self.preference else ''}{scale}{changed}"
        if self.head == "old" or (self.base, self.head) == ("tailor", "fitted"):
            return name
        site = "" if self.site == self.preference else f":{self.site}"
        return f"{name}{'+fit' if self.head == 'fitted' else ''}+prior{site}"

    @property
    def method(self) -> str | None:
        """The merge method; None of what is no merge, or is chosen."""
        return METHODS.get(self.base)

    @property
    def samples(self) -> int | None:
        """How many samples of the environment it knows; None: all that are known."""
        return int(self.options[SAMPLES]) if SAMPLES in self.options else None

    @property
    def kept(self) -> int | None:
        """How many kept samples of each class it has; None: all."""
        return int(self.options[KEPT]) if KEPT in self.options else None

    @property
    def has_less(self) -> bool:
        """Whether it shows what fewer samples give."""
        return self.samples is not None or self.kept is not None

    @property
    def merge_options(self) -> dict[str, str]:
        """The further options of its merge."""
        return {key: value for key, value in self.options.items() if key not in (SAMPLES, KEPT)}

    @classmethod
    def parse(cls, name: str) -> Row:
        """Returns the row of a name; what a name says that its row cannot do is an `InputError`."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise InputError(
                f"{name!r} is no row; rows look like magmax@best, tsv:auto@1+prior or zero-shot+fit+prior:auto"
            )
        base, preference, scale = found["base"], found["preference"], found["scale"]
        if base not in _SHAPES:
            raise InputError(f"{name!r}: unknown method {base!r}{closest(base, list(_SHAPES))}")
        options = dict(part.split("=") for part in found["options"].split(",") if part)
        site = (found["site"] or preference) if found["prior"] else None
        head: HeadKind = "fitted" if found["fit"] else "prior" if found["prior"] else "old"
        if base == "tailor" and head == "old":
            head, site = "fitted", preference
        row = cls(base, preference, scale, options, head, site)
        for problem in row._problems(bool(found["fit"]), bool(found["prior"])):
            raise InputError(f"{name!r}: {problem}")
        return cls(base, preference, scale if scale in (None, "matched", "best") else float(scale), options, head, site)

    def _problems(self, fit: bool, prior: bool) -> Iterator[str]:
        needs, scaled = _SHAPES[self.base]
        base, preference, scale = self.base, self.preference, self.scale
        for source in filter(None, (preference, self.site)):
            if source not in SOURCES:
                yield f"unknown preference {source!r}{closest(source, SOURCES)}"
        if needs and preference is None:
            yield f"which preference? For example {base}:auto"
        if needs is False and preference is not None:
            yield f"{base} looks at no environment, so it has no preference"
        if scaled != (scale is not None):
            yield f"at which scale? For example {base}@matched" if scaled else f"{base} has no scale"
        if scale == "best" and preference is not None:
            yield "the best scale is searched on training data, without a preference"
        if isinstance(scale, str) and re.fullmatch(r"matched|best|[0-9]+(\.[0-9]+)?", scale) is None:
            yield f"the scale {scale!r} is none; give matched, best or a number"
        own = {"tunable": ["scope", "compare"], "tailor": [KEPT]}.get(base, [])
        allowed = [*own, *([SAMPLES] if preference is not None else [])]
        for option in self.options:
            if option not in allowed:
                yield f"{base} has no option {option!r}{closest(option, allowed)}"
        for name, least in ((SAMPLES, 1), (KEPT, 0)):
            text = self.options.get(name, "1")
            if not text.isdecimal() or int(text) < least:
                yield f"{name} is {text!r}, expected a whole number of at least {least}"
        if fit and not prior:
            yield "a head is fitted for a site: end the name with +fit+prior:auto"
        if prior and self.site is None:
            yield "whose class shares? End the name with +prior:auto"
        if base in ("tailor", "logistic") and (fit or self.site != preference or self.head == "old"):
            yield f"{base} has the class shares of its own preference; {base}:auto+prior is such a row"
        if "both" in (preference, self.site) and base != "tailor":
            yield "inputs with their labels are for tailor:both"


# -- names in reports -------------------------------------------------------------------------------------------------

_ORDER = (
    *("zero-shot", "sequential", "single-best", "random_mix", "average", "ties", "magmax", "likeliest", "tsv"),
    *("tunable", "tailor", "logistic", "joint"),
)
_SOURCE_ORDER = ("", "cosine", "mmd", "ot", "ot-raw", "auto", "label", "wrong", "both", "search")
_SCALE_ORDER = ("", "1", "0.5", "matched", "best")


def row_parts(row: str) -> tuple[str, str, str, str]:
    """Splits a row's name into its base, preference, scale, and what follows.

    >>> row_parts("tunable:label@matched,compare=active"), row_parts("magmax@best+prior:auto")
    (('tunable', 'label', 'matched', ',compare=active'), ('magmax', '', 'best', '+prior:auto'))
    """
    end = min((row.find(mark) for mark in ",+" if mark in row), default=len(row))
    name, _, scale = row[:end].partition("@")
    base, _, preference = name.partition(":")
    return base, preference, scale, row[end:]


def row_order(row: str) -> tuple[int, bool, int, int, str]:
    """Returns a sort key that puts rows in the order of the tables: by base, then preference, then scale."""
    base, preference, scale, rest = row_parts(row)

    def place(name: str, order: tuple[str, ...]) -> int:
        return order.index(name) if name in order else len(order)

    return place(base, _ORDER), bool(rest), place(preference, _SOURCE_ORDER), place(scale, _SCALE_ORDER), row
