"""What tailoring would do, from headers alone (`tmx tailor --dry-run`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.data.features import holds_features
from tunable_magmax.data.source import open_labels, open_samples
from tunable_magmax.engines.inputs import named_heads
from tunable_magmax.engines.log import finished_report
from tunable_magmax.errors import InputError
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.plan import MergePlan, plan_merge
from tunable_magmax.workflows.prefer import class_tables, opinions
from tunable_magmax.workflows.site_model import Unfinished, fingerprint
from tunable_magmax.workflows.tailoring import (
    MANY_TASKS,
    Tailoring,
    check_adapters,
    check_place,
    check_sources,
    default_method,
    default_scale,
    default_words,
    options_of,
    require_head,
    why_not_tsv,
)
from tunable_magmax.workflows.target import TargetReading, TargetSamples, TargetSources


@dataclass(frozen=True)
class TailorPlan:
    """What tailoring would do, from headers alone. `merge` is the plan of the merge; `problems` prevent it.

    `complete`: the model is there already, made from the same inputs with the same options.
    """

    preference: str
    samples: int | None
    weights: tuple[float, ...] | None
    method: str
    scale: str
    head: str | None
    classes: int | None
    merge: MergePlan
    complete: bool
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON."""
        return {**vars(self), "merge": self.merge.to_dict()}


def plan_tailor(
    run: Run,
    sources: TargetSources,
    out: Path | None,
    tailoring: Tailoring,
    reading: TargetReading,
    preference: Preference | None = None,
) -> TailorPlan:
    """Returns what `tailor` would do; no weights of a model are read, and nothing is written."""
    problems: list[str] = []

    def attempt(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except InputError as error:
            problems.append(str(error))
            return None

    run = run.with_heads(attempt(named_heads, tailoring.heads, run.names, run.tasks))
    target = TargetSamples(run, sources, reading, tailoring.estimation.seed)
    attempt(check_sources, sources, preference)
    attempt(check_adapters, run, sources, tailoring)
    kept = {key: value for key, value in tailoring.output.items() if key not in ("engine", "device", "workers")}
    complete = False
    if out is not None:
        known_by = fingerprint(run, sources, reading, options_of(tailoring, reading, preference))
        complete = not kept.get("overwrite", False) and finished_report(out, known_by) is not None
        kept["overwrite"] = kept.get("overwrite", False) or complete
        attempt(check_place, out, kept["overwrite"])
        # Unfinished work of the same tailoring is continued, or replaced; its weights are not known yet.
        kept["fresh"] = kept.get("fresh", False) or Unfinished(out, known_by).is_there()
    head = attempt(require_head, target, True)
    samples = attempt(_count_samples, target)
    how = attempt(_estimator, target, tailoring, preference) or "not known"
    opinion = preference or attempt(_opinion, sources, run)
    weights = None if opinion is None else opinion.weights
    no_tsv = attempt(why_not_tsv, run, tailoring.output) if tailoring.method == "auto" else None
    method, rule = _method_rule(tailoring, sources, weights, no_tsv)
    informed = _gets_prior(run, tailoring, preference)
    options = _merge_options(tailoring, preference, weights, "tunable_magmax" if method == "auto" else method, informed)
    merge = plan_merge(run.base, run.tasks, out, heads=run.heads, **options, **kept)
    problems += [problem for problem in merge.problems if problem not in problems]
    return TailorPlan(
        preference=how,
        samples=samples,
        weights=weights,
        method=rule,
        scale=_scale_rule(tailoring, sources, preference, method, informed),
        head=head and ("of the tasks themselves" if head.own else str(target.head_file)),
        classes=None if head is None else len(head.classes),
        merge=merge,
        complete=complete,
        problems=tuple(problems),
    )


def _count_samples(target: TargetSamples) -> int | None:
    """Counts the site's samples, and so finds out whether they can be opened."""
    sources, reading = target.sources, target.reading
    count = None
    if sources.labels is not None:
        count = len(open_labels(sources.labels, reading.split, reading.label_column))
    for path in (sources.inputs, sources.pairs):
        if path is not None and not (isinstance(path, Path) and holds_features(path)):
            count = len(open_samples(path, reading.split, reading.text_column, reading.label_column))
    return count


def _estimator(target: TargetSamples, tailoring: Tailoring, preference: Preference | None) -> str:
    """Returns in words how the weights would be found."""
    sources, method = target.sources, tailoring.estimation.method
    if preference is not None:
        return f"given, by {preference.method}"
    if sources.opinions:
        return f"given as {sources.opinions[0]}"
    if not sources.samples:
        raise InputError(
            "what is known of the site? Give --inputs, --labels or --pairs, --preference FILE, or --weights, --alpha "
            "or --equal if there are no samples of it"
        )
    if not (sources.named().keys() <= {"labels", "strengths"} and target.by_task):  # labels that name tasks need none
        target.run.require_profiles("an estimate from samples")
    if method != "auto":
        return method
    if sources.pairs is not None or sources.inputs is None:
        return "label"
    by_inputs = "probe" if target.can_probe else "shift" if target.can_predict else "ot"
    return by_inputs if sources.labels is None else f"{by_inputs} and labels"


def _opinion(sources: TargetSources, run: Run) -> Preference | None:
    return next(opinions(sources, run), None)


def _gets_prior(run: Run, tailoring: Tailoring, preference: Preference | None) -> bool:
    """Whether the head would get a site prior."""
    known = preference is not None and preference.prior is not None
    return tailoring.estimation.prior != "none" and (known or class_tables(run) is not None)


def _method_rule(
    tailoring: Tailoring, sources: TargetSources, weights: Sequence[float] | None, no_tsv: str | None
) -> tuple[str, str]:
    """Returns the method, "auto" if only the estimate will tell, and in words how it is found."""
    method = tailoring.method
    if method == "auto" and weights is not None:
        method = default_method(weights)
    many = f"tsv if many tasks matter (their weights amount to more than {MANY_TASKS:g} equal ones)"
    rule = f"tunable_magmax, or {many}" if method == "auto" else method
    if no_tsv is not None and method in ("auto", "tsv"):
        method, rule = "tunable_magmax", f"tunable_magmax ({no_tsv})"
    if sources.pairs is not None and tailoring.method == "auto" and tailoring.choose == "auto":
        rule = f"chosen by cross-validation on the pairs; {rule} if there are too few"
    return method, rule


def _merge_options(
    tailoring: Tailoring, preference: Preference | None, weights: Sequence[float] | None, method: str, prior: bool
) -> dict[str, Any]:
    own = None if preference is None else preference.scale
    scales = (tailoring.scale, own, default_scale(method, prior))
    options: dict[str, Any] = {"method": method, "scale": next(scale for scale in scales if scale is not None)}
    if "seed" in METHODS[method].reads:
        options["seed"] = tailoring.seed
    if weights is not None and METHODS[method].weights != "refused":
        options["weights"] = list(weights)
    return options


def _scale_rule(
    tailoring: Tailoring, sources: TargetSources, preference: Preference | None, method: str, prior: bool
) -> str:
    if tailoring.scale is not None:
        return f"{tailoring.scale}, as given"
    if preference is not None and preference.scale is not None:
        return f"{preference.scale:g}, the preference's"
    if method != "auto":
        scale = default_scale(method, prior)
        usual = f"{scale if isinstance(scale, str) else f'{scale:g}'}, {default_words(method, prior)}"
    else:
        usual = "1, the default with a site prior" if prior else "the method's default: matched, 1 for tsv"
    if sources.pairs is not None and tailoring.choose == "auto":
        return f"chosen by pairs if that is better in cross-validation, else {usual}"
    return usual
