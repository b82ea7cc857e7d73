"""The cost model: bytes as read, and times that add up."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sequences import SMALL, save_sequence, sequence

from tunable_magmax.checkpoints.descriptors import PositionedFile
from tunable_magmax.cli.plan import time_lines
from tunable_magmax.engines.cost import RAY_START, Load, Speeds, estimate
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.merging.kernels.native import NativeKernels
from tunable_magmax.workflows import plan as plan_module
from tunable_magmax.workflows.plan import MergePlan, plan_merge

SHAPES = {name: shape for name, shape in SMALL.items() if "frozen" not in name}  # a plan cannot know what is unchanged

amounts = st.integers(0, 10**15)
speeds_of_things = st.floats(1e3, 1e13)
loads = st.builds(
    Load,
    elements=amounts,
    survey=amounts,
    decide=amounts,
    measure=amounts,
    render=amounts,
    written=amounts,
    passes=st.just(3),
    largest=amounts,
    stashed=st.booleans(),
    measured_early=st.booleans(),
)
machines = st.builds(
    Speeds,
    threads=st.integers(1, 256),
    read=speeds_of_things,
    read_again=speeds_of_things,
    read_cpu=st.floats(0, 1e-6),
    survey=speeds_of_things,
    decide=speeds_of_things,
    measure=speeds_of_things,
    render=speeds_of_things,
    write=st.none() | speeds_of_things,
    write_cpu=st.floats(0, 1e-6),
)
AMOUNTS = ("elements", "survey", "decide", "measure", "render", "written", "largest")


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": "40MiB", "threads": 2},
        {"scale": 0.5},
        {"weights": [1, 0, 0, 2]},
        {"weights": [1, 0, 0, 2], "compare": "active", "scale": 0.5},
        {"weights": [1, 0, 1000, 0], "scope": "tensor", "scale": 1},  # in small tensors, the first has no budget
        {"method": "average", "weights": [0, 1, 1, 0]},
        {"method": "average", "scale": 1},
        {"method": "magmax"},
        {"method": "random_mix", "weights": [1, 0, 0, 1], "scale": 1},
        {"method": "task_arithmetic", "weights": [0, 1, 0, 2]},
        {"method": "last_task"},
    ],
    ids=str,
)
def test_a_merge_reads_what_its_plan_says(tmp_path, monkeypatch, options) -> None:
    base, tasks = save_sequence(tmp_path / "in", *sequence(4, SHAPES, "bf16"))
    plan = plan_merge(base, tasks, **options)
    assert not plan.problems
    read = []
    original = PositionedFile.read_into

    def noted(self: PositionedFile, position: int, buffer: memoryview) -> None:
        if position > 8:  # not the header
            read.append(buffer.nbytes)
        original(self, position, buffer)

    monkeypatch.setattr(PositionedFile, "read_into", noted)
    merge_checkpoints(base, tasks, tmp_path / "out.safetensors", **options)
    assert sum(read) == plan.bytes_to_read


def test_a_cut_by_magnitude_reads_no_more_than_its_plan_says(tmp_path, monkeypatch) -> None:
    base, tasks = save_sequence(tmp_path / "in", *sequence(4, SHAPES))
    for options in ({"keep": "magnitude", "weights": [1, 0, 2, 3]}, {"method": "ties"}):
        plan = plan_merge(base, tasks, **options)
        plain = plan_merge(base, tasks, weights=options.get("weights"))
        assert plan.bytes_to_read > plain.bytes_to_read
        read = []
        original = PositionedFile.read_into
        with monkeypatch.context() as patch:
            patch.setattr(
                PositionedFile,
                "read_into",
                lambda self, at, buffer, original=original, read=read: (
                    read.append(buffer.nbytes * (at > 8)),
                    original(self, at, buffer),
                ),
            )
            merge_checkpoints(base, tasks, tmp_path / "out.safetensors", **options, overwrite=True)
        assert plain.bytes_to_read < sum(read) <= plan.bytes_to_read
        if options.get("method") == "ties":  # no task has fewer candidates than it keeps
            assert sum(read) == plan.bytes_to_read


def test_tasks_without_a_budget_are_read_once(tmp_path) -> None:
    base, tasks = save_sequence(tmp_path / "in", *sequence(4, SHAPES))
    reads = [plan_merge(base, tasks, scale=1, weights=w).bytes_to_read for w in ([1, 1, 1, 1], [1, 1, 0, 0])]
    assert reads[0] - reads[1] == 2 * 4 * plan_merge(base, tasks).elements  # two tasks of four bytes an element


# -- time -------------------------------------------------------------------------------------------------------------


@given(loads, machines)
def test_phases_add_up_and_overlap_inside(load, speeds) -> None:
    found = estimate(load, speeds)
    assert found.seconds == pytest.approx(sum(phase.seconds for phase in found.phases))
    assert found.low <= found.seconds <= found.high
    for phase in found.phases:
        parts = (phase.reading, phase.computing, phase.writing)
        assert min(parts) >= 0
        assert max(parts) <= phase.seconds <= sum(parts)
    read = sum(phase.reading for phase in found.phases)
    slowest = min(speeds.read, speeds.read_again)
    assert read <= load.bytes_to_read / slowest * (1 + 1e-9)


@given(loads, machines, st.sampled_from(AMOUNTS), st.integers(1, 1000))
def test_more_to_do_never_takes_less_time(load, speeds, what, factor) -> None:
    # A stash takes the measuring out of the rendering, so elements of no work would be the odd case.
    load = replace(load, stashed=False)
    more = replace(load, **{what: getattr(load, what) * factor})
    assert estimate(more, speeds).seconds >= estimate(load, speeds).seconds * (1 - 1e-9)


@given(loads, machines, st.floats(1, 100))
def test_a_merge_k_times_as_large_takes_k_times_as_long(load, speeds, factor) -> None:
    whole = math.ceil(factor)
    large = replace(load, **{name: getattr(load, name) * whole for name in AMOUNTS})
    assert estimate(large, speeds).seconds == pytest.approx(whole * estimate(load, speeds).seconds, rel=1e-6)


@given(loads, machines, st.sampled_from(["read", "survey", "decide", "render"]), st.floats(1, 1e3))
def test_a_faster_machine_never_takes_longer(load, speeds, what, factor) -> None:
    load = replace(load, stashed=False)
    faster = replace(speeds, **{what: getattr(speeds, what) * factor})
    assert estimate(load, faster).seconds <= estimate(load, speeds).seconds * (1 + 1e-9)


# -- clusters ---------------------------------------------------------------------------------------------------------


@given(loads.filter(lambda load: load.elements), machines, st.integers(1, 10_000))
def test_more_workers_never_take_longer(load, speeds, workers) -> None:
    few, many = (plan_module._timed(MergePlan("magmax", 1), load, speeds, n, 0.0) for n in (workers, 2 * workers))
    assert few.time.seconds / workers <= few.cluster.seconds
    assert many.cluster.seconds <= few.cluster.seconds * (1 + 1e-9)


@given(loads.filter(lambda load: load.elements), machines, st.floats(0, 30))
def test_a_cluster_pays_for_the_start_of_ray(load, speeds, start) -> None:
    plan = plan_module._timed(MergePlan("magmax", 1), load, speeds, 1, start)
    assert plan.cluster.seconds == pytest.approx(plan.time.seconds + RAY_START)
    assert plan.cluster.speedup < 1


@given(loads, machines, st.floats(0, 30))
def test_what_is_told_of_time_is_never_nothing(load, speeds, start) -> None:
    plan = plan_module._timed(MergePlan("magmax", 1), load, speeds, 4, start)
    text = "\n".join(time_lines(plan))
    assert not re.search(r"(?<![\d.])0(\.0+)? (s|min|h|times)\b|e-\d", text)
    assert ("about a second or less" in text) == (plan.time.seconds < 1)
    assert ("not worth it" in text) == (plan.cluster.speedup < 1.1)


# -- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"scope": "tensor", "keep": "magnitude"}, {"method": "average", "exclude": ["a.*"]}, {"method": "ties"}],
    ids=str,
)
def test_an_estimate_leaves_nothing_behind(tmp_path, options) -> None:
    base, tasks = save_sequence(tmp_path / "in", *sequence(3, SHAPES, "f16+bf16"))
    before = sorted(tmp_path.rglob("*"))
    plan = plan_merge(base, tasks, tmp_path / "deep" / "out", estimate=True, workers=2, **options)
    assert sorted(tmp_path.rglob("*")) == before
    assert plan.speeds is not None
    assert plan.time is not None
    assert plan.time.seconds > 0
    for value in (plan.speeds.read, plan.speeds.survey, plan.speeds.render, plan.speeds.write):
        assert value is not None
        assert 0 < value < 1e15
    without = plan_merge(base, tasks, tmp_path / "deep" / "out", **options)
    assert replace(plan, speeds=None, time=None, cluster=None) == without


def test_an_estimate_with_a_budget_and_without_a_place(tmp_path) -> None:
    base, tasks = save_sequence(tmp_path / "in", *sequence(2, SHAPES))
    elements = plan_merge(base, tasks).elements
    plan = plan_merge(base, tasks, budget=[5, elements - 5], estimate=True)
    assert plan.time is not None
    assert plan.speeds is not None
    assert plan.speeds.write is None
    assert plan.notes == ("without -o, the time to write is not estimated",)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"workers": 0, "estimate": True}, "workers is 0, expected at least 1"),
        ({"workers": 2}, "workers is 2, which is about the time on a cluster: give --estimate"),
    ],
)
def test_workers_that_mean_nothing_are_told_before_measuring(tmp_path, monkeypatch, asked, told) -> None:
    monkeypatch.setattr(plan_module, "measure_speeds", None)  # calling it would fail
    base, tasks = save_sequence(tmp_path / "in", *sequence(2, SHAPES))
    with pytest.raises(InputError, match=told):
        plan_merge(base, tasks, **asked)


def test_a_plan_counts_the_threads_that_a_merge_has(tmp_path, monkeypatch) -> None:
    """Kernels without threads have one, however many are asked for: a bound that does for it is no problem."""
    monkeypatch.setattr(NativeKernels, "threads", False)
    base, tasks = save_sequence(tmp_path / "in", *sequence(2, SHAPES))
    one, many = (plan_merge(base, tasks, threads=threads, memory="8MiB") for threads in (1, 64))
    assert one == many
    assert not one.problems
    merge_checkpoints(base, tasks, tmp_path / "out", threads=64, memory="8MiB")


def test_a_plan_with_problems_measures_nothing(tmp_path) -> None:
    base, tasks = save_sequence(tmp_path / "in", *sequence(2, SHAPES))
    plan = plan_merge(base, [*tasks, Path("nowhere")], estimate=True)
    assert plan.problems
    assert plan.time is None
