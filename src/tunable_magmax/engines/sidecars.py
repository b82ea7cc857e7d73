"""Writes the files beside the weights of a merge: report, configuration, model card, the base's own files, a log."""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import yaml

from tunable_magmax.checkpoints.companions import (
    CARD,
    CONFIG,
    DTYPE_NAMES,
    MODEL_CONFIG,
    REPORT,
    companion_files,
    retyped_config,
)
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.version import __version__


def write_sidecars(report: MergeReport, inputs: Inputs, output: Output, base_model: str | None) -> MergeReport:
    """Writes the report, and in a directory also the base's own files, the configuration and a model card."""
    if output.out.name.endswith(".safetensors"):
        output.write_file("report.json", report.to_json().encode())
        return report
    digests = dict(report.files)
    for name, path in companion_files(inputs.paths[0]):
        changed = retyped_config(name, path, report.options["out_dtype"])
        digests[name] = output.copy_file(name, path) if changed is None else output.write_file(name, changed)
    name = _base_name(inputs.paths[0], base_model)
    config = yaml.safe_dump(_effective_config(report.options, report.method, report.tasks, name), sort_keys=False)
    note = "# Models are named here, not located: put in their paths before merging by this again.\n"
    digests[CONFIG] = output.write_file(CONFIG, (note + config).encode())
    library = "transformers" if MODEL_CONFIG in digests else None
    card = _model_card(name, report.method, _shares(report), config, library)
    digests[CARD] = output.write_file(CARD, card.encode())
    report = replace(report, files=digests)
    output.write_file(REPORT, report.to_json().encode())
    return report


def _shares(report: MergeReport) -> list[tuple[str, str]]:
    """Returns each task's name and what it gave, as text."""
    names = [
        f"{label} ({report.adapters[role]})" if (role := f"task {t}") in report.adapters else label
        for t, label in enumerate(report.labels(), start=1)
    ]
    if report.counts is not None:
        total = max(report.elements, 1)
        return [(n, f"{c:,} elements ({c / total:.1%})") for n, c in zip(names, report.counts, strict=True)]
    weights = report.options["weights"] or ["1"] * report.tasks
    return [(n, f"weight {weight}") for n, weight in zip(names, weights, strict=True)]


@dataclass(frozen=True, slots=True)
class Log:
    """The log beside an output: time, host and paths of its merges, a JSON object a line.

    They are not in the output itself, because equal merges must give equal outputs.
    """

    path: Path
    out: Path
    started: float
    fingerprint: Mapping[str, Any] | None = None
    """By what a sweep recognises a finished point."""

    def write(self, inputs: Inputs, report: MergeReport) -> None:
        """Appends a line for the merge that made `report`."""
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "seconds": round(time.time() - self.started, 3),
            "host": socket.gethostname(),
            "versions": {
                "tunable-magmax": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "base": str(inputs.paths[0].resolve()),
            "tasks": [str(path.resolve()) for path in inputs.paths[1:]],
            "out": str(self.out.resolve()),
            "files": dict(report.files),
            **({} if self.fingerprint is None else {"fingerprint": self.fingerprint}),
        }
        # The weights are complete, so a full disk must not make it look as if they were not.
        with suppress(OSError), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _base_name(base: Path, chosen: str | None) -> str:
    """Returns the base's name for the model card: the chosen one, or the hub name in the base's configuration.

    Never its path: equal merges must give equal bytes wherever they are made.
    """
    if chosen:
        return chosen
    try:
        config = json.loads((base / MODEL_CONFIG).read_text(encoding="utf-8"))
        name = config.get("_name_or_path", "")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError):
        name = ""
    is_hub_name = isinstance(name, str) and name and not name.startswith((".", "/", "~")) and name.count("/") <= 1
    return name if is_hub_name else "base"


def _effective_config(options: Mapping[str, Any], method: str, tasks: int, base: str) -> dict[str, Any]:
    """Returns the merge as a configuration that `tmx merge config.yml` reads; models are named, not located."""
    weights = options.get("weights")
    models: list[dict[str, Any]] = [{"model": f"task-{t}"} for t in range(1, tasks + 1)]
    if weights is not None:
        for model, weight in zip(models, weights, strict=True):
            exact = Fraction(weight)
            short = float(exact)
            model["parameters"] = {"weight": short if Fraction(str(short)) == exact else weight}
    kept = {"scale", "scope", "compare", "keep", "density", "seed", "budget", "include", "exclude"}
    parameters = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if name in kept and value is not None
    }
    config: dict[str, Any] = {"merge_method": method, "base_model": base, "models": models, "parameters": parameters}
    if options.get("out_dtype"):
        config["dtype"] = DTYPE_NAMES[options["out_dtype"]]
    return config


def _model_card(base: str, method: str, shares: list[tuple[str, str]], config: str, library: str | None) -> str:
    """Returns the model card with its front matter; `shares` are rows of a task and what it gave."""
    loaded = "" if library is None else f"library_name: {library}\n"
    front = f"---\nbase_model: {json.dumps(base)}\ntags:\n- merge\n- tunable-magmax\n{loaded}---\n"
    rows = "".join(f"| {_cell(task)} | {share} |\n" for task, share in shares)
    return (
        f"{front}\n# A merge of {len(shares)} task checkpoints into {base}\n\n"
        f"Made with tunable-magmax, method `{method}`.\n\n"
        f"| task | gave |\n| --- | --- |\n{rows}\n"
        f"The configuration that was used (also in `{CONFIG}`; what came out of it is in `{REPORT}`):\n\n"
        f"```yaml\n{config}```\n"
    )


def _cell(text: str) -> str:
    """Escapes text so that it neither ends a table's cell nor starts markup."""
    return "".join(f"\\{letter}" if letter in "\\|<[*`" else letter for letter in text)
