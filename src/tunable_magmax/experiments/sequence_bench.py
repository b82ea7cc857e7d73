"""A trained sequence on the product's bench, and one environment after the other as a site of its run.

What is believed of an environment, the model that is tailored to it and the heads come from the functions that
`tmx prefer`, `tmx tailor` and `tmx compare` call. What all environments share is made once: the probe, and the
embeddings of the test and kept samples by models that know nothing of the environment.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, shuffled, unit_rows
from tunable_magmax.data.benchmark import Benchmark
from tunable_magmax.data.source import as_samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import label_benchmark, label_samples
from tunable_magmax.evaluation.bench import Bench, BenchData
from tunable_magmax.evaluation.run_models import BASE, MergeSpec
from tunable_magmax.experiments.environments import Environment
from tunable_magmax.experiments.rows import HeadKind
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import Linear
from tunable_magmax.models.prepared import embed_prepared
from tunable_magmax.preference.base_features import TaskProbe
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.site import Site, completed
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.material import KeptSamples, Material, open_material, site_shares
from tunable_magmax.workflows.options import PreferOptions, Reading, SiteSources, TailorOptions
from tunable_magmax.workflows.prefer import find_preference, search_preference
from tunable_magmax.workflows.tailor import Decision, decide

BATCH = 512
TRIALS = 50
"""Of the search for a preference."""
KNOWN = {"label": "labels", "both": "labelled", "search": "labelled", "wrong": "weights"}
"""What sources know of an environment; the others know its inputs."""
LEAST_LOGIT = -30.0
"""Of classes that no kept sample has."""
STRENGTHS = (1.0, 10.0, 100.0)
"""Inverse strengths of regularisation among which scikit-learn's rival chooses."""


class Trained:
    """A run on a bench of its own, with the benchmark's test samples and the kept samples decoded."""

    def __init__(self, run: Run, benchmark: Benchmark, seed: int, device: str | None) -> None:
        """Reads base, tasks, test samples and kept samples into memory."""
        self.run, self.bench = run, Bench(run, seed=seed, device=device, precise=False)
        self.tests = self.bench.open_labelled("test", label_benchmark(benchmark, self.bench.classes))
        self._rows = {position: row for row, position in enumerate(self.tests.prepared.positions)}
        kept = KeptSamples.open(self.bench) if self.bench.views else None
        self.kept = None if kept is None else kept.decode(self.bench)
        self._rest: dict[str, BenchData] = {}

    def rows_of(self, positions: Sequence[int]) -> list[int]:
        """Returns the rows of the readable test samples at some positions."""
        return [self._rows[position] for position in positions if position in self._rows]

    def distinct(self, positions: Sequence[int]) -> list[int]:
        """Returns the rows of the readable test samples at some positions; copies count once, as at a site."""
        rows = self.rows_of(positions)
        tables = [values[rows].cpu().numpy() for values in self.tests.prepared.inputs.values()]
        contents = {tuple(table[k].tobytes() for table in tables): row for k, row in reversed(list(enumerate(rows)))}
        return sorted(contents.values())

    def rest(self, environment: Environment) -> BenchData:
        """Returns the test samples that models are scored on in an environment."""
        name = f"{environment.name} rest"
        if name not in self._rest:
            self._rest = {name: self.tests.take(self.rows_of(environment.rest), name)}
        return self._rest[name]

    def forget(self, environment: Environment) -> None:
        """Forgets what models made of an environment's samples."""
        for name in ("inputs", "labelled", f"{environment.name} rest"):
            self.bench.forget(name)


class SequenceBench(AbstractContextManager["SequenceBench"]):
    """The models of one trained sequence, and what its environments share. A context manager.

    `joint`: the run directory of the model that was trained on all tasks together. `seed`: that of all merges.
    """

    def __init__(
        self,
        run: Path,
        benchmark: Benchmark,
        environments: Sequence[Environment],
        *,
        seed: int = 0,
        device: str | None = None,
        joint: Path | None = None,
    ) -> None:
        self.benchmark, self.environments = benchmark, environments
        self.seed, self.device, self._joint = seed, device, joint
        self.run = Run.open(run)
        self.trained = Trained(self.run, benchmark, seed, device)

    def __exit__(self, *error: object) -> None:
        self.trained.bench.close()
        if "joint" in vars(self):
            self.joint.bench.close()

    @cached_property
    def joint(self) -> Trained:
        """The model that was trained on all tasks together: the only task of a run of its own."""
        assert self._joint is not None
        return Trained(Run.open(self._joint), self.benchmark, self.seed, self.device)

    # -- what environments share -------------------------------------------------------------------------------------

    @cached_property
    def probe(self) -> TaskProbe:
        """The probe that inputs are compared with."""
        return Site(self.run, SiteSources(), Reading(), self.seed).probe

    @cached_property
    def base_tests(self) -> NDArray[np.float32]:
        """The base's own embeddings of the test samples, as profiles hold them: of sentences, the mean of tokens."""
        return self._base_embeddings(self.trained.tests)

    def _base_embeddings(self, data: BenchData) -> NDArray[np.float32]:
        if not self.trained.bench.is_builtin:
            return self.trained.bench.features(BASE, data)
        return embed_prepared(load_encoder(self.run.base, self.device), data.prepared, BATCH, precise=False)

    def task_features(self, task: int, rows: Sequence[int]) -> NDArray[np.float32]:
        """Returns what a task's checkpoint makes of known test samples; those of all environments are embedded once."""
        known, places = self._known
        return self.trained.bench.features(MergeSpec(checkpoint=task), known)[[places[row] for row in rows]]

    @cached_property
    def _known(self) -> tuple[BenchData, dict[int, int]]:
        """The test samples that are known in any environment, and the place of each among them."""
        rows = sorted({row for each in self.environments for row in self.trained.rows_of(each.meta)})
        whole = self.trained.tests.take(rows, "known")
        return replace(whole, source=whole.prepared), {row: place for place, row in enumerate(rows)}

    @cached_property
    def logistic(self) -> tuple[Any, Floats]:
        """scikit-learn's regression on the base's embeddings of kept samples; how often each class is among them."""
        kept = self.trained.kept
        if kept is None or kept.decoded is None:
            raise InputError("logistic regression is fitted to kept samples, and the run has none")
        features, labels = unit_rows(self._base_embeddings(kept.decoded)), kept.decoded.labels
        held = np.arange(len(labels)) % 5 == 0  # kept samples stand class by class
        regression = importlib.import_module("sklearn.linear_model").LogisticRegression
        models = [regression(C=strength, max_iter=1000) for strength in STRENGTHS]
        best = max(
            models, key=lambda model: model.fit(features[~held], labels[~held]).score(features[held], labels[held])
        )
        best.fit(features, labels)
        return best, np.bincount(labels)[best.classes_] / len(labels)

    # -- without an environment --------------------------------------------------------------------------------------

    def task_accuracy(self, spec: MergeSpec, task: int) -> float:
        """Returns the accuracy on a task's test samples, among all classes, with the old head."""
        tests = self.trained.tests
        part = tests.take(np.flatnonzero(tests.tasks == task), f"task {task}")
        return self._accuracy(spec, replace(part, source=part.prepared))

    def held_accuracy(self, spec: MergeSpec) -> float:
        """Returns the accuracy on the training samples that were held out of all tasks, with the old head."""
        return self._accuracy(spec, self._held)

    def _accuracy(self, spec: MergeSpec, data: BenchData) -> float:
        return float((self.trained.bench.logits(spec, data).argmax(axis=1) == data.labels).mean())

    @cached_property
    def _held(self) -> BenchData:
        """What best scales are chosen on: held-out training samples, or the kept ones if there are none."""
        positions = sorted(position for task in self.benchmark.tasks for position in task.held)
        kept = self.trained.kept
        if not positions and kept is not None and kept.decoded is not None:
            return kept.decoded
        if not positions:
            raise InputError(
                "best scales are chosen on held-out or kept training samples, and there are none: raise "
                "run.benchmark.holdout or run.keep, or leave rows @best out"
            )
        bench = self.trained.bench
        return bench.open_labelled("held", label_samples(self.benchmark.train, bench.classes, None, positions))


@dataclass(frozen=True, eq=False, kw_only=True)
class EnvironmentSite(Site):
    """An environment as a user's site, whose samples are embedded already with those of all environments."""

    shared: SequenceBench
    environment: Environment

    @cached_property
    def base_features(self) -> NDArray[Any]:
        return self.shared.base_tests[self._distinct]

    @cached_property
    def features(self) -> list[NDArray[Any]]:
        if self.shared.trained.bench.is_builtin:  # profiles hold other features than those that heads read
            return super().features
        return [self.shared.task_features(t, self._distinct) for t in range(1, len(self.run.tasks) + 1)]

    @cached_property
    def probe(self) -> TaskProbe:
        return self.shared.probe

    @cached_property
    def _distinct(self) -> list[int]:
        return self.shared.trained.distinct(self.environment.meta)


@dataclass(frozen=True, eq=False)
class EnvironmentBench:
    """One environment of a sequence: what each source believes of it, and the models and heads that follow.

    A context manager: the bench forgets what it made of other environments' samples, which have the same names.
    """

    shared: SequenceBench
    environment: Environment
    _sites: dict[str, EnvironmentSite] = field(default_factory=dict)
    _preferences: dict[str, Preference] = field(default_factory=dict)
    _material: dict[tuple[Any, ...], Material] = field(default_factory=dict)

    def __enter__(self) -> EnvironmentBench:
        self._forget()
        return self

    def __exit__(self, *error: object) -> None:
        self._forget()

    def _forget(self) -> None:
        self.shared.trained.forget(self.environment)
        if "joint" in vars(self.shared):
            self.shared.joint.forget(self.environment)

    # -- what is believed --------------------------------------------------------------------------------------------

    def truth(self) -> Floats:
        """Returns the true mixture over tasks, as it was drawn."""
        weights = np.zeros(len(self.shared.run.tasks))
        weights[list(self.environment.tasks)] = self.environment.ratio
        return weights

    def preference(self, source: str) -> Preference:
        """Returns the environment's preference by a source, as `tmx prefer` finds it."""
        if source not in self._preferences:
            site = self.site(source)
            if source == "search":  # on the bench that is there, instead of one for each environment
                found = search_preference(site, TRIALS, self.shared.trained.bench)
                self.shared.trained.bench.forget("labelled")
                self._preferences[source] = completed(found, site.run)
            else:
                method: Any = source.removesuffix("-raw") if source in ("ot", "ot-raw", "cosine", "mmd") else "auto"
                options = PreferOptions(method=method, raw=source == "ot-raw")
                self._preferences[source] = find_preference(site, options)
        return self._preferences[source]

    def site(self, source: str) -> Site:
        """Returns the environment as a user's site; sources that know the same share it."""
        known = KNOWN.get(source, "inputs")
        if known not in self._sites:
            reading = Reading(max_samples=len(self.environment.meta), device=self.shared.device)
            shared: dict[str, Any] = {"shared": self.shared, "environment": self.environment}
            run, seed = self.shared.run, self.shared.seed
            self._sites[known] = EnvironmentSite(run, self._sources(known), reading, seed, **shared)
        return self._sites[known]

    def _sources(self, known: str) -> SiteSources:
        environment, tasks = self.environment, len(self.shared.run.tasks)
        if known == "weights":  # by hand, for tasks that the environment does not have
            others = [t for t in range(tasks) if t not in environment.tasks] or list(range(tasks))
            drawn = shuffled(len(others), derived_seed(environment.variant, environment.mixture, "wrong"))
            chosen = {others[k] for k in drawn[: len(environment.tasks)]}
            return SiteSources(weights=[float(t in chosen) for t in range(tasks)])
        part = self.shared.benchmark.test.subset(environment.meta)
        if known == "labels":
            return SiteSources(labels=as_samples(part.label_names(), "labels"))
        if known == "inputs":
            return SiteSources(inputs=replace(part, labels=None, classes=()))
        return SiteSources(labelled=part)

    # -- models and heads --------------------------------------------------------------------------------------------

    def tailored(self, source: str, head: HeadKind, most_kept: int | None = None) -> Decision:
        """Returns what `tmx tailor` makes of what a source knows; with the old head unless it is to be fitted.

        `most_kept`: kept samples of each class that it has, by default all.
        """
        options = TailorOptions(head="auto" if head == "fitted" else "old", seed=self.shared.seed)
        material = self._material_of(source, self.shared.trained, head, most_kept)
        return decide(self.shared.trained.bench, material, self.preference(source), options)

    def head(self, trained: Trained, spec: MergeSpec, head: HeadKind, source: str) -> Linear:
        """Returns the head of a model: fitted to it, or the old one with the environment's class shares."""
        return trained.bench.fit(spec, self._material_of(source, trained, head).all).linear

    def _material_of(self, source: str, trained: Trained, head: HeadKind, most_kept: int | None = None) -> Material:
        """Returns what heads are fitted to, as `tmx tailor` opens it."""
        joint, fits = trained is not self.shared.trained, head == "fitted"
        key = source, joint, fits, most_kept
        if key not in self._material:
            kept = trained.kept if most_kept is None or trained.kept is None else _fewer(trained.kept, most_kept)
            preference = self.preference(source)
            if joint:  # a run of one task, which the weights of the sequence's tasks do not fit
                alone = replace(Preference.from_weights([1.0]), prior=preference.prior)
                self._material[key] = open_material(trained.bench, alone, fits=fits, kept=kept)
            else:
                site = self.site(source)
                self._material[key] = open_material(trained.bench, preference, site, fits=fits, kept=kept)
        return self._material[key]

    def best_checkpoint(self) -> int:
        """Returns the task whose checkpoint gets most of the known samples right; of equal ones the last."""
        trained, rows = self.shared.trained, self.shared.trained.rows_of(self.environment.meta)
        counts = []
        for t in range(1, len(self.shared.run.tasks) + 1):
            features = trained.bench.rows(self.shared.task_features(t, rows))
            logits = trained.bench.old_head(MergeSpec(checkpoint=t)).logits(features)
            counts.append(int((logits.argmax(axis=1) == trained.tests.labels[rows]).sum()))
        return 1 + int(np.flatnonzero(np.array(counts) == max(counts))[-1])

    def logistic_logits(self, source: str) -> Floats:
        """Returns logits of the rest by logistic regression on the base's embeddings, with the site's shares."""
        classes, model, fitted_shares = self.shared.trained.bench.classes, *self.shared.logistic
        rows = self.shared.trained.rows_of(self.environment.rest)
        logits = np.full((len(rows), len(classes)), LEAST_LOGIT)
        features = unit_rows(self.shared.base_tests[rows])
        logits[:, model.classes_] = model.predict_log_proba(features) - np.log(fitted_shares)
        return logits + np.log(site_shares(self.preference(source), classes))


def _fewer(kept: KeptSamples, most: int) -> KeptSamples:
    """Returns kept samples of which at most so many of each class of a task count; the others' class is unknown."""
    seen: Counter[tuple[int, int]] = Counter()
    labels = kept.labels.copy()
    for k, key in enumerate(zip(kept.tasks, kept.labels.tolist(), strict=True)):
        seen[key] += 1
        labels[k] = key[1] if seen[key] <= most else -1
    return replace(kept, labels=labels)
