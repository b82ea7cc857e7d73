"""A trained sequence on the product's bench, with the environments that its models are scored in.

What is believed of an environment, the model that is tailored to it and the heads come from the functions that
`tmx prefer`, `tmx tailor` and `tmx compare` call; here is only what they get.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, unit_rows
from tunable_magmax.data.benchmark import Benchmark
from tunable_magmax.data.memory import MemorySamples, as_labels
from tunable_magmax.data.splits import shuffled
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.bench import Bench, BenchData
from tunable_magmax.evaluation.labelled import label_benchmark, label_samples
from tunable_magmax.evaluation.run_models import MergeSpec
from tunable_magmax.experiments.environments import Environment
from tunable_magmax.experiments.rows import HeadKind
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import Linear
from tunable_magmax.models.prepared import embed_prepared
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.material import KeptSamples, Material, open_material, open_site_material, site_shares
from tunable_magmax.workflows.options import Reading
from tunable_magmax.workflows.prefer import PreferOptions, find_preference
from tunable_magmax.workflows.site import Site, SiteSources
from tunable_magmax.workflows.tailor import Decision, TailorOptions, fits_heads, tailor_in_memory

BATCH = 512
KNOWN = MappingProxyType({"label": "labels", "both": "labelled", "search": "labelled", "wrong": "weights"})
"""What sources know of an environment; the others know its inputs."""
LEAST_LOGIT = -30.0
"""Of classes that no kept sample has."""
STRENGTHS = (1.0, 10.0, 100.0)
"""Inverse strengths of regularisation among which scikit-learn's rival chooses."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A run on a bench of its own. `tests`: the benchmark's test samples, `rows` the row of each by position."""

    bench: Bench
    tests: BenchData
    rows: dict[int, int]
    kept: KeptSamples | None
    parts: dict[str, BenchData]

    @classmethod
    def open(cls, run: Run, benchmark: Benchmark, seed: int, device: str | None) -> Trained:
        """Reads base, tasks, test samples and kept samples into memory."""
        bench = Bench(run, seed=seed, device=device, precise=False)
        labelled = label_benchmark(benchmark, bench.classes)
        assert labelled.sample_tasks is not None
        tests = bench.open_labelled("test", labelled)
        rows = {position: k for k, position in enumerate(tests.prepared.positions)}
        kept = KeptSamples.open(bench) if bench.views else None
        return cls(bench, tests, rows, None if kept is None else kept.decode(bench), {})

    def part(self, positions: Sequence[int], name: str) -> BenchData:
        """Returns the readable test samples at some positions, kept for the next model."""
        if name not in self.parts:
            self.parts[name] = self.tests.take([self.rows[p] for p in positions if p in self.rows], name)
        return self.parts[name]

    def features(self, spec: MergeSpec, environment: Environment) -> NDArray[np.float32]:
        """Returns a model's features of the rest of an environment; of a model for all of them, embedded once."""
        part = self.part(environment.rest, f"{environment.name} rest")
        if spec.weights is None:
            chosen = [self.rows[position] for position in environment.rest if position in self.rows]
            return self.bench.features(spec, self.tests)[chosen]
        return self.bench.features(spec, part)

    def right(self, spec: MergeSpec, environment: Environment, head: Linear | None = None) -> int:
        """Counts what a model gets right in the rest of an environment, by default with its old head."""
        logits = (head or self.bench.old_head(spec)).logits(self.bench.rows(self.features(spec, environment)))
        return self.count(logits, environment)

    def count(self, logits: Floats, environment: Environment) -> int:
        """Counts what logits get right in the rest of an environment."""
        labels = self.part(environment.rest, f"{environment.name} rest").labels
        return int((logits.argmax(axis=1) == labels).sum())


class SequenceBench:
    """The models of one trained sequence, and what is known of each environment. A context manager.

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
        trials: int = 50,
        joint: Path | None = None,
    ) -> None:
        self.benchmark, self.environments, self.seed = benchmark, tuple(environments), seed
        self._device, self._joint, self._trials = device, joint, trials
        self.run = Run.open(run)
        self.trained = Trained.open(self.run, benchmark, seed, device)
        self._sites: dict[tuple[str, Environment], Site] = {}
        self._preferences: dict[tuple[str, Environment], Preference] = {}

    def __enter__(self) -> SequenceBench:
        return self

    def __exit__(self, *error: object) -> None:
        self.trained.bench.close()
        if "joint" in vars(self):
            self.joint.bench.close()

    @cached_property
    def joint(self) -> Trained:
        """The model that was trained on all tasks together: the only task of a run of its own."""
        assert self._joint is not None
        return Trained.open(Run.open(self._joint), self.benchmark, self.seed, self._device)

    # -- what is known of an environment -----------------------------------------------------------------------------

    def truth(self, environment: Environment) -> Floats:
        """Returns the true mixture over tasks, as it was drawn."""
        weights = np.zeros(len(self.run.tasks))
        weights[list(environment.tasks)] = environment.ratio
        return weights

    def preference(self, source: str, environment: Environment) -> Preference:
        """Returns an environment's preference by a source, as `tmx prefer` finds it; found once."""
        key = (source, environment)
        if key not in self._preferences:
            options = PreferOptions(seed=self.seed, trials=self._trials)
            if source in ("ot", "ot-raw", "cosine", "mmd", "search"):
                method: Any = source.removesuffix("-raw")
                options = replace(options, method=method, raw=source == "ot-raw")
            self._preferences[key] = find_preference(self.site(source, environment), options)
        return self._preferences[key]

    def site(self, source: str, environment: Environment) -> Site:
        """Returns the environment as a user's site; sources that know the same share it, and so its embeddings."""
        known = KNOWN.get(source, "inputs")
        if (known, environment) not in self._sites:
            reading = Reading(max_samples=len(environment.meta), device=self._device)
            self._sites[known, environment] = Site(self.run, self._sources(known, environment), reading, self.seed)
        return self._sites[known, environment]

    def _sources(self, known: str, environment: Environment) -> SiteSources:
        if known == "weights":  # by hand, for tasks that the environment does not have
            others = [t for t in range(len(self.run.tasks)) if t not in environment.tasks]
            others = others or list(range(len(self.run.tasks)))
            drawn = shuffled(len(others), derived_seed(environment.variant, environment.mixture, "wrong"))
            chosen = {others[k] for k in drawn[: len(environment.tasks)]}
            return SiteSources(weights=[float(t in chosen) for t in range(len(self.run.tasks))])
        part = self.benchmark.test.subset(environment.meta)
        if known == "labels":
            assert part.labels is not None
            return SiteSources(labels=as_labels([part.classes[label] for label in part.labels]))
        own = vars(part) | ({"labels": None, "classes": ()} if known == "inputs" else {})
        samples = MemorySamples(**own)
        return SiteSources(inputs=samples) if known == "inputs" else SiteSources(labelled=samples)

    # -- models and heads --------------------------------------------------------------------------------------------

    def tailored(self, source: str, environment: Environment, head: HeadKind) -> Decision:
        """Returns what `tmx tailor` makes of what is known of an environment; with the old head unless it is fitted."""
        site, options = self.site(source, environment), TailorOptions(head="auto" if head == "fitted" else "old")
        self._forget_site()
        preference = self.preference(source, environment)
        bench, kept = self.trained.bench, self.trained.kept
        return tailor_in_memory(bench, site, replace(options, seed=self.seed), preference, kept)

    def head(self, trained: Trained, spec: MergeSpec, head: HeadKind, source: str, environment: Environment) -> Linear:
        """Returns the head of a model in an environment: fitted to it, or the old one with the site's class shares."""
        options = TailorOptions(head="auto" if head == "fitted" else "old")
        fits, preference = fits_heads(trained.bench, options), self.preference(source, environment)
        if trained is self.trained:
            self._forget_site()
            site = self.site(source, environment)
            material: Material = open_site_material(trained.bench, site, preference, fits=fits, kept=trained.kept)
        else:  # a run of one task, which the weights of the sequence's tasks do not fit
            alone = replace(Preference.from_weights([1.0]), prior=preference.prior)
            material = open_material(trained.bench, alone, fits=fits, kept=trained.kept)
        return trained.bench.fit(spec, material.all).linear

    def _forget_site(self) -> None:
        """Forgets the samples of the site before: those of every site have these names."""
        for name in ("inputs", "labelled"):
            self.trained.bench.forget(name)

    def task_accuracies(self, spec: MergeSpec) -> list[float]:
        """Returns the accuracy on each task's test samples, among all classes, with the old head."""
        trained = self.trained
        right = trained.bench.logits(spec, trained.tests).argmax(axis=1) == trained.tests.labels
        return [float(right[trained.tests.tasks == t].mean()) for t in range(len(self.run.tasks))]

    def best_checkpoint(self, environment: Environment) -> int:
        """Returns the task whose checkpoint gets most of the known samples right; of equal ones the last."""
        bench, meta = self.trained.bench, self.trained.part(environment.meta, f"{environment.name} known")
        counts = [
            int((bench.logits(MergeSpec(checkpoint=t), meta).argmax(axis=1) == meta.labels).sum())
            for t in range(1, len(self.run.tasks) + 1)
        ]
        return 1 + int(np.flatnonzero(np.array(counts) == max(counts))[-1])

    def held_accuracy(self, spec: MergeSpec) -> float:
        """Returns the accuracy on the training samples that were held out of all tasks, with the old head."""
        right = self.trained.bench.logits(spec, self._held).argmax(axis=1) == self._held.labels
        return float(right.mean())

    @cached_property
    def _held(self) -> BenchData:
        positions = sorted(position for task in self.benchmark.tasks for position in task.held)
        if not positions:
            raise InputError(
                "best scales are chosen on held-out training samples, and there are none: raise run.benchmark.holdout, "
                "or leave rows @best out"
            )
        bench = self.trained.bench
        return bench.open_labelled("held", label_samples(self.benchmark.train, bench.classes, None, positions))

    # -- scikit-learn's rival ----------------------------------------------------------------------------------------

    def logistic_logits(self, source: str, environment: Environment) -> Floats:
        """Returns logits by logistic regression on the base's embeddings of kept samples, with the site's shares."""
        classes, model, fitted_shares = self.trained.bench.classes, *self._logistic
        rows = [self.trained.rows[position] for position in environment.rest if position in self.trained.rows]
        logits = np.full((len(rows), len(classes)), LEAST_LOGIT)
        logits[:, model.classes_] = model.predict_log_proba(unit_rows(self._base_tests[rows])) - np.log(fitted_shares)
        return logits + np.log(site_shares(self.preference(source, environment), classes))

    @cached_property
    def _logistic(self) -> tuple[Any, Floats]:
        """The regression, and how often each of its classes was among what it was fitted to."""
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

    @cached_property
    def _base_tests(self) -> NDArray[np.float32]:
        return self._base_embeddings(self.trained.tests)

    def _base_embeddings(self, data: BenchData) -> NDArray[np.float32]:
        """Returns the base's own embeddings, which profiles hold: of sentences, the mean over the tokens."""
        if not self.trained.bench.is_builtin:
            return self.trained.bench.features(MergeSpec(checkpoint=0), data)
        return embed_prepared(self._base_encoder, data.prepared, BATCH, precise=False)

    @cached_property
    def _base_encoder(self) -> Any:
        return load_encoder(self.run.base, self._device)
