"""Kept samples: what is drawn, that files are whole, safe and read back exactly, and what is refused."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs.keeping import keep_samples

from tunable_magmax.data.images import open_image_folder
from tunable_magmax.data.samples import Samples, Unreadable
from tunable_magmax.data.source import memory_samples
from tunable_magmax.errors import InputError
from tunable_magmax.runs import kept
from tunable_magmax.runs.kept import open_kept
from tunable_magmax.runs.run import Run

HOSTILE = ["../x", "a/b", "CON", "x" * 3000, "\n", "a", "A", ".", "..", "", "\r\n ", "=1+1", "ü\u2028", "q\",'"]


def new_run(path: Path, *tasks: str) -> Run:
    path.mkdir()
    entries = [{"name": task, "checkpoint": f"task-{t}"} for t, task in enumerate(tasks or ("travel",))]
    (path / "run.json").write_text(json.dumps({"version": 1, "base": "base", "tasks": entries}))
    return Run.open(path)


def texts(contents: list[str], labels: list[str]) -> Samples:
    return memory_samples(contents, "text", labels)


def numbered(classes: list[str], each: int) -> Samples:
    names = [name for name in classes for _ in range(each)]
    places = {name: k for k, name in enumerate(classes)}
    contents = [f"text {k}" for k in range(len(names))]
    return Samples(
        "numbered", "text", len(names), lambda wanted: (contents[p] for p in wanted), tuple(classes),
        tuple(places[name] for name in names),
    )  # fmt: skip


def pictures(count: int, size: int = 12, classes: int = 2, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    values = [rng.integers(0, 256, (size, size + 3, 3), dtype=np.uint8) for _ in range(count)]
    return memory_samples(values, "image", [f"class {k % classes}" for k in range(count)])


def pairs(samples: Samples | None) -> list[tuple[str, str]]:
    assert samples is not None
    assert samples.labels is not None
    loaded = samples.load(range(len(samples)))
    return [(text, samples.classes[label]) for text, label in zip(loaded, samples.labels, strict=True)]


def files(run: Run) -> dict[str, bytes]:
    return {str(file.relative_to(run.path)): file.read_bytes() for file in run.path.rglob("*") if file.is_file()}


@settings(max_examples=40, deadline=None)
@given(
    contents=st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(HOSTILE)), min_size=1, max_size=30
    ),
    per_class=st.integers(1, 4),
)
def test_what_is_kept_is_what_was_there(tmp_path_factory, contents, per_class):
    run = new_run(tmp_path_factory.mktemp("kept") / "run")
    classes = sorted({label for _, label in contents})
    samples = Samples(
        "texts", "text", len(contents), lambda wanted: (contents[p][0] for p in wanted), tuple(classes),
        tuple(classes.index(label) for _, label in contents),
    )  # fmt: skip
    entry = keep_samples(run, 0, samples, per_class=per_class, source="training")
    back = pairs(open_kept(Run.open(run.path), 0))
    assert set(back) <= set(contents)
    assert len({text for text, _ in back}) == len(back) == entry.samples
    assert entry.classes == tuple(classes)
    for name in classes:
        count = sum(label == name for _, label in back)
        only = {text for text, label in contents if label == name} - {t for t, label in contents if label != name}
        assert min(per_class, len(only)) <= count <= per_class


def test_hostile_names_of_tasks_and_classes(tmp_path):
    names = [name for name in HOSTILE if name.strip()]
    run = new_run(tmp_path / "run", *names)
    for t in range(len(names)):
        keep_samples(run, t, numbered(HOSTILE, 2), source="training")
        shown = replace(pictures(28, classes=14), classes=tuple(HOSTILE))
        keep_samples(run, t, shown, source="evaluation")
    run = Run.open(run.path)
    for t in range(len(names)):
        samples = open_kept(run, t)
        assert samples.classes == tuple(HOSTILE)
        assert sorted(samples.labels) == sorted(list(range(14)) * 2)
    assert {item.name for item in tmp_path.iterdir()} == {"run"}
    assert {item.name for item in run.path.iterdir()} == {"run.json", "kept"}
    folded = [str(path.relative_to(run.path)).lower() for path in run.path.rglob("*") if path.is_file()]
    assert len(set(folded)) == len(folded)
    assert max(len(part.encode()) for path in folded for part in Path(path).parts) < 200


def test_a_person_opens_what_is_kept(tmp_path):
    run = new_run(tmp_path / "run", "travel", "birds")
    entry = keep_samples(run, 0, texts(["hello, you", 'say "hi"'], ["greet", "quote"]), source="evaluation")
    assert (run.path / entry.path).read_text().splitlines()[0] == '"text","label"'
    assert (entry.source, entry.kind, entry.samples) == ("evaluation", "text", 2)
    entry = keep_samples(run, 1, pictures(6), source="training")
    folder = open_image_folder(run.path / entry.path)
    assert folder.classes == entry.classes == ("class 0", "class 1")
    assert sorted(folder.labels) == sorted(open_kept(run, 1).labels)


def test_one_seed_one_draw(tmp_path):
    made = [new_run(tmp_path / name) for name in ("one", "two", "three")]
    for run, seed in zip(made, (3, 3, 4), strict=True):
        keep_samples(run, 0, pictures(60), per_class=5, source="training", seed=seed)
    assert files(made[0]) == files(made[1])
    assert files(made[0]).keys() != files(made[2]).keys()
    keep_samples(made[0], 0, pictures(60), per_class=5, source="training", seed=4)
    assert files(made[0]) == files(made[2])
    assert keep_samples(made[0], 0, pictures(60), per_class=0, source="training") is None
    assert list(files(made[0])) == ["run.json"]
    assert open_kept(made[0], 0) is None


def test_pictures_cover_the_size_and_never_grow(tmp_path):
    run = new_run(tmp_path / "run")
    rng = np.random.default_rng(0)
    shapes = {(40, 80): (20, 40), (80, 40): (40, 20), (10, 90): (10, 90), (20, 20): (20, 20)}
    values = [rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]
    keep_samples(run, 0, memory_samples(values, "image", ["a"] * 4), source="training", size=(20, 20))
    sizes = {(image.height, image.width) for image in open_kept(run, 0).load(range(4))}
    assert sizes == set(shapes.values())
    keep_samples(run, 0, memory_samples(values, "image", ["a"] * 4), source="training")
    back = {np.asarray(image).tobytes() for image in open_kept(run, 0).load(range(4))}
    assert back == {value.tobytes() for value in values}


def test_duplicates_and_unreadable_pictures_are_replaced(tmp_path):
    samples = pictures(40, classes=1)
    bad = set(range(0, 40, 2))

    def load(wanted):
        for position, value in zip(wanted, samples.load([p // 4 * 4 for p in wanted]), strict=True):
            yield Unreadable(f"{position}.png", "cut") if position in bad else value

    run = new_run(tmp_path / "run")
    with pytest.warns(UserWarning, match="could not be read") as told:
        entry = keep_samples(run, 0, replace(samples, load=load), per_class=10, source="training")
    assert len(told) == 1
    assert entry.samples == 10  # of 40, half are unreadable, and the others are there twice
    bad |= set(range(40))
    before = files(run)
    with pytest.raises(InputError, match="cannot be read"):
        keep_samples(run, 0, replace(samples, load=load), source="training")
    assert files(run) == before


def test_no_more_samples_than_stated(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST_KEPT", 7)
    run = new_run(tmp_path / "run")
    entry = keep_samples(run, 0, pictures(40), per_class=10, source="training")
    assert np.bincount(open_kept(run, 0).labels).tolist() == [3, 3] == [entry.per_class] * 2
    stored = sum(path.stat().st_size for path in (run.path / entry.path).rglob("*.png"))
    monkeypatch.setattr(kept, "TASK_BYTES", stored - 1)
    entry = keep_samples(run, 0, pictures(40), per_class=10, source="training")
    assert np.bincount(open_kept(run, 0).labels).tolist() == [2, 2] == [entry.per_class] * 2
    monkeypatch.setattr(kept, "TASK_BYTES", 100)
    with pytest.warns(UserWarning, match="nothing is kept"):
        assert keep_samples(run, 0, pictures(40), source="training") is None


def refused(run: Run, task: int = 0) -> str:
    with pytest.raises(InputError, match="tmx init") as error:
        open_kept(run, task)
    return str(error.value)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_damaged_and_foreign_samples_are_refused(tmp_path, kind):
    made = {"text": lambda seed: numbered([f"a{seed}", "b"], 4), "image": lambda seed: pictures(8, seed=seed)}[kind]
    run, other = (new_run(tmp_path / name, "travel", "bank") for name in ("run", "other"))
    for t in range(2):
        keep_samples(run, t, made(t), source="training")
        keep_samples(other, t, made(7 + t), source="training")
    good = files(run)
    one, two = (run.path / entry.path for entry in run.kept)
    copying = shutil.copytree if kind == "image" else shutil.copy

    def restore():
        shutil.rmtree(run.path)
        for name, content in good.items():
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            (run.path / name).write_bytes(content)
        assert open_kept(Run.open(run.path), 0) is not None

    inside = [one] if kind == "text" else [one / "labels.csv", *sorted(one.rglob("*.png"))[:2]]
    for file in inside:
        for content in (b"", file.read_bytes()[:-1], file.read_bytes() + b"x", b"\xff\xfe\0"):
            file.write_bytes(content)
            refused(run)
        file.unlink()
        refused(run)
        restore()
    for foreign in (two, other.path / other.kept[0].path):
        shutil.rmtree(one, ignore_errors=True)
        one.unlink(missing_ok=True)
        copying(foreign, one)
        refused(run)
        restore()
    content = json.loads((run.path / "run.json").read_text())
    content["tasks"][0]["kept"] = content["tasks"][1]["kept"]
    (run.path / "run.json").write_text(json.dumps(content))
    assert "travel" in refused(Run.open(run.path))
    for path in ("../other/kept/x", "/etc/passwd", "kept/../run.json", "kept/..", "run.json"):
        content["tasks"][0]["kept"]["path"] = path
        (run.path / "run.json").write_text(json.dumps(content))
        refused(Run.open(run.path))
    content["tasks"][0]["kept"] = {"path": 3}
    (run.path / "run.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="kept"):
        Run.open(run.path)


def test_refusals(tmp_path):
    run = new_run(tmp_path / "run")
    with pytest.raises(InputError, match="-1"):
        keep_samples(run, 0, numbered(["a"], 2), per_class=-1, source="training")
    with pytest.raises(InputError, match="without labels"):
        keep_samples(run, 0, memory_samples(["a"], "text"), source="training")
    for name in ("\ud800", "a\0"):
        with pytest.raises(InputError, match="class"):
            keep_samples(run, 0, numbered([name], 2), source="training")
    assert list(files(run)) == ["run.json"]
    with pytest.warns(UserWarning, match="half of a character"):
        keep_samples(run, 0, texts(["good", "\ud800"], ["a", "b"]), source="training")
    assert pairs(open_kept(run, 0)) == [("good", "a")]


@pytest.mark.parametrize("kind", ["text", "image"])
def test_killed_at_any_write_nothing_is_half(tmp_path, kind):
    """Samples are kept of a run that keeps others; at every call that changes the disk the process is killed."""
    code = """
import os, sys, signal
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from test_kept import keep_samples, numbered, pictures
from tunable_magmax.runs.run import Run
def samples(seed):
    return numbered([f"a{seed}", "b"], 1) if sys.argv[2] == "text" else pictures(2, seed=seed)
calls = {name: getattr(os, name) for name in ("replace", "rename", "unlink", "mkdir", "fsync", "rmdir", "open")}
for moment in range(300):
    def step(left=iter(range(moment))):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
    if os.fork() == 0:
        run = Run.open(Path(sys.argv[1]) / str(moment))
        def counted(call):
            def counting(*given, **named):
                step()
                return call(*given, **named)
            return counting
        for name, call in calls.items():
            setattr(os, name, counted(call))
        keep_samples(run, 0, samples(1), source="training")
        os._exit(0)
    if os.waitstatus_to_exitcode(os.wait()[1]) == 0:
        print(moment)
        break
"""
    made = {"text": lambda seed: numbered([f"a{seed}", "b"], 1), "image": lambda seed: pictures(2, seed=seed)}[kind]
    start, wanted = new_run(tmp_path / "start"), new_run(tmp_path / "wanted")
    keep_samples(start, 0, made(0), source="training")
    keep_samples(wanted, 0, made(1), source="training")
    for moment in range(80):
        shutil.copytree(start.path, tmp_path / str(moment))
    words = [str(tmp_path), kind, *sys.path, str(Path(__file__).parent)]
    done = subprocess.run([sys.executable, "-c", code, *words], timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    moments = int(done.stdout)
    assert moments >= 5
    for moment in range(moments):
        run = Run.open(tmp_path / str(moment))
        assert run.kept[0] in (start.kept[0], wanted.kept[0])
        assert len(open_kept(run, 0)) == 2
        keep_samples(run, 0, made(1), source="training")
        assert files(run) == files(wanted)
