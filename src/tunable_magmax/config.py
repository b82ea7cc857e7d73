"""Reads YAML and JSON files into dataclasses, and reports every problem of a file in one error.

The dataclasses describe the files: pydantic checks values against their annotations. `--set KEY=VALUE` changes single
values before they are checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from tunable_magmax.errors import InputError, bulleted, closest
from tunable_magmax.files import DEEPEST, TOO_DEEP, parse_json, read_whole

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""For `__pydantic_config__` of the dataclasses that describe files."""
LENIENT = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
"""The same for files that may have other keys as well."""

Described = TypeVar("Described")


def _yaml_number(value: Any) -> Any:
    # YAML 1.1 reads 1e-5 as a text, because it has no dot.
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# Last in each annotation: a bound that comes after it would be missing in the JSON Schema.
_FROM_YAML = BeforeValidator(_yaml_number)
Positive: TypeAlias = Annotated[float, Field(gt=0), _FROM_YAML]
NotNegative: TypeAlias = Annotated[float, Field(ge=0), _FROM_YAML]
Proportion: TypeAlias = Annotated[float, Field(ge=0, lt=1), _FROM_YAML]
PositiveInt: TypeAlias = Annotated[int, Field(ge=1)]
Seed: TypeAlias = Annotated[int, Field(ge=0)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]


def check(kind: type[Described], data: Any, where: str) -> Described:
    """Returns `data`, as YAML or JSON holds it, as a `kind`: a dataclass. All problems are in one `InputError`.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Training:
    ...     __pydantic_config__ = STRICT
    ...     lr: Positive = 1e-5
    ...     epochs: int = 10
    >>> check(Training, {"lr": "1e-3"}, "run.yaml")
    Training(lr=0.001, epochs=10)
    >>> check(Training, {"lr": -1, "epochs": "many", "epoch": 3}, "run.yaml")
    Traceback (most recent call last):
    ...
    tunable_magmax.errors.InputError: run.yaml:
      - lr is -1: must be greater than 0
      - epochs is 'many': must be a whole number
      - unknown key 'epoch' (did you mean 'epochs'?); known: lr, epochs
    """
    problems: list[str] = []
    checked = gather(kind, data, problems)
    refuse(problems, where)
    assert checked is not None
    return checked


def check_json(kind: type[Described], text: str, where: str, newest: int) -> Described:
    """Does the same with a JSON text, and refuses one whose `version` is above `newest`."""
    try:
        record = parse_json(text)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    version = record.get("version") if isinstance(record, dict) else None
    if isinstance(version, int) and version > newest:
        raise InputError(f"{where}: version {version}, this program reads {newest} at most: upgrade tunable-magmax")
    return check(kind, record, where)


def gather(kind: type[Described], data: Any, problems: list[str], inside: str = "") -> Described | None:
    """Like `check`, but adds the problems to a list and returns None. `inside`: the keys that lead to `data`."""
    try:
        content = json.dumps(data, default=str)
    except TypeError:
        problems.append(f"{inside or 'it'} has a key that is neither a text nor a number")
        return None
    if "\\u0000" in content:  # no path may have it, and no text needs it
        problems.append(f"{inside or 'it'} has a text with a NUL character")
        return None
    adapter = TypeAdapter(kind)
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    places = [each["loc"] for each in errors]
    for each in [each for each in errors if each["type"] == "too_short"]:
        if any(place[: len(each["loc"])] == each["loc"] != place for place in places):
            errors.remove(each)  # a list is not too short because its items are wrong
    schema, data = adapter.json_schema(), json.loads(content)
    problems += dict.fromkeys(_problem(error, schema, data, inside) for error in errors)
    return None


def refuse(problems: Sequence[str], where: str) -> None:
    """Raises one `InputError` with all problems, if there are any."""
    if problems:
        raise InputError(f"{where}:\n{bulleted(problems)}")


_WORDS = {
    "Input should be": "must be",
    "a valid array": "a list",
    "an object": "a mapping",
    "a valid dictionary": "a mapping",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "a text",
    "a valid boolean": "true or false",
    "String should have at least 1 character": "must not be empty",
    "List should have": "must have",
    "Tuple should have": "must have",
    "Dictionary should have": "must have",
    " after validation, not 0": "",
    "Value error, ": "",
}
"""pydantic's words, and what our messages say."""


def _problem(error: Mapping[str, Any], schema: Mapping[str, Any], data: Any, inside: str) -> str:
    """Says what is wrong with one value. A value of several possible types is one problem: its description says it."""

    def resolved(node: Mapping[str, Any]) -> Mapping[str, Any]:
        if "$ref" in node:
            return resolved(schema["$defs"][node["$ref"].rsplit("/", 1)[-1]])
        choices = [choice for choice in node.get("anyOf", ()) if choice.get("type") != "null"]
        return resolved(choices[0]) if len(choices) == 1 else node

    path: list[str] = [inside] if inside else []
    node, value, message = resolved(schema), data, error["msg"]
    outside, last = "", ""
    for part in error["loc"]:
        if "anyOf" in node and "description" in node:
            return f"{'.'.join(path)} is {value!r}: must be {node['description']}"
        if part == "[key]":
            continue
        outside, last = ".".join(path), str(part)
        path.append(last)
        keys = node.get("properties", {})
        held = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
        value = value[part] if part in held else None
        below = node.get("items") if isinstance(part, int) else keys.get(part, node.get("additionalProperties"))
        if isinstance(below, Mapping):
            node = resolved(below)
    name = ".".join(path)
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = list(node.get("properties", ()))
        where = f" in {outside}" if outside else ""
        return f"unknown key {last!r}{where}{closest(last, known)}; known: {', '.join(known)}"
    if error["type"] in ("missing", "missing_argument"):
        return f"{name!r} is missing"
    if error["type"] == "dataclass_type":
        message = f"must be a mapping with the keys {', '.join(node.get('properties', ()))}"
    if error["type"] == "literal_error" and isinstance(value, str):
        message += closest(value, re.findall("'([^']*)'", error["ctx"]["expected"]))
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return f"{name} is {value!r}: {message}" if name else message


def read_yaml(path: Path, expected: str, mapping: str) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping. `expected` and `mapping` are for errors: which file, with which keys."""
    try:
        content = parse_yaml(read_whole(path, LARGEST_YAML))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; expected {expected}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable YAML file: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a mapping with {mapping}")
    return content


LARGEST_YAML = 1 << 20
"""Bytes of the largest YAML file that is read."""


def parse_yaml(content: bytes | str) -> Any:
    """Returns what a YAML text holds; one that is broken or made to do harm is a ValueError that says why.

    Limits are those of JSON. Aliases are refused, because a few lines of them can stand for any number of values.

    >>> parse_yaml("{scale: 0.5, weights: [3, 1]}")
    {'scale': 0.5, 'weights': [3, 1]}
    """
    import yaml

    depth = 0
    try:
        for event in yaml.parse(content, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"*{event.anchor} is an alias: write its value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ValueError(TOO_DEEP)
        parsed = yaml.safe_load(content)
        parse_json(json.dumps(parsed, default=str, skipkeys=True))  # has the limits
    except (yaml.YAMLError, OverflowError) as error:
        raise ValueError(str(error)) from None
    except (LookupError, AttributeError) as error:  # of PyYAML, about tags such as !!bool perhaps
        raise ValueError(f"a tag (!!) does not fit its value ({error})") from None
    return parsed


PATH_KEYS = ("model", "data", "file")
"""What keys that hold paths are called."""


def set_value(content: Any, change: str) -> None:
    """Sets a value in nested mappings, in place: "train.lr=3e-5".

    A path that is there counts from the current directory, wherever the file is.
    """
    path, equals, value = change.partition("=")
    *outer, last = path.split(".")
    for key in outer:
        if isinstance(content, dict) and content.get(key) is None:
            content[key] = {}  # not there, or there without a value
        content = content[key] if isinstance(content, dict) else None
    if not equals or not isinstance(content, dict):
        raise InputError(f"--set {change}: expected KEY=VALUE, such as train.lr=3e-5")
    if last in PATH_KEYS and value and (value.startswith(".") or Path(value).expanduser().exists()):
        value = str(Path(value).expanduser().absolute())
    try:
        content[last] = parse_yaml(value)
    except ValueError as error:
        raise InputError(f"--set {change}: the value is not readable ({error})") from None
