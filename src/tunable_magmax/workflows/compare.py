"""`compare`: which model of a run is best for a site, measured on labelled samples of it."""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import LEVEL, Share
from tunable_magmax.evaluation.comparison import ALPHA, Paired, Verdict, holm, paired
from tunable_magmax.files import Progress
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.candidates import (
    Candidate,
    Candidates,
    refuse_adapters,
    right_answers,
    tunable,
    usual_candidates,
)
from tunable_magmax.workflows.choice import LIKELIEST
from tunable_magmax.workflows.merge import require_tasks
from tunable_magmax.workflows.scoring import (
    AppliedPrior,
    Data,
    Prior,
    Reading,
    find_head,
    open_evaluator,
    open_head,
    open_labelled,
)
from tunable_magmax.workflows.site_model import PREFERENCE, RECORD
from tunable_magmax.workflows.tailoring import (
    default_method,
    default_scale,
    default_words,
    why_not_tsv,
    with_site_prior,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tunable_magmax.models.head import Head

SCALES: tuple[float | str, ...] = (0.5, 1.0, "matched")
VERSION = 1


@dataclass(frozen=True)
class Rivals:
    """What is compared beside the tailored model: Tunable MAGMAX at `scales`. `prior`: the site prior, or "none"."""

    scales: Sequence[float | str] = SCALES
    prior: Literal["auto", "none"] = "auto"
    seed: int = 0
    """Of the merges' lottery; a tailored model's directory has its own."""


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


@dataclass(frozen=True)
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
        count = f"{self.samples:,} sample{'' if self.samples == 1 else 's'}"
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


@dataclass(frozen=True)
class ComparisonPlan:
    """What a comparison would do, known without the values of any checkpoint."""

    run: str
    data: str
    head: str
    samples: int
    candidates: tuple[Candidate, ...]
    tailored: Candidate
    prior: AppliedPrior | None
    model: str | None = None
    """The directory of the tailored model, if one was given."""

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        record = asdict(self)
        models = [candidate.title for candidate in self.candidates]
        return {**record, "candidates": models, "tailored": self.tailored.title}


def compare(
    run: Run | str | Path,
    preference: Preference | str | Path,
    data: Data = None,
    *,
    head: str | Path | None = None,
    rivals: Rivals = Rivals(),  # noqa: B008  (frozen)
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measures base, every task's checkpoint, other merges and the tailored one on the same labelled samples.

    Each is measured with and without the site prior of the preference, and compared with the tailored model by an
    exact sign test, corrected for the number of comparisons. `preference` may be the directory of a tailored model:
    then this is the model to compare with. `data` and `head` are as for `evaluate`.

    >>> compare("run", "site.json", "site/test").sentences()  # doctest: +SKIP
    ['The tailored model is the best here: 71.2 %, clearly better than 9 of the 15 others.']
    """
    reading = reading or Reading()
    opened = _open(run, preference, head, rivals)
    evaluator, origin = open_evaluator(opened.run.base, data, opened.head, opened.run, reading, progress)
    samples, unreadable = len(evaluator), evaluator.unreadable
    biases: dict[bool, Any] = {False: None} if opened.prior is None else {True: opened.head.bias, False: None}
    fewest = least_samples(len(biases) * len(opened.candidates) - 1)
    if samples < fewest:
        warnings.warn(
            f"{samples} sample{'' if samples == 1 else 's'} cannot show any difference between so many models, however "
            f"large it is: give at least {fewest}, better some hundred",
            stacklevel=2,
        )
    right: dict[tuple[Candidate, bool], NDArray[np.bool_]] = {}
    with Candidates(opened.run, evaluator, seed=opened.seed, progress=progress) as candidates:
        for done, candidate in enumerate(opened.candidates, 1):
            logits = candidates.logits(candidate, opened.preference.weights)
            for prior, bias in biases.items():
                right[candidate, prior] = right_answers(logits, evaluator.truth, bias)
            if progress is not None:
                progress("comparing", done, len(opened.candidates))
        scales = {candidate.title: float(report.scale) for candidate, report in candidates.reports.items()}
    rows = _rows(right, (opened.tailored, opened.informed))
    return Comparison(
        str(opened.run.path),
        origin,
        str(opened.head_file),
        samples,
        unreadable,
        rows,
        opened.prior,
        scales,
        reading.level,
        opened.file,
        opened.model,
        opened.usual,
    )


def plan_comparison(
    run: Run | str | Path,
    preference: Preference | str | Path,
    data: Data = None,
    *,
    head: str | Path | None = None,
    rivals: Rivals = Rivals(),  # noqa: B008  (frozen)
    reading: Reading | None = None,
) -> ComparisonPlan:
    """Returns what `compare` would do; of checkpoints it reads the headers only."""
    from tunable_magmax.checkpoints.source import open_checkpoint

    opened = _open(run, preference, head, rivals)
    labelled, origin = open_labelled(data, opened.head, opened.run, reading or Reading())
    for path in (opened.run.base, *opened.run.tasks):
        with open_checkpoint(path):
            pass
    return ComparisonPlan(
        str(opened.run.path),
        origin,
        str(opened.head_file),
        len(labelled),
        opened.candidates,
        opened.tailored,
        opened.prior,
        opened.model,
    )


def least_samples(comparisons: int, alpha: float = ALPHA) -> int:
    """Returns how many samples a sign test needs before any difference can be clear among so many comparisons.

    >>> least_samples(1), least_samples(20)
    (6, 10)
    """
    return 1 + math.ceil(math.log2(max(1, comparisons) / alpha))


@dataclass(frozen=True)
class _Opened:
    run: Run
    preference: Preference
    head_file: Path
    head: Head
    """With the prior as its bias, if there is one."""
    prior: AppliedPrior | None
    candidates: tuple[Candidate, ...]
    tailored: Candidate
    informed: bool
    """Whether the tailored model has the prior."""
    seed: int
    file: str
    model: str | None
    usual: str


def _open(
    run: Run | str | Path, preference: Preference | str | Path, head: str | Path | None, rivals: Rivals
) -> _Opened:
    trained = run if isinstance(run, Run) else Run.open(run)
    model, record = _tailored_model(preference)
    if model is not None:
        preference = model / PREFERENCE
    file = "the preference" if isinstance(preference, Preference) else str(preference)
    chosen = preference if isinstance(preference, Preference) else Preference.load(preference)
    require_tasks(chosen, trained.names, file)
    if len(chosen.weights) != len(trained.tasks):
        raise InputError(
            f"{file} has {len(chosen.weights)} weights, and {trained.path} has {len(trained.tasks)} tasks: make a "
            f"preference for this run with `tmx prefer {trained.path}`"
        )
    refuse_adapters(trained)
    chosen = with_site_prior(chosen, trained, rivals.prior)
    head_file, _ = find_head(trained.base, head, trained)
    asked: Prior = "none" if rivals.prior == "none" else chosen
    opened, prior = open_head(head_file, asked, trained)
    usual = tailored_candidate(chosen, prior is not None, why_not_tsv(trained, {}) is None)
    tailored, informed, seed = usual, prior is not None, rivals.seed
    if record is not None:
        tailored = recorded_candidate(record, chosen, trained)
        informed = informed and record["prior"] is not None
        seed = seed if record["merge"]["seed"] is None else record["merge"]["seed"]
    scales = [*rivals.scales, *([tailored.scale] if tailored.name == "tunable" else [])]
    candidates = usual_candidates(trained, [scale for scale in scales if scale is not None])
    if tailored not in candidates:
        candidates = (*candidates, tailored)
    return _Opened(
        trained,
        chosen,
        head_file,
        opened,
        prior,
        candidates,
        tailored,
        informed,
        seed,
        "FILE" if isinstance(preference, Preference) else file,
        None if record is None else str(model),
        usual.method or "tunable_magmax",
    )


def _tailored_model(preference: Preference | str | Path) -> tuple[Path | None, dict[str, Any] | None]:
    """Returns the directory that was given for a preference, and what `tailor` recorded there."""
    if isinstance(preference, Preference) or not Path(preference).is_dir():
        return None, None
    folder = Path(preference)
    if not (folder / PREFERENCE).is_file():
        raise InputError(
            f"{folder} is a directory without {PREFERENCE}: give the file that `tmx prefer` writes, or the directory "
            "of a model that `tmx tailor` made"
        )
    if not (folder / RECORD).is_file():
        return folder, None
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        record["merge"]["method"], record["merge"]["scale"], record["merge"]["seed"], record["prior"], record["choice"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / RECORD} is no record of `tmx tailor` ({error}); make the model again") from None
    return folder, record


def recorded_candidate(record: Mapping[str, Any], preference: Preference, run: Run) -> Candidate:
    """Returns the model that a record of `tailor` says was written: a checkpoint, or a merge at its scale.

    A scale that was found to match is the candidate's `matched`, so that equal models are one.
    """
    merge = record["merge"]
    method, scale = str(merge["method"]), float(merge["scale"])
    if method not in METHODS:
        raise InputError(f"the tailored model was merged by {method!r}, a method that is not known here")
    checkpoints = usual_candidates(run)[: len(run.tasks) + 1]
    if record["choice"] is not None and record["choice"]["chosen"] == LIKELIEST:
        return checkpoints[1 + preference.weights.index(max(preference.weights))]
    if scale == 0:
        return checkpoints[0]
    if method == "last_task" and scale == 1:
        return checkpoints[-1]
    usual = default_scale(method, record["prior"] is not None)
    by_default = merge["scale_from"] == default_words(method, record["prior"] is not None)
    if by_default and usual == "matched":
        return _merge_by(method, "matched")
    return _merge_by(method, None if method == "tsv" and scale == METHODS[method].default_scale else scale)


def _merge_by(method: str, scale: float | str | None) -> Candidate:
    name = {"tunable_magmax": "tunable"}.get(method, method)
    usual = {"tunable": scale, "tsv": scale, "average": 1.0, "magmax": "matched"}.get(name)
    if scale != usual:  # two models of one method need two names
        name += f", {scale}" if isinstance(scale, str) else f", scale {scale:g}"
    return Candidate(name, method, None, scale, weighted=METHODS[method].weights != "refused")


def tailored_candidate(preference: Preference, prior: bool, tsv: bool = True) -> Candidate:
    """Returns the merge that `tailor` makes of a preference by default; `prior`: whether its head has a site prior.

    `tsv`: whether that can be merged in the memory that `tailor` uses by default.

    >>> [tailored_candidate(Preference(weights), prior=True).title for weights in ((0.9, 0.1), (1,) * 9)]
    ['tunable, scale 1', 'tsv']
    """
    method = default_method(preference.weights) if tsv else "tunable_magmax"
    if method == "tsv":
        return Candidate("tsv", "tsv", None, preference.scale, weighted=True)
    return tunable(preference.scale or default_scale(method, prior))


def _rows(right: dict[tuple[Candidate, bool], NDArray[np.bool_]], tailored: tuple[Candidate, bool]) -> tuple[Row, ...]:
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
    return f"{100 * row.share.value:.1f} %"


def _against(row: Row, other: Row) -> str:
    return f"{_percent(row)} against {_percent(other)}"
