"""Points of the page: what a request says, the model that it means, and the command that makes it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunable_magmax.config import STRICT
from tunable_magmax.errors import InputError, closest, shortened
from tunable_magmax.evaluation.choosing import default_method, default_scale
from tunable_magmax.evaluation.run_models import MergeSpec
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.site import completed
from tunable_magmax.runs.run import Run

MOST_SCALE = 100.0
OFFERED = tuple(name for name, method in METHODS.items() if method.weights == "shares" or name == "magmax")
"""Methods of the page. Those whose weights are plain factors mean something else by a mix."""


@dataclass(frozen=True)
class Preset:
    """A preference to begin with. `file`: where it is saved, for those that samples or a file gave."""

    id: str
    title: str
    preference: Preference
    file: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns what the page shows of it."""
        shown = ("weights", "intervals", "expected_error", "method", "scale")
        facts = {name: getattr(self.preference, name) for name in shown}
        return {"id": self.id, "title": self.title, "samples": self.preference.provenance.get("samples"), **facts}


def usual_presets(run: Run) -> list[Preset]:
    """Returns equal weights, and one preset for each task alone."""
    tasks = len(run.tasks)
    only = [
        Preset(f"only-{t}", f"only {label}", Preference.from_weights([float(k == t) for k in range(tasks)]))
        for t, label in enumerate(run.names)
    ]
    return [Preset("equal", "equal", Preference.equal(tasks)), *only]


@dataclass(frozen=True)
class PointRequest:
    """What the page asks about. Without a method, a point has the one that its weights ask for."""

    __pydantic_config__ = STRICT
    weights: tuple[float, ...] | None = None
    scale: float | Literal["matched"] | None = None
    method: str | None = None
    preset: str | None = None
    data: str | None = None
    mix: tuple[float, ...] | None = None


@dataclass(frozen=True)
class SaveRequest:
    """A point, and what its model or preference is to be called."""

    __pydantic_config__ = STRICT
    name: str = "site-model"
    point: PointRequest = PointRequest()


@dataclass(frozen=True)
class Setting:
    """A merge for a mixture. `preset`: the one whose weights these are; `file`: the file that the preference is in."""

    preference: Preference
    scale: float | str | None = "matched"
    method: str = "tunable_magmax"
    preset: str | None = None
    file: Path | None = None

    @property
    def spec(self) -> MergeSpec:
        """The merge."""
        return MergeSpec(self.method, self.scale, self.preference.weights)

    def command(self, run: Path, out: Path) -> str:
        """Returns the command that makes the model, with the same merged bytes. Weights read back exactly."""
        scale = self.scale if isinstance(self.scale, str) else f"{self.scale!r}"
        how = ["--method", self.method, "--scale", scale]
        numbers = ",".join(f"{weight!r}" for weight in self.preference.weights)
        known = ["--weights", numbers] if self.file is None else ["--preference", str(self.file)]
        return shlex.join(["tmx", "tailor", str(run), *known, *how, "-o", str(out)])


def setting_of(request: PointRequest, run: Run, presets: Mapping[str, Preset], no_tsv: str | None = None) -> Setting:
    """Returns the model that a request means. `no_tsv`: why tsv is not the method that weights ask for here, if so."""
    if request.method is not None and request.method not in OFFERED:
        hint = closest(request.method, OFFERED)
        raise InputError(f"unknown method {shortened(request.method)!r}{hint}; known: {', '.join(OFFERED)}")
    preset = presets.get(request.preset or "")
    if request.preset is not None and preset is None:
        raise InputError(f"there is no preset {shortened(request.preset)!r}: get the state again")
    if request.mix is not None:
        _checked(request.mix, run, "numbers in the mix")
    chosen = None if request.weights is None else _checked(request.weights, run, "weights")
    given = chosen if preset is None else preset.preference
    if given is None:
        raise InputError("which weights? Give one number for each task, or a preset")
    if chosen is not None and any(abs(a - b) > 1e-9 for a, b in zip(chosen.weights, given.weights, strict=True)):
        raise InputError(f"these are not the weights of the preset {request.preset!r}: leave one of them out")
    preference = completed(given, run)
    method = request.method or ("tunable_magmax" if no_tsv else default_method(preference.weights))
    scale: float | str | None = preference.scale if request.scale is None else request.scale
    scale = default_scale(method, preference.prior is not None) if scale is None else scale
    if not isinstance(scale, str) and not 0 <= scale <= MOST_SCALE:
        raise InputError(f"the scale is {scale:g}: give a number from 0 to {MOST_SCALE:g}, or matched")
    number = scale if isinstance(scale, str) else float(scale)
    return Setting(preference, number, method, request.preset, None if preset is None else preset.file)


def _checked(numbers: Sequence[float], run: Run, what: str) -> Preference:
    if len(numbers) != len(run.tasks):
        raise InputError(
            f"{len(numbers)} {what} for {len(run.tasks)} tasks: give one for each task, in training order, 0 for tasks "
            "that do not matter"
        )
    return Preference.from_weights(numbers)
