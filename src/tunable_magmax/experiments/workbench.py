"""Measures many models of one trained sequence in its environments, on the product's own bench."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, choose_rows, unit_rows
from tunable_magmax.data.benchmark import Benchmark
from tunable_magmax.data.splits import shuffled
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import predict
from tunable_magmax.evaluation.bench import Bench, BenchData, SiteFacts
from tunable_magmax.evaluation.choosing import affordable, sizes, tokens_of
from tunable_magmax.evaluation.labelled import label_benchmark, label_samples
from tunable_magmax.evaluation.run_models import BASE, MergeSpec
from tunable_magmax.experiments.environments import Environment
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import Linear
from tunable_magmax.models.prepared import embed_prepared
from tunable_magmax.preference.base_features import TaskProbe
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.material import MOST_ANCHORS, KeptSamples, open_material, site_shares
from tunable_magmax.workflows.search import search
from tunable_magmax.workflows.tailor import Decision, TailorOptions, decide, fits_heads

BATCH = 512
UNLABELLED = ("auto", "probe")
"""Sources of a preference that give the inputs of the site as well."""
STRENGTHS = (1.0, 10.0, 100.0)
"""Inverse strengths of regularisation among which scikit-learn's rival chooses."""


@dataclass(frozen=True)
class Count:
    """How many of an environment's samples a model gets right: among all classes, and among the true task's."""

    right: int
    samples: int
    known_right: int


@dataclass(frozen=True, eq=False)
class Model:
    """A model of a bench; `head`: the one that it comes with, None for the one that it has without fitting."""

    side: Side
    spec: MergeSpec
    head: Linear | None = None
    plan: Decision | None = None

    @property
    def report(self) -> Any:
        """The report of the merge; None of a checkpoint."""
        return None if self.spec.checkpoint is not None else self.side.bench.report(self.spec)


@dataclass(frozen=True, eq=False)
class Side:
    """A bench, and the test samples with the bench's own numbers of the classes. `owners` [n]: each sample's task."""

    bench: Bench
    tests: BenchData
    owners: NDArray[np.int64]
    members: tuple[tuple[int, ...], ...]
    kept: KeptSamples | None
    parts: dict[str, BenchData] = field(default_factory=dict)

    def part(self, name: str, rows: Sequence[int]) -> BenchData:
        """Returns some of the test samples, kept for the next model."""
        if name not in self.parts:
            self.parts[name] = self.tests.take(rows, name)
        return self.parts[name]

    def as_seen_by(self, bench: Bench) -> Side:
        """Returns the same samples for a bench whose classes have another order."""
        place = {name: k for k, name in enumerate(bench.classes)}
        order = np.array([*(place.get(name, -1) for name in self.bench.classes), -1], dtype=np.int64)
        tests = replace(self.tests, labels=order[self.tests.labels])
        kept = self.kept
        if kept is not None and kept.decoded is not None:
            decoded = replace(kept.decoded, labels=order[kept.decoded.labels])
            kept = replace(kept, labels=order[kept.labels], decoded=decoded)
        members = tuple(tuple(order[list(own)].tolist()) for own in self.members)
        return Side(bench, tests, self.owners, members, kept)


class Workbench:
    """A run directory with everything that measurements need. A context manager.

    `seconds`: time spent by kind of work. `seed`: that of all merges.
    """

    def __init__(
        self,
        run: Path,
        benchmark: Benchmark,
        environments: Sequence[Environment] = (),
        *,
        seed: int = 0,
        device: str | None = None,
        joint: Path | None = None,
    ) -> None:
        """`joint`: the run directory of the model that was trained on all tasks together."""
        self._joint, self._device = joint, device
        self.benchmark, self.environments, self.seed = benchmark, tuple(environments), seed
        self.run = Run.open(run)
        self.profiles = self.run.require_profiles("an experiment")
        self.seconds: dict[str, float] = {}
        self._preferences: dict[tuple[str, str], Preference] = {}
        with self.timed("read"):
            self.bench = Bench(self.run, seed=seed, device=device, precise=False)
            self.main = self._opened()

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *error: object) -> None:
        self.bench.close()
        if "joint" in vars(self):
            self.joint.side.bench.close()

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Adds the time of what follows to `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - began

    def _opened(self) -> Side:
        labelled = label_benchmark(self.benchmark, self.bench.classes)
        samples = self.benchmark.test.subset(labelled.positions)
        assert labelled.sample_tasks is not None
        names = [self.bench.classes[k] for k in labelled.targets.tolist()]
        tests = self.bench.open("test", samples, names, labelled.sample_tasks.tolist())
        positions = [labelled.positions[k] for k in tests.prepared.positions]
        self._row = {position: k for k, position in enumerate(positions)}
        kept = KeptSamples.open(self.bench) if self.bench.views else None
        members = tuple(tuple(own) for own in labelled.tasks.values())
        return Side(self.bench, tests, tests.tasks, members, None if kept is None else kept.decode(self.bench))

    # -- models ------------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> int:
        return len(self.run.tasks)

    def model(self, spec: MergeSpec) -> Model:
        """Returns a model of the run; it is merged when it is first scored."""
        return Model(self.main, spec)

    @cached_property
    def joint(self) -> Model:
        """The model that was trained on all tasks together."""
        assert self._joint is not None
        with self.timed("read"):
            bench = Bench(Run.open(self._joint), seed=self.seed, device=self._device, precise=False)
        return Model(self.main.as_seen_by(bench), MergeSpec(checkpoint=1))

    def tailored(self, source: str, environment: Environment) -> tuple[Model, Preference]:
        """Returns what `tmx tailor` makes of an environment's meta samples: `label` gives labels, `both` both."""
        preference = self.preference("label" if source == "both" else source, environment)
        labelled = self._part(environment, "meta") if source == "both" else None
        options, inputs = TailorOptions(seed=self.seed), self._anchors(environment, source)
        with self.timed("tailor"):
            fits = fits_heads(self.bench, options)
            material = open_material(self.bench, preference, labelled, inputs, fits=fits, kept=self.main.kept)
            plan = decide(self.bench, material, preference, options)
        assert plan.head is not None
        return Model(self.main, plan.spec, plan.head.linear, plan), preference

    def fitted(self, model: Model, preference: Preference, source: str, environment: Environment) -> Linear:
        """Returns the head that fits a model in an environment, from kept samples, by a preference."""
        bench, kept = model.side.bench, model.side.kept
        shares = site_shares(preference, bench.classes)
        taken = None
        if kept is not None:
            most = sizes(affordable(bench, tokens_of(bench, kept.first(bench))))[2]
            taken = kept.take(bench, shares, most)
        inputs = self._anchors(environment, source) if model.side is self.main else None
        with self.timed("fit"):
            return bench.fit(model.spec, SiteFacts(tuple(preference.weights), shares, taken, None, inputs)).linear

    def _anchors(self, environment: Environment, source: str) -> BenchData | None:
        """Returns the inputs of a site that show how features moved, as `tmx tailor` takes them."""
        if source not in (*UNLABELLED, "both") or self.bench.is_builtin:
            return None
        if any(profile is None or profile.base_features is None for profile in self.run.profiles):
            return None
        meta = self._part(environment, "meta")
        rows = choose_rows(len(meta), MOST_ANCHORS, self.seed)
        return meta.take(rows, f"{environment.name} inputs")

    # -- measurements ------------------------------------------------------------------------------------------------

    def _part(self, environment: Environment, what: str = "rest", side: Side | None = None) -> BenchData:
        rows = self._rows(environment.rest if what == "rest" else environment.meta)
        return (side or self.main).part(f"{environment.name} {what}", rows)

    def features(self, model: Model, environment: Environment) -> NDArray[np.float32]:
        """Returns a model's features of the rest of an environment; of a model for all of them, embedded once."""
        side, spec = model.side, model.spec
        with self.timed("evaluate"):
            if spec.weights is None and len(self.environments) > 1:
                return side.bench.features(spec, side.tests)[self._rows(environment.rest)]
            return side.bench.features(spec, self._part(environment, "rest", side))

    def logits(self, model: Model, environment: Environment, head: Linear | None = None) -> Floats:
        """Returns what a head, by default the model's own, gives for the rest of an environment [samples, classes]."""
        bench = model.side.bench
        used = head or model.head or bench.old_head(model.spec)
        return used.logits(bench.rows(self.features(model, environment)))

    def count(self, side: Side, logits: Floats, environment: Environment) -> Count:
        """Counts what is right in the rest of an environment."""
        rows = np.array(self._rows(environment.rest), dtype=np.int64)
        predicted, known = predict(logits, side.owners[rows], side.members)
        right, among = (int((classes == side.tests.labels[rows]).sum()) for classes in (predicted, known))
        return Count(right, len(rows), among)

    @property
    def tables(self) -> list[dict[str, int]]:
        """How many samples of each class every task has."""
        return [profile.label_table for profile in self.profiles]

    def task_accuracies(self, spec: MergeSpec) -> tuple[float, ...]:
        """Returns the accuracy on each task's test samples, among all classes."""
        with self.timed("evaluate"):
            right = self.bench.logits(spec, self.main.tests).argmax(axis=1) == self.main.tests.labels
        return tuple(float(right[self.main.owners == t].mean()) for t in range(self.tasks))

    def in_task(self) -> list[float]:
        """Returns, for each task's own checkpoint, the accuracy on its test samples among its own classes."""
        shares = []
        for t, own in enumerate(self.main.members):
            rows = np.flatnonzero(self.main.owners == t)
            data = self.main.tests.take(rows, f"task {t}")
            with self.timed("evaluate"):
                best = self.bench.logits(MergeSpec(checkpoint=t + 1), data)[:, list(own)].argmax(axis=1)
            shares.append(float((np.array(own)[best] == data.labels).mean()) if len(rows) else float("nan"))
            self.bench.forget(data.name)
        return shares

    def meta_accuracy(self, spec: MergeSpec, environment: Environment) -> float:
        """Returns the accuracy on an environment's meta samples."""
        with self.timed("evaluate"):
            return self._accuracy(spec, self._part(environment, "meta"))

    def held_accuracy(self, spec: MergeSpec) -> float:
        """Returns the accuracy on the training samples that were held out of all tasks."""
        with self.timed("evaluate"):
            return self._accuracy(spec, self._held)

    def _accuracy(self, spec: MergeSpec, data: BenchData) -> float:
        return float((self.bench.logits(spec, data).argmax(axis=1) == data.labels).mean())

    def lengths(self) -> list[float]:
        """Returns the length of each task vector."""
        models = self.bench.models
        base, *states = (models.state(MergeSpec(checkpoint=k)) for k in range(self.tasks + 1))
        heads = () if models.heads is None else models.heads.made
        names = [name for name, tensor in base.items() if tensor.is_floating_point() and name not in heads]
        return [
            float(np.sqrt(sum(float((state[name].double() - base[name].double()).square().sum()) for name in names)))
            for state in states
        ]

    @cached_property
    def _held(self) -> BenchData:
        positions = sorted(position for task in self.benchmark.tasks for position in task.held)
        if not positions:
            raise InputError(
                "best scales are chosen on held-out training samples, and there are none: raise run.benchmark.holdout, "
                "or leave 'best' out of the scales"
            )
        labelled = label_samples(self.benchmark.train, self.bench.classes, None, positions)
        names = [self.bench.classes[k] for k in labelled.targets.tolist()]
        return self.bench.open("held", self.benchmark.train.subset(labelled.positions), names)

    def _rows(self, positions: Sequence[int]) -> list[int]:
        return [self._row[position] for position in positions if position in self._row]

    # -- the meta samples --------------------------------------------------------------------------------------------

    def truth(self, environment: Environment) -> NDArray[np.float64]:
        """Returns the true mixture over tasks, as it was drawn."""
        weights = np.zeros(len(self.benchmark.tasks))
        weights[list(environment.tasks)] = environment.ratio
        return weights

    def labels(self, positions: Sequence[int]) -> list[str]:
        """Returns the class names of test samples."""
        labels = self.benchmark.test.labels
        assert labels is not None
        return [self.benchmark.classes[labels[position]] for position in positions]

    def preference(self, source: str, environment: Environment, trials: int = 0) -> Preference:
        """Returns an environment's preference by a source, which is found once."""
        key = (source, environment.name)
        if key not in self._preferences:
            self._preferences[key] = preference_for(self, source, environment, trials=trials)
        return self._preferences[key]

    def target_features(self, positions: Sequence[int]) -> list[NDArray[np.float32]]:
        """Returns embeddings of meta samples under each task's encoder."""
        rows = [self._meta_row[position] for position in positions]
        with self.timed("embed"):
            return [self.bench.features(MergeSpec(checkpoint=t + 1), self._meta)[rows] for t in range(self.tasks)]

    def base_features(self, positions: Sequence[int]) -> NDArray[np.float32]:
        """Returns embeddings of meta samples under the base; copies of a sample count once."""
        rows = [self._meta_row[position] for position in positions]
        first = np.sort(np.unique(self._contents[rows], return_index=True)[1])
        with self.timed("embed"):
            found: NDArray[np.float32] = self._plain(self._meta)[[rows[k] for k in first.tolist()]]
        return found

    def task_correct(self, environment: Environment) -> NDArray[np.int64]:
        """Returns how many meta samples each task's own checkpoint gets right [T]."""
        data = self._part(environment, "meta")
        with self.timed("embed"):
            shares = [self._accuracy(MergeSpec(checkpoint=t + 1), data) for t in range(self.tasks)]
        return np.array([round(share * len(data)) for share in shares])

    @cached_property
    def probe(self) -> TaskProbe:
        """The probe of the tasks, for all environments."""
        tables, labels = [], []
        for profile in self.profiles:
            if profile.base_features is None or profile.row_labels is None:
                raise InputError(f"the profile of task {profile.task!r} lacks the base's embeddings: train again")
            tables.append(profile.base_features)
            labels.append(profile.row_classes)
        with self.timed("embed"):
            return TaskProbe.fit(tables, labels)

    @cached_property
    def _meta_positions(self) -> list[int]:
        wanted = sorted({position for environment in self.environments for position in environment.meta})
        return [position for position in wanted if position in self._row]

    @cached_property
    def _meta(self) -> BenchData:
        return self.main.tests.take(self._rows(self._meta_positions), "meta")

    @cached_property
    def _meta_row(self) -> dict[int, int]:
        return {position: k for k, position in enumerate(self._meta_positions)}

    @cached_property
    def _contents(self) -> NDArray[np.int64]:
        """A number for each meta sample, which copies share."""
        tables = [table.flatten(1).cpu().numpy() for table in self._meta.prepared.inputs.values()]
        rows = [b"".join(table[k].tobytes() for table in tables) for k in range(len(self._meta))]
        return np.unique(np.array(rows, dtype=object), return_inverse=True)[1].astype(np.int64)

    def _plain(self, data: BenchData) -> NDArray[np.float32]:
        """Returns the base's own embeddings, which profiles hold: of sentences, the mean over the tokens."""
        if not self.bench.is_builtin:
            return self.bench.features(BASE, data)
        return embed_prepared(self._plain_encoder, data.prepared, BATCH, precise=False)

    @cached_property
    def _plain_encoder(self) -> Any:
        return load_encoder(self.run.base, self._device)

    # -- scikit-learn's rival ----------------------------------------------------------------------------------------

    @cached_property
    def logistic(self) -> Linear:
        """Logistic regression on the base's embeddings of the kept samples, which knows no class shares."""
        kept = self.main.kept
        if kept is None or kept.decoded is None:
            raise InputError("logistic regression is fitted to kept samples, and the run has none")
        with self.timed("fit"):
            features = unit_rows(self._plain(kept.decoded))
            labels = kept.decoded.labels
            linear = importlib.import_module("sklearn.linear_model")

            def made(strength: float, chosen: Any) -> Any:
                return linear.LogisticRegression(C=strength, max_iter=1000).fit(features[chosen], labels[chosen])

            held = np.arange(len(labels)) % 5 == 0  # kept samples stand class by class
            found = max((made(c, ~held).score(features[held], labels[held]), c) for c in STRENGTHS)[1]
            best = made(found, np.ones(len(labels), dtype=bool))
        weight = np.zeros((len(self.bench.classes), features.shape[1]))
        bias = np.full(len(weight), -30.0)
        two = len(best.classes_) == 2 and len(best.coef_) == 1
        rows, offsets = (np.concatenate([-v, v]) if two else v for v in (best.coef_, best.intercept_))
        shares = np.bincount(labels, minlength=len(weight))[best.classes_] / len(labels)
        weight[best.classes_], bias[best.classes_] = rows, offsets - np.log(shares)
        return Linear(weight, bias)

    def logistic_logits(self, environment: Environment) -> Floats:
        """Returns the logits of the rest of an environment by `logistic`."""
        head = self.logistic
        with self.timed("evaluate"):
            return head.logits(unit_rows(self._plain_tests[self._rows(environment.rest)]))

    @cached_property
    def _plain_tests(self) -> NDArray[np.float32]:
        return self._plain(self.main.tests)


def why_no_logistic() -> str | None:
    """Returns why there can be no row `logistic`; None if there can be one."""
    return None if find_spec("sklearn") is not None else "scikit-learn is not installed (extra: dev)"


def preference_for(
    bench: Workbench, source: str, environment: Environment, meta: Sequence[int] | None = None, trials: int = 0
) -> Preference:
    """Finds a preference by a source, from the environment's meta samples or from those at `meta`."""
    if source == "search":
        return _searched(bench, environment, trials)
    if source == "wrong":
        return _wrong(bench, environment)
    with bench.timed("prefer"):
        return _estimated(bench, source, environment.meta if meta is None else meta).named(bench.run.names)


def _searched(bench: Workbench, environment: Environment, trials: int) -> Preference:
    """Finds the weights whose merge classifies the meta samples best, starting from the label preference."""
    start = preference_for(bench, "label", environment)

    def score(weights: tuple[float, ...]) -> float:
        return bench.meta_accuracy(MergeSpec("tunable_magmax", None, weights), environment)

    value, weights = max(search(score, [Preference.equal(bench.tasks).weights, start.weights], trials, bench.seed))
    return Preference(weights, "search", {"value": value, "trials": trials})


def _wrong(bench: Workbench, environment: Environment) -> Preference:
    """Returns equal weights, as if given by hand, for tasks that the environment does not have.

    As many as it has, or all others if these are fewer; all tasks if there is no other.
    """
    others = [t for t in range(bench.tasks) if t not in environment.tasks] or list(range(bench.tasks))
    drawn = shuffled(len(others), derived_seed(environment.variant, environment.mixture, "wrong"))
    chosen = {others[k] for k in drawn[: len(environment.tasks)]}
    return Preference.from_weights([float(t in chosen) for t in range(bench.tasks)])


def with_prior(bench: Workbench, preference: Preference, eps: float | None = None) -> Preference:
    """Adds the site prior that the weights mean, unless the posterior has given one."""
    return preference.with_prior(bench.tables, eps=eps)


def _estimated(bench: Workbench, source: str, meta: Sequence[int]) -> Preference:
    labels = [profile.label_table for profile in bench.profiles]
    if source == "label":
        return Preference.from_labels(labels, bench.labels(meta))
    if source in ("ot", "ot-raw", "cosine", "mmd"):
        method: Any = source.removesuffix("-raw")
        own = [profile.features for profile in bench.profiles]
        return Preference.from_features(own, bench.target_features(meta), method, source == "ot-raw")
    assert source in UNLABELLED, source  # an experiment's configuration is checked
    return Preference.from_base_features(
        [profile.base_features for profile in bench.profiles],
        [profile.row_classes for profile in bench.profiles],
        bench.base_features(meta),
        task_label_counts=labels,
        fitted=bench.probe,
    )


def weights_of(preference: Preference) -> Mapping[str, float]:
    """Returns the weights above 0 by task, from 1."""
    return {str(t): round(weight, 6) for t, weight in enumerate(preference.weights, 1) if weight > 0}
