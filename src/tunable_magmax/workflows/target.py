"""What a user has of the target, as the arrays that preferences are made from. Read when first asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.data.class_names import by_name
from tunable_magmax.data.features import (
    Features,
    holds_features,
    holds_task_features,
    read_base_features,
    read_task_features,
)
from tunable_magmax.data.samples import Samples, Unreadable, warn_unreadable
from tunable_magmax.data.source import open_labels, open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.preference.profile import Profile, choose_rows, require_one_base, require_one_classifier
from tunable_magmax.runs.run import Run

MOST_SAMPLES = 500


@dataclass(frozen=True, eq=False)
class Target:
    """Files about the target, for a run. `limit`: of more inputs than that a seeded draw is used."""

    run: Run
    labels_file: Path | None = None
    inputs: Path | None = None
    predictions_file: Path | None = None
    head: Path | None = None
    classifier_checkpoint: Path | None = None
    split: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    limit: int = MOST_SAMPLES
    seed: int = 0
    device: str | None = None
    progress: Progress | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What was read, for the provenance."""

    @property
    def ready(self) -> bool:
        """Whether the inputs are features already."""
        return self.inputs is not None and holds_features(self.inputs)

    @property
    def can_predict(self) -> bool:
        """Whether the fixed classifier's predictions on the target are at hand or can be made."""
        profiled = all(profile is not None and profile.predicted is not None for profile in self.run.profiles)
        if self.predictions_file is not None:
            return True
        return profiled and self.inputs is not None and not self.ready and self.head_file is not None

    @property
    def can_compare(self) -> bool:
        """Whether the target's features under each task's encoder are at hand or can be made."""
        if self.inputs is None:
            return False
        return not self.ready or holds_task_features(self.inputs, self.run.labels, self._encoders)

    @property
    def can_probe(self) -> bool:
        """Whether the base's embeddings are there for all tasks, and for the target are at hand or can be made."""
        if self.inputs is None or not all(profile is not None and profile.base for profile in self.run.profiles):
            return False
        return not self.ready or self._ready_base is not None

    @property
    def head_file(self) -> Path | None:
        return self.head or self.run.head

    @cached_property
    def labels(self) -> list[Any]:
        """The target's labels, in the names of the tasks' classes."""
        assert self.labels_file is not None
        given = open_labels(self.labels_file, self.split, self.label_column)
        self.facts["labels_file"] = self.labels_file.name
        lists = [profile.classes for profile in self.run.require_profiles("--labels")]
        classifiers = [profile.classifier_classes for profile in self.run.profiles if profile is not None]
        return by_name(given, lists, classifiers, self.labels_file)

    @cached_property
    def predictions(self) -> list[str]:
        """The class that the fixed classifier gives each of the target's samples."""
        profiles = self.run.require_profiles("label-shift estimation")
        require_one_classifier(profiles)
        classes = profiles[0].classifier_classes
        if self.predictions_file is not None:
            self.facts["predictions_file"] = self.predictions_file.name
            given = open_labels(self.predictions_file, None, self.label_column)
            return by_name(given, [classes], [classes], self.predictions_file)
        classifier = self._classifier()
        for profile in profiles:
            profile.require(classifier=classifier.digest)
        found: list[str] = []

        def predict(inputs: Sequence[Any]) -> None:
            indices = classifier.probabilities(inputs).argmax(axis=1)
            found.extend(classes[index] for index in indices.tolist())

        self._each_batch(predict, "classifying", 1, 1)
        return found

    @cached_property
    def features(self) -> list[Any]:
        """The target's features under each task's encoder."""
        profiles = self.run.require_profiles("comparing inputs")
        assert self.inputs is not None
        if self.ready:
            return self._ready_features(profiles)
        from tunable_magmax.models.encoder import load_encoder

        tables = []
        for t, (path, profile) in enumerate(zip(self.run.tasks, profiles, strict=True), 1):
            encoder = load_encoder(path, self.device, assets=self.run.base)
            profile.require(encoder=encoder.digest)
            parts: list[Any] = []
            embed = _appending(encoder.embed, parts)
            self._each_batch(embed, "embedding", t, len(profiles))
            tables.append(np.concatenate(parts))
        return tables

    @cached_property
    def base_features(self) -> Any:
        """The target's features under the base."""
        profiles = self.run.require_profiles("a probe")
        require_one_base(profiles)
        if self.inputs is None:
            raise InputError("a probe looks at embeddings: give --inputs, not only --predictions")
        if self.ready:
            return self._checked_base(profiles[0])
        from tunable_magmax.models.encoder import load_encoder

        encoder = load_encoder(self.run.base, self.device)
        profiles[0].require(base=encoder.digest)
        parts: list[Any] = []
        self._each_batch(_appending(encoder.embed, parts), "embedding", 1, 1)
        return np.concatenate(parts)

    @cached_property
    def _ready_base(self) -> Features | None:
        assert self.inputs is not None
        return read_base_features(self.inputs, self.run.labels, self._encoders)

    @property
    def _encoders(self) -> list[str]:
        return [profile.encoder for profile in self.run.profiles if profile is not None]

    def _checked_base(self, profile: Profile) -> Any:
        found = self._ready_base
        assert self.inputs is not None
        assert profile.base_features is not None
        if found is None:
            raise InputError(
                f"{self.inputs} holds no features under the base: add them as base.npy or base.safetensors, or give "
                "the inputs themselves"
            )
        if found.encoder is not None:
            profile.require(base=found.encoder)
        width = profile.base_features.shape[1]
        if found.values.shape[1] != width:
            raise InputError(
                f"{found.origin}: the features have width {found.values.shape[1]}, but the base's embeddings in the "
                f"profiles have width {width}; embed the target with the run's base"
            )
        self.facts["inputs"] = self.inputs.name
        return found.values

    def _ready_features(self, profiles: Sequence[Profile]) -> list[Any]:
        assert self.inputs is not None
        found = read_task_features(self.inputs, self.run.labels, [profile.encoder for profile in profiles])
        for profile, features in zip(profiles, found, strict=True):
            if features.encoder is not None:
                profile.require(encoder=features.encoder)
            if features.values.shape[1] != profile.width:
                raise InputError(
                    f"{features.origin}: the features have width {features.values.shape[1]}, but the profile of task "
                    f"{profile.task!r} has width {profile.width}; embed the target with that task's checkpoint"
                )
        self.facts["inputs"] = self.inputs.name
        return [features.values for features in found]

    @cached_property
    def _samples(self) -> tuple[Samples, list[int]]:
        assert self.inputs is not None
        samples = open_samples(self.inputs, self.split, self.text_column, self.label_column)
        positions = choose_rows(len(samples), self.limit, self.seed)
        self.facts["inputs"] = self.inputs.name
        self.facts["given_inputs"] = len(samples)
        if samples.labels is not None and self.labels_file is None:
            self.facts["unused_labels"] = True
        return samples, positions

    def _each_batch(self, use: Callable[[Sequence[Any]], None], phase: str, part: int, parts: int) -> None:
        """Read the inputs and hand them on in batches. What cannot be read is told once, however often it is tried."""
        samples, positions = self._samples
        failed: dict[int, Unreadable] = {}
        done = 0
        for _, inputs in samples.batches(positions, 64, failed):
            use(inputs)
            done += len(inputs)
            if self.progress is not None:
                self.progress(phase, (part - 1) * len(positions) + done, parts * len(positions))
        with warnings.catch_warnings():
            if self.facts.get("unreadable"):
                warnings.simplefilter("ignore")
            warn_unreadable(samples.origin, failed, len(positions))
        if failed:
            self.facts["unreadable"] = len(failed)

    def _classifier(self) -> Any:
        from tunable_magmax.models.encoder import load_encoder
        from tunable_magmax.models.head import Classifier, load_head

        if self.head_file is None:
            raise InputError(
                "label-shift estimation needs the fixed classifier: give its head with --classifier (and its encoder "
                "with --classifier-checkpoint, by default the run's base), or its predictions with --predictions"
            )
        if self.inputs is None or self.ready:
            raise InputError(
                "the fixed classifier needs the inputs themselves (images or texts), not ready features; give "
                "--predictions FILE, the classes it predicted for them, or use --method ot"
            )
        head = load_head(self.head_file)
        checkpoint = self.classifier_checkpoint or self.run.classifier_checkpoint or self.run.base
        return Classifier(load_encoder(checkpoint, self.device, assets=self.run.base), head)


def _appending(embed: Callable[[Sequence[Any]], Any], parts: list[Any]) -> Callable[[Sequence[Any]], None]:
    def use(inputs: Sequence[Any]) -> None:
        parts.append(embed(inputs))

    return use
