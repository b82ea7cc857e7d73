"""`Preference`: weights over tasks and where they came from; a JSON file."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tunable_magmax.errors import InputError, closest
from tunable_magmax.files import write_atomic

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from tunable_magmax.preference.features import Method as Features
    from tunable_magmax.preference.labels import Similarity
    from tunable_magmax.preference.shift import Method as Shift

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
VERSION = 1
KEYS = ("version", "method", "weights", "tasks", "intervals", "provenance")


@dataclass(frozen=True)
class Preference:
    """How much each task matters to a target, and how that was found.

    `weights`: T non-negative numbers, normalised on entry. `method`: the source's name. `provenance`: what went in,
    as JSON. `intervals`: a (low, high) pair per task where samples stood behind the weights. `tasks`: their names.

    >>> Preference((3, 1), "weights").weights
    (0.75, 0.25)
    """

    weights: tuple[float, ...]
    method: str = "weights"
    provenance: Mapping[str, JSON] = field(default_factory=dict, hash=False)
    intervals: tuple[tuple[float, float], ...] | None = None
    tasks: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", normalised(self.weights))
        if not isinstance(self.method, str) or not self.method:
            raise InputError(f"a preference's method must be a name, not {self.method!r}")
        if not isinstance(self.provenance, Mapping):
            raise InputError(f"a preference's provenance must be a mapping, not {type(self.provenance).__name__}")
        object.__setattr__(self, "provenance", copy.deepcopy(dict(self.provenance)))
        object.__setattr__(self, "intervals", _intervals(self.intervals, len(self.weights)))
        object.__setattr__(self, "tasks", _task_names(self.tasks, len(self.weights)))

    # -- files -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The file's text: one line per key, in fixed order, so equal preferences are equal bytes."""
        record = {"version": VERSION, **{key: getattr(self, key) for key in KEYS[1:-1]}}
        try:
            lines = [f'  "{key}": {_line(value)}' for key, value in record.items()]
            facts = [f"    {_line(str(key))}: {_line(self.provenance[key])}" for key in sorted(self.provenance)]
        except (TypeError, ValueError) as error:
            raise InputError(f"provenance cannot be written as JSON: {error}") from error
        provenance = "{\n" + ",\n".join(facts) + "\n  }" if facts else "{}"
        return "{\n" + ",\n".join([*lines, f'  "provenance": {provenance}']) + "\n}\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the preference to `path`, whole or not at all."""
        write_atomic(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Preference:
        """Read a preference file of this version or an older one."""
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InputError(f"{file}: no such file; `tmx prefer` writes preference files") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file}: cannot be read as a preference file ({error})") from error
        try:
            return cls.from_json(text)
        except InputError as error:
            raise InputError(f"{file}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Preference:
        """The inverse of `to_json`; also reads version 0, which had no `version`, `tasks` or `intervals`.

        >>> Preference.from_json('{"weights": [3, 1]}').weights
        (0.75, 0.25)
        """
        try:
            record = json.loads(text)
        except ValueError as error:
            raise InputError(f"not JSON: {error}") from error
        if not isinstance(record, dict):
            raise InputError(f"expected a JSON object with 'weights', found {type(record).__name__}")
        version = record.get("version", 0)
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise InputError(f"'version' must be a whole number, not {version!r}")
        if version > VERSION:
            raise InputError(f"version {version} is newer than this program reads ({VERSION}): upgrade tunable-magmax")
        for key in record:
            if key not in KEYS:
                raise InputError(f"unknown key {key!r}{closest(key, KEYS)}; a preference has {', '.join(KEYS)}")
        if "weights" not in record:
            raise InputError("the key 'weights' is missing: one number per task")
        provenance = record.get("provenance")
        return cls(
            weights=record["weights"],
            method=record.get("method", "weights"),
            provenance={} if provenance is None else provenance,
            intervals=record.get("intervals"),
            tasks=record.get("tasks"),
        )

    # -- use -------------------------------------------------------------------------------------------------------

    def budget(self, elements: int) -> list[int]:
        """How many of `elements` each task may give (rule 3 of the method)."""
        from tunable_magmax.merging.budget import budget

        return budget(self.weights, elements)

    def named(self, tasks: Sequence[str] | None) -> Preference:
        """The same preference with task names."""
        names = None if tasks is None else tuple(tasks)
        return Preference(self.weights, self.method, self.provenance, self.intervals, names)

    # -- sources ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_weights(cls, weights: Sequence[float] | ArrayLike) -> Preference:
        """Weights as the user wants them.

        >>> Preference.from_weights([3, 1]).weights
        (0.75, 0.25)
        """
        given = _numbers(weights)
        return cls(given, "weights", {"given": list(given)})

    @classmethod
    def from_alpha(cls, alpha: float, tasks: int) -> Preference:
        """The paper's schedule, w_t proportional to alpha^(T - t).

        >>> Preference.from_alpha(0.5, 2).weights
        (0.3333333333333333, 0.6666666666666666)
        """
        from tunable_magmax.preference.schedule import alpha_weights

        return cls(alpha_weights(alpha, tasks), "alpha", {"alpha": float(alpha)})

    @classmethod
    def equal(cls, tasks: int) -> Preference:
        """The same weight for every task.

        >>> Preference.equal(4).weights
        (0.25, 0.25, 0.25, 0.25)
        """
        from tunable_magmax.preference.schedule import task_count

        return cls((1.0,) * task_count(tasks), "equal")

    @classmethod
    def from_labels(
        cls,
        task_label_counts: Sequence[Any],
        labels: Iterable[Any],
        *,
        similarity: Similarity = "inner",
        **options: Any,
    ) -> Preference:
        """From labels of the target; one class-to-count mapping per task. See `labels.label_preference`.

        >>> Preference.from_labels([{"cat": 8}, {"car": 8}], ["cat", "cat", "cat", "car"]).weights
        (0.75, 0.25)
        """
        from tunable_magmax.preference.labels import label_preference

        return label_preference(task_label_counts, labels, similarity=similarity, **options)

    @classmethod
    def from_features(
        cls, task_features: Sequence[Any], target_features: Sequence[Any], method: Features = "ot", **options: Any
    ) -> Preference:
        """From inputs of the target: T arrays [n, width] each, every pair embedded by theta_t. See `features`."""
        from tunable_magmax.preference.features import feature_preference

        return feature_preference(task_features, target_features, method=method, **options)

    @classmethod
    def from_base_features(
        cls, task_features: Sequence[Any], task_labels: Sequence[Any], target_features: Any, **options: Any
    ) -> Preference:
        """From inputs of the target, embedded by the base alone, as the tasks' labelled rows are. See `base_features`.

        >>> tasks, labels = [[[2.0, 0.1], [2.0, 0.2]], [[0.1, 2.0], [0.2, 2.0]]], [["cat"] * 2, ["car"] * 2]
        >>> Preference.from_base_features(tasks, labels, [[0.1, 2.0], [0.0, 1.0]]).weights
        (0.0, 1.0)
        """
        from tunable_magmax.preference.base_features import probe_preference

        return probe_preference(task_features, task_labels, target_features, **options)

    @classmethod
    def from_predictions(
        cls, task_predictions: Sequence[Any], predictions: Iterable[Any], method: Shift = "shift", **options: Any
    ) -> Preference:
        """From a fixed classifier's predictions on the target and its histograms on the tasks. See `shift`."""
        from tunable_magmax.preference.shift import shift_preference

        return shift_preference(task_predictions, predictions, method=method, **options)

    @classmethod
    def auto(cls, **evidence: Any) -> Preference:
        """From the best of what is given, by a rule that needs no labels. See `auto.auto_preference`."""
        from tunable_magmax.preference.auto import auto_preference

        return auto_preference(**evidence)

    @classmethod
    def combined(cls, sources: Sequence[Preference], strengths: Sequence[float] | None = None) -> Preference:
        """From several preferences for one target, each found from other samples. See `combine`.

        >>> Preference.combined([Preference((1, 0)), Preference((0, 1))], strengths=[3, 1]).weights
        (0.75, 0.25)
        """
        from tunable_magmax.preference.combine import combined_preference

        return combined_preference(sources, strengths)


def normalised(weights: Any) -> tuple[float, ...]:
    """`weights` divided by their sum, each rounded once. Weights that sum to 1 already stay as they are."""
    numbers = _numbers(weights)
    total = math.fsum(numbers) if max(numbers) < 1e300 else math.inf
    # Rounding each weight once moves their sum by 2 ulp at most; without this a file would change when read and saved.
    if abs(total - 1) <= 1e-15:
        return numbers
    # As in rule 3, a weight is the decimal number it prints as; rationals neither overflow nor underflow on the way.
    exact = [Fraction(repr(number)) for number in numbers]
    whole = sum(exact)
    return tuple(float(number / whole) for number in exact)


def _numbers(weights: Any) -> tuple[float, ...]:
    if isinstance(weights, (str, bytes, Mapping)) or not hasattr(weights, "__iter__"):
        raise InputError(f"weights must be a list with one number per task, not {weights!r}")
    numbers = []
    for position, weight in enumerate(weights, start=1):
        try:
            number = float("" if isinstance(weight, (str, bytes, bool)) else weight)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"the weight of task {position} must be a number, not {weight!r}") from None
        if not math.isfinite(number):
            raise InputError(f"the weight of task {position} is {number}: weights must be finite")
        if number < 0:
            raise InputError(f"the weight of task {position} is {number}: weights must not be negative")
        numbers.append(abs(number))
    if not numbers:
        raise InputError("no weights: give one number per task")
    if not any(numbers):
        raise InputError("all weights are 0: give at least one task a positive weight, or ask for equal weights")
    return tuple(numbers)


def _intervals(pairs: Any, tasks: int) -> tuple[tuple[float, float], ...] | None:
    if pairs is None:
        return None
    try:
        clean = tuple((float(low), float(high)) for low, high in pairs)
    except (TypeError, ValueError):
        raise InputError("intervals must be one [low, high] pair of numbers per task") from None
    if len(clean) != tasks:
        raise InputError(f"{len(clean)} intervals for {tasks} weights: give one [low, high] pair per task")
    for position, (low, high) in enumerate(clean, start=1):
        if not 0 <= low <= high <= 1:
            raise InputError(f"the interval of task {position} is [{low}, {high}]; expected 0 <= low <= high <= 1")
    return clean


def _task_names(names: Any, tasks: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError("tasks must be a list of names")
    clean = tuple(names)
    if len(clean) != tasks:
        raise InputError(f"{len(clean)} task names for {tasks} weights: give one name per task")
    if len(set(clean)) != tasks:
        raise InputError(f"task names must differ; {sorted({n for n in clean if clean.count(n) > 1})} appear twice")
    return clean


def _line(value: JSON) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
