"""A run that was killed, at whatever moment, ends as one that was not."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from forked import forking
from training import toy

KINDS = {
    "vit": {"train": {"augment": "crop+flip"}, "regularise": {"method": "ewc", "strength": 10}},
    "bert": {"regularise": {"method": "lwf", "strength": 2}},  # with dropout
}
MOMENTS = {
    "base without head": ("save_head", 1),
    "nothing trained": ("check_setup", 1),
    "inside the first task": ("save_state", 3),
    "trained but not saved": ("empty_folder", 3),
    "saved but not entered": ("add_task", 1),
    "entered, with an old snapshot": ("drop_state", 2),
    "inside the second task": ("save_state", 6),
    "checkpoint without profile": ("checkpoint_digest", 2),
    "the last one not entered": ("add_task", 2),
    "the very end": ("drop_state", 4),
}


# Much like others: `make stress` tries them too.
RARE = ("nothing trained", "entered, with an old snapshot", "checkpoint without profile", "the last one not entered")


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
        assert answer["trained"] == [True, True]
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
        pytest.param("bert", "inside the first task", marks=pytest.mark.stress),
        ("bert", "inside the second task"),
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
    for place, deadly in (("save_head", 1), ("save_state", 2), ("save_state", 2), ("add_task", 1)):
        killed(serve, order, tmp_path / "run", place, deadly)
    assert_same(serve, order, tmp_path / "run", undisturbed)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert serve(**order, out=tmp_path / "run")["trained"] == [False, False]  # and once more, nothing is done
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
