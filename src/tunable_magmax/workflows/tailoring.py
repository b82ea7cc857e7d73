"""How a model is tailored: the options, the rules for method and scale, and what is checked before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunable_magmax.checkpoints.writer import Output, is_one_file
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.settings import Resources
from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.merging.methods import METHODS, read_options
from tunable_magmax.merging.resources import kernels_for, plan_memory, whole_bytes
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.prior import read_eps
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.candidates import refuse_adapters
from tunable_magmax.workflows.prefer import Estimation, class_tables
from tunable_magmax.workflows.target import OPINIONS, TargetReading, TargetSamples, TargetSources

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


def why_default(method: str, weights: Sequence[float]) -> str:
    """Returns why a method is the default one for weights.

    >>> why_default("tunable_magmax", [0.5, 0.5])
    'few tasks matter: the weights amount to 2 equal ones, and tsv is for more than 3.2'
    >>> why_default("tsv", [1] * 10)
    'many tasks matter: the weights amount to 10 equal ones, more than 3.2'
    """
    count = f"{effective_tasks(weights):.3g}"
    if count == "1":
        return "only one task matters"
    amount = f"the weights amount to {count} equal ones"
    if method == "tsv":
        return f"many tasks matter: {amount}, more than {MANY_TASKS:g}"
    return f"few tasks matter: {amount}, and tsv is for more than {MANY_TASKS:g}"


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
            f"--classifier, or enter it with `tmx init {run.path} --head HEAD` (`tmx head` makes one); "
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
            f"(`tmx init {run.path.name} --data NAME=DATA`)"
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
    if (
        error is not None
        and preference.method not in OPINIONS
        and effective_tasks(preference.weights) > MANY_TASKS
        and error > UNSURE
    ):
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
