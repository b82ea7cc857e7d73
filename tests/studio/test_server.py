"""What the page can do: measure, upload, write a model and take it home."""

import io
import shlex
import threading

import numpy as np
import pytest
from labelled_run import keeping
from runs.keeping import keep_samples

from tunable_magmax import Preference
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError, shortened
from tunable_magmax.runs.run import Run
from tunable_magmax.studio.options import StudioOptions
from tunable_magmax.studio.points import PointRequest
from tunable_magmax.studio.scores import compared
from tunable_magmax.studio.session import Studio
from tunable_magmax.workflows.evaluate import evaluate
from tunable_magmax.workflows.options import Reading
from tunable_magmax.workflows.tailored import read_record


def test_another_mix_costs_no_forward_pass(page):
    point = page.measure(weights=[3, 1], scale=1.0)
    before = page.studio.scores.bench.embedded
    other = page.measure(weights=[3, 1], scale=1.0, mix=[1, 3])
    assert page.studio.scores.bench.embedded == before
    assert point["id"] == other["id"]


@pytest.mark.parametrize("weights", [[3, 1], [1, 4]])
def test_a_point_is_as_right_as_the_model_that_is_written(page, image_run, site, weights):
    point = {"weights": weights, "scale": 0.5}
    measured, name = page.measure(**point), f"written-{weights[0]}"
    page.post("/api/models", {"name": name, "point": point}, 202)
    done = page.wait("model", name=name, state="done")
    made = evaluate(page.studio.out / name, site, run=image_run.path, reading=Reading(device="cpu"))
    assert measured["overall"]["right"] == made.accuracy.overall.right
    record = read_record(page.studio.out / name)
    assert measured["head"] == record.head.kind
    assert done["expected"] == {key: list(value) for key, value in record.expected.items()}


def test_without_a_method_a_point_has_the_one_that_its_weights_ask_for(page):
    from tunable_magmax.evaluation.choosing import default_method

    assert page.measure(weights=[3, 1])["method"] == default_method([3, 1])
    assert page.get("/api/state")["start"]["method"] == default_method([1, 1])


@pytest.fixture
def own_run(image_run, tmp_path):
    """A copy of the run that keeps samples, and no data beside them."""
    return Run.open(keeping(image_run, tmp_path / "run", 6).path)


def test_without_data_points_are_measured_on_kept_samples_by_cross_validation(own_run, tmp_path):
    studio = Studio(own_run, StudioOptions(out=tmp_path / "out", device="cpu"))
    list(studio.opening())
    [data] = studio.state()["data"]
    assert (data["id"], data["samples"], data["of"], data["tasks"]) == ("kept", 24, 24, [12, 12])
    asked = PointRequest((3.0, 1.0), 0.5)
    point = studio.measure_now(asked)
    setting = studio.setting(asked)
    fit = studio.scores.bench.fit(setting.spec, studio.scores.facts(setting))
    assert point["overall"]["right"] == int(fit.right.sum())
    names = [line["name"] for line in point["lines"] if line["name"] != "old"]
    assert names == ["base", "last", "best", "magmax"]
    studio.close()


def test_no_samples_to_measure_on_are_refused():
    with pytest.raises(InputError, match="--samples is 0, expected at least 1"):
        StudioOptions(samples=0)


@pytest.mark.parametrize("name", ["inputs", "labelled", "data", "device"])
def test_what_cannot_be_used_is_refused_before_the_page_opens(image_run, tmp_path, name):
    value = "nope" if name == "device" else tmp_path / "nope"
    with pytest.raises(InputError, match="nope"):
        Studio(Run.open(image_run.path), StudioOptions(out=tmp_path / "out", **{name: value}))


def test_the_latest_request_wins(page):
    began, go_on = threading.Event(), threading.Event()

    def slow():
        began.set()
        go_on.wait(30)
        return {}

    first = page.studio.worker.request(slow)
    began.wait(30)
    numbers = [page.post("/api/measure", {"weights": [1, k]}, 202)["request"] for k in range(20)]
    go_on.set()
    page.wait("measured", request=numbers[-1])
    outcomes = {data["request"]: name for name, data in page.events if "request" in data}
    assert outcomes[first] == outcomes[numbers[-1]] == "measured"
    assert {outcomes[number] for number in numbers[:-1]} == {"superseded"}


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"weights": [1]}, "1 weights for 2 tasks"),
        ({"weights": [0, 0]}, "all weights are zero"),
        ({"weights": [1, -1]}, "weight 2 is negative"),
        ({"weights": [1, 1], "scale": -1}, "from 0 to 100"),
        ({"weights": [1, 1], "scale": "long"}, "scale"),
        ({"weights": [1, 1], "method": "../ties"}, "unknown method"),
        ({"weights": [1, 1], "data": "/etc/passwd"}, "there are no data"),
        ({"weights": [1, 2], "preset": "equal"}, "not the weights of the preset"),
        ({"preset": "nobody"}, "no preset"),
        ({"weights": [1, 1], "mix": [1]}, "in the mix"),
        ({"weigths": [1, 1]}, "did you mean 'weights'"),
        ({}, "which weights"),
    ],
)
def test_a_bad_point_is_refused_in_plain_words(page, point, words):
    answer = page.ask("POST", "/api/measure", point)
    assert answer.status_code == 400
    assert answer.json().keys() == {"error"}
    assert words in answer.json()["error"]["message"]


def test_a_merge_that_fails_says_so(page, monkeypatch):
    def fail(*_):
        raise RuntimeError("the memory is gone")

    monkeypatch.setattr(type(page.studio.scores.bench.models), "state", fail)
    failed = page.wait("failed", request=page.post("/api/measure", {"weights": [1, 7]}, 202)["request"])
    assert failed["error"]["message"] == "the memory is gone"
    monkeypatch.undo()
    assert page.measure(weights=[1, 7])["overall"]["samples"] == 22


def test_the_model_that_is_written_is_that_of_the_shown_command(page, tmx, tmp_path):
    point = {"weights": [2, 1], "scale": 0.7}
    shown = page.post("/api/command", {"name": "mine", "point": point})
    assert shown["tailor"].endswith(shlex.join(["-o", str(page.studio.out / "mine")]))
    assert page.post("/api/command", {"point": point})["tailor"].endswith("site-model")
    assert page.post("/api/models", {"name": "mine", "point": point}, 202) == {"name": "mine"}
    page.wait("model", name="mine", state="done")
    arguments = shlex.split(shown["tailor"])[1:]
    arguments[-1] = str(tmp_path / "again")
    assert tmx(*arguments).code == 0
    written = (page.studio.out / "mine/model.safetensors").read_bytes()
    assert (tmp_path / "again/model.safetensors").read_bytes() == written
    twice = page.ask("POST", "/api/models", {"name": "mine", "point": point})
    assert (twice.status_code, "already" in twice.text) == (409, True)
    assert "mine" in [model["name"] for model in page.get("/api/state")["models"]]


def test_a_cancelled_or_failed_model_leaves_nothing(page, image_run, monkeypatch):
    from tunable_magmax.studio import writing

    reached, go_on = threading.Event(), threading.Event()

    def held(run, options, progress):
        def pause(phase, done, total):
            reached.set()
            go_on.wait(30)
            progress(phase, done, total)

        return writing_tailor(run, options, pause)

    writing_tailor = writing.tailor
    monkeypatch.setattr(writing, "tailor", held)
    page.post("/api/models", {"name": "half", "point": {"weights": [1, 1]}}, 202)
    assert reached.wait(30)
    busy = page.ask("POST", "/api/models", {"name": "other", "point": {"weights": [1, 1]}})
    assert busy.status_code == 409
    name = page.upload({"a.png": image_png(image_run, "red"), "b.png": image_png(image_run, "blue")})
    page.post(f"/api/uploads/{name}/estimate", {"labels": False}, 202)
    assert page.wait("samples", upload=name)["samples"] == 2  # while the model waits
    page.ask("DELETE", f"/api/uploads/{name}")
    threading.Timer(0.2, go_on.set).start()
    assert page.ask("DELETE", "/api/models/half").json() == {}
    assert page.wait("model", name="half", state="cancelled")
    assert not [item.name for item in page.studio.out.iterdir() if item.name.startswith("half")]

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "tailor", fail)
    page.post("/api/models", {"name": "full", "point": {"weights": [1, 1]}}, 202)
    assert "No space left" in page.wait("model", name="full", state="failed")["error"]["message"]
    assert not [item.name for item in page.studio.out.iterdir() if item.name.startswith("full")]


def test_a_preference_is_saved_with_its_scale(page):
    saved = page.post("/api/preferences", {"name": "mine", "point": {"weights": [3, 1], "scale": 0.5}})
    loaded = Preference.load(page.studio.out / saved["file"])
    assert (loaded.weights, loaded.scale, loaded.tasks) == ((0.75, 0.25), 0.5, ("first", "second"))


@pytest.mark.parametrize("strange", ["zebra", "", "...", "x" * 300])
def test_samples_with_unknown_labels_are_left_out_of_accuracies_alone(page, image_run, tmp_path, strange):
    folder = image_run.pairs(tmp_path / "mine", {"red": 3, "green": 2}, seed=900)
    files = {f"{file.parent.name}/{file.name}": file.read_bytes() for file in sorted(folder.rglob("*.png"))}
    name = page.upload({**files, f"{strange}/other.png".removeprefix("/"): image_png(image_run, "grey")})
    page.post(f"/api/uploads/{name}/estimate", {"labels": True}, 202)
    facts = page.wait("samples", upload=name)
    assert (facts["samples"], facts["labelled"], facts["unknown_labels"]) == (6, 5, 1)
    shown = strange or "(no class folder)"
    told = [text for text in facts["warnings"] if "of 6 labels" in text]
    assert [shortened(shown)[:50] in text for text in told] == [True, True]  # for the weights and for accuracies
    assert not any("no class of the head" in text for text in page.get("/api/state")["warnings"])
    assert page.measure(preset="samples", data="site")["overall"]["samples"] == 5
    assert shown in [row["label"] for row in page.get("/api/samples?count=100")["samples"]]
    page.ask("DELETE", f"/api/uploads/{name}")


def image_png(image_run, colour):
    content = io.BytesIO()
    image_run.inputs(colour, 1, 77)[0].save(content, "PNG")
    return content.getvalue()


def test_samples_are_estimated_shown_and_measured_on(page, image_run, tmp_path):
    folder = image_run.pairs(tmp_path / "mine", {"red": 6, "green": 2}, seed=900)
    files = {f"mine/{file.parent.name}/{file.name}": file.read_bytes() for file in sorted(folder.rglob("*.png"))}
    copy = next(iter(files.values()))
    name = page.upload({**files, "mine/red/copy.png": copy})
    page.post(f"/api/uploads/{name}/estimate", {"labels": True}, 202)
    facts = page.wait("samples", upload=name)
    assert (facts["samples"], facts["copies"], facts["labelled"]) == (9, 1, 9)
    state = page.get("/api/state")
    assert [data["id"] for data in state["data"]] == ["given", "site"]
    assert [preset["id"] for preset in state["presets"]][:2] == ["equal", "samples"]
    preset = state["presets"][1]
    assert preset["method"] == "label"
    assert all(
        low <= weight <= high for weight, (low, high) in zip(preset["weights"], preset["intervals"], strict=True)
    )
    point = page.measure(preset="samples", data="site")
    assert point["overall"]["samples"] == 9
    assert "site" in [other["data"] for other in page.get("/api/points")["points"]]
    assert "--preference" in page.post("/api/command", {"point": {"preset": "samples"}})["tailor"]
    shown = page.get("/api/samples?count=100")
    assert shown["total"] == shown["shown"] == 9
    assert all(row["picture"].startswith("data:image/png;base64,") for row in shown["samples"])
    assert page.ask("GET", "/api/samples?show=../x").status_code == 400
    assert page.ask("DELETE", f"/api/uploads/{name}").json() == {}
    assert page.get("/api/samples")["total"] == 0
    assert "site" not in [point["data"] for point in page.get("/api/points")["points"]]


@pytest.mark.parametrize("kept", [True, False])
def test_classifiers_of_the_tasks_own_are_measured_as_they_are_written(tmp_path, kept):
    from builtin_run import LABELS, TASKS, build_builtin, write

    run = Run.open(build_builtin(tmp_path))
    for t, name in enumerate(TASKS if kept else ()):
        keep_samples(run, t, open_samples(tmp_path / f"{name}.csv"), source="evaluation")
    test = write(tmp_path / "test.csv", LABELS, 4, seed=5)
    studio = Studio(Run.open(tmp_path), StudioOptions(out=tmp_path / "out", data=test, device="cpu"))
    list(studio.opening())
    asked = PointRequest((3.0, 1.0), 0.5)
    point = studio.measure_now(asked)
    studio.writer.write("mine", studio.setting(asked))
    studio.writer._thread.join()
    assert [model.state for model in studio.writer.models.values()] == ["done"]
    made = evaluate(tmp_path / "out/mine", test, run=tmp_path, reading=Reading(device="cpu"))
    assert point["overall"]["right"] == made.accuracy.overall.right
    assert point["head"] == ("fitted" if kept else "old")
    assert ("old" in [line["name"] for line in point["lines"]]) is kept
    studio.close()


@pytest.mark.parametrize(("tasks", "verdict"), [(2, "clearly worse"), (20, "cannot tell")])
def test_the_best_of_many_tasks_must_be_further_ahead(tasks, verdict):
    """The best single task was chosen on the samples that it is compared on."""
    point = np.arange(40) < 20
    best, worst = np.arange(40) < 28, np.zeros(40, bool)
    found = compared(point, {"best": best, "base": worst}, np.full(40, 1 / 40), tasks)
    assert {name: told for name, (_, told) in found.items()} == {"best": verdict, "base": "clearly better"}


def test_samples_take_the_place_of_those_before(page, image_run):
    png = image_png(image_run, "red")
    for _ in range(2):
        name = page.upload({"a.png": png})
        page.post(f"/api/uploads/{name}/estimate", {"labels": False}, 202)
        page.wait("samples", upload=name)
    assert [folder.name for folder in (page.studio.out / "samples").iterdir()] == [name]
    page.ask("DELETE", f"/api/uploads/{name}")
