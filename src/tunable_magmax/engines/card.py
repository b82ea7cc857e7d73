"""The model card of a merge and the configuration in it, made from the report."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from tunable_magmax.checkpoints.companions import CONFIG, MODEL_CONFIG, REPORT
from tunable_magmax.checkpoints.hub import pinned
from tunable_magmax.checkpoints.tensors import FLOATS
from tunable_magmax.errors import InputError
from tunable_magmax.files import read_json
from tunable_magmax.merging.report import MergeReport

_PARAMETERS = (
    "budget scale scope compare density normalize seed include exclude heads fitted_head".split()  # noqa: SIM905
)
_PIPELINES = {
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForQuestionAnswering": "question-answering",
}
"""What the hub calls the job of a model, by how the name of its class ends."""


def base_name(base: Path) -> str:
    """Returns the base's name: that on the hub if it comes from there, or that in its configuration.

    Never its path: equal merges must give equal bytes wherever they are made.
    """
    if (pin := pinned(base)) is not None:
        return pin.partition("@")[0]
    try:
        name = read_json(base / MODEL_CONFIG).get("_name_or_path")
    except InputError:
        return "base"
    is_hub_name = isinstance(name, str) and name and not name.startswith((".", "/", "~")) and name.count("/") <= 1
    return str(name) if is_hub_name else "base"


def effective_config(report: MergeReport, base: str) -> str:
    """Returns the merge as the YAML that `tmx merge config.yml` reads.

    Models are named, not located; those of the hub by the commit, so that a second merge reads the same bytes.
    """
    options = report.options
    per_task = {"weight": options.get("weights")}
    parameters = {name: options[name] for name in _PARAMETERS if options.get(name) is not None}
    if isinstance(parameters.get("density"), (list, tuple)):
        per_task["density"] = parameters.pop("density")
    models = []
    for t in range(report.tasks):
        model: dict[str, Any] = {"model": report.hub.get(f"task {t + 1}", f"task-{t + 1}")}
        if report.names is not None:
            model["name"] = report.names[t]
        if own := {name: _number(values[t]) for name, values in per_task.items() if values is not None}:
            model["parameters"] = own
        models.append(model)
    config = {
        "merge_method": report.method,
        "base_model": report.hub.get("base", base),
        "models": models,
        "parameters": {name: list(value) if isinstance(value, tuple) else value for name, value in parameters.items()},
    }
    if options.get("out_dtype"):
        config["dtype"] = FLOATS[options["out_dtype"]]
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _number(text: str) -> float | str:
    """Returns an option's text as a number, if that is exactly the same."""
    short = float(exact := Fraction(text))
    return short if Fraction(str(short)) == exact else text


def model_card(report: MergeReport, base: str, config: str, model_config: Mapping[str, Any] | None) -> str:
    """Returns the model card; `model_config` is the output's config.json, if it has one."""
    return (
        f"---\n{_front_matter(report, base, model_config)}---\n"
        f"\n# A merge of {report.tasks} task checkpoints into {base}\n\n"
        f"Made with tunable-magmax, method `{report.method}`.\n\n"
        f"| task | gave |\n| --- | --- |\n{_rows(report)}\n"
        f"The configuration that was used (also in `{CONFIG}`; what came out of it is in `{REPORT}`):\n\n"
        f"```yaml\n{config}```\n"
    )


def _front_matter(report: MergeReport, base: str, model_config: Mapping[str, Any] | None) -> str:
    """Returns the YAML by which the hub files a model."""
    front: dict[str, Any] = {}
    named = [report.hub.get("base", base), *(pin for role, pin in report.hub.items() if role != "base")]
    if on_hub := list(dict.fromkeys(name.partition("@")[0] for name in named if "/" in name)):
        front = {"base_model": on_hub, "base_model_relation": "merge"}
    if model_config is not None:
        front["library_name"] = "transformers"
        classes = model_config.get("architectures")
        names = [str(name) for name in classes] if isinstance(classes, list) else []
        jobs = {job for name in names for ending, job in _PIPELINES.items() if name.endswith(ending)}
        if len(jobs) == 1:
            front["pipeline_tag"] = jobs.pop()
    front["tags"] = ["merge", "tunable-magmax"]
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True)


def _rows(report: MergeReport) -> str:
    """Returns a table row for each task, with what it gave."""
    rows = []
    for t, label in enumerate(report.labels()):
        adapter = report.adapters.get(f"task {t + 1}")
        if report.counts is not None:
            gave = f"{report.counts[t]:,} elements ({report.counts[t] / max(report.elements, 1):.1%})"
        else:
            gave = f"weight {(report.options['weights'] or ['1'] * report.tasks)[t]}"
        rows.append(f"| {card_cell(label if adapter is None else f'{label} ({adapter})')} | {gave} |\n")
    return "".join(rows)


def card_cell(text: str) -> str:
    """Escapes a text of a model card, so that it neither ends a table's cell nor starts markup."""
    return "".join(f"\\{letter}" if letter in "\\|<[*`" else letter for letter in text)
