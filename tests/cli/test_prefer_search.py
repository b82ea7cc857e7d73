"""`tmx prefer --labelled`: inputs with their labels, and the search on them."""

import json

import pytest

from tunable_magmax.preference.preference import Preference

SEARCH = ("--method", "search", "--device", "cpu")


@pytest.fixture(scope="module")
def site(image_run, tmp_path_factory):
    """Nine images of the first task's classes and three of the second's."""
    return image_run.pairs(tmp_path_factory.mktemp("site") / "site", {"red": 5, "blue": 4, "green": 3})


def test_a_search_from_pairs_to_a_merge(tmx, image_run, site, tmp_path):
    out = tmp_path / "site.json"
    given = ("--labelled", site, *SEARCH, "--trials", "5", "-o", out)
    result = tmx("prefer", image_run.path, *given)
    assert (result.code, result.err) == (0, "")
    found = Preference.load(out)
    assert (found.method, found.provenance["trials"]) == ("search", 5)
    assert f"{found.provenance['accuracy']:.1%}" in result.out
    assert tmx("merge", image_run.path, "--preference", out, "-o", tmp_path / "m.safetensors").code == 0


@pytest.mark.parametrize("method", ["auto", "label"])
def test_pairs_give_their_labels(tmx, image_run, site, method):
    found = json.loads(tmx("prefer", image_run.path, "--labelled", site, "--method", method, "--json").out)
    assert found == json.loads(tmx("prefer", image_run.path, "--labels", site, "--json").out)
    assert found["preference"]["method"] == "label"
    assert found["preference"]["weights"] == pytest.approx([0.7, 0.3], abs=0.1)


def test_pairs_give_their_inputs(tmx, image_run, site):
    given = ("--method", "cosine", "--device", "cpu", "--json")
    paired = json.loads(tmx("prefer", image_run.path, "--labelled", site, *given).out)
    alone = json.loads(tmx("prefer", image_run.path, "--inputs", site, *given).out)
    assert paired["preference"] == alone["preference"]
    assert paired["warnings"] == alone["warnings"] == []


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("--labelled {site}/nothing", "nothing"),
        ("--labelled {site} --labels {site}", "labels and labelled"),
        ("--labelled {site} --equal", "equal"),
        ("--equal", "labelled"),
        ("--labelled {site} --seed -1", "-1"),
    ],
)
def test_bad_input(tmx, image_run, site, arguments, value):
    result = tmx("prefer", image_run.path, *arguments.format(site=site).split(), *SEARCH, "--trials=1")
    assert (result.code, result.out, value in result.err) == (2, "", True)
