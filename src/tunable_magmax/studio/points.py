"""Points of the page: what a request says, the model that it means, and the commands that make it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunable_magmax.config import STRICT, check
from tunable_magmax.errors import InputError, closest, shortened
from tunable_magmax.evaluation.choosing import default_method, default_scale
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.studio.measuring import Setting
from tunable_magmax.workflows.prefer import completed

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
        found, estimated = self.preference, self.file is not None
        return {
            "id": self.id,
            "title": self.title,
            "weights": list(found.weights),
            "intervals": None if found.intervals is None else [list(pair) for pair in found.intervals],
            "expected_error": found.expected_error if estimated else None,
            "samples": found.provenance.get("samples"),
            "method": found.method,
            "scale": found.scale,
        }


def usual_presets(run: Run) -> list[Preset]:
    """Returns equal weights, and one preset for each task alone."""
    tasks = len(run.tasks)
    only = [
        Preset(f"only-{t}", f"only {label}", Preference.from_weights([float(k == t) for k in range(tasks)]))
        for t, label in enumerate(run.labels)
    ]
    return [Preset("equal", "equal", Preference.equal(tasks)), *only]


@dataclass(frozen=True)
class PointRequest:
    """What the page asks about."""

    __pydantic_config__ = STRICT
    weights: tuple[float, ...] | None = None
    scale: float | Literal["matched"] | None = None
    prior: bool = True
    method: str | None = None
    """By default, that which the weights ask for."""
    preset: str | None = None
    data: str | None = None
    mix: tuple[float, ...] | None = None

    @classmethod
    def read(cls, content: Any) -> PointRequest:
        """Reads a request; all its problems are in one `InputError`."""
        return check(cls, content, "the point")


def usual_method(weights: Sequence[float], no_tsv: str | None) -> str:
    """Returns the method that weights ask for. `no_tsv`: why that cannot be tsv here, if so."""
    return "tunable_magmax" if no_tsv is not None else default_method(weights)


def setting_of(
    request: PointRequest, run: Run, presets: Mapping[str, Preset], no_tsv: str | None = None
) -> tuple[Setting, Preset | None]:
    """Returns the model that a request means, and the preset whose weights it still has."""
    if request.method is not None and request.method not in OFFERED:
        hint = closest(request.method, OFFERED)
        raise InputError(f"unknown method {shortened(request.method)!r}{hint}; known: {', '.join(OFFERED)}")
    preset = None
    if request.preset is not None:
        if request.preset not in presets:
            raise InputError(f"there is no preset {shortened(request.preset)!r}: get the state again")
        preset = presets[request.preset]
    if request.weights is not None:
        _require_tasks(request.weights, run, "weights")
        chosen = Preference.from_weights(request.weights)
        if preset is not None and not _equal(chosen.weights, preset.preference.weights):
            raise InputError(f"these are not the weights of the preset {preset.id!r}: leave one of them out")
    elif preset is None:
        raise InputError("which weights? Give one number for each task, or a preset")
    if request.mix is not None:
        _require_tasks(request.mix, run, "numbers in the mix")
        Preference.from_weights(request.mix)
    base = chosen if preset is None else preset.preference
    preference = completed(base, run)
    informed = request.prior and preference.prior is not None
    asked: float | str | None = preference.scale if request.scale is None else request.scale
    method = request.method or usual_method(preference.weights, no_tsv)
    scale = default_scale(method, informed) if asked is None else asked
    if not isinstance(scale, str) and not 0 <= scale <= MOST_SCALE:
        raise InputError(f"the scale is {scale:g}: give a number from 0 to {MOST_SCALE:g}, or matched")
    exact = scale if isinstance(scale, str) else float(scale)
    return Setting(preference, exact, method, request.prior), preset


def _require_tasks(numbers: Sequence[float], run: Run, what: str) -> None:
    if len(numbers) != len(run.tasks):
        raise InputError(
            f"{len(numbers)} {what} for {len(run.tasks)} tasks: give one for each task, in training order, 0 for tasks "
            "that do not matter"
        )


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= 1e-9 for a, b in zip(one, other, strict=True))


def tailor_command(setting: Setting, preset: Preset | None, run: Path, out: Path, seed: int) -> str:
    """Returns the command that makes the model of a point, with the same merged bytes. Weights read back exactly."""
    scale = setting.scale if isinstance(setting.scale, str) else f"{setting.scale!r}"
    how = ["--method", setting.method, "--scale", scale]
    if "seed" in METHODS[setting.method].reads:
        how += ["--seed", str(seed)]
    numbers = ",".join(f"{weight!r}" for weight in setting.preference.weights)
    by_file = preset is not None and preset.file is not None
    known = ["--preference", str(preset.file)] if preset is not None and by_file else ["--weights", numbers]
    return shlex.join(["tmx", "tailor", str(run), *known, *how, "-o", str(out)])
