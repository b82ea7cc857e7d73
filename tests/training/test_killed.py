"""A run that was killed, at whatever moment, ends as one that was not."""

import os
import signal
import subprocess

import pytest
from forked import forking
from training import toy

KINDS = {
    "vit": {"train": {"augment": "crop+flip"}},
    "bert": {"head": {"source": "builtin"}},  # with dropout
}
MOMENTS = {
    "head without base": ("save_encoder", 1),
    "nothing trained": ("check_setup", 1),
    "first task trained but not saved": ("save_encoder", 2),
    "saved but not entered": ("enter", 1),
    "second task trained but not saved": ("save_encoder", 3),
    "checkpoint without profile": ("profile_task", 2),
    "the last one not entered": ("enter", 2),
}
# Much like others: `make stress` tries them too.
RARE = ("nothing trained", "checkpoint without profile", "the last one not entered")


@pytest.fixture(scope="module")
def serve():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with forking("training.doomed", stderr=subprocess.DEVNULL, env=environment) as ask:
        yield ask


@pytest.fixture(scope="module")
def whole(serve, tmp_path_factory):
    """For each kind: its settings, and a run that nobody disturbed."""
    made = {}
    for kind, sections in KINDS.items():
        root = tmp_path_factory.mktemp(kind)
        order = {"settings": toy.settings(root, kind, **sections), "root": root}
        answer = serve(**order, out=root / "whole")
        assert answer["trained"] == 2
        made[kind] = (order, root / "whole", answer["count"])
    return made


def killed(serve, order, out, place, deadly):
    assert serve(**order, out=out, place=place, deadly=deadly)["killed"] == signal.SIGKILL


def assert_same(serve, order, out, whole):
    """Started again it ends, equal in every file."""
    assert "trained" in serve(**order, out=out)
    assert toy.differing(out, whole) == []


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *(pytest.param("vit", moment, marks=[pytest.mark.stress] * (moment in RARE)) for moment in MOMENTS),
        ("bert", "second task trained but not saved"),
    ],
)
def test_killed_once(serve, whole, tmp_path, kind, moment):
    order, undisturbed, _ = whole[kind]
    killed(serve, order, tmp_path / "run", *MOMENTS[moment])
    assert_same(serve, order, tmp_path / "run", undisturbed)


@pytest.mark.parametrize("share", [0.4, *(pytest.param(share, marks=pytest.mark.stress) for share in (0.05, 0.8))])
def test_killed_before_a_change_of_the_disk(serve, whole, tmp_path, share):
    order, undisturbed, changes = whole["vit"]
    killed(serve, order, tmp_path / "run", None, max(1, round(share * changes)))
    assert_same(serve, order, tmp_path / "run", undisturbed)


def test_killed_again_and_again(serve, whole, tmp_path):
    order, undisturbed, _ = whole["bert"]
    for place, deadly in (("save_encoder", 1), ("save_encoder", 1), ("enter", 1), ("enter", 1)):
        killed(serve, order, tmp_path / "run", place, deadly)
    assert_same(serve, order, tmp_path / "run", undisturbed)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert serve(**order, out=tmp_path / "run")["trained"] == 0  # and once more, nothing is done
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
