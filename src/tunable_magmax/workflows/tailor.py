"""What `tmx tailor` does: makes the model that a site needs from what is known of it, with the evidence for it."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.engines.additions import AddedFiles, Additions
from tunable_magmax.engines.inputs import named_heads
from tunable_magmax.engines.log import finished_report
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.candidates import Candidate, merge_by
from tunable_magmax.workflows.choice import LIKELIEST, TITLES, UNMERGED, Choice, Refit, choose, rivals
from tunable_magmax.workflows.merge import merge_recipe
from tunable_magmax.workflows.overshoot import (
    Agreement,
    can_embed,
    check_agreement,
    count_calls,
    embedded_by,
    missed_warning,
    why_not,
)
from tunable_magmax.workflows.own import takes_prior
from tunable_magmax.workflows.prefer import Estimation, Preferred, class_tables, prefer_for
from tunable_magmax.workflows.scale import BASE, LEAST_PAIRS, ScaleChoice, choose_scale, open_pairs, with_scale
from tunable_magmax.workflows.site_model import (
    HEAD,
    PREFERENCE,
    RECORD,
    VERSION,
    Tailored,
    Unfinished,
    card_section,
    fingerprint,
    prior_record,
    read_finished,
    record_bytes,
    without_paths,
)
from tunable_magmax.workflows.tailoring import (
    Tailoring,
    check_adapters,
    check_place,
    check_sources,
    default_method,
    default_scale,
    default_words,
    options_of,
    prior_warnings,
    read_scale,
    require_head,
    why_default,
    why_not_tsv,
    with_site_prior,
)
from tunable_magmax.workflows.target import TargetReading, TargetSamples, TargetSources

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.models.head import Head

FEW = 20
"""Samples below which weights say little without their intervals."""
AS_TRIED = "as it was tried"


@dataclass(frozen=True)
class MergeChoice:
    """The merge that is made: its method, weights and scale, and why."""

    method: str
    weights: tuple[float, ...] | None
    scale: float | str
    why: str
    scale_from: str


def tailor(
    run: Run | str | os.PathLike[str],
    sources: TargetSources,
    out: str | os.PathLike[str],
    tailoring: Tailoring = Tailoring(),  # noqa: B008  (frozen)
    reading: TargetReading = TargetReading(),  # noqa: B008
    *,
    preference: Preference | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Tailored:
    """Makes the model that a site needs, from what is known of it, as a directory that is all the site needs.

    `preference`: one that was found before; then `sources` may only hold pairs, to choose by. Called again after a
    kill, it continues; the output appears whole or not at all.

    >>> tailored = tailor("run", TargetSources(inputs=Path("site/images")), "site-model")  # doctest: +SKIP
    >>> tailored.record["merge"]["method"]  # doctest: +SKIP
    'tunable_magmax'
    """
    run, place = run if isinstance(run, Run) else Run.open(os.fspath(run)), Path(out)
    run = run.with_heads(named_heads(tailoring.heads, run.names, run.tasks))
    check_sources(sources, preference)
    known_by = fingerprint(run, sources, reading, options_of(tailoring, reading, preference))
    overwrite = bool(tailoring.output.get("overwrite", False))
    if not overwrite and finished_report(place, known_by) is not None:
        return read_finished(place, run.labels)
    check_place(place, overwrite)
    check_adapters(run, sources, tailoring)
    target = TargetSamples(run, sources, reading, tailoring.estimation.seed, progress)
    work = _Work(target, require_head(target), tailoring, preference)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work.prefer()
        work.choose()
        notes = work.merge(place, Additions(work.files, known_by), lambda: _texts(caught), notify)
    texts = tuple(dict.fromkeys([*work.texts, *work.report.warnings]))
    shown = {phase: round(seconds, 3) for phase, seconds in work.seconds.items()}
    return Tailored(place, work.record, work.preference, run.labels, work.report, texts, notes, shown)


class _Work:
    """The steps of one tailoring, and what each of them found.

    `texts`: all warnings, with paths as they were given; in the record they are names.
    """

    def __init__(self, target: TargetSamples, head: Head, tailoring: Tailoring, given: Preference | None) -> None:
        self.target, self.head, self.tailoring, self.given = target, head, tailoring, given
        self.seconds: dict[str, float] = {}
        self.warnings: list[str] = []
        self.texts: list[str] = []
        self.choice: Choice | None = None
        self.scale: ScaleChoice | None = None
        self.agreement: Agreement | None = None
        self.record: dict[str, Any] = {}
        self._texts: Callable[[], list[str]] = list

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began, inside = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            # A phase inside another one counts for itself only.
            nested = sum(self.seconds.values()) - inside
            spent = time.perf_counter() - began - nested
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    # -- the preference ----------------------------------------------------------------------------------------------

    def prefer(self) -> None:
        """Finds the preference, and the head with its prior."""
        from tunable_magmax.preference.calibration import site_head

        target, estimation = self.target, self.tailoring.estimation
        if self.given is None and target.can_probe and estimation.method in ("auto", "probe"):
            with self._phase("embedding"):
                target.base_features  # noqa: B018  (it is kept, for the estimate and for the check)
        with self._phase("estimating"):
            if self.given is None:
                found = _prefer(target, estimation)
                self.warnings += found.warnings
                self.preference = found.preference
            else:
                self.preference = with_site_prior(self.given, target.run, estimation.prior)
            if (
                self.head.own
                and self.preference.prior is not None
                and not takes_prior(target.run.base, target.run.tasks, target.run.heads)
            ):
                self.warnings.append("the tasks' classifiers have no bias, to which a site prior could be added")
                self.preference = replace(self.preference, prior=None)
            plain, self.head = self.head, site_head(self.head, self.preference, target.run.profiles)
            self.logit_factor = round(self.head.logit_scale / plain.logit_scale, 6)
        samples = self.preference.provenance.get("samples")
        if isinstance(samples, int) and samples < FEW:
            few = "1 sample is little" if samples == 1 else f"{samples} samples are few"
            self.warnings.append(f"{few}: the weights are rough; look at their intervals")
        self.warnings += prior_warnings(target.run, self.preference, self.head.classes, estimation.prior == "none")

    # -- the merge that suits it -------------------------------------------------------------------------------------

    def choose(self) -> None:
        """Chooses model and scale: by pairs where there are any, else by rule."""
        tailoring, weights = self.tailoring, self.preference.weights
        auto = tailoring.method == "auto"
        method = default_method(weights) if auto else tailoring.method
        tasks = why_default(method, weights)
        no_tsv = why_not_tsv(self.target.run, tailoring.output) if auto else None
        if auto and method == "tsv" and no_tsv is not None:
            method, tasks = "tunable_magmax", f"{tasks}, but {no_tsv}"
        self.merged = self._usual(method, tasks if auto else "asked for")
        by_pairs = self.target.sources.pairs is not None
        if not by_pairs or not tailoring.scores_pairs:
            return
        with self._phase("choosing"), open_pairs(self.target, self.head, tailoring.seed) as candidates:
            pairs, progress = len(candidates.truth), self.target.progress
            if pairs < LEAST_PAIRS:
                few = "1 pair is" if pairs == 1 else f"{pairs} pairs are"
                self.warnings.append(f"{few} too few to choose a model or a scale by; {LEAST_PAIRS} are needed")
                return
            if auto and tailoring.choose == "auto":
                models = rivals(self._candidate(), self._scale)
                models = [model for model in models if no_tsv is None or model.method != "tsv"]
                self.choice = choose(candidates, models, self._refit(), progress)
                self.merged = self._chosen(self.choice.chosen.name)
            if self._unmerged or self.merged.scale_from == AS_TRIED:
                return
            asked = self._asked_scale
            free, fixed = tailoring.choose == "auto" and asked is None, asked if isinstance(asked, float) else None
            usual = asked if isinstance(asked, str) else default_scale(self.merged.method, self._informed)
            merge = replace(self._candidate(), scale=usual)
            self.scale = choose_scale(candidates, merge, self.preference, fixed=fixed, free=free, progress=progress)
        self._use_scale()

    @property
    def _informed(self) -> bool:
        """Whether the head gets a site prior."""
        return self.preference.prior is not None

    @property
    def _asked_scale(self) -> float | str | None:
        """The scale that was asked for, or the preference's; None if neither says one."""
        asked = self.preference.scale if self.tailoring.scale is None else self.tailoring.scale
        return asked if asked is None or asked == "matched" else read_scale(asked)

    def _scale(self, method: str) -> float | str:
        """The scale of a merge by a method, before pairs choose one."""
        return default_scale(method, self._informed) if self._asked_scale is None else self._asked_scale

    def _candidate(self) -> Candidate:
        """The merge as a candidate."""
        return merge_by(self.merged.method, self.merged.scale)

    @property
    def _unmerged(self) -> bool:
        return self.choice is not None and self.choice.chosen.name in UNMERGED

    def _use_scale(self) -> None:
        found = self.scale
        assert found is not None
        if found.scale is not None:
            self.merged = replace(self.merged, scale=found.scale, scale_from="chosen by pairs")
        free = self.tailoring.choose == "auto" and self.tailoring.scale is None
        # The scale of a preference is that of a Tunable MAGMAX merge; another method's is in the record only.
        if free and self.preference.scale is None and self.merged.method == "tunable_magmax":
            self.preference = with_scale(self.preference, found)
        if found.better is not None and self.tailoring.check == "auto":
            self.warnings.append(better_warning(found, *found.better, self.tailoring))

    def _usual(self, method: str, why: str) -> MergeChoice:
        if self._asked_scale is None:
            whence = default_words(method, self._informed)
        else:
            whence = "the preference's" if self.tailoring.scale is None else "given"
        weights = None if METHODS[method].weights == "refused" else self.preference.weights
        return MergeChoice(method, weights, self._scale(method), why, whence)

    def _chosen(self, name: str) -> MergeChoice:
        """Returns the merge that gives a model of the choice; a checkpoint is a merge of one task at scale 1 or 0."""
        why, weights = f"chosen by pairs: {TITLES.get(name, name)}", self.preference.weights
        if name == LIKELIEST:
            best = weights.index(max(weights))
            alone = tuple(float(t == best) for t in range(len(weights)))
            return MergeChoice("tunable_magmax", alone, 1.0, why, f"{self.target.run.labels[best]} as it is")
        if name in UNMERGED:
            scale = 1.0 if name == "last" else 0.0
            return MergeChoice("last_task", None, scale, why, "the checkpoint as it is")
        if name == "average":
            return MergeChoice("average", weights, 1.0, why, AS_TRIED)
        return self._usual({"tunable": "tunable_magmax"}.get(name, name), why)

    def _refit(self) -> Refit:
        """Returns what estimates a preference from the labels of some folds, as the whole one was estimated.

        One that was given is not estimated: it stays as it is, as it does in the tailored model.
        """
        if self.given is not None:
            return lambda labels: self.preference
        estimation, whole = self.tailoring.estimation, self.preference
        tables, sources = class_tables(self.target.run), self.target.sources
        opinions = sources.weights is not None or sources.alpha is not None or sources.equal
        by_labels = not opinions and estimation.method in ("auto", "label") and tables is not None
        eps = estimation.prior if isinstance(estimation.prior, float) else None

        def refit(labels: Sequence[str]) -> Preference:
            found = whole
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if by_labels:
                    assert tables is not None
                    found = Preference.from_labels(tables, labels, similarity=estimation.similarity, on_zero="equal")
                if whole.prior is not None and tables is not None:
                    found = found.with_prior(tables, labels, eps=eps)
            return found.tempered(whole.tempering or 0.0) if by_labels else found

        return refit

    # -- the files ---------------------------------------------------------------------------------------------------

    def merge(
        self,
        out: Path,
        additions: Additions,
        texts: Callable[[], list[str]],
        notify: Callable[[str], None] | None,
    ) -> tuple[str, ...]:
        """Merges into the output; returns notes that name paths. `texts` gives the warnings that came up meanwhile."""
        run, chosen, self._texts = self.target.run, self.merged, texts
        options: dict[str, Any] = {"method": chosen.method, "scale": chosen.scale}
        if "seed" in METHODS[chosen.method].reads:
            options["seed"] = self.tailoring.seed
        if chosen.weights is not None:
            options["weights"] = list(chosen.weights)
        if run.heads is not None:
            options["heads"] = run.heads
        if self.head.own and self.head.bias is not None:
            options["class_bias"] = dict(zip(self.head.classes, map(float, self.head.bias), strict=True))
        recipe = Recipe(run.base, run.tasks, options, run.names)
        unfinished, told = Unfinished(out, additions.fingerprint, options), list[str]()
        notify = notify or (lambda note: None)

        def progress(phase: str, done: int, total: int) -> None:
            unfinished.leave()
            if self.target.progress is not None:
                self.target.progress(phase, done, total)

        settings = {**self.tailoring.output, "additions": additions, "progress": progress}
        if unfinished.is_stale() and not settings.get("fresh"):
            settings["fresh"] = True
            told.append("the estimate differs a little from that of the interrupted call, so the merge begins anew")
            notify(told[0])
        with self._phase("merging"):
            result = merge_recipe(recipe, out, notify, **settings)
        self.report = result.report
        return (*told, *result.notes, *result.lacking)

    def files(self, folder: Path, report: MergeReport) -> AddedFiles:
        """Makes the files beside the weights; the merged model is checked first, while it is still out of sight."""
        from tunable_magmax.models.head import head_bytes

        unasked = self.tailoring.check == "none" or self.given is not None or self._unmerged
        if not unasked and can_embed(self.target):
            with self._phase("checking"):
                self._check(folder)
        self.record = self._record(report)
        content = {
            **({} if self.head.own else {HEAD: head_bytes(self.head)}),
            PREFERENCE: self.preference.to_json().encode(),
            RECORD: record_bytes(self.record),
        }
        return AddedFiles(content, card_section(self.record, self.preference, self.target.run.labels))

    def _check(self, folder: Path) -> None:
        """Warns if the merged model overshoots, or hardly knows a task that has a weight."""
        target, head, preference = self.target, self.head, self.preference
        features = embedded_by(target, head, folder)
        if why_not(target) is None:
            self.agreement = check_agreement(target, head, preference, features)
            self.warnings += filter(None, [self.agreement.warning])
        self.warnings += filter(None, [missed_warning(count_calls(target, head, preference, features))])

    def _record(self, report: MergeReport) -> dict[str, Any]:
        preference, sources, merged = self.preference, self.target.sources, self.merged
        named = sources.named()
        paths = [*(value for value in named.values() if isinstance(value, Path)), *self._places()]
        self.texts = list(dict.fromkeys([*self.warnings, *self._texts()]))
        scale = None if self.scale is None else {**self.scale.to_dict(), "sentence": self.scale.sentence}
        choice, check = self.choice, self.agreement
        return {
            "version": VERSION,
            "sources": {key: getattr(value, "name", value) for key, value in named.items()},
            "preference": {
                "method": preference.method,
                "samples": preference.provenance.get("samples"),
                "expected_error": preference.expected_error,
                "weights": dict(zip(self.target.run.labels, preference.weights, strict=True)),
                "tempering": preference.tempering,
            },
            "prior": prior_record(preference.prior, self.head.classes, self.logit_factor),
            **({"own_head": True} if self.head.own else {}),
            "merge": {
                "method": merged.method,
                "why": merged.why,
                "scale": report.scale,
                "scale_from": merged.scale_from,
                "seed": report.seed,
            },
            "choice": choice and {**choice.to_dict(), "sentence": choice.sentence, "simpler": choice.simpler},
            "scale_by_pairs": scale,
            "check": check and {**check.to_dict(), "sentence": check.sentence},
            "warnings": [without_paths(text, paths) for text in self.texts],
        }

    def _places(self) -> list[Path]:
        """Returns the run, and what is outside of it: checkpoints, the classifier's head and checkpoint."""
        run, reading = self.target.run, self.target.reading
        named = [run.base, *run.tasks, run.head, run.classifier_checkpoint]
        named += [reading.classifier, reading.classifier_checkpoint]
        return [run.path, *(path for path in named if path is not None and not path.is_relative_to(run.path))]


def better_warning(found: ScaleChoice, name: str, right: int, tailoring: Tailoring) -> str:
    """Returns a warning that the base, or another scale, is clearly better than the merge, and what to try."""
    own, other = (count / found.samples for count in (found.right[found.scales.index(found.used)], right))
    shares = f"{own:.0%} of {found.samples} pairs are right at the scale {found.used:g}, and {other:.0%} with {name}"
    remedy = f"try --scale {found.best:g}" if found.best != found.used else "try a smaller --scale"
    if name != BASE:
        return f"the merged step has the wrong length: {shares}; {remedy}"
    if tailoring.method != "auto":
        remedy = f"leave out --method, so that pairs choose the model, or {remedy}"
    elif tailoring.choose == "none":
        remedy = f"leave out --choose none, so that pairs choose the model, or {remedy}"
    return f"the base is better than the merged model: {shares}; {remedy}"


def _prefer(target: TargetSamples, estimation: Estimation) -> Preferred:
    """Estimates a preference; an error advises options that tailoring has."""
    try:
        return prefer_for(target, estimation)
    except InputError as error:
        text = re.sub(r"(?:on_zero='equal' \()?--on-zero equal\)?", "--equal instead", str(error))
        if text == str(error):
            raise
        raise InputError(text) from None


def _texts(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if warning.category is UserWarning]
