"""docs/schemas: the JSON Schemas of the files that people write or read, made from what checks these files.

After a change of a file's keys: `python tests/test_schemas.py` writes them again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunable_magmax.config import schema_of
from tunable_magmax.data.benchmark import section_type
from tunable_magmax.experiments.config import ExperimentFile
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.preference.preference import PreferenceFile
from tunable_magmax.runs.merge_file import RecipeFile
from tunable_magmax.runs.run import RunRecord
from tunable_magmax.training.config import RunFile

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "schemas"


def run_yaml() -> dict[str, Any]:
    """The section `benchmark` has a model of its own, because the table of data sets says which keys it has."""
    schema, section = schema_of(RunFile), schema_of(section_type())
    definitions = {**schema.pop("$defs"), **section.pop("$defs"), "BenchmarkSection": section}
    schema["properties"]["benchmark"] = {"$ref": "#/$defs/BenchmarkSection"}
    return {**schema, "$defs": definitions}


def experiment() -> dict[str, Any]:
    """Its `run` is a run.yaml, of which any key may come from the file that it extends."""
    schema, run = schema_of(ExperimentFile), run_yaml()
    definitions = {**schema.pop("$defs"), **run.pop("$defs"), "RunFile": run}
    for part in (run, definitions["BenchmarkSection"]):
        part.pop("required", None)
    schema["properties"]["run"] = {"$ref": "#/$defs/RunFile"}
    return {**schema, "$defs": definitions}


def recipe() -> dict[str, Any]:
    """A model may also be its path alone."""
    schema = schema_of(RecipeFile)
    models = schema["properties"]["models"]
    models["items"] = {"anyOf": [{"type": "string"}, models["items"]]}
    return schema


def report() -> dict[str, Any]:
    """The version stands in the file only."""
    schema = schema_of(MergeReport)
    return {**schema, "properties": {"version": {"const": 1}, **schema["properties"]}}


SCHEMAS = {
    "run-yaml": run_yaml,
    "experiment": experiment,
    "merge-recipe": recipe,
    "run-json": lambda: schema_of(RunRecord),
    "preference": lambda: schema_of(PreferenceFile),
    "report": report,
}


def text_of(name: str) -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMAS[name]()}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_is_what_checks_the_file(name):
    file = FOLDER / f"{name}.json"
    assert file.read_text(encoding="utf-8") == text_of(name), f"run `python {Path(__file__).name}` in tests/"


def test_no_schema_is_left_over():
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(SCHEMAS)


GOLDEN = ROOT / "tests" / "golden"
FILES = [
    ("preference", GOLDEN / "preference.json"),
    *(("experiment", path) for path in sorted((ROOT / "configs").rglob("*.yaml"))),
]


@pytest.mark.parametrize(("name", "file"), FILES, ids=lambda value: getattr(value, "name", value))
def test_files_of_the_program_fit_the_schema(name, file):
    jsonschema = pytest.importorskip("jsonschema")
    # YAML 1.1, unlike editors, takes 1e-3 for a text.
    text = re.sub(r"(?<![\d.])\d+e-\d+\b", lambda match: f"{float(match[0]):.9f}", file.read_text())
    jsonschema.validate(yaml.safe_load(text), SCHEMAS[name]())


def test_keys_that_do_not_exist_do_not_fit():
    jsonschema = pytest.importorskip("jsonschema")
    content = {"model": "glyphs", "benchmark": {"name": "glyphs", "tasks": 2}}
    jsonschema.validate(content, run_yaml())
    for wrong in ({"modell": 1}, {"benchmark": {"name": "glyph"}}, {"train": {"lr": -1}}, {"train": {"epoch": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**content, **wrong}, run_yaml())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in SCHEMAS:
        (FOLDER / f"{name}.json").write_text(text_of(name), encoding="utf-8")
