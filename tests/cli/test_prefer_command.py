"""`tmx prefer`: from what is known of the site to weights and intervals, also by a search on labelled inputs."""

import json
import shutil

import numpy as np
import pytest

from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.profile import Profile

NAMES = ("birds", "cars", "flowers")
CLASSES = ("crow", "owl", "bus", "van", "rose", "lily")


@pytest.fixture
def run(sequence):
    """A run of three tasks with profiles; no data, no encoder."""
    folder = sequence.folder
    tasks = []
    for t, name in enumerate(NAMES):
        counts = [0] * 6
        counts[2 * t] = counts[2 * t + 1] = 50
        rows, labels = np.ones((1, 3), np.float32), np.array([2 * t])
        profile = Profile(name, 100, CLASSES, f"encoder {t}", "base", tuple(counts), rows, rows, labels)
        profile.save(folder / "profiles" / f"{name}.safetensors")
        tasks.append(
            {"name": name, "checkpoint": f"task{t + 1}.safetensors", "profile": f"profiles/{name}.safetensors"}
        )
    (folder / "run.json").write_text(json.dumps({"version": 1, "base": "base.safetensors", "tasks": tasks}))
    return folder


@pytest.fixture(scope="module")
def pairs(image_run, tmp_path_factory):
    """Nine images of the first task's classes and three of the second's."""
    return image_run.pairs(tmp_path_factory.mktemp("site") / "site", {"red": 5, "blue": 4, "green": 3})


def weights(path):
    return Preference.load(path).weights


@pytest.mark.parametrize(
    ("arguments", "expected", "method"),
    [
        ("--weights 3,1,0", (0.75, 0.25, 0), "weights"),
        ("--alpha 0", (0, 0, 1), "alpha"),
        ("--alpha 0.5", (1 / 7, 2 / 7, 4 / 7), "alpha"),
        ("--equal", (1 / 3, 1 / 3, 1 / 3), "equal"),
    ],
)
def test_without_samples(tmx, run, tmp_path, arguments, expected, method):
    out = tmp_path / "new" / "site.json"
    result = tmx("prefer", run, *arguments.split(), "-o", out)
    assert result.code == 0, result.err
    found = Preference.load(out)
    assert found.weights == pytest.approx(expected)
    assert (found.method, found.tasks, found.intervals) == (method, NAMES, None)
    assert result.err == ""
    assert f"wrote {out}" in result.out


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", '{"version": 1, "base": "b", "tasks": []}', "name,weight\n"])
def test_what_is_no_preference_is_not_replaced(tmx, run, tmp_path, content):
    (tmp_path / "mine").write_text(content)
    result = tmx("prefer", run, "--equal", "-o", tmp_path / "mine")
    assert (result.code, result.out) == (2, "")
    assert "mine exists and is no preference file: choose another name" in result.err
    assert (tmp_path / "mine").read_text() == content


@pytest.mark.parametrize(
    ("name", "head", "row"),
    [("l.txt", "", "{0}\n"), ("l.csv", "id,label\n", "7,{0}\n"), ("l.jsonl", "", '{{"label": {1}}}\n')],
)
def test_labels(tmx, run, tmp_path, name, head, row):
    """Three quarters are of cars, one quarter of flowers."""
    labels = ["bus"] * 15 + ["van"] * 15 + ["rose"] * 5 + ["lily"] * 5
    (tmp_path / name).write_text(head + "".join(row.format(label, CLASSES.index(label)) for label in labels))
    out = tmp_path / "site.json"
    result = tmx("prefer", run, "--labels", tmp_path / name, "-o", out)
    assert result.code == 0, result.err
    found = Preference.load(out)
    assert found.weights == pytest.approx((0, 0.75, 0.25), abs=0.05)
    assert found.provenance["samples"] == 40
    assert found.intervals[1][0] < 0.75 < found.intervals[1][1]
    assert "90% interval" in result.out


@pytest.mark.parametrize("kind", ["image_run", "text_run"])
def test_equal_texts_and_equal_pictures_are_copies(tmx, request, tmp_path, kind):
    any_run = request.getfixturevalue(kind)
    inputs = [any_run.inputs("red", 3, 500)[k] for k in (0, 0, 1, 2, 1, 0, 0, 0, 2)]
    place = tmp_path / "site"
    if any_run.kind == "vit":
        place.mkdir()
        for k, image in enumerate(inputs):
            image.save(place / f"{k}.png")
    else:
        place = tmp_path / "site.txt"
        place.write_text("".join(f"{text}\n" for text in inputs))
    result = tmx("prefer", any_run.path, "--inputs", place, "--method", "ot", "--device", "cpu", "--json")
    facts = json.loads(result.out)["preference"]["provenance"]
    assert (facts["samples"], facts["read"]["copies"], facts["read"]["given_inputs"]) == (3, 6, 9)


@pytest.mark.parametrize("beside", ["", "inputs"])
def test_unknown_labels_are_named_and_refused_if_none_is_known(tmx, text_run, tmp_path, beside):
    given = ["--inputs", written(tmp_path / "site.txt", text_run.inputs("red", 4, 500))] if beside else []
    for labels in (["green", "zebra"], ["second", "thrid"]):
        file = written(tmp_path / "labels.txt", labels)
        result = tmx("prefer", text_run.path, "--labels", file, *given)
        warning = f"warning: 1 ('{labels[1]}') of 2 labels belong to no task and were left out\n"
        assert (result.code, result.err) == (0, warning)
    file = written(tmp_path / "labels.txt", ["Green", "zebra"])
    result = tmx("prefer", text_run.path, "--labels", file, *given)
    assert (result.code, "all 2 labels belong to no task: they are 'Green', 'zebra'" in result.err) == (2, True)


def test_a_profile_of_another_task_is_refused(tmx, run, tmp_path):
    (tmp_path / "labels.txt").write_text("bus\n")
    record = json.loads((run / "run.json").read_text())
    record["tasks"][0]["profile"] = "profiles/cars.safetensors"
    (run / "run.json").write_text(json.dumps(record))
    result = tmx("prefer", run, "--labels", tmp_path / "labels.txt")
    assert result.code == 2
    assert "cars.safetensors is of task 'cars', expected 'birds'" in result.err


# -- with encoders ---------------------------------------------------------------------------------------------------


def written(place, texts):
    place.write_text("".join(f"{text}\n" for text in texts))
    return place


@pytest.mark.parametrize("method", ["auto", "probe", "ot", "cosine", "mmd"])
def test_texts(tmx, text_run, tmp_path, method):
    site = written(tmp_path / "site.txt", [*text_run.inputs("green", 4, 500), *text_run.inputs("grey", 4, 500)])
    result = tmx("prefer", text_run.path, "--inputs", site, "--method", method, "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    found = told["preference"]
    assert np.argmax(found["weights"]) == 1
    assert found["provenance"]["read"]["inputs"] == "site.txt"
    posterior = method in ("auto", "probe")
    assert found["method"] == ("probe" if posterior else method)
    assert (found["intervals"] is None, found["expected_error"] is None) == (not posterior, not posterior)
    assert found["prior"]["eps"] == (0.002 if posterior else 0.02)


def test_inputs_and_labels_share_one_posterior(tmx, text_run, tmp_path):
    site = written(tmp_path / "site.txt", text_run.inputs("green", 4, 500))
    labels = written(tmp_path / "labels.txt", ["green"] * 30 + ["red"] * 10)
    for method in ("auto", "probe"):
        given = ("--inputs", site, "--labels", labels, "--method", method, "--json")
        found = json.loads(tmx("prefer", text_run.path, *given).out)["preference"]
        assert (found["method"], found["provenance"]["labels"]) == ("probe+label", 40)
        assert found["provenance"]["samples"] == 40 + found["provenance"]["inputs"]
        assert found["weights"] == pytest.approx([0.25, 0.75], abs=0.1)
        assert found["prior"]["source"] == "labels"


def test_samples_of_another_kind_are_warned_of_and_expect_a_larger_error(tmx, text_run, tmp_path):
    told = "of the samples are farther from every class than 95% of the tasks' own samples"
    own = written(tmp_path / "own.txt", text_run.inputs("green", 4, 0))
    other = written(tmp_path / "other.txt", ["good " * k for k in range(20, 40)])
    errors = []
    for site in (own, other):
        result = tmx("prefer", text_run.path, "--inputs", site, "--json")
        assert (told in result.err) == (site is other)
        errors.append(json.loads(result.out)["preference"]["expected_error"])
    assert errors[1] > 0.5


def test_a_checkpoint_that_the_profile_does_not_know(tmx, image_run, pairs, tmp_path):
    run = shutil.copytree(image_run.path, tmp_path / "run")
    record = (run / "run.json").read_text()
    (run / "run.json").write_text(record.replace('"profiled"', '"unknown"'))
    for name, method, encoder in (("first", "ot", "encoder"), ("base", "auto", "base"), ("base", "probe", "base")):
        shutil.copy(run / "second" / "model.safetensors", run / name)
        result = tmx("prefer", run, "--inputs", pairs, "--method", method)
        assert (result.code, f"the profile of task 'first' belongs to another {encoder}" in result.err) == (2, True)


def test_opinions_and_labels_by_task_name(tmx, run, tmp_path):
    assert tmx("prefer", run, "--weights", "cars=3,birds=1", "-o", tmp_path / "p.json").code == 0
    assert weights(tmp_path / "p.json") == (0.25, 0.75, 0)
    (tmp_path / "names.txt").write_text("cars\n" * 30 + "flowers\n" * 10)
    found = tmx("prefer", run, "--labels", tmp_path / "names.txt", "-o", tmp_path / "p.json")
    assert found.code == 0, found.err
    assert weights(tmp_path / "p.json") == pytest.approx((0, 0.75, 0.25), abs=0.05)


def test_a_name_of_a_class_and_a_task_is_a_class(tmx, run, tmp_path):
    content = json.loads((run / "run.json").read_text())
    content["tasks"][0] |= {"name": "bus", "profile": None}
    (run / "run.json").write_text(json.dumps(content))
    (tmp_path / "names.txt").write_text("bus\n" * 4)
    result = tmx("prefer", run, "--labels", tmp_path / "names.txt")
    assert result.code == 2  # as classes, they need all profiles
    assert "missing: 'bus'" in result.err


# -- inputs with their labels -----------------------------------------------------------------------------------------


def test_a_search_from_pairs_to_a_merge(tmx, image_run, pairs, tmp_path):
    out = tmp_path / "site.json"
    given = ("--labelled", pairs, "--method", "search", "--device", "cpu", "--trials", "5", "-o", out)
    result = tmx("prefer", image_run.path, *given)
    assert (result.code, result.err) == (0, "")
    found = Preference.load(out)
    assert (found.method, found.provenance["trials"]) == ("search", 5)
    assert f"{found.provenance['accuracy']:.1%}" in result.out
    assert tmx("merge", image_run.path, "--preference", out, "-o", tmp_path / "m.safetensors").code == 0


@pytest.mark.parametrize("method", ["auto", "label"])
def test_pairs_give_their_labels(tmx, image_run, pairs, method):
    found = json.loads(tmx("prefer", image_run.path, "--labelled", pairs, "--method", method, "--json").out)
    assert found == json.loads(tmx("prefer", image_run.path, "--labels", pairs, "--json").out)
    assert found["preference"]["method"] == "label"
    assert found["preference"]["weights"] == pytest.approx([0.7, 0.3], abs=0.1)


def test_pairs_give_their_inputs(tmx, image_run, pairs):
    given = ("--method", "cosine", "--device", "cpu", "--json")
    paired = json.loads(tmx("prefer", image_run.path, "--labelled", pairs, *given).out)
    alone = json.loads(tmx("prefer", image_run.path, "--inputs", pairs, *given).out)
    assert paired["preference"] == alone["preference"]
    assert paired["warnings"] == alone["warnings"] == []
