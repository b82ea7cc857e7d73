"""Names of rows: each says how a model is made and how its answers are read, and reads back to the same row."""

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.experiments.rows import BY_RULE, RECOMMENDED, Row, row_order, row_parts


def test_the_parts_of_a_name() -> None:
    row = Row.parse("tunable:auto@1,compare=active+prior")
    assert (row.base, row.method, row.preference, row.scale) == ("tunable", "tunable_magmax", "auto", 1.0)
    assert (row.options, row.head, row.site) == ({"compare": "active"}, "prior", "auto")
    assert Row.parse("average@best").method == "average"
    assert Row.parse("magmax@best+fit+prior:label").site == "label"
    assert (Row.parse(RECOMMENDED).head, Row.parse(BY_RULE).head) == ("fitted", "prior")
    assert (Row.parse("zero-shot").head, Row.parse("zero-shot+fit+prior:auto").head) == ("old", "fitted")


@pytest.mark.parametrize(
    "name",
    [
        *(RECOMMENDED, BY_RULE, "tailor:both", "zero-shot+fit+prior:auto", "magmax@best+prior:wrong", "joint"),
        *("tunable:label@matched,scope=tensor", "tsv:auto@1+fit+prior", "logistic:auto+prior", "likeliest:auto"),
    ],
)
def test_a_name_reads_back(name: str) -> None:
    assert Row.parse(name).name == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("magmax@best+", "magmax@best+"),
        ("magmix@best", "magmax"),
        ("tunable:labels@1", "label"),
        ("magmax@best+prior", "+prior:auto"),
        ("tsv@1", "tsv:auto"),
        ("tailor:auto+fit+prior", "tailor:auto+prior"),
        ("magmax@1+fit", "+fit+prior:auto"),
        ("tunable:both@1", "tailor:both"),
        ("tailor:auto@0.5+prior", "scale"),
        ("magmax", "magmax@matched"),
        ("magmax:auto@1", "preference"),
        ("zero-shot@2", "scale"),
        ("tsv:auto@best", "best"),
        ("tsv:auto@fast", "fast"),
        ("tunable:auto@1,foo=bar", "foo"),
    ],
)
def test_names_that_are_no_rows(name: str, value: str) -> None:
    with pytest.raises(InputError) as error:
        Row.parse(name)
    assert repr(name) in str(error.value)
    assert value in str(error.value)


def test_names_are_ordered_also_those_of_older_records() -> None:
    assert row_parts("tunable:label@matched,keep=magnitude+prior@0.02")[3] == ",keep=magnitude+prior@0.02"
    names = ["joint", "tunable:label@matched+prior", "tunable:label@matched", "magmax@best"]
    wanted = ["magmax@best", "tunable:label@matched", "tunable:label@matched+prior", "joint"]
    assert sorted(names, key=row_order) == wanted
