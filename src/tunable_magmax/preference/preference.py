"""`Preference`: weights over tasks and where they came from; a JSON file."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tunable_magmax.errors import InputError, plural, shown_shares
from tunable_magmax.files import read_whole, write_atomic
from tunable_magmax.merging.budget import in_order
from tunable_magmax.preference.shares import (
    HAND_EPS,
    JSON,
    LEAST_EPS,
    Intervals,
    PriorSource,
    Similarity,
    SitePrior,
    alpha_weights,
    count_classes,
    normalised,
    plain_list,
    read_shares,
    task_count,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from tunable_magmax.data.arrays import Floats
    from tunable_magmax.preference.base_features import TaskProbe
    from tunable_magmax.preference.distances import FeatureMethod
    from tunable_magmax.preference.mixture import Groups

VERSION = 1
FILE = "preference.json"
"""Its name in the directory of a tailored model."""


@dataclass(frozen=True)
class PriorFile:
    """The key `prior` of a preference file."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "strict": True}

    shares: dict[str, float]
    eps: float
    source: PriorSource = "tasks"


@dataclass(frozen=True)
class PreferenceFile:
    """The keys of a preference file, in the order in which they are written; only `weights` must be there."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "strict": True}

    weights: list[float]
    version: int = VERSION
    method: str = "weights"
    tasks: list[str] | None = None
    intervals: list[tuple[float, float]] | None = None
    expected_error: float | None = None
    scale: float | None = None
    prior: PriorFile | None = None
    provenance: dict[str, Any] | None = None


@dataclass(frozen=True, repr=False)
class Preference:
    """How much each task matters to a site, and how that was found.

    `weights`: T non-negative numbers, normalised on entry. `method`: the source's name. `provenance`: what went in,
    as JSON. `intervals`: a (low, high) pair for each task, and `expected_error`: half the L1 distance to the site's
    true weights, None where nothing is known of them. `tasks`: their names. `scale`: the length of the merged step that
    was found to suit the site, None for the method's default. `prior`: how often each class occurs.

    >>> Preference((3, 1), "weights").weights
    (0.75, 0.25)
    """

    weights: tuple[float, ...]
    method: str = "weights"
    provenance: Mapping[str, JSON] = field(default_factory=dict, hash=False)
    intervals: Intervals | None = None
    expected_error: float | None = None
    tasks: tuple[str, ...] | None = None
    scale: float | None = None
    prior: SitePrior | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", normalised(self.weights))
        if not isinstance(self.method, str) or not self.method:
            raise InputError(f"a preference's method must be a name, not {self.method!r}")
        if not isinstance(self.provenance, Mapping):
            raise InputError(f"a preference's provenance must be a mapping, not {type(self.provenance).__name__}")
        object.__setattr__(self, "provenance", copy.deepcopy(dict(self.provenance)))
        object.__setattr__(self, "intervals", _intervals(self.intervals, len(self.weights)))
        object.__setattr__(self, "tasks", _task_names(self.tasks, len(self.weights)))
        if self.expected_error is not None and not 0 <= self.expected_error <= 1:
            raise InputError(f"a preference's expected error must lie between 0 and 1, not {self.expected_error!r}")
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise InputError(f"a preference's scale must be a finite number above 0, not {self.scale!r}")

    # -- how it shows itself -----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        more = [] if self.scale is None else [f"scale {self.scale:g}"]
        more += ["a site prior"] if self.prior is not None else []
        shares = shown_shares(self._labels, self.weights)
        return f"Preference({'; '.join([f'{self._source}: {shares}', *more])})"

    @property
    def _labels(self) -> tuple[str, ...]:
        return self.tasks or tuple(f"task {t}" for t in range(1, len(self.weights) + 1))

    @property
    def _source(self) -> str:
        samples = self.provenance.get("samples")
        if not isinstance(samples, int):
            return self.method
        return f"{self.method}, {plural(samples, 'sample')}"

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON: what the file holds."""
        content: dict[str, Any] = json.loads(self.to_json())
        return content

    # -- files -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns the file's text: one line per key, in fixed order, so equal preferences are equal bytes."""
        keys = ("method", "weights", "tasks", "intervals", "expected_error", "scale")
        record: dict[str, JSON] = {"version": VERSION, **{key: getattr(self, key) for key in keys}}
        record["prior"] = None if self.prior is None else {**vars(self.prior)}
        try:
            lines = [f'  "{key}": {_line(value)}' for key, value in record.items()]
            facts = [f"    {_line(str(key))}: {_line(self.provenance[key])}" for key in sorted(self.provenance)]
        except (TypeError, ValueError) as error:
            raise InputError(f"provenance cannot be written as JSON: {error}") from error
        provenance = "{\n" + ",\n".join(facts) + "\n  }" if facts else "{}"
        return "{\n" + ",\n".join([*lines, f'  "provenance": {provenance}']) + "\n}\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the preference to `path`, whole or not at all."""
        write_atomic(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Preference:
        """Reads a preference file, or the one in a directory that `tailor` made."""
        file = Path(path)
        if file.is_dir():
            if not (file / FILE).is_file():
                raise InputError(
                    f"{file} is a directory without {FILE}: give the file that `tmx prefer` writes, or the directory "
                    "of a model that `tmx tailor` made"
                )
            file = file / FILE
        try:
            text = read_whole(file).decode()
        except FileNotFoundError:
            raise InputError(f"{file}: no such file; `tmx prefer` writes preference files") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{file}: cannot be read as a preference file ({error})") from error
        return cls._read(text, str(file))

    @classmethod
    def from_json(cls, text: str) -> Preference:
        """Reads what `to_json` returned.

        >>> Preference.from_json('{"weights": [3, 1]}').weights
        (0.75, 0.25)
        """
        return cls._read(text, "the preference")

    @classmethod
    def _read(cls, text: str, where: str) -> Preference:
        from tunable_magmax.config import check_json

        file = check_json(PreferenceFile, text, where, VERSION)
        try:
            prior = None if file.prior is None else SitePrior(**vars(file.prior))
            facts = {name: getattr(file, name) for name in ("method", "intervals", "expected_error", "tasks", "scale")}
            return cls(tuple(file.weights), provenance=file.provenance or {}, prior=prior, **facts)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error

    # -- use -------------------------------------------------------------------------------------------------------

    def budget(self, elements: int) -> list[int]:
        """Returns how many of `elements` each task may give (rule 3 of the method)."""
        from tunable_magmax.merging.budget import budget

        return budget(self.weights, elements)

    def named(self, tasks: Sequence[str] | None) -> Preference:
        """Returns the same preference with task names."""
        return replace(self, tasks=None if tasks is None else tuple(tasks))

    def with_facts(self, **facts: JSON) -> Preference:
        """Returns the same preference with more facts in its provenance."""
        return replace(self, provenance={**self.provenance, **facts})

    def with_prior(self, task_label_counts: Sequence[Any], *, eps: float | None = None) -> Preference:
        """Returns the same preference with the site prior that its weights mean, unless it has one already.

        One class-to-count mapping for each task. `eps`: the part that is spread evenly over all classes, by default
        that of the prior that is there, or 0.02.

        >>> Preference((3, 1)).with_prior([{"cat": 5}, {"car": 5}], eps=0.1).prior.shares
        {'cat': 0.75, 'car': 0.25}
        """
        if self.prior is not None:
            return self if eps is None else replace(self, prior=replace(self.prior, eps=eps))
        return replace(
            self, prior=SitePrior.of_tasks(self.weights, task_label_counts, HAND_EPS if eps is None else eps)
        )

    # -- sources ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_evidence(
        cls,
        evidence: Floats,
        groups: Groups,
        method: str = "posterior",
        provenance: Mapping[str, JSON] | None = None,
        *,
        labelled: bool = False,
        seed: int = 0,
    ) -> Preference:
        """Returns the posterior's mean, intervals and expected error, with the site prior; see `mixture`.

        `evidence` [samples, groups]: how likely each sample is under each class of each task. `labelled`: whether the
        evidence holds labels, of which the prior is said to come then.
        """
        from tunable_magmax.preference.mixture import infer_mixture

        found = infer_mixture(evidence, groups, seed)
        facts: dict[str, JSON] = {"samples": found.samples, "mattering": found.mattering, "seed": seed}
        shares: dict[str, float] = {}
        for name, share in found.class_shares.items():
            shares[str(name)] = shares.get(str(name), 0.0) + share
        return cls(
            tuple(found.weights.tolist()),
            method,
            {**(provenance or {}), **facts, "concentration": found.concentration},
            tuple((low, high) for low, high in found.intervals.clip(0, 1).tolist()),
            found.expected_error,
            prior=SitePrior(shares, LEAST_EPS, "labels" if labelled else "tasks"),
        )

    @classmethod
    def from_weights(
        cls, weights: Sequence[float] | ArrayLike | Mapping[str, float], tasks: Sequence[str] | None = None
    ) -> Preference:
        """Takes weights as the user wants them: one for each task, or by name.

        `tasks`: all names in training order; a task that is not among the weights weighs 0.

        >>> Preference.from_weights([3, 1]).weights
        (0.75, 0.25)
        >>> Preference.from_weights({"bank": 3, "travel": 1}, tasks=["travel", "music", "bank"]).weights
        (0.25, 0.0, 0.75)
        """
        names = tuple(weights) if tasks is None and isinstance(weights, Mapping) else tasks
        numbers = tuple(map(float, read_shares(in_order(weights, names))))
        return cls(numbers, "weights", {"given": list(numbers)}).named(names)

    @classmethod
    def from_alpha(cls, alpha: float, tasks: int) -> Preference:
        """Follows the paper's schedule, w_t proportional to alpha^(T - t).

        >>> Preference.from_alpha(0.5, 2).weights
        (0.3333333333333333, 0.6666666666666666)
        """
        return cls(alpha_weights(alpha, tasks), "alpha", {"alpha": float(alpha)})

    @classmethod
    def equal(cls, tasks: int) -> Preference:
        """Gives every task the same weight.

        >>> Preference.equal(4).weights
        (0.25, 0.25, 0.25, 0.25)
        """
        return cls((1.0,) * task_count(tasks), "equal")

    @classmethod
    def from_labels(
        cls, task_label_counts: Sequence[Any], labels: Iterable[Any], similarity: Similarity = "count", *, seed: int = 0
    ) -> Preference:
        """Estimates from labels of the site; one class-to-count mapping for each task.

        "count": the posterior of the mixture. "inner": the paper's inner product of class shares, without intervals,
        which favours tasks of few classes.

        >>> few, many = Preference.from_labels([{"cat": 8}, {"car": 8}], ["cat"] * 30 + ["car"] * 10).weights
        >>> round(few, 1), round(many, 1)
        (0.7, 0.3)
        """
        from tunable_magmax.preference.mixture import Groups

        if similarity not in ("inner", "count"):
            raise InputError(f"similarity must be 'inner' or 'count', not {similarity!r}")
        counts = count_classes(task_label_counts, plain_list(labels, "labels"))
        counts.require_known()
        facts: dict[str, JSON] = {"unknown": sum(counts.unknown.values())}
        if similarity == "inner":
            found = counts.similarities.tolist()
            facts |= {"samples": int(counts.site.sum()), "similarities": found}
            return cls(found, "label-inner", facts)
        groups = Groups.of([dict(zip(counts.classes, row, strict=True)) for row in counts.tasks.tolist()])
        known = [name for name, count in zip(counts.classes, counts.site, strict=True) for _ in range(int(count))]
        return cls.from_evidence(groups.of_labels(known), groups, "label", facts, labelled=True, seed=seed)

    @classmethod
    def from_features(
        cls,
        task_features: Sequence[Any],
        site_features: Sequence[Any],
        method: FeatureMethod = "ot",
        raw: bool = False,
    ) -> Preference:
        """Estimates as the paper does: T arrays [n, width] of the tasks and of the site, each pair embedded by theta_t.

        `raw`: compare embeddings as they are by transport, as in the paper, and not those of unit length.
        """
        from tunable_magmax.preference.distances import GAMMA, feature_distances, weights_from_distances

        distances = feature_distances(task_features, site_features, method, raw)
        weights = weights_from_distances(distances, GAMMA[method])
        facts: dict[str, JSON] = {"samples": len(site_features[0]), "distances": distances.tolist()}
        return cls(tuple(weights.tolist()), method, {**facts, **({"raw": True} if raw else {})})

    def with_ood_share(self, fitted: TaskProbe, features: Any) -> Preference:
        """Returns the same preference with the share of samples that are unlike every task in its facts.

        More of them than a mixture of the tasks holds count as misjudged in the expected error.
        """
        import numpy as np

        from tunable_magmax.preference.base_features import USUAL_OOD, ood_share

        share = ood_share(fitted, np.asarray(self.weights), fitted.probe.distances(features))
        error = min(1.0, (self.expected_error or 0.0) + max(0.0, share - USUAL_OOD))
        return replace(self, expected_error=error).with_facts(ood_share=share)


def read_preference(source: Preference | str | os.PathLike[str], names: Sequence[str] | None, tasks: int) -> Preference:
    """Returns a preference, or that of a file or of a tailored model; refuses one that is about other tasks."""
    if not isinstance(source, Preference | str | os.PathLike):
        raise InputError(f"{source!r} is no preference: give one, or its file; weights go as weights={source!r}")
    preference = source if isinstance(source, Preference) else Preference.load(source)
    where = "the preference" if preference is source else str(source)
    if names is not None and preference.tasks is not None and preference.tasks != tuple(names):
        raise InputError(
            f"{where} is about other tasks than the run: it has {', '.join(preference.tasks)}; "
            f"the run has {', '.join(names)}; make one for this run with `tmx prefer`"
        )
    if len(preference.weights) != tasks:
        raise InputError(
            f"{where} has {len(preference.weights)} weights for {tasks} tasks: make one for this run with `tmx prefer`"
        )
    return preference


def _intervals(pairs: Any, tasks: int) -> Intervals | None:
    if pairs is None:
        return None
    try:
        clean = tuple((float(low), float(high)) for low, high in pairs)
    except (TypeError, ValueError):
        clean = ()
    if len(clean) != tasks or not all(0 <= low <= high <= 1 for low, high in clean):
        raise InputError(
            f"intervals must be {tasks} pairs [low, high], one per task, with 0 <= low <= high <= 1: {pairs}"
        )
    return clean


def _task_names(names: Any, tasks: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not listed or not all(isinstance(name, str) for name in names) or not len(names) == len(set(names)) == tasks:
        raise InputError(f"tasks must be a list of {tasks} different names, one for each weight: {names!r}")
    return tuple(names)


def _line(value: JSON) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
