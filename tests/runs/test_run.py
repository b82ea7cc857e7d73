"""Run directories: what is read, what is written, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.runs.profile import Profile
from tunable_magmax.runs.recipe import read_recipe
from tunable_magmax.runs.run import Run, is_run

PLAIN = {
    "version": 1,
    "base": "base",
    "tasks": [{"name": "cats", "checkpoint": "task-1"}, {"name": "dogs", "checkpoint": "/elsewhere/task-2"}],
}


def write(folder, record):
    (folder / "run.json").write_text(record if isinstance(record, str) else json.dumps(record))
    return folder


def profile(task, classes):
    counts = tuple(3 for _ in classes)
    rows = np.ones((2, 4), np.float32)
    return Profile(task, 6, tuple(classes), "sha256:x", "sha256:b", counts, rows, rows, np.array([0, 1]))


def test_profiles_and_a_head_are_registered(tmp_path):
    head = tmp_path / "head.safetensors"
    head.write_bytes(b"a head")
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run.open(write(folder, PLAIN))
    assert run.profile_name("birds") == "profiles/birds.safetensors"
    names = ["birds & bees", "birds___bees", "\u65e5\u672c", "\u4e2d\u56fd", "x" * 300, "x" * 301, "../up", "a\nb"]
    places = [Path(run.profile_name(name)) for name in names]
    assert len({*places}) == len(names)
    assert all(place.parent == Path("profiles") for place in places)
    assert max(len(place.name) for place in places) < 200
    with pytest.raises(InputError, match=r"a test needs the tasks' profiles; missing: 'cats', 'dogs'\. Make them"):
        run.require_profiles("a test")
    for task in ("cats", "dogs"):
        profile(task, [task, "mice"]).save(run.path / run.profile_name(task))
    run.register("cats", profile=run.profile_name("cats"))
    assert [found and found.task for found in run.profiles] == ["cats", None]
    run.register("dogs", profile=run.profile_name("dogs"))
    run.register_head(head)
    for seen in (run, Run.open(folder)):
        assert [found.task for found in seen.require_profiles("a test")] == ["cats", "dogs"]
        assert seen.classes == {"cats": ("cats", "mice"), "dogs": ("dogs", "mice")}
        assert seen.head == folder / "classifier-head.safetensors"
    assert (folder / "classifier-head.safetensors").read_bytes() == b"a head"
    record = json.loads((folder / "run.json").read_text())
    assert record["tasks"][0] == {**PLAIN["tasks"][0], "profile": "profiles/cats.safetensors"}
    assert record["classifier"] == {"head": "classifier-head.safetensors"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("{", "JSON"),
        ("[]", "mapping"),
        ({**PLAIN, "version": 2}, "version is 2"),
        ({"version": 1, "tasks": []}, "'base'"),
        ({"version": 1, "base": "b"}, "'tasks'"),
        ({**PLAIN, "tasks": []}, "no tasks"),
        ({**PLAIN, "tasks": ["t"]}, "tasks.0 is 't'"),
        ({**PLAIN, "tasks": [{"name": "t"}]}, "tasks.0.checkpoint"),
        ({**PLAIN, "tasks": [{"checkpoint": "t"}]}, "tasks.0.name"),
        ({**PLAIN, "tasks": [{"checkpoint": "t", "profile": 3}]}, "tasks.0.profile is 3"),
        ({**PLAIN, "tasks": [{"checkpoint": "t", "classes": []}]}, "tasks.0.classes is []"),
        ({**PLAIN, "tasks": [PLAIN["tasks"][0]] * 2}, "same name"),
        ({**PLAIN, "classifier": {"head": 3}}, "classifier.head is 3"),
        ({**PLAIN, "benchmark": "cifar100"}, "benchmark is 'cifar100'"),
    ],
)
def test_a_broken_run(tmp_path, record, says):
    with pytest.raises(InputError) as caught:
        Run.open(write(tmp_path, record))
    assert str(tmp_path / "run.json") in str(caught.value)
    assert says in str(caught.value)


def test_a_run_in_training(tmp_path):
    arguments = (tmp_path / "run", {"seed": 1, "benchmark": {"name": "texts"}}, 2)
    with Run.training(*arguments) as run:
        assert (run.tasks, run.base, is_run(run.path)) == ((), tmp_path / "run" / "base", False)
        run.enter("cats", run.path / "task-01", classes=("cat",), training={"steps": 3})
        run.save()
        assert (run.names, run.tasks) == (("cats",), (run.path / "task-01",))
    with pytest.raises(InputError, match=r"task-01 is missing; remove .*run and train again"), Run.training(*arguments):
        pass
    (run.path / "task-01").mkdir()
    with Run.training(*arguments) as again:
        assert (again.names, again.classes) == (("cats",), {"cats": ("cat",)})
        assert again.record.benchmark == {"name": "texts"}
        assert [task.training for task in again.record.tasks] == [{"steps": 3}]
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "run.json", "task-01"]


def test_run_json_in_place_of_its_directory(tmp_path):
    write(tmp_path, PLAIN)
    for opens in (Run.open, read_recipe):
        with pytest.raises(InputError, match=r"not run\.json"):
            opens(tmp_path / "run.json")
