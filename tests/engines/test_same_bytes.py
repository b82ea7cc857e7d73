"""One seed, one result: SHA-256 over everything that must not show in the output."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sequences import SMALL, StateDict, digests, raw, save_sequence, sequence

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.merging import cuts, merge, state_dicts
from tunable_magmax.merging.kernels.numba_ops import MappedPlanes, NumbaKernels
from tunable_magmax.merging.state_dicts import merge_state_dicts

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

Models = tuple[StateDict, list[StateDict]]

SHARD = 300_000
GOLDEN = Path(__file__).parents[1] / "golden" / "merged-v1.json"
WEIGHTS = (3, 0, 0.5, 2, 1)
"""For five tasks, one of which has no share."""

TUNABLE = [{"scope": scope, "compare": compare} for scope, compare in product(("model", "tensor"), ("all", "active"))]
METHODS = [
    *({"method": "tunable_magmax", **options} for options in TUNABLE),
    {"method": "magmax"},
    {"method": "average"},
    {"method": "random_mix"},
    {"method": "ties"},
    {"method": "ties", "density": 0.613},
    {"method": "ties", "density": 0.4, "scope": "tensor", "normalize": True},
    {"method": "task_arithmetic"},
    {"method": "last_task"},
]
CASES = [{**options, "scale": scale} for options in METHODS for scale in ("matched", 0.3)]
FEWER = [case for k, case in enumerate(CASES) if k % 4 in (0, 3)]
"""Every method and option, each with one of the scales."""


def weighted(options: dict, tasks: int) -> dict:
    """The options with weights, where the method takes some: repeated over the tasks, or none where T is 1."""
    if tasks == 1 or options["method"] in ("magmax", "last_task"):
        return options
    return {**options, "weights": [WEIGHTS[t % len(WEIGHTS)] for t in range(tasks)]}


def label(options: object) -> str | None:
    return "-".join(map(str, options.values())) if isinstance(options, dict) else None


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumbaKernels, "chunk", 1 << 17)


@pytest.fixture(scope="module")
def models() -> Models:
    return sequence(5)


@pytest.fixture(scope="module")
def files(models, tmp_path_factory) -> tuple[Path, list[Path]]:
    return save_sequence(tmp_path_factory.mktemp("files"), *models)


def spilled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Let every plan keep its planes on disk; the list tells where they were."""
    seen: list[Path] = []
    plan = merge.plan_memory
    build = MappedPlanes.__init__

    def on_disk(*given: Any, **named: Any) -> merge.MemoryPlan:
        return replace(plan(*given, **named), mapped=1, cached_delta=0)

    def note(self: MappedPlanes, rows: int, slots: int, path: Path) -> None:
        seen.append(path)
        build(self, rows, slots, path)

    monkeypatch.setattr(merge, "plan_memory", on_disk)
    monkeypatch.setattr(MappedPlanes, "__init__", note)
    return seen


@pytest.mark.parametrize("options", FEWER, ids=label)
def test_every_way_of_running_a_method(files, tmp_path, monkeypatch, options) -> None:
    options = weighted(options, 5)
    base, tasks = files
    merge_checkpoints(base, tasks, tmp_path / "plain", **options, shard_size=SHARD)
    wanted = digests(tmp_path / "plain")
    assert sum(name.endswith(".safetensors") for name in wanted) > 3
    ways = {"threads-1": {"threads": 1}, "threads-4": {"threads": 4}, "small": {"memory": "12MiB", "threads": 1}}
    for name, way in ways.items():
        merge_checkpoints(base, tasks, tmp_path / name, **options, shard_size=SHARD, **way)
        assert digests(tmp_path / name) == wanted, name
    seen = spilled(monkeypatch)
    monkeypatch.setattr(NumbaKernels, "span", 1 << 12)
    merge_checkpoints(base, tasks, tmp_path / "spilled", **options, shard_size=SHARD, threads=2)
    assert digests(tmp_path / "spilled") == wanted
    assert bool(seen) == (options["method"] == "tunable_magmax")


@pytest.mark.parametrize("types", ["f32", "f32+f64", "f32+bf16"])
@pytest.mark.parametrize("options", [CASES[0], CASES[7], CASES[-5]], ids=label)
def test_form_and_place_of_the_inputs(tmp_path, monkeypatch, options, types) -> None:
    base, tasks = sequence(4, SMALL, types)
    merged = merge_state_dicts(base, tasks, **options)
    wanted = None
    for k, form in enumerate(("file", "shards", "torch", "mixed")):
        folder = tmp_path / f"{form} {k}" / "päth"
        paths = save_sequence(folder, base, tasks, form)
        monkeypatch.chdir(folder if k % 2 else tmp_path)
        relative = [os.path.relpath(path) for path in (paths[0], *paths[1])]
        merge_checkpoints(relative[0], relative[1:], f"out-{k}", **options, shard_size=2000)
        found = digests(Path(f"out-{k}"))
        wanted = wanted or found
        assert found == wanted, form
        merge_checkpoints(*paths, tmp_path / f"{k}.safetensors", **options)
        assert raw(load_file(tmp_path / f"{k}.safetensors")) == raw(merged.state_dict), form
        assert digests(tmp_path / f"{k}.safetensors") == digests(tmp_path / "0.safetensors"), form
    report = json.loads(Path(f"out-{k}/tmx-report.json").read_text())
    assert report["counts"] == (None if merged.report.counts is None else list(merged.report.counts))
    text = "".join(path.read_text() for path in Path(f"out-{k}").iterdir() if path.suffix != ".safetensors")
    assert str(tmp_path) not in text
    assert "theta" not in text


SCRIPT = """
import json, sys
from tunable_magmax.engines.local import merge_checkpoints
base, *tasks = sys.argv[2:]
merge_checkpoints(base, tasks, sys.argv[1], weights=[3, 0, 0.5, 2, 1], shard_size=300_000)
"""


def test_two_processes_and_a_second_run(files, tmp_path) -> None:
    processes = []
    for k in range(2):
        home = tmp_path / f"home {k}"
        home.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": str(k), "HOME": str(home), "TZ": ("UTC", "Asia/Tokyo")[k]}
        arguments = [os.path.relpath(path, home) if k else str(path) for path in (files[0], *files[1])]
        command = [sys.executable, "-W", "error", "-c", SCRIPT, "out", *arguments]
        processes.append(subprocess.Popen(command, cwd=home, env=environment))
    assert [process.wait() for process in processes] == [0, 0]
    first, second = (digests(tmp_path / f"home {k}" / "out") for k in range(2))
    assert first == second
    for _ in range(2):
        merge_checkpoints(*files, tmp_path / "out", weights=WEIGHTS, shard_size=300_000, overwrite=True)
        assert digests(tmp_path / "out") == first


@pytest.mark.parametrize("types", ["f32", "f32+f64"])
def test_boundaries_of_chunks_and_spans(monkeypatch, types) -> None:
    base, tasks = sequence(5, SMALL, types)
    for options in FEWER:
        options = weighted(options, 5)
        wanted = merge_state_dicts(base, tasks, **options)
        for chunk, span in ((64, 1 << 22), (192, 128), (1 << 17, 64)):
            native = NumbaKernels()
            native.chunk, native.span = chunk, span
            with monkeypatch.context() as patch:  # and samples, where all could be listed
                for name in ("SAMPLE", "LISTED"):
                    patch.setattr(cuts, name, 256)
                patch.setattr(state_dicts, "kernels_for", lambda device, native=native: native)
                found = merge_state_dicts(base, tasks, **options)
            assert raw(found.state_dict) == raw(wanted.state_dict), (options, chunk, span)
            assert found.report == wanted.report, (options, chunk, span)


def integer_sequence() -> Models:
    """A sequence in which every value is a small integer over a power of two: no generator, no rounding."""
    shapes = {"block.0.weight": (29, 31), "block.0.bias": (29,), "block.1.weight": (700,), "c.frozen": (17,), "d": ()}
    base: StateDict = {}
    tasks: list[StateDict] = [{} for _ in range(4)]
    for k, (name, shape) in enumerate(shapes.items()):
        index = torch.arange(max(1, torch.Size(shape).numel()))
        values = ((index * 37 + 11 * k) % 101 - 50) / 64
        base[name] = values.reshape(shape)
        for t, task in enumerate(tasks, start=1):
            move = ((index * (17 + 6 * t) + 29 * t + k) % 97 - 48) / 256
            task[name] = (values if "frozen" in name else values + move).reshape(shape)
    for checkpoint in (base, *tasks):
        checkpoint["ids"] = torch.arange(9)
    return base, tasks


def golden_cases() -> dict[str, dict]:
    cases = {}
    for options in CASES:
        named = {name: value for name, value in options.items() if name != "method"}
        title = " ".join([options["method"], *(f"{name}={value}" for name, value in named.items())])
        if options["method"] not in ("magmax", "last_task"):
            options = {**options, "weights": [3, 1, 0, 2]}
        cases[title] = options
    return cases


def test_golden(tmp_path) -> None:
    """A change of the lottery, the arithmetic or the file format shows here; if it is meant, it is a new version."""
    paths = save_sequence(tmp_path / "in", *integer_sequence())
    found = {}
    for title, options in golden_cases().items():
        out = tmp_path / "out.safetensors"
        merge_checkpoints(*paths, out, **options, seed=7, overwrite=True)
        found[title] = hashlib.sha256(out.read_bytes()).hexdigest()
    assert found == json.loads(GOLDEN.read_text())
