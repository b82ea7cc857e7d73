"""What a comparison of models found: each model's share of right answers, and who wins in plain words."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tunable_magmax.evaluation.accuracy import LEVEL, Share
from tunable_magmax.evaluation.comparison import ALPHA, Paired, Verdict, holm, paired
from tunable_magmax.showing import data_frame, html_table, number
from tunable_magmax.workflows.candidates import Candidate
from tunable_magmax.workflows.scoring import AppliedPrior

if TYPE_CHECKING:
    import numpy as np
    import pandas
    from numpy.typing import NDArray

VERSION = 1


@dataclass(frozen=True)
class Row:
    """A model with or without the site prior. `pair`: against the tailored model, None for itself."""

    candidate: Candidate
    prior: bool
    share: Share
    pair: Paired | None
    p_value: float | None
    """Corrected for the number of comparisons."""
    verdict: Verdict | None

    def to_dict(self, level: float) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {
            "model": self.candidate.title,
            **asdict(self.candidate),
            "prior": self.prior,
            "right": self.share.right,
            "accuracy": self.share.value,
            "interval": list(self.share.interval(level)),
            "won": None if self.pair is None else self.pair.won,
            "lost": None if self.pair is None else self.pair.lost,
            "difference": None if self.pair is None else self.pair.difference,
            "p_value": self.p_value,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, repr=False)
class Comparison:
    """Models of a run on a site's samples, best first; `rows[k].pair` is None for the tailored model."""

    run: str
    data: str
    head: str
    samples: int
    unreadable: int
    rows: tuple[Row, ...]
    prior: AppliedPrior | None
    scales: dict[str, float]
    """The number that each merge's scale was, by the title of its candidate."""
    level: float = LEVEL
    preference: str = "FILE"
    """The file of the preference."""
    model: str | None = None
    """The directory of the tailored model, if one was given."""
    usual: str = "tunable_magmax"
    """The method that `tmx tailor` takes by default."""
    unknown_labels: int = 0

    def __repr__(self) -> str:
        return f"Comparison({len(self.by_model())} models of {self.run} on {self.data}:\n  {self.sentences()[0]})"

    def _repr_html_(self) -> str:
        """Returns the table for a notebook, best first; the tailored model has a star."""
        rows = []
        for row in self.rows:
            low, high = row.share.interval(self.level)
            star = " *" if row is self.tailored else ""
            name = f"{row.candidate.title}{'' if self.prior is None or row.prior else ', no prior'}{star}"
            rows.append([name, f"{row.share.value:.1%}", f"{low:.1%} to {high:.1%}", row.verdict or ""])
        level = f"{100 * self.level:g}% interval"
        return html_table(["model", "accuracy", level, "against *"], rows, " ".join(self.sentences()))

    def to_frame(self) -> pandas.DataFrame:
        """Returns a row for each model, with and without the site prior, best first, as a pandas frame."""
        records = [row.to_dict(self.level) for row in self.rows]
        columns: dict[str, list[Any]] = {
            "prior": [row.prior for row in self.rows],
            "accuracy": [record["accuracy"] for record in records],
            "low": [record["interval"][0] for record in records],
            "high": [record["interval"][1] for record in records],
            "difference": [record["difference"] for record in records],
            "p_value": [record["p_value"] for record in records],
            "verdict": [record["verdict"] for record in records],
            "tailored": [row.pair is None for row in self.rows],
        }
        return data_frame(columns, [record["model"] for record in records], "model")

    @cached_property
    def tailored(self) -> Row:
        """The model in `model`; else the one that `tmx tailor` makes of the preference by default, with its prior."""
        return next(row for row in self.rows if row.pair is None)

    @property
    def best(self) -> Row:
        """The row with the most right answers; of equal ones the tailored model, else the simplest."""
        return self.rows[0]

    def by_model(self) -> dict[Candidate, dict[bool, Row]]:
        """Returns each model's rows, with (True) and without the prior; best first, with the prior if there is one."""
        models: dict[Candidate, dict[bool, Row]] = {}
        for row in self.rows:
            models.setdefault(row.candidate, {})[row.prior] = row
        first = self.prior is not None
        return dict(sorted(models.items(), key=lambda item: -item[1][first].share.right))

    def sentences(self) -> list[str]:
        """Returns who wins, and whether a checkpoint would do without any merge, in plain words.

        Samples that are too few to show any difference have no winner.
        """
        mine, best = self.tailored, self.best
        count = number(self.samples, "sample")
        others = [row for row in self.rows if row.pair is not None]
        fewest = least_samples(len(others))
        if self.samples < fewest:
            return [f"No verdict: {count} cannot tell any of these models apart, and at least {fewest} are needed."]
        beaten = sum(row.verdict == "clearly worse" for row in others)
        if best is mine:
            told = (
                f"clearly better than {beaten} of the {len(others)} others"
                if beaten
                else "though not clearly better than any other"
            )
            lines = [f"The tailored model is the best here: {_percent(mine)}, {told}."]
        elif best.verdict == "clearly better":
            how = f"{_against(best, mine)}{self._made(best)}"
            lines = [f"{self._name(best)} is clearly better than the tailored model: {how}."]
        else:
            lines = [
                f"{self._name(best)} has the most right answers ({_against(best, mine)}), but {count} cannot tell it "
                f"from the tailored model{self._would(best)}."
            ]
            if beaten:
                lines.append(f"The tailored model is clearly better than {beaten} of the {len(others)} others.")
        plain = next((row for row in others if row.candidate.checkpoint is not None), None)
        if plain is None or plain.verdict == "clearly worse":
            return lines
        if plain.verdict == "clearly better":
            more = "So" if plain is best else f"{self._name(plain)} alone is, too: {_against(plain, mine)};"
            return [*lines, f"{more} this site needs no tailored merge."]
        if plain is best:
            return [*lines, "It needs no merge."]
        whom = "it" if best is mine else "the tailored model"
        return [
            *lines,
            f"{self._name(plain)} alone cannot be told apart from {whom} on these {count} ({_against(plain, mine)})"
            f"{self._would(plain)}; it needs no merge.",
        ]

    def _name(self, row: Row) -> str:
        suffix = "" if self.prior is None else f" with{'' if row.prior else 'out'} the prior"
        return f"`{row.candidate.title}`{suffix}"

    def _made(self, row: Row) -> str:
        """Returns the command that makes a merge with its head, as the end of a sentence."""
        candidate = row.candidate
        if candidate.method is None:
            return ""
        scale = self.scales.get(candidate.title, 1) if candidate.scale is None else candidate.scale
        words = ["tmx", "tailor", self.run, "--preference", self.preference]
        words += [] if candidate.method == self.usual else ["--method", candidate.method]
        words += ["--scale", scale if isinstance(scale, str) else f"{scale:g}"]
        words += [] if row.prior else ["--prior", "none"]
        return f"; `{shlex.join([*words, '-o', 'OUT'])}` makes it"

    def _would(self, row: Row) -> str:
        """Returns how many samples would tell the difference, as the end of a sentence."""
        comparisons = len(self.rows) - 1
        needed = None if row.pair is None else row.pair.needed(ALPHA / comparisons)
        if needed is None:
            return ""
        most = max(needed, least_samples(comparisons))
        return f"; about {most:,} would tell, if the difference is real"

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {
            "version": VERSION,
            "run": self.run,
            "preference": self.preference,
            "model": self.model,
            "data": self.data,
            "head": self.head,
            "samples": self.samples,
            "unreadable": self.unreadable,
            "unknown_labels": self.unknown_labels,
            "prior": None if self.prior is None else asdict(self.prior),
            "level": self.level,
            "tailored": self.rows.index(self.tailored),
            "rows": [
                {**row.to_dict(self.level), "scale_used": self.scales.get(row.candidate.title)} for row in self.rows
            ],
            "definitions": {
                "difference": "accuracy less that of the tailored model, on the same samples",
                "p_value": "exact two-sided sign test (McNemar) on samples that one of the two alone gets right, "
                "corrected by Holm's method for all rows",
                "verdict": f"against the tailored model: clear if p_value <= {ALPHA:g}",
            },
            "summary": self.sentences(),
        }


def least_samples(comparisons: int) -> int:
    """Returns how many samples a sign test needs before any difference can be clear among so many comparisons.

    >>> least_samples(1), least_samples(20)
    (6, 10)
    """
    return 1 + math.ceil(math.log2(max(1, comparisons) / ALPHA))


def compared_rows(
    right: dict[tuple[Candidate, bool], NDArray[np.bool_]], tailored: tuple[Candidate, bool]
) -> tuple[Row, ...]:
    """Compares every model with the tailored one; best first, of equal ones the tailored, then as they were given."""
    mine = right[tailored]
    others = {key: paired(answers, mine) for key, answers in right.items() if key != tailored}
    corrected = dict(zip(others, holm([pair.p_value for pair in others.values()]), strict=True))
    rows = []
    for key, answers in right.items():
        share = Share(int(answers.sum()), len(answers))
        if key == tailored:
            rows.append(Row(*key, share, None, None, None))
        else:
            p_value = corrected[key]
            rows.append(Row(*key, share, others[key], p_value, others[key].verdict(p_value)))
    return tuple(sorted(rows, key=lambda row: (-row.share.right, row.pair is not None)))


def _percent(row: Row) -> str:
    return f"{100 * row.share.value:.1f}%"


def _against(row: Row, other: Row) -> str:
    return f"{_percent(row)} against {_percent(other)}"
