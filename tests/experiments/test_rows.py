"""Names of rows: each says how a model is made and how its answers are read, and reads back to the same row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import read_experiment
from tunable_magmax.experiments.rows import BY_RULE, RECOMMENDED, Row, meanings, row_order, row_parts

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*/*.yaml"))


@pytest.mark.parametrize("path", [path for path in CONFIGS if "common" not in path.name], ids=lambda path: path.stem)
def test_the_rows_of_every_configuration_read_back(path: Path) -> None:
    experiment = read_experiment(path)
    for part in experiment.parts or (experiment,):
        names = [row.name for row in part.planned]
        assert names
        assert len(names) == len(set(names))
        assert [Row.parse(name).name for name in names] == names


def test_the_parts_of_a_name() -> None:
    row = Row.parse("tunable:auto@1,compare=active+prior@0.02")
    assert (row.base, row.method, row.preference, row.scale, row.prior, row.eps) == (
        "tunable",
        "tunable_magmax",
        "auto",
        1.0,
        "auto",
        0.02,
    )
    assert row.options == {"compare": "active"}
    assert Row.parse("average@best").method == "average"
    assert Row.parse("average:label@1").tailored
    assert not Row.parse("magmax@best+prior:auto").tailored  # the model is the same everywhere
    assert Row.parse(RECOMMENDED).method is None
    assert (Row.parse(RECOMMENDED).fit, Row.parse(BY_RULE).fit) == (True, False)
    assert Row.parse("zero-shot+fit+prior:auto").fit


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("magmax@best+", "is no row; rows look like"),
        ("magmix@best", "unknown method 'magmix' (did you mean 'magmax'?)"),
        ("tunable:labels@1", "unknown preference 'labels' (did you mean 'label'?)"),
        ("magmax@best+prior", "a prior needs a source here, such as +prior:auto"),
        ("tsv@1", "which preference? For example tsv:auto"),
        ("tailor:auto+fit+prior", "tailor fits a head with its own prior"),
        ("tailor:auto+prior:label", "tailor fits a head with its own prior"),
        ("magmax@1+fit", "a head is fitted for a site"),
        ("magmax@1+fit+prior:auto@0.02", "a head is fitted for a site"),
        ("logistic:auto", "logistic:auto+prior"),
        ("tunable:both@1", "tailor:both"),
        ("tailor:auto@0.5+prior", "tailor has no scale"),
        ("tailor:auto,compare=all+prior", "tailor has no option 'compare'"),
        ("magmax@0.5,compare=active", "magmax has no option 'compare'"),
        ("magmax", "at which scale? For example magmax@matched"),
        ("magmax:auto@1", "magmax looks at no environment, so it has no preference"),
        ("zero-shot@2", "zero-shot has no scale"),
        ("tsv:auto@best", "the best scale is searched for baselines only"),
        ("tsv:auto@fast", "the scale 'fast' is none"),
        ("tunable:auto@1,foo=bar", "tunable has no option 'foo'"),
        ("magmax@1+prior:auto@0", "the eps of a prior must be above 0 and at most 1"),
    ],
)
def test_names_that_are_no_rows(name: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        Row.parse(name)
    assert message in str(error.value)


def test_names_are_explained_and_ordered() -> None:
    told = meanings(["magmax@best+prior:auto", RECOMMENDED, "joint"])
    assert {"magmax", "tailor", "joint", ":auto", "@best", "+prior:auto"} <= set(told)
    assert {"+fit", "+prior"} < set(meanings(["tunable:auto@1+fit+prior"]))
    assert {"+prior:wrong"} < set(meanings(["magmax@best+prior:wrong@0.02"]))
    assert row_parts("tunable:label@matched,keep=magnitude+prior")[3] == "keep=magnitude+prior"
    names = ["joint", "tunable:label@matched+prior", "tunable:label@matched", "magmax@best"]
    assert sorted(names, key=row_order) == [
        "magmax@best",
        "tunable:label@matched",
        "tunable:label@matched+prior",
        "joint",
    ]
