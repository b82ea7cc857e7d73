"""`Site`: what is known of a site, as the arrays that estimators take; read when first asked for."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import choose_rows
from tunable_magmax.data.samples import Samples, Unreadable, by_name, is_index, warn_unreadable
from tunable_magmax.data.source import open_labels
from tunable_magmax.errors import some_of
from tunable_magmax.files import Progress
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.preference.base_features import TaskProbe
from tunable_magmax.preference.distances import task_matrices
from tunable_magmax.runs.profile import require_base
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.command_options import SiteSources as SiteSources
from tunable_magmax.workflows.options import Reading

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head

MOST_INPUTS = 500
"""Inputs of a site that are used unless told otherwise."""
COPIES = 0.1
"""A larger share of copies among the inputs is worth a warning."""


@dataclass(frozen=True, eq=False)
class Site:
    """What is known of a site, and the run that it is compared with.

    `seed`: of the draw from many samples, and of the probe. `facts`: what was read, for the provenance. `rows`: which
    row of its features each readable input has, by position; copies share one.
    """

    run: Run
    sources: SiteSources = SiteSources()
    reading: Reading = Reading()
    seed: int = 0
    progress: Progress | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)

    def open_samples(self, name: str) -> Samples:
        """Opens the samples called `inputs` or `labelled`, at most so many as are to be read."""
        source = getattr(self.sources, name)
        samples = self.reading.open(source)
        if name == "labelled":
            samples.require_labels()
        most = self.reading.max_samples or MOST_INPUTS
        return samples if len(samples) <= most else samples.subset(choose_rows(len(samples), most, self.seed))

    def frozen_head(self) -> Head | None:
        """Reads the run's frozen head; None where the tasks have classifiers themselves."""
        from tunable_magmax.models.head import load_head

        return None if self.run.head is None else load_head(self.run.head)

    # -- labels ------------------------------------------------------------------------------------------------------

    @cached_property
    def _read_labels(self) -> Sequence[str]:
        source = self.sources.labels
        assert source is not None
        self.facts["labels_file"] = source.name
        return open_labels(source, self.reading.split, self.reading.label_column)

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
    def labels(self) -> list[Any]:
        """The site's labels, in the names of the tasks' classes or (`by_task`) of the tasks."""
        labels, source = self._read_labels, self.sources.labels
        assert source is not None
        if self.by_task:
            return list(labels)
        classes = [profile.classes for profile in self.run.require_profiles("labels")]
        head = self.frozen_head() if all(map(is_index, labels)) else None
        return by_name(labels, classes, source, () if head is None else head.classes)

    # -- inputs ------------------------------------------------------------------------------------------------------

    @cached_property
    def features(self) -> list[NDArray[Any]]:
        """The site's features under each task's encoder."""
        from tunable_magmax.models.encoder import load_encoder

        profiles = self.run.require_profiles("comparing inputs")
        embedded = []
        for t, (path, profile) in enumerate(zip(self.run.tasks, profiles, strict=True)):
            encoder = load_encoder(path, self.reading.device, assets=self.run.base)
            profile.require(encoder=encoder.digest)
            embedded.append(self._embed(encoder, t, len(profiles)))
        return embedded

    @cached_property
    def base_features(self) -> NDArray[Any]:
        """The site's features under the base."""
        from tunable_magmax.models.encoder import load_encoder

        profiles = self.run.require_profiles("a probe")
        require_base(profiles)
        encoder = load_encoder(self.run.base, self.reading.device)
        profiles[0].require(base=encoder.digest)
        return self._embed(encoder)

    @cached_property
    def probe(self) -> TaskProbe:
        """The probe of the tasks' rows under the base, fitted once."""
        profiles = self.run.require_profiles("a probe")
        rows = task_matrices([profile.base_features for profile in profiles], "base features")
        return TaskProbe.fit(rows, [profile.row_classes for profile in profiles], self.seed)

    @cached_property
    def _inputs(self) -> tuple[Samples, list[int]]:
        source = self.sources.inputs
        assert source is not None
        samples = self.reading.open(source)
        self.facts.update(inputs=source.name, given_inputs=len(samples))
        if samples.labels is not None and self.sources.labels is None and self.sources.labelled is None:
            warnings.warn(
                f"{source} holds labels as well, which say more than inputs; labels in place of inputs uses them",
                stacklevel=2,
            )
        return samples, choose_rows(len(samples), self.reading.max_samples or MOST_INPUTS, self.seed)

    def _embed(self, encoder: Encoder, part: int = 0, parts: int = 1) -> NDArray[Any]:
        """Embeds the readable inputs, in batches; copies are embedded once and count once."""
        samples, positions = self._inputs
        failed: dict[int, Unreadable] = {}
        results, done = [], part * len(positions)
        distinct: dict[Any, int] = {}
        for where, inputs in samples.batches(positions, self.reading.batch, failed):
            fresh = []
            for position, value in zip(where, inputs, strict=True):
                if (content := _content(value)) not in distinct:
                    distinct[content] = len(distinct)
                    fresh.append(value)
                self.rows[position] = distinct[content]
            if fresh:
                results.append(embed_inputs(encoder, fresh))
            done += len(inputs)
            if self.progress is not None:
                self.progress("embedding", done, parts * len(positions))
        warn_unreadable(samples.origin, failed, len(positions))
        read = len(positions) - len(failed)
        copies = read - len(distinct)
        if copies > COPIES * read and "copies" not in self.facts:
            warnings.warn(f"{copies} of {read} samples are copies of others; they count once", stacklevel=2)
        counted = {"unreadable": len(failed), "copies": copies}
        self.facts.update({name: count for name, count in counted.items() if count})
        return np.concatenate(results)


def _content(value: Any) -> Any:
    """Returns what equal inputs have in common: a text, or size, mode and digest of a picture."""
    if isinstance(value, str):
        return value
    return value.size, value.mode, hashlib.sha256(value.tobytes()).digest()
