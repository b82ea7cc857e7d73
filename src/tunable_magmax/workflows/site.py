"""`Site`: what a user has of it, as the arrays that estimators take; read when first asked for."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import choose_rows, task_matrices
from tunable_magmax.data.class_names import by_name
from tunable_magmax.data.given import Source
from tunable_magmax.data.samples import Samples, Unreadable, is_index, warn_unreadable
from tunable_magmax.data.source import open_labels, open_samples
from tunable_magmax.errors import some_of
from tunable_magmax.files import Progress
from tunable_magmax.preference.base_features import TaskProbe
from tunable_magmax.runs.profile import require_base
from tunable_magmax.runs.run import Run

if TYPE_CHECKING:
    from tunable_magmax.models.head import Head

BATCH = 64
COPIES = 0.1
"""A larger share of copies among the inputs is worth a warning."""


SAMPLES = ("labels", "inputs", "labelled")
OPINIONS = ("weights", "alpha", "equal")
"""What may be said of a site without a sample of it; preferences have methods of these names, too."""


@dataclass(frozen=True)
class SiteSources:
    """What is known of a site: samples, in files or in memory, or an opinion. `weights`: by task, or by name."""

    weights: Sequence[float] | Mapping[str, float] | None = None
    alpha: float | None = None
    equal: bool = False
    labels: Source | None = None
    inputs: Source | None = None
    labelled: Source | None = None

    @property
    def samples(self) -> list[str]:
        """The names of the samples that were given."""
        return [name for name in SAMPLES if getattr(self, name) is not None]

    @property
    def opinions(self) -> list[str]:
        """The names of what was given by hand."""
        return [name for name in self.named() if name in OPINIONS]

    def named(self) -> dict[str, Any]:
        """Returns what was given, by name.

        >>> SiteSources(alpha=0.0, equal=False).named()
        {'alpha': 0.0}
        """
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}


@dataclass(frozen=True)
class SiteReading:
    """How the files are read.

    Of more inputs than `max_samples` a seeded draw is used. `device`: of encoders, by default the GPU if there is one.
    """

    max_samples: int = 500
    split: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    device: str | None = None


@dataclass(frozen=True, eq=False)
class Site:
    """What is known of a site, and the run that it is compared with.

    `facts`: what was read, for the provenance. `rows`: which row of its features each readable input has, by position;
    copies share one.
    """

    run: Run
    sources: SiteSources = SiteSources()
    reading: SiteReading = SiteReading()
    seed: int = 0
    progress: Progress | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)

    @property
    def can_probe(self) -> bool:
        """Whether there are inputs, and the base's embeddings for all tasks."""
        based = all(profile is not None and profile.base for profile in self.run.profiles)
        return based and self.sources.inputs is not None

    def head_of_file(self) -> Head | None:
        """Reads the run's frozen head; None where the tasks have classifiers themselves."""
        from tunable_magmax.models.head import load_head

        return None if self.run.head is None else load_head(self.run.head)

    def head(self) -> Head | None:
        """Reads the head that models are scored with: a file's, or the classifiers that the tasks have themselves."""
        from tunable_magmax.evaluation.run_models import merged_labels
        from tunable_magmax.models.head import builtin_head

        if self.run.head is not None:
            return self.head_of_file()
        labels = merged_labels(self.run.base, self.run.tasks, self.run.heads)
        return None if labels is None else builtin_head(labels)

    @cached_property
    def labels(self) -> list[Any]:
        """The site's labels, in the names of the tasks' classes or (`by_task`) of the tasks."""
        labels, file = self._read_labels, self.sources.labels
        assert file is not None
        if self.by_task:
            return list(labels)
        lists = [profile.classes for profile in self.run.require_profiles("--labels")]
        head = self.head_of_file() if all(map(is_index, labels)) else None
        return by_name(labels, lists, [] if head is None else [head.classes], file)

    @cached_property
    def by_task(self) -> bool:
        """Whether the labels are names of tasks. A name of both is a class, and so are indices."""
        labels, tasks = set(self._read_labels), set(self.run.names or ())
        classes = {name for profile in self.run.profiles if profile is not None for name in profile.classes}
        classes.update(*self.run.classes.values())
        both = sorted(labels & tasks & classes)
        if both:
            warnings.warn(f"{some_of(both)}: both a class and a task; the labels are taken as classes", stacklevel=2)
        return bool(labels & tasks) and not labels & classes and not all(map(is_index, labels))

    @cached_property
    def _read_labels(self) -> Sequence[str]:
        file = self.sources.labels
        assert file is not None
        self.facts["labels_file"] = file.name
        return open_labels(file, self.reading.split, self.reading.label_column)

    @cached_property
    def features(self) -> list[Any]:
        """The site's features under each task's encoder."""
        from tunable_magmax.models.encoder import load_encoder

        profiles = self.run.require_profiles("comparing inputs")
        embedded = []
        for t, (path, profile) in enumerate(zip(self.run.tasks, profiles, strict=True)):
            encoder = load_encoder(path, self.reading.device, assets=self.run.base)
            profile.require(encoder=encoder.digest)
            embedded.append(self.embed(encoder.embed, "embedding", t, len(profiles)))
        return embedded

    @cached_property
    def base_features(self) -> Any:
        """The site's features under the base."""
        from tunable_magmax.models.encoder import load_encoder

        profiles = self.run.require_profiles("a probe")
        require_base(profiles)
        encoder = load_encoder(self.run.base, self.reading.device)
        profiles[0].require(base=encoder.digest)
        return self.embed(encoder.embed, "embedding")

    @cached_property
    def probe(self) -> TaskProbe:
        """The probe of the tasks' rows under the base, fitted once."""
        profiles = self.run.require_profiles("a probe")
        rows = task_matrices([profile.base_features for profile in profiles], "base features")
        return TaskProbe.fit(rows, [profile.row_classes for profile in profiles], self.seed)

    @cached_property
    def _samples(self) -> tuple[Samples, list[int]]:
        inputs, reading = self.sources.inputs, self.reading
        assert inputs is not None
        samples = open_samples(inputs, reading.split, reading.text_column, reading.label_column)
        self.facts.update(inputs=inputs.name, given_inputs=len(samples))
        if samples.labels is not None and self.sources.labels is None:
            self.facts["unused_labels"] = True
        return samples, choose_rows(len(samples), reading.max_samples, self.seed)

    def embed(
        self, function: Callable[[Sequence[Any]], NDArray[Any]], phase: str, part: int = 0, parts: int = 1
    ) -> NDArray[Any]:
        """Reads the inputs, calls `function` on batches of them, and joins what it returns. Copies count once."""
        samples, positions = self._samples
        failed: dict[int, Unreadable] = {}
        results, done = [], part * len(positions)
        distinct: dict[Any, int] = {}
        for where, inputs in samples.batches(positions, BATCH, failed):
            fresh = []
            for position, value in zip(where, inputs, strict=True):
                if (content := _content(value)) not in distinct:
                    distinct[content] = len(distinct)
                    fresh.append(value)
                self.rows[position] = distinct[content]
            if fresh:
                results.append(function(fresh))
            done += len(inputs)
            if self.progress is not None:
                self.progress(phase, done, parts * len(positions))
        warn_unreadable(samples.origin, failed, len(positions))
        if failed:
            self.facts["unreadable"] = len(failed)
        self._note_copies(len(positions) - len(failed), len(distinct))
        return np.concatenate(results)

    def _note_copies(self, samples: int, distinct: int) -> None:
        copies = samples - distinct
        if copies and "copies" not in self.facts:
            self.facts["copies"] = copies
            if copies > COPIES * samples:
                warnings.warn(f"{copies} of {samples} samples are copies of others; they count once", stacklevel=3)


def _content(value: Any) -> Any:
    """Returns what equal inputs have in common: a text, or size, mode and digest of a picture."""
    if isinstance(value, str):
        return value
    return value.size, value.mode, hashlib.sha256(value.tobytes()).digest()
