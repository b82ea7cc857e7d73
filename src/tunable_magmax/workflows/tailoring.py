"""How a model is tailored: the options, the rule for the method, and what is checked before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunable_magmax.checkpoints.writer import Output, is_one_file
from tunable_magmax.data.features import holds_features
from tunable_magmax.data.source import open_labels, open_samples
from tunable_magmax.engines.inputs import Inputs, named_heads
from tunable_magmax.engines.settings import Resources
from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.merging.methods import METHODS, read_options
from tunable_magmax.merging.resources import kernels_for, plan_memory, whole_bytes
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.prior import read_eps
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.candidates import refuse_adapters
from tunable_magmax.workflows.plan import MergePlan, plan_merge
from tunable_magmax.workflows.prefer import Estimation, class_tables, opinions
from tunable_magmax.workflows.site_model import OPINIONS, Unfinished, fingerprint
from tunable_magmax.workflows.target import TargetReading, TargetSamples, TargetSources

if TYPE_CHECKING:
    from tunable_magmax.models.head import Head

# Above this effective number of tasks, tsv keeps the lead that Tunable MAGMAX loses; below, they are level, and Tunable
# MAGMAX is exact and several times as fast. Chosen on other seeds and environments than the tables' (docs/results.md).
MANY_TASKS = 3.2

# Weights over many tasks with a larger expected error may be those of all tasks alike, where a prior costs accuracy.
UNSURE = 0.2


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


def why_not_tsv(run: Run, output: Mapping[str, Any]) -> str | None:
    """Returns why tsv, which merges matrices whole, cannot make a model of a run with these settings; None if it can.

    `output`: settings of `merge_checkpoints`.
    """
    import torch

    resources = Resources(**{name: output[name] for name in Resources.__slots__ if name in output})
    try:
        resources.check_method("tsv")
    except InputError:
        place = f"engine {resources.engine!r}" if resources.engine != "local" else f"device {resources.device!r}"
        return f"tsv does not run with {place}"
    options, kernels = read_options(len(run.tasks), method="tsv"), kernels_for(torch.device("cpu"))
    with Inputs(run.base, run.tasks, options) as inputs:

        def fits(memory: int) -> bool:
            try:
                plan_memory(inputs.layout, options, kernels, resources.threads, memory)
            except InputError:
                return False
            return True

        if fits(resources.memory_bytes):
            return None
        gib = next((power for power in (1 << bit for bit in range(20)) if fits(power << 30)), None)
        needed = -(-whole_bytes(inputs.layout, options) // 2**20)
    remedy = "" if gib is None else f"; --memory {gib}GiB lets it"
    return f"tsv needs {needed} MiB for its largest matrix{remedy}"


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
    comparison of the result with a probe, or with other scales. `heads`: what becomes of classifiers that the tasks
    have themselves (docs/heads.md). `output`: settings of `merge_checkpoints`.
    """

    method: str = "auto"
    scale: float | str | None = None
    choose: Literal["auto", "none"] = "auto"
    check: Literal["auto", "none"] = "auto"
    seed: int = 0
    estimation: Estimation = field(default_factory=Estimation)
    output: Mapping[str, Any] = field(default_factory=dict)
    heads: str | None = None

    def __post_init__(self) -> None:
        if self.method != "auto" and self.method not in METHODS:
            known = ["auto", *METHODS]
            raise InputError(f"unknown method {self.method!r}{closest(self.method, known)}; known: {', '.join(known)}")
        if self.scale not in (None, "matched") and read_scale(self.scale) < 0:
            raise InputError(
                f"scale is {self.scale}, a step away from what the tasks learned: give a number above 0, or 0 for the "
                "base as it is"
            )

    @property
    def scores_pairs(self) -> bool:
        """Whether pairs, if there are any, are used to score models: to choose one, or a scale, or to check it."""
        return (self.choose, self.check) != ("none", "none")


# -- before anything is read ------------------------------------------------------------------------------------------


def check_sources(sources: TargetSources, preference: Preference | None) -> None:
    """Refuses samples beside a preference, which is made of samples already; pairs may choose model and scale."""
    named = [name for name in sources.named() if name != "pairs"]
    if preference is not None and named:
        raise InputError(
            f"--preference holds weights already: leave out --{' and --'.join(named)}, or the preference; --pairs may "
            "be added, to choose by labels"
        )


def check_adapters(run: Run, sources: TargetSources, tailoring: Tailoring) -> None:
    """Refuses pairs that models are scored on if the run's tasks are adapters."""
    if sources.pairs is not None and tailoring.scores_pairs:
        refuse_adapters(run, "give --choose none --check none, and pairs are used by their labels only, or ")


def check_place(out: Path, overwrite: bool) -> None:
    """Refuses an output that is one file, or is there already."""
    if is_one_file(out):
        raise InputError(f"{out} is one file, but a tailored model is a directory: choose a name without .safetensors")
    Output.check(out, overwrite)


def require_head(target: TargetSamples, headers_only: bool = False) -> Head:
    """Loads the head that the tailored model gets, and checks that it fits the encoder."""
    run, head = target.run, target.head()
    if head is None:
        raise InputError(
            f"{run.path}: a tailored model needs a classifier head, and the run names none: give one with "
            f"--classifier, or enter it with `tmx profile {run.path} --classifier HEAD` (`tmx head` makes one); "
            "`tmx prefer` and `tmx merge` work without one"
        )
    if head.own:
        return head
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
    """Yields what a user should know of the prior: none is there, it is about other classes, its weights are unsure."""
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
        what = "1 class of the tasks is" if len(lost) == 1 else f"{len(lost)} classes of the tasks are"
        named = some_of(lost, show=repr)
        yield f"{what} no class of the head, which cannot predict {_them(lost)}: {named}"
    if strange:
        what = "1 class of the head belongs" if len(strange) == 1 else f"{len(strange)} classes of the head belong"
        yield (
            f"{what} to no task, and the prior makes {_them(strange)} unlikely: {some_of(strange, show=repr)}; "
            "--prior none leaves the prior out"
        )
    error = preference.expected_error
    if preference.method not in OPINIONS and effective_tasks(preference.weights) > MANY_TASKS and error > UNSURE:
        yield (
            f"the weights are spread over many tasks and unsure (expected error {error:.2f}). If the site wants all "
            "tasks alike, the prior costs accuracy, and --equal is better; more samples, or labels, tell"
        )


def _them(items: Sequence[str]) -> str:
    return "it" if len(items) == 1 else "them"


def with_site_prior(preference: Preference, run: Run, prior: float | str) -> Preference:
    """Returns a stored preference with the prior that a tailored model gets: its own, or that of the tasks' classes.

    `prior`: "auto", "none", or the eps that is wanted.
    """
    if prior == "none":
        return replace(preference, prior=None)
    eps = None if prior == "auto" else read_eps(prior)
    if preference.prior is not None:
        return preference if eps is None else replace(preference, prior=replace(preference.prior, eps=eps))
    tables = class_tables(run)
    return preference if tables is None else preference.with_prior(tables, eps=eps)


def read_scale(scale: float | str) -> float:
    """Reads a scale that is not `matched`."""
    from tunable_magmax.merging.options import Options

    return Options.read(1, scale=scale).scale or 0.0


def options_of(tailoring: Tailoring, reading: TargetReading, preference: Preference | None) -> dict[str, Any]:
    """Returns the options that a tailored model depends on."""
    output = {name: value for name, value in tailoring.output.items() if name in ("shard_size", "base_model")}
    own = {**asdict(tailoring), **asdict(reading), "output": output}
    return own | ({} if preference is None else {"preference": preference.to_json()})


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

    run = run.with_heads(attempt(named_heads, tailoring.heads, run.names, run.tasks))
    target = TargetSamples(run, sources, reading, tailoring.estimation.seed)
    attempt(check_sources, sources, preference)
    attempt(check_adapters, run, sources, tailoring)
    if out is not None:
        attempt(check_place, out, bool(tailoring.output.get("overwrite", False)))
    head = attempt(require_head, target, True)
    samples = attempt(_count_samples, target)
    how = attempt(_estimator, target, tailoring, preference) or "not known"
    opinion = preference or attempt(_opinion, sources, run)
    weights = None if opinion is None else opinion.weights
    method = tailoring.method
    no_tsv = attempt(why_not_tsv, run, tailoring.output) if method == "auto" else None
    if method == "auto" and weights is not None:
        method = default_method(weights)
    rule = f"tunable_magmax, or tsv if more than {MANY_TASKS:g} tasks matter in effect" if method == "auto" else method
    if no_tsv is not None and method in ("auto", "tsv"):
        method, rule = "tunable_magmax", f"tunable_magmax ({no_tsv})"
    if sources.pairs is not None and tailoring.method == "auto" and tailoring.choose == "auto":
        rule = f"chosen by cross-validation on the pairs; {rule} if there are too few"
    options: dict[str, Any] = {"method": "tunable_magmax" if method == "auto" else method}
    if "seed" in METHODS[options["method"]].reads:
        options["seed"] = tailoring.seed
    informed = _gets_prior(run, tailoring, preference)
    own = None if preference is None else preference.scale
    options["scale"] = next(
        scale for scale in (tailoring.scale, own, default_scale(options["method"], informed)) if scale is not None
    )
    if weights is not None and METHODS[options["method"]].weights != "refused":
        options["weights"] = list(weights)
    kept = {key: value for key, value in tailoring.output.items() if key not in ("engine", "device", "workers")}
    if out is not None:
        # Unfinished work of the same tailoring is continued, or replaced; its weights are not known yet.
        known_by = fingerprint(run, sources, reading, options_of(tailoring, reading, preference))
        kept["fresh"] = kept.get("fresh", False) or Unfinished(out, known_by).is_there()
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
    if opinion := [name for name in sources.named() if name in ("weights", "alpha", "equal")]:
        return f"given as {opinion[0]}"
    if all(value is None for value in (sources.labels, sources.inputs, sources.predictions, sources.pairs)):
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
