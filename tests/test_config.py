"""YAML and JSON into dataclasses: every problem in one error, under the name of its key."""

from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Literal

import pytest
from pydantic import Field

from tunable_magmax.config import (
    LENIENT,
    STRICT,
    Positive,
    PositiveInt,
    Proportion,
    Seed,
    Text,
    check,
    gather,
    parse_yaml,
    read_yaml,
    set_value,
)
from tunable_magmax.errors import InputError


@dataclass(frozen=True)
class Inner:
    __pydantic_config__ = STRICT
    method: Literal["cosine", "constant"] = "cosine"
    names: tuple[Text, ...] = ()


@dataclass(frozen=True)
class Lenient:
    __pydantic_config__ = LENIENT
    path: Text | None = None


@dataclass(frozen=True)
class Sample:
    __pydantic_config__ = STRICT
    model: Text
    lr: Positive = 1e-5
    share: Proportion = 0.0
    epochs: PositiveInt = 10
    seed: Seed = 0
    flag: bool = False
    inner: Inner | None = None
    several: dict[str, Inner] = field(default_factory=dict)
    listed: tuple[Inner, ...] = ()
    some: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
    either: Annotated[Literal["natural"] | Inner | tuple[int, ...], Field(description="natural, or some")] = "natural"
    lenient: Lenient = Lenient()


def problems(data):
    found = []
    assert gather(Sample, {"model": "m", **data} if isinstance(data, dict) else data, found) is None
    return found


def test_values_are_what_the_annotations_say():
    given = {"model": "m", "lr": "1e-3", "share": 0, "inner": {"names": ["one"]}, "either": [1, 2]}
    found = check(Sample, given, "x.yaml")
    assert found == Sample("m", 0.001, 0.0, inner=Inner(names=("one",)), either=(1, 2))
    assert check(Sample, {"model": "m", "lenient": {"path": "p", "more": 1}}, "x.yaml").lenient == Lenient("p")
    assert check(Sample, {"model": "m", "inner": None}, "x.yaml") == Sample("m")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"lr": 0}, "lr is 0: must be greater than 0"),
        ({"lr": "fast"}, "lr is 'fast': must be a number"),
        ({"lr": True}, "lr is True: must be a number"),
        ({"lr": float("inf")}, "lr is inf: must be a finite number"),
        ({"share": 1}, "share is 1: must be less than 1"),
        ({"epochs": 0}, "epochs is 0: must be greater than or equal to 1"),
        ({"epochs": 2.5}, "epochs is 2.5: must be a whole number"),
        ({"epochs": "3"}, "epochs is '3': must be a whole number"),
        ({"flag": 1}, "flag is 1: must be true or false"),
        ({"model": ""}, "model is '': must not be empty"),
        ({"model": 3}, "model is 3: must be a text"),
        ({"inner": 7}, "inner is 7: must be a mapping with the keys method, names"),
        (
            {"inner": {"method": "cosin"}},
            "inner.method is 'cosin': must be 'cosine' or 'constant' (did you mean 'cosine'?)",
        ),
        ({"inner": {"names": ["a", 1]}}, "inner.names.1 is 1: must be a text"),
        ({"inner": {"nams": []}}, "unknown key 'nams' in inner (did you mean 'names'?); known: method, names"),
        ({"several": {"a": {"b": 1}}}, "unknown key 'b' in several.a; known: method, names"),
        ({"listed": [{}, {"method": 1}]}, "listed.1.method is 1: must be 'cosine' or 'constant'"),
        ({"listed": 3}, "listed is 3: must be a list"),
        ({"some": []}, "some is []: must have at least 1 item"),
        ({"some": ["x"]}, "some.0 is 'x': must be a whole number"),
        ({"either": "x"}, "either is 'x': must be natural, or some"),
        ({"either": {"nams": 1}}, "either is {'nams': 1}: must be natural, or some"),
        ({"lenient": {"path": 1}}, "lenient.path is 1: must be a text"),
        ([], "must be a mapping with the keys model, lr, share"),
    ],
)
def test_each_problem_is_one_line(data, says):
    (found,) = problems(data)
    assert found.startswith(says)


def test_single_values_are_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    data = {"a": {"b": 1}, "c": None}
    set_value(data, "a.b=[1, 2]")
    set_value(data, "c.d.e=x")
    for change in ("model=here", "data=there", "word=here", "file=./none", "a.file="):
        set_value(data, change)
    places = {"model": str(tmp_path / "here"), "file": str(tmp_path / "none"), "data": "there", "word": "here"}
    assert data == {"a": {"b": [1, 2], "file": None}, "c": {"d": {"e": "x"}}, **places}
    for change in ("a.b", "a.b.c=1", "c=[1"):
        with pytest.raises(InputError, match=f"--set {change}".replace("[", r"\[")):
            set_value(data, change)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 5000, "nested more than 100 deep"),
        ("a: &a [*a]", r"\*a is an alias"),
        ("a: &a {x: 1}\nb: {<<: *a}", r"\*a is an alias"),
        ("seed: " + "9" * 4000, "a number has 4,000 digits"),
        ("seed: 0x" + "f" * 5000, "digits"),
        ('name: "\\ud800"', "half of a character"),
        ('name: "\\UFFFFFFFF"', "too large"),
        ("when: 2024-99-99", "month must be in 1..12"),
        ("x: !!bool perhaps", "does not fit its value"),
        ("x: !!int ''", "does not fit its value"),
        ("x: !!timestamp z", "does not fit its value"),
        ("x: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ],
)
def test_yaml_made_to_do_harm_is_refused(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        parse_yaml(text)
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(InputError, match=f"(?s)not a readable YAML file: .*{says}"):
        read_yaml(tmp_path / "file.yaml", "a file", "keys")
    with pytest.raises(InputError, match=f"(?s)--set x=.*{says}"):
        set_value({}, f"x={text}")


@pytest.mark.parametrize(
    ("data", "says"), [({date(2024, 1, 1): 1}, "neither a text nor a number"), ({"name": "a\0b"}, "NUL character")]
)
def test_values_that_no_file_should_have(data, says):
    with pytest.raises(InputError, match=says):
        check(Sample, data, "file")
