"""What `tmx compare` does: says which model of a run is best for a site, by labelled samples of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunable_magmax.checkpoints.companions import REPORT
from tunable_magmax.config import LENIENT, Seed, check
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.run_models import BuiltinModels, refuse_adapters
from tunable_magmax.files import Progress, load_json
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.showing import number
from tunable_magmax.workflows.candidates import (
    Candidate,
    Candidates,
    merge_by,
    right_answers,
    tunable,
    usual_candidates,
)
from tunable_magmax.workflows.choice import LIKELIEST
from tunable_magmax.workflows.merge import require_tasks
from tunable_magmax.workflows.scoring import (
    AppliedPrior,
    BuiltinHead,
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
from tunable_magmax.workflows.verdicts import Comparison, compared_rows, least_samples

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tunable_magmax.models.head import Head

SCALES: tuple[float | str, ...] = (0.5, 1.0, "matched")


@dataclass(frozen=True)
class Rivals:
    """What is compared beside the tailored model: Tunable MAGMAX at `scales`. `prior`: the site prior, or "none"."""

    scales: Sequence[float | str] = SCALES
    prior: Literal["auto", "none"] = "auto"
    seed: int = 0
    """Of the merges' lottery; a tailored model's directory has its own."""


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
    ['The tailored model is the best here: 71.2%, clearly better than 9 of the 15 others.']
    """
    reading = reading or Reading()
    opened = _open(run, preference, head, rivals)
    own = BuiltinModels.read(opened.run.base, opened.run.tasks, opened.run.heads) if opened.head.builtin else None
    evaluator, origin = open_evaluator(opened.run.base, data, opened.head, opened.run, reading, progress, own)
    samples = len(evaluator)
    biases: dict[bool, Any] = {False: None} if opened.prior is None else {True: opened.head.bias, False: None}
    fewest = least_samples(len(biases) * len(opened.candidates) - 1)
    if samples < fewest:
        warnings.warn(
            f"{number(samples, 'sample')} cannot show any difference between so many models, however "
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
    rows = compared_rows(right, (opened.tailored, opened.informed))
    return Comparison(
        str(opened.run.path),
        origin,
        str(opened.head_file),
        samples,
        evaluator.unreadable,
        rows,
        opened.prior,
        scales,
        reading.level,
        opened.file,
        opened.model,
        opened.usual,
        evaluator.unknown_labels,
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


@dataclass(frozen=True)
class _Opened:
    run: Run
    preference: Preference
    head_file: Path | BuiltinHead
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
    file = "the preference" if isinstance(preference, Preference) else str(model / PREFERENCE if model else preference)
    chosen = preference if isinstance(preference, Preference) else Preference.load(preference)
    require_tasks(chosen, trained.names, file)
    if len(chosen.weights) != len(trained.tasks):
        raise InputError(
            f"{file} has {len(chosen.weights)} weights, and {trained.path} has {len(trained.tasks)} tasks: make a "
            f"preference for this run with `tmx prefer {trained.path}`"
        )
    refuse_adapters(trained)
    chosen = with_site_prior(chosen, trained, rivals.prior)
    if model is not None:
        trained = trained.with_heads(_recorded_heads(model))
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


@dataclass(frozen=True)
class _RecordedMerge:
    __pydantic_config__ = LENIENT
    method: str
    scale: float
    seed: Seed | None
    scale_from: str


@dataclass(frozen=True)
class _RecordedChoice:
    __pydantic_config__ = LENIENT
    chosen: str


@dataclass(frozen=True)
class _Record:
    """What of tmx-tailor.json is needed here."""

    __pydantic_config__ = LENIENT
    merge: _RecordedMerge
    prior: dict[str, Any] | None
    choice: _RecordedChoice | None


def _tailored_model(preference: Preference | str | Path) -> tuple[Path | None, dict[str, Any] | None]:
    """Returns the directory that was given for a preference, and what `tailor` recorded there."""
    if isinstance(preference, Preference) or not Path(preference).is_dir():
        return None, None
    folder = Path(preference)
    if not (folder / RECORD).is_file():
        return folder, None
    try:
        record = load_json(folder / RECORD)
        check(_Record, record, "it")
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / RECORD} is no record of `tmx tailor` ({error}); make the model again") from None
    return folder, record


def _recorded_heads(model: Path) -> str | None:
    """Returns what became of the tasks' heads in a model, as its report says."""
    try:
        heads = load_json(model / REPORT)["options"].get("heads")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return heads if isinstance(heads, str) else None


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
        return _named_merge(method, "matched")
    return _named_merge(method, None if method == "tsv" and scale == METHODS[method].default_scale else scale)


def _named_merge(method: str, scale: float | str | None) -> Candidate:
    merge = merge_by(method, scale)
    usual = {"tunable_magmax": scale, "tsv": scale, "average": 1.0, "magmax": "matched"}.get(method)
    if scale == usual:
        return merge
    # Two models of one method need two names.
    return replace(merge, name=f"{merge.name}, {scale if isinstance(scale, str) else f'scale {scale:g}'}")


def tailored_candidate(preference: Preference, prior: bool, tsv: bool = True) -> Candidate:
    """Returns the merge that `tailor` makes of a preference by default; `prior`: whether its head has a site prior.

    `tsv`: whether that can be merged in the memory that `tailor` uses by default.

    >>> [tailored_candidate(Preference(weights), prior=True).title for weights in ((0.9, 0.1), (1,) * 9)]
    ['tunable, scale 1', 'tsv']
    """
    method = default_method(preference.weights) if tsv else "tunable_magmax"
    if method == "tsv":
        return merge_by("tsv", preference.scale)
    return tunable(preference.scale or default_scale(method, prior))
