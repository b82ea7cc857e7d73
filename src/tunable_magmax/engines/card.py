"""The model card of a merge and the configuration in it: texts made of the report."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from tunable_magmax.checkpoints.companions import CONFIG, MODEL_CONFIG, REPORT
from tunable_magmax.checkpoints.heads import Heads
from tunable_magmax.checkpoints.hub import pinned
from tunable_magmax.checkpoints.tensors import FLOATS
from tunable_magmax.errors import InputError
from tunable_magmax.files import read_json
from tunable_magmax.merging.report import MergeReport


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


def hub_models(report: MergeReport, base: str) -> list[str]:
    """Returns the models that a merge is made of, as far as they are on the hub, the base first."""
    named = [report.hub.get("base", base), *(pin for role, pin in report.hub.items() if role != "base")]
    return list(dict.fromkeys(model.partition("@")[0] for model in named if "/" in model))


def effective_config(report: MergeReport, base: str) -> str:
    """Returns the merge as the YAML that `tmx merge config.yml` reads.

    Models are named, not located; those of the hub by the commit, so that a second merge reads the same bytes.
    """
    options = report.options
    weights = options.get("weights")
    models: list[dict[str, Any]] = [
        {"model": report.hub.get(f"task {t}", f"task-{t}")} for t in range(1, report.tasks + 1)
    ]
    for model, name in zip(models, report.names or (), strict=False):
        model["name"] = name
    if weights is not None:
        for model, weight in zip(models, weights, strict=True):
            model["parameters"] = {"weight": _number(weight)}
    kept = {"scale", "scope", "compare", "keep", "density", "normalize", "seed", "budget"}
    kept |= {"include", "exclude", "heads", "fitted_head"}
    parameters = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if name in kept and value is not None
    }
    config: dict[str, Any] = {"merge_method": report.method, "base_model": report.hub.get("base", base)}
    config |= {"models": models, "parameters": parameters}
    if isinstance(densities := parameters.get("density"), list):
        del parameters["density"]
        for model, density in zip(models, densities, strict=True):
            model.setdefault("parameters", {})["density"] = _number(density)
    if options.get("out_dtype"):
        config["dtype"] = FLOATS[options["out_dtype"]]
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _number(text: str) -> float | str:
    """Returns an option's text as a number, if that is exactly the same."""
    short = float(exact := Fraction(text))
    return short if Fraction(str(short)) == exact else text


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


def front_matter(models: Sequence[str], library: str | None, architectures: Any) -> str:
    """Returns the YAML in front of a model card, by which the hub files a model.

    >>> print(front_matter(["org/base"], "transformers", ["ViTForImageClassification"]), end="")
    ---
    base_model:
    - org/base
    base_model_relation: merge
    library_name: transformers
    pipeline_tag: image-classification
    tags:
    - merge
    - tunable-magmax
    ---
    """
    known = [str(name) for name in architectures] if isinstance(architectures, list) else []
    jobs = {job for name in known for ending, job in _PIPELINES.items() if name.endswith(ending)}
    front: dict[str, Any] = {"base_model": list(models), "base_model_relation": "merge"} if models else {}
    if library is not None:
        front["library_name"] = library
    if len(jobs) == 1:
        front["pipeline_tag"] = jobs.pop()
    front["tags"] = ["merge", "tunable-magmax"]
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n"


def model_card(report: MergeReport, base: str, config: str) -> str:
    """Returns the model card behind its front matter."""
    rows = "".join(f"| {card_cell(task)} | {share} |\n" for task, share in _shares(report))
    return (
        f"\n# A merge of {report.tasks} task checkpoints into {base}\n\n"
        f"Made with tunable-magmax, method `{report.method}`.\n\n"
        f"| task | gave |\n| --- | --- |\n{rows}\n"
        f"The configuration that was used (also in `{CONFIG}`; what came out of it is in `{REPORT}`):\n\n"
        f"```yaml\n{config}```\n"
    )


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


def heads_section(heads: Heads | None) -> str:
    """Returns what the model card says of heads that base and tasks do not share."""
    if heads is None:
        return ""
    lines = "".join(f"- {card_cell(note)}\n" for note in heads.notes)
    named = f"Labels: {', '.join(map(card_cell, heads.labels))}.\n" if heads.labels else ""
    return f"\n## Heads\n\n{lines}\n{named}"


def card_cell(text: str) -> str:
    """Escapes a text of a model card, so that it neither ends a table's cell nor starts markup."""
    return "".join(f"\\{letter}" if letter in "\\|<[*`" else letter for letter in text)
