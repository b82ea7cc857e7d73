"""What a merge leaves beside its weights: report, configuration, model card, the base's own files, and a log."""

from __future__ import annotations

import json
import platform
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import yaml

from tunable_magmax.checkpoints.card import (
    CARD,
    CONFIG,
    MODEL_CONFIG,
    REPORT,
    base_name,
    effective_config,
    model_card,
    retyped_config,
    tag_along,
)
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.version import __version__


def write_sidecars(report: MergeReport, inputs: Inputs, output: Output, base_model: str | None) -> MergeReport:
    """The report, and in a directory also the base's own files, the configuration and a model card."""
    if output.out.name.endswith(".safetensors"):
        output.write_file("report.json", report.to_json().encode())
        return report
    digests = dict(report.files)
    for name, path in tag_along(inputs.paths[0]):
        changed = retyped_config(name, path, report.options["out_dtype"])
        digests[name] = output.copy_file(name, path) if changed is None else output.write_file(name, changed)
    name = base_name(inputs.paths[0], base_model)
    config = yaml.safe_dump(effective_config(report.options, report.method, report.tasks, name), sort_keys=False)
    note = "# Models are named here, not located: put in their paths before merging by this again.\n"
    digests[CONFIG] = output.write_file(CONFIG, (note + config).encode())
    library = "transformers" if MODEL_CONFIG in digests else None
    card = model_card(name, report.method, _shares(report), config, library)
    digests[CARD] = output.write_file(CARD, card.encode())
    report = replace(report, files=digests)
    output.write_file(REPORT, report.to_json().encode())
    return report


def _shares(report: MergeReport) -> list[tuple[str, str]]:
    """What each task gave, in words."""
    names = [
        f"{label} ({report.adapters[role]})" if (role := f"task {t}") in report.adapters else label
        for t, label in enumerate(report.labels(), start=1)
    ]
    if report.counts is not None:
        total = max(report.elements, 1)
        return [(n, f"{c:,} elements ({c / total:.1%})") for n, c in zip(names, report.counts, strict=True)]
    weights = report.options["weights"] or ["1"] * report.tasks
    return [(n, f"weight {weight}") for n, weight in zip(names, weights, strict=True)]


def log_merge(log: Path, out: Path, inputs: Inputs, report: MergeReport, started: float) -> None:
    """What depends on clock, host and path stays out of the output: it goes to a log beside it."""
    entry = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "host": socket.gethostname(),
        "versions": {
            "tunable-magmax": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "base": str(inputs.paths[0].resolve()),
        "tasks": [str(path.resolve()) for path in inputs.paths[1:]],
        "out": str(out.resolve()),
        "files": dict(report.files),
    }
    # The output is complete, so a full disk must not make it look as if it were not.
    with suppress(OSError), open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
