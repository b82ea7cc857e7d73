"""How a model is tailored: the options, the rule for the method, and what is checked before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunable_magmax.checkpoints.writer import Output, is_one_file
from tunable_magmax.data.features import holds_features
from tunable_magmax.data.source import open_labels, open_samples
from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.plan import MergePlan, plan_merge
from tunable_magmax.workflows.prefer import Estimation, class_tables, opinions
from tunable_magmax.workflows.target import TargetReading, TargetSamples, TargetSources

if TYPE_CHECKING:
    from tunable_magmax.models.head import Head

# Above this effective number of tasks, tsv keeps the lead that Tunable MAGMAX loses; below, they are level, and Tunable
# MAGMAX is exact and several times as fast. Chosen on other seeds and environments than the tables' (docs/results.md).
MANY_TASKS = 3.2


def effective_tasks(weights: Sequence[float]) -> float:
    """Returns how many tasks of equal weight would be as mixed: 1 / sum of w^2.

    >>> effective_tasks([0.5, 0.5, 0.0]), effective_tasks([1.0, 0.0])
    (2.0, 1.0)
    """
    total = sum(weights)
    return 1 / sum((weight / total) ** 2 for weight in weights)


def default_method(weights: Sequence[float]) -> str:
    """Returns the method for weights if none is asked for: the one rule of `--method auto`.

    >>> default_method([0.5, 0.5]), default_method([1] * 10)
    ('tunable_magmax', 'tsv')
    """
    return "tsv" if effective_tasks(weights) > MANY_TASKS else "tunable_magmax"


def default_scale(method: str, prior: bool) -> float | str:
    """Returns the scale for a method if none is asked for and no preference has one.

    With a site prior, the tasks' own steps serve better than steps that are stretched to the last one's length: what
    stretching gives, keeping other tasks' classes from winning, the prior gives already. Without one, the method's own.

    >>> default_scale("tunable_magmax", prior=True), default_scale("tunable_magmax", prior=False)
    (1.0, 'matched')
    """
    return 1.0 if prior and method == "tunable_magmax" else METHODS[method].default_scale


def default_words(method: str, prior: bool) -> str:
    """Returns what a default scale is called.

    >>> default_words("tunable_magmax", prior=True), default_words("tsv", prior=True)
    ('the default with a site prior', 'the default of tsv')
    """
    return "the default with a site prior" if prior and method == "tunable_magmax" else f"the default of {method}"


@dataclass(frozen=True)
class Tailoring:
    """How a model is tailored.

    `method`: "auto" follows `default_method`. `scale`: None is the preference's, or what pairs choose, or follows
    `default_scale`. `choose`: "none" lets pairs choose neither the model nor the scale. `check`: "none" leaves out the
    comparison of the result with a probe, or with other scales. `output`: settings of `merge_checkpoints`.
    """

    method: str = "auto"
    scale: float | str | None = None
    choose: Literal["auto", "none"] = "auto"
    check: Literal["auto", "none"] = "auto"
    seed: int = 0
    estimation: Estimation = field(default_factory=Estimation)
    output: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method != "auto" and self.method not in METHODS:
            known = ["auto", *METHODS]
            raise InputError(f"unknown method {self.method!r}{closest(self.method, known)}; known: {', '.join(known)}")


# -- before anything is read ------------------------------------------------------------------------------------------


def check_sources(sources: TargetSources, preference: Preference | None) -> None:
    """Refuses samples beside a preference, which is made of samples already; pairs may choose model and scale."""
    named = [name for name, value in vars(sources).items() if value not in (None, False) and name != "pairs"]
    if preference is not None and named:
        raise InputError(
            f"--preference holds weights already: leave out --{' and --'.join(named)}, or the preference; --pairs may "
            "be added, to choose by labels"
        )


def check_place(out: Path, overwrite: bool) -> None:
    """Refuses an output that is one file, or is there already."""
    if is_one_file(out):
        raise InputError(f"{out} is one file, but a tailored model is a directory: choose a name without .safetensors")
    Output.check(out, overwrite)


def require_head(target: TargetSamples, headers_only: bool = False) -> Head:
    """Loads the head that the tailored model gets, and checks that it fits the encoder."""
    from tunable_magmax.models.head import load_head

    run = target.run
    if target.head_file is None:
        raise InputError(
            f"{run.path}: a tailored model needs a classifier head, and the run names none: give one with "
            f"--classifier, or enter it with `tmx profile {run.path} --classifier HEAD`; `tmx prefer` and `tmx merge` "
            "work without one"
        )
    head = load_head(target.head_file)
    widths = {profile.width for profile in run.profiles if profile is not None}
    if not widths and not headers_only:
        from tunable_magmax.models.encoder import load_encoder

        widths = {load_encoder(run.base, target.reading.device).dim}
    if widths and head.weight.shape[1] not in widths:
        raise InputError(
            f"{target.head_file}: the head has width {head.weight.shape[1]}, and the run's encoders have width "
            f"{', '.join(map(str, sorted(widths)))}: they do not belong together; give the run's own head with "
            "--classifier"
        )
    return head


def prior_warnings(run: Run, preference: Preference, classes: Sequence[str], unwanted: bool) -> Iterator[str]:
    """Yields what a user should know of the prior: there is none, or it is about other classes than the head's."""
    if unwanted:
        return
    if preference.prior is None:
        yield (
            "there is no site prior, because the classes of the tasks are not known: profiles say them "
            f"(`tmx profile {run.path.name} --task NAME --data DATA`)"
        )
        return
    lost = [name for name, share in preference.prior.shares.items() if share > 0 and name not in classes]
    strange = [name for name in classes if name not in preference.prior.shares]
    if lost:
        named = some_of(lost, show=repr)
        yield f"{len(lost)} classes of the tasks are no class of the head, which cannot predict them: {named}"
    if strange:
        yield (
            f"{len(strange)} classes of the head belong to no task, and the prior makes them unlikely: "
            f"{some_of(strange, show=repr)}; --prior none leaves the prior out"
        )


def read_scale(scale: float | str) -> float:
    """Reads a scale that is not `matched`."""
    from tunable_magmax.merging.options import Options

    return Options.read(1, scale=scale).scale or 0.0


# -- what would be done -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TailorPlan:
    """What tailoring would do, from headers alone. `merge` is the plan of the merge; `problems` prevent it."""

    preference: str
    samples: int | None
    weights: tuple[float, ...] | None
    method: str
    scale: str
    head: str | None
    classes: int | None
    merge: MergePlan
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

    target = TargetSamples(run, sources, reading, tailoring.estimation.seed)
    attempt(check_sources, sources, preference)
    if out is not None:
        attempt(check_place, out, bool(tailoring.output.get("overwrite", False)))
    head = attempt(require_head, target, True)
    samples = attempt(_count_samples, target)
    how = attempt(_estimator, target, tailoring, preference) or "not known"
    opinion = preference or attempt(_opinion, sources, len(run.tasks))
    weights = None if opinion is None else opinion.weights
    method = tailoring.method
    if method == "auto" and weights is not None:
        method = default_method(weights)
    by_tasks = f"tunable_magmax, or tsv if more than {MANY_TASKS:g} tasks matter in effect"
    rule = by_tasks if method == "auto" else method
    if sources.pairs is not None and tailoring.method == "auto" and tailoring.choose == "auto":
        rule = f"chosen by cross-validation on the pairs; {rule} if there are too few"
    options: dict[str, Any] = {"method": "tunable_magmax" if method == "auto" else method, "seed": tailoring.seed}
    informed = _gets_prior(run, tailoring, preference)
    own = None if preference is None else preference.scale
    options["scale"] = next(
        scale for scale in (tailoring.scale, own, default_scale(options["method"], informed)) if scale is not None
    )
    if weights is not None and METHODS[options["method"]].weights != "refused":
        options["weights"] = list(weights)
    kept = {key: value for key, value in tailoring.output.items() if key not in ("engine", "device", "workers")}
    merge = plan_merge(run.base, run.tasks, out, **options, **kept)
    problems += [problem for problem in merge.problems if problem not in problems]
    return TailorPlan(
        preference=how,
        samples=samples,
        weights=weights,
        method=rule,
        scale=_scale_rule(tailoring, sources, preference, method, informed),
        head=None if target.head_file is None else str(target.head_file),
        classes=None if head is None else len(head.classes),
        merge=merge,
        problems=tuple(problems),
    )


def _count_samples(target: TargetSamples) -> int | None:
    """Counts the site's samples, and so finds out whether they can be opened."""
    sources, reading = target.sources, target.reading
    count = None
    if sources.labels is not None:
        count = len(open_labels(sources.labels, reading.split, reading.label_column))
    for path in (sources.inputs, sources.pairs):
        if path is not None and not holds_features(path):
            count = len(open_samples(path, reading.split, reading.text_column, reading.label_column))
    return count


def _estimator(target: TargetSamples, tailoring: Tailoring, preference: Preference | None) -> str:
    """Returns in words how the weights would be found."""
    sources, method = target.sources, tailoring.estimation.method
    if preference is not None:
        return f"given, by {preference.method}"
    if opinion := [name for name in ("weights", "alpha", "equal") if getattr(sources, name) not in (None, False)]:
        return f"given as {opinion[0]}"
    if all(value is None for value in (sources.labels, sources.inputs, sources.predictions, sources.pairs)):
        raise InputError(
            "what is known of the site? Give --inputs, --labels or --pairs, --preference FILE, or --weights, --alpha "
            "or --equal if there are no samples of it"
        )
    target.run.require_profiles("an estimate from samples")
    if method != "auto":
        return method
    if sources.pairs is not None or sources.inputs is None:
        return "label"
    by_inputs = "probe" if target.can_probe else "shift" if target.can_predict else "ot"
    return by_inputs if sources.labels is None else f"{by_inputs} and labels"


def _opinion(sources: TargetSources, tasks: int) -> Preference | None:
    return next(opinions(sources, tasks), None)


def _gets_prior(run: Run, tailoring: Tailoring, preference: Preference | None) -> bool:
    """Whether the head would get a site prior."""
    known = preference is not None and preference.prior is not None
    return tailoring.estimation.prior != "none" and (known or class_tables(run) is not None)


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
