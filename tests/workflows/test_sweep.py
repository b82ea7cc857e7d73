"""A sweep makes what single merges make, to the byte; it goes on where it stopped, and replaces nothing unasked."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from sequences import SMALL, TYPES, digests, save_sequence, sequence

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.safetensors_file import SafetensorsFile
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.workflows import sweep as engine
from tunable_magmax.workflows.points import Point, grid, line, listed
from tunable_magmax.workflows.sweep import plan_sweep, sweep_checkpoints

SHARD = 4_000
POINTS = line([1, 0, 0], [0, 1, 3], 4)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("inputs")
    base, tasks = save_sequence(folder, *sequence(3, SMALL), form="shards")
    (base / "config.json").write_text('{"model_type": "tiny", "torch_dtype": "float32"}')
    (base / "tokenizer.json").write_text("{}")
    return base, tasks


def made(out: Path) -> dict[str, str]:
    """All that a sweep wrote and that must not depend on how it came about, by path."""
    return {name: sha for name, sha in digests(out).items() if name != "sweep.log"}


# -- the same bytes ---------------------------------------------------------------------------------------------------


def assert_same(files, out: Path, points, **options) -> None:
    base, tasks = files
    sweep = sweep_checkpoints(base, tasks, out / "sweep", points, **options)
    assert [point.name for point in sweep.points] == [point.name for point in points]
    for point, record in zip(points, sweep.points, strict=True):
        weights = [str(weight) for weight in point.weights]
        report = merge_checkpoints(base, tasks, out / point.name, weights=weights, **options)
        assert digests(out / "sweep" / point.name) == digests(out / point.name)
        assert MergeReport.from_json((out / "sweep" / record.report).read_text()).to_json() == report.to_json()
        assert (record.scale, record.counts, record.leftovers) == (report.scale, report.counts, report.leftovers)
        assert [Fraction(weight) for weight in record.weights] == list(point.weights)


TUNABLE = [{"scope": scope, "compare": compare} for scope, compare in product(("model", "tensor"), ("all", "active"))]
OTHERS = [{"method": method} for method in ("average", "random_mix", "task_arithmetic", "ties")]


@pytest.mark.parametrize("options", [*TUNABLE, *OTHERS], ids=lambda options: "-".join(options.values()))
def test_a_point_is_what_a_merge_makes(files, tmp_path, options) -> None:
    scale = "matched" if options.get("compare") != "active" else 0.4
    assert_same(files, tmp_path, POINTS, **options, scale=scale, seed=5)


def test_shards(files, tmp_path) -> None:
    assert_same(files, tmp_path, POINTS[:2], shard_size=SHARD, threads=1)
    assert len(list((tmp_path / "sweep" / "step-00").glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize("types", sorted(set(TYPES) - {"f32"}))
def test_types(tmp_path, types) -> None:
    files = save_sequence(tmp_path / "in", *sequence(3, SMALL, types), form="mixed")
    assert_same(files, tmp_path, POINTS[1:3])


def test_patterns_and_an_output_type(files, tmp_path) -> None:
    options = {
        "out_dtype": "bfloat16",
        "include": ["a.*", "b.*"],
        "exclude": ["*.bias", "nothing"],
        "method": "average",
    }
    assert_same(files, tmp_path, POINTS[:2], **options)
    assert json.loads((tmp_path / "sweep" / "step-00" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_task_that_is_the_base_and_a_grid(files, tmp_path) -> None:
    base, tasks = files
    assert_same((base, [tasks[0], base, tasks[1]]), tmp_path, grid(2))


def test_tied_tensors(tmp_path) -> None:
    paths = []
    for t in range(3):
        shared = torch.arange(6.0) * (t + 1)
        paths.append(tmp_path / f"{t}.pt")
        torch.save({"head": shared, "embed": shared, "w": torch.ones(9) + t}, paths[-1])
    assert_same((paths[0], paths[1:]), tmp_path, line([1, 0], [1, 3], 3))


def test_a_sequence_without_changes_is_a_copy_and_a_warning(tmp_path) -> None:
    for name in ("base", "task"):
        save_file({"w": torch.ones(4)}, tmp_path / f"{name}.safetensors")
    with pytest.warns(UserWarning, match="a copy of the base"):
        sweep = sweep_checkpoints(
            tmp_path / "base.safetensors", [tmp_path / "task.safetensors"], tmp_path / "out", listed({"a": [1]})
        )
    assert sweep.elements == 0
    assert (tmp_path / "out" / "00-a" / "model.safetensors").is_file()


# -- reading once, and the memory for it ------------------------------------------------------------------------------


def test_every_tensor_of_a_task_is_read_once(files, tmp_path, monkeypatch) -> None:
    base, tasks = files
    read: dict[Path, int] = {}
    plain = Checkpoint._target

    def counted(self, name, offset, buffer):
        read[self.path] = read.get(self.path, 0) + buffer.nbytes
        return plain(self, name, offset, buffer)

    monkeypatch.setattr(SafetensorsFile, "_target", counted)
    sweep_checkpoints(base, tasks, tmp_path / "out", POINTS)
    with Inputs(base, tasks, engine.read_options(3)) as inputs:
        mergeable = sum(info.nbytes for tensor in inputs.layout.mergeable for info in tensor.infos[1:])
    of_tasks = sum(n for path, n in read.items() if any(task in (path, *path.parents) for task in tasks))
    assert of_tasks == mergeable > 0


def test_too_little_memory_is_said_before_anything_is_read(files, tmp_path, monkeypatch) -> None:
    base, tasks = files
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"needs .* MiB, more than the 1.0 MiB it may use: give a larger --memory"):
        sweep_checkpoints(base, tasks, out, POINTS, memory="1MiB")
    monkeypatch.setattr(engine, "available_memory", lambda: 1 << 20)
    with pytest.raises(InputError, match=r"needs .* MiB, but 1.0 MiB are free: merge fewer tensors"):
        sweep_checkpoints(base, tasks, out, POINTS)
    plan = plan_sweep(base, tasks, out, POINTS)
    assert plan.available == 1 << 20 < plan.memory
    assert len(plan.problems) == 1
    assert not out.exists()
    sweep_checkpoints(base, tasks, out, POINTS, memory="1GiB")


def test_a_plan_counts_what_a_sweep_writes(files, tmp_path) -> None:
    base, tasks = files
    plan = plan_sweep(base, tasks, tmp_path / "out", POINTS, shard_size=SHARD)
    assert plan.problems == plan.finished == ()
    assert (plan.points[1]["name"], plan.points[1]["weights"]) == ("step-01", ("2/3", "1/12", "1/4"))
    sweep_checkpoints(base, tasks, tmp_path / "out", POINTS, shard_size=SHARD)
    weights = list((tmp_path / "out").glob("*/*.safetensors"))
    assert sum(path.stat().st_size for path in weights) == plan.bytes_to_write == 4 * plan.bytes_each
    assert len(weights) == 4 * plan.files_each
    again = plan_sweep(base, tasks, tmp_path / "out", POINTS, shard_size=SHARD)
    assert len(again.finished) == 4
    assert again.bytes_to_write == 0


# -- going on ---------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


def stop_after(monkeypatch, points: int) -> None:
    plain, calls = engine._write_point, []

    def some(*given):
        calls.append(given)
        if len(calls) > points:
            raise Stopped
        return plain(*given)

    monkeypatch.setattr(engine, "_write_point", some)


def test_a_sweep_goes_on_and_gives_the_same_bytes(files, tmp_path, monkeypatch) -> None:
    base, tasks = files
    whole = sweep_checkpoints(base, tasks, tmp_path / "whole", POINTS)
    assert whole.skipped == ()
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            sweep_checkpoints(base, tasks, tmp_path / "out", POINTS)
    assert not (tmp_path / "out" / "sweep.json").exists()
    before = (tmp_path / "out" / "step-01" / "model.safetensors").stat().st_mtime_ns
    sweep = sweep_checkpoints(base, tasks, tmp_path / "out", POINTS)
    assert sweep.skipped == ("step-00", "step-01")
    assert sweep.to_json() == whole.to_json() == (tmp_path / "out" / "sweep.json").read_text()
    assert made(tmp_path / "out") == made(tmp_path / "whole")
    assert (tmp_path / "out" / "step-01" / "model.safetensors").stat().st_mtime_ns == before
    monkeypatch.setattr(engine, "loaded_sources", None)  # nothing is left to be read
    assert len(sweep_checkpoints(base, tasks, tmp_path / "out", POINTS).skipped) == 4


def test_a_point_that_lost_a_file_is_made_again(files, tmp_path) -> None:
    base, tasks = files
    sweep_checkpoints(base, tasks, tmp_path / "out", POINTS)
    wanted = made(tmp_path / "out")
    (tmp_path / "out" / "step-02" / "tokenizer.json").unlink()
    assert "step-02" not in sweep_checkpoints(base, tasks, tmp_path / "out", POINTS).skipped
    assert made(tmp_path / "out") == wanted


def test_changed_inputs_are_another_sweep(tmp_path) -> None:
    base, tasks = save_sequence(tmp_path / "in", *sequence(3, SMALL))
    sweep_checkpoints(base, tasks, tmp_path / "out", POINTS)
    save_sequence(tmp_path / "in", *sequence(3, SMALL, seed=1))
    with pytest.raises(InputError, match=r"holds another sweep \(different: inputs\).*--overwrite"):
        sweep_checkpoints(base, tasks, tmp_path / "out", POINTS)
    sweep_checkpoints(base, tasks, tmp_path / "out", POINTS, overwrite=True)
    sweep_checkpoints(base, tasks, tmp_path / "whole", POINTS)
    assert made(tmp_path / "out") == made(tmp_path / "whole")


def test_another_sweep_is_replaced_only_when_asked(files, tmp_path, monkeypatch) -> None:
    base, tasks = files
    out = tmp_path / "out"
    sweep_checkpoints(base, tasks, out, POINTS)
    (out / "mine").mkdir()
    before = made(out)
    with pytest.raises(InputError, match=r"holds another sweep \(different: seed, points\)"):
        sweep_checkpoints(base, tasks, out, POINTS[:3], seed=1)
    assert made(out) == before
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stopped):
            sweep_checkpoints(base, tasks, out, POINTS[:3], seed=1, overwrite=True)
    assert (out / "step-03").exists()  # it goes when its successors are complete
    assert sweep_checkpoints(base, tasks, out, POINTS[:3], seed=1, overwrite=True).skipped == ("step-00",)
    assert not (out / "step-03").exists()
    assert (out / "mine").exists()
    (out / "mine").rmdir()
    sweep_checkpoints(base, tasks, tmp_path / "whole", POINTS[:3], seed=1)
    assert made(out) == made(tmp_path / "whole")


def test_what_others_have_written_is_not_replaced(files, tmp_path) -> None:
    base, tasks = files
    out = tmp_path / "out"
    merge_checkpoints(base, tasks, out / "step-02")
    before = digests(out)
    with pytest.raises(InputError, match="step-02 already exists"):
        sweep_checkpoints(base, tasks, out, POINTS)
    assert digests(out) == before
    sweep_checkpoints(base, tasks, out, POINTS, overwrite=True)
    (out / "sweep.log").unlink()  # without it, a point can't be recognised
    with pytest.raises(InputError, match="step-00 already exists"):
        sweep_checkpoints(base, tasks, out, POINTS)
    sweep_checkpoints(base, tasks, out, POINTS, overwrite=True)


def test_a_state_file_of_an_earlier_version_is_ignored(files, tmp_path) -> None:
    base, tasks = files
    (tmp_path / "out").mkdir()
    state = {"fingerprint": {"seed": "3"}, "points": ["step-00"], "done": {"step-00": "step-00/tmx-report.json"}}
    (tmp_path / "out" / "sweep.state.json").write_text(json.dumps(state))
    assert sweep_checkpoints(base, tasks, tmp_path / "out", POINTS).skipped == ()
    assert len(sweep_checkpoints(base, tasks, tmp_path / "out", POINTS).skipped) == 4


def test_a_point_that_was_logged_and_not_committed_is_made(files, tmp_path, monkeypatch) -> None:
    """The point that it was to replace is not taken for it."""
    base, tasks = files
    sweep_checkpoints(base, tasks, tmp_path / "out", POINTS)
    with monkeypatch.context() as patch:
        patch.setattr(engine.Output, "commit", lambda self: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            sweep_checkpoints(base, tasks, tmp_path / "out", POINTS, seed=1, overwrite=True)
    assert sweep_checkpoints(base, tasks, tmp_path / "out", POINTS, seed=1, overwrite=True).skipped == ()
    sweep_checkpoints(base, tasks, tmp_path / "whole", POINTS, seed=1)
    assert made(tmp_path / "out") == made(tmp_path / "whole")


def test_more_points_are_added_to_those_that_are_there(files, tmp_path) -> None:
    base, tasks = files
    few, more = listed({"a": [1, 0, 0]}), listed({"a": [1, 0, 0], "b": [1, 2, 3]})
    sweep_checkpoints(base, tasks, tmp_path / "out", few)
    assert sweep_checkpoints(base, tasks, tmp_path / "out", more).skipped == ("00-a",)
    with pytest.raises(InputError, match=r"holds another sweep \(different: points\)"):
        sweep_checkpoints(base, tasks, tmp_path / "out", few)


def test_bad_values_leave_nothing_in_the_way(tmp_path) -> None:
    (base, one), out = sequence(1, {"w": (4,)}), tmp_path / "out"
    one[0]["w"][2] = float("nan")
    paths = save_sequence(tmp_path / "in", base, one)
    with pytest.raises(InputError, match="NaN or infinite"):
        sweep_checkpoints(*paths, out, listed({"a": [1]}))
    assert not out.exists()


# -- reports alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["matched", 0.3])
def test_reports_alone_say_the_same(files, tmp_path, scale) -> None:
    base, tasks = files
    out = tmp_path / "out"
    look = sweep_checkpoints(base, tasks, out, POINTS, scale=scale, reports_only=True)
    assert not list(out.glob("**/*.safetensors"))
    reports = [MergeReport.from_json((out / point.report).read_text()) for point in look.points]
    assert look == sweep_checkpoints(base, tasks, tmp_path / "again", POINTS, scale=scale, reports_only=True)
    full = sweep_checkpoints(base, tasks, out, POINTS, scale=scale)
    assert full.skipped == ()
    for seen, point in zip(reports, full.points, strict=True):
        report = json.loads((out / point.report).read_text())
        assert {**json.loads(seen.to_json()), "files": report["files"]} == report
    assert not list(out.glob("*.report.json"))
    assert len(sweep_checkpoints(base, tasks, out, POINTS, scale=scale, reports_only=True).skipped) == 4


# -- points -----------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 5).flatmap(lambda t: st.tuples(*[st.lists(st.integers(0, 9), min_size=t, max_size=t)] * 2)),
    st.integers(2, 120),
)
def test_a_line_is_exact_and_even(ends, steps) -> None:
    start, stop = ends
    if not any(start) or not any(stop) or [x * sum(stop) for x in start] == [x * sum(start) for x in stop]:
        return
    points = line(start, stop, steps)
    assert points[0].weights == tuple(Fraction(x, sum(start)) for x in start)
    assert points[-1].weights == tuple(Fraction(x, sum(stop)) for x in stop)
    assert all(sum(point.weights) == 1 for point in points)
    for one, two, three in zip(points, points[1:], points[2:], strict=False):
        assert all(a + c == 2 * b for a, b, c in zip(one.weights, two.weights, three.weights, strict=True))
    assert [point.name for point in points] == sorted(point.name for point in points)


@pytest.mark.parametrize("parts", [1, 2, 9, 10, 12])
def test_a_grid_has_every_point_once(parts) -> None:
    points = grid(parts)
    assert len({point.weights for point in points}) == len(points) == (parts + 1) * (parts + 2) // 2
    assert all(sum(point.weights) == 1 for point in points)
    assert [point.name for point in points] == sorted(point.name for point in points)


def test_factors_are_not_normalised() -> None:
    assert line([2, 2], [0, 1], 3, normalise=False)[1].weights == (1, Fraction(3, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: line([1, 0], [0, 1], 1), "steps is 1, expected a whole number, 2 or more"),
        (lambda: line([1, 0], [0, 1, 0], 3), "from 2 weights to 3"),
        (lambda: line([0, 0], [0, 1], 3), "the first point of the line: all weights are zero"),
        (lambda: line([1, 0], [0, -1], 3), "the last point of the line: weight 2 is negative"),
        (lambda: line([1, 2], [2, 4], 3), "the same preference"),
        (lambda: grid(0), "the grid has 0 parts"),
        (lambda: grid(3, tasks=4), "a grid is for three tasks, and there are 4"),
        (lambda: listed({"a": [0, 0]}), "a: all weights are zero"),
        (lambda: Point("../a", (Fraction(1),)), "can't name a point"),
    ],
)
def test_points_that_make_no_sense(make, message) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("points", "options", "message"),
    [
        (line([1, 0], [0, 1], 2), {}, "point step-00: 2 weights for 3 tasks"),
        ([], {}, "a sweep needs points"),
        ([POINTS[0], POINTS[0]], {}, "'step-00' names two points"),
        ([Point("a", (Fraction(0),) * 3)], {}, "point a: all weights are zero"),
        (POINTS, {"method": "magmax"}, "method 'magmax' takes no weights, so there is nothing to sweep"),
        (POINTS, {"weights": [1, 1, 1]}, "the points of a sweep are its weights"),
        (POINTS, {"scope": "layer"}, "unknown scope 'layer'"),
    ],
)
def test_sweeps_that_make_no_sense(files, tmp_path, points, options, message) -> None:
    with pytest.raises(InputError, match=message):
        sweep_checkpoints(*files, tmp_path / "out", points, **options)
    assert not (tmp_path / "out").exists()


def test_places_that_are_no_directories(files, tmp_path) -> None:
    for name in ("out.safetensors", "out.bin"):
        with pytest.raises(InputError, match="a sweep's output is a directory"):
            sweep_checkpoints(*files, tmp_path / name, POINTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a sweep's output is a directory"):
        sweep_checkpoints(*files, tmp_path / "file", POINTS)
    base, tasks = files
    with pytest.raises(InputError, match="would replace base"):
        sweep_checkpoints(base, tasks, base.parent, [Point(base.name, (Fraction(1),) * 3)])
