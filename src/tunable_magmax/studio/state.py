"""The state that the page shows first."""

from __future__ import annotations

from typing import Any

from tunable_magmax.evaluation.choosing import default_scale
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.runs.profile import Profile
from tunable_magmax.runs.run import Run
from tunable_magmax.studio.measuring import DataSet
from tunable_magmax.studio.points import MOST_SCALE, OFFERED, PointRequest, usual_method
from tunable_magmax.studio.session import Studio
from tunable_magmax.studio.uploads import FILE_BYTES, FILES, SUFFIXES, TOTAL_BYTES


def state_of(studio: Studio) -> dict[str, Any]:
    """Returns everything that the page shows first."""
    run = studio.run
    start = _start(studio)
    informed = run.label_tables is not None
    return {
        "run": {
            "name": run.path.resolve().name,
            "path": str(run.path),
            "tasks": list(run.labels),
            "classes": [list(run.classes[label]) for label in run.labels] if run.classes else None,
            "kind": next((data.samples.prepared.kind for data in studio.data.values()), None),
            "elements": studio.measuring.bench.models.elements if studio.ready else None,
        },
        "out": str(studio.out),
        "ready": studio.ready,
        "methods": [
            {
                "name": name,
                "weights": METHODS[name].weights,
                "default_scale": default_scale(name, informed),
                "why_not": studio.no_tsv if name == "tsv" else None,
            }
            for name in OFFERED
        ],
        "profiles": _profiles(run),
        "prior": {
            "possible": informed,
            "why_not": None if informed else "the classes of the tasks are not known: profiles say them",
        },
        "scale": {
            "matched": _matched(studio, start),
            "default": default_scale("tunable_magmax", informed),
            "default_without_prior": default_scale("tunable_magmax", False),
            "most": MOST_SCALE,
        },
        "data": [_data_record(data, len(run.tasks)) for data in studio.data.values()],
        "presets": [preset.to_dict() for preset in studio.presets.values()],
        "start": start,
        "lines": {"ready": bool(studio.data) and all(map(studio.has_lines, studio.data.values())), **studio.lines},
        "points": len(studio.points()),
        "reading": dict(studio.reading),
        "samples": None if studio.site is None else studio.site.to_dict(),
        "models": [model.to_dict() for model in studio.writer.models()],
        "limits": {
            "file_bytes": FILE_BYTES,
            "total_bytes": TOTAL_BYTES,
            "files": FILES,
            "suffixes": sorted(SUFFIXES),
        },
        "writing": studio.writer.writing,
        "warnings": list(dict.fromkeys(studio.warnings)),
    }


def _profiles(run: Run) -> dict[str, Any]:
    profiles = run.profiles
    complete = all(profile is not None for profile in profiles)
    return {
        "complete": complete,
        "samples": [None if profile is None else _rows(profile) for profile in profiles],
        "can": ["labels", "inputs"] if complete else [],
        "why_not": None if complete else "not all tasks have a profile: `tmx init --data` makes them",
    }


def _data_record(data: DataSet, count: int) -> dict[str, Any]:
    owner = data.sample_tasks
    tasks = None if owner is None else [int((owner == t).sum()) for t in range(count)]
    return {
        "id": data.name,
        "title": data.title,
        "samples": len(data),
        "of": data.total,
        "tasks": tasks,
        "mixed": data.mixed,
    }


def _start(studio: Studio) -> dict[str, Any]:
    preset = next((studio.presets[name] for name in ("given", "labels", "inputs") if name in studio.presets), None)
    preset = preset or studio.presets["equal"]
    informed = studio.run.label_tables is not None
    method = usual_method(preset.preference.weights, studio.no_tsv)
    return {
        "weights": list(preset.preference.weights),
        "scale": preset.preference.scale or default_scale(method, informed),
        "prior": informed,
        "method": method,
        "preset": preset.id,
        "data": next(iter(studio.data), None),
        "mix": None,
    }


def _matched(studio: Studio, start: dict[str, Any]) -> float | None:
    if not studio.ready:
        return None
    setting, _ = studio.setting(PointRequest(preset=start["preset"], scale="matched", method="tunable_magmax"))
    return studio.measuring.scale(setting)


def _rows(profile: Profile) -> int:
    return 0 if profile.row_labels is None else len(profile.row_labels)
