"""Files that the program reads, valid ones to begin with, and what is done with a bad one of each kind."""

import inspect
import io
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml
from adapters import factors, save_adapter
from safetensors.torch import save_file
from sequences import save_sharded, sequence

from fuzz.mutations import bytes_changed, changed_json, changed_safetensors
from tunable_magmax import Preference
from tunable_magmax.cli.app import app
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import TmxError
from tunable_magmax.models.head import Head, load_head, save_head
from tunable_magmax.preference.shares import SitePrior
from tunable_magmax.runs.profile import Profile
from tunable_magmax.runs.run import Run


class FoundError(AssertionError):
    """A case ended in something else than a result or an error of ours."""


@dataclass(frozen=True)
class Target:
    """A kind of file: where it is, how it is made bad, and what then reads it."""

    file: str
    changed: Callable[[bytes, Random], bytes]
    use: Callable[[Path], None]


@cache
def _command(*arguments: object) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    command, bound, _ = app.parse_args([str(argument) for argument in arguments])
    return command, bound


def tmx(*arguments: object) -> None:
    """Runs a command, parsed once, since that takes most of the time; all but errors of ours is for the caller."""
    command, bound = _command(*arguments)
    with suppress(TmxError), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        command(*bound.args, **bound.kwargs)


def prepare(folder: Path) -> None:
    """Writes a valid file of every kind."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"embed.weight": (6, 4), "layers.0.weight": (4, 4), "layers.0.bias": (4,), "head.weight": (3, 4)}
    base, tasks = sequence(2, shapes, seed=3)
    for name, tensors in zip(("base", "task1", "task2"), (base, *tasks), strict=True):
        save_file(tensors, folder / f"{name}.safetensors")
    sharded = save_sharded(folder / "sharded", base, 2)
    (sharded / "config.json").write_text(json.dumps({"model_type": "bert", "torch_dtype": "float32"}))
    save_adapter(folder / "adapter", {"layers.0": factors(4, 4, 2, 1)}, lora_alpha=4, r=2)
    recipe = {
        "merge_method": "tunable_magmax",
        "base_model": "base.safetensors",
        "models": [{"model": f"task{t}.safetensors", "parameters": {"weight": t}} for t in (1, 2)],
        "parameters": {"scale": 0.5, "seed": 3, "scope": "model"},
        "dtype": "float32",
    }
    (folder / "recipe.yml").write_text(yaml.safe_dump(recipe))
    prior = SitePrior({"cat": 3, "dog": 1}, eps=0.1)
    preference = Preference([3, 1], "labels", {"samples": 20}, [(0.5, 0.9), (0.1, 0.5)], 0.1, ["birds", "cars"])
    preference = replace(preference, scale=0.9, prior=prior)
    preference.save(folder / "preference.json")
    shutil.copy(Path(__file__).parents[1] / "golden" / "profile.safetensors", folder / "profile.safetensors")
    head = Head.of(np.eye(2, 4, dtype=np.float32), ["cat", "dog"], 10.0, np.array([0.5, -0.5], np.float32))
    save_head(head, folder / "head.safetensors")
    entries = [
        {"checkpoint": f"task{t}.safetensors", "name": f"t{t}", "profile": "profile.safetensors", "classes": ["cat"]}
        for t in (1, 2)
    ]
    classifier = {"head": "head.safetensors"}
    run = {"version": 1, "base": "base.safetensors", "tasks": entries, "classifier": classifier}
    (folder / "run.json").write_text(json.dumps(run | {"benchmark": {"data": "here"}}))
    merge_checkpoints(
        folder / "base.safetensors", [folder / f"task{t}.safetensors" for t in (1, 2)], folder / "merged.safetensors"
    )


# -- what reads each kind ---------------------------------------------------------------------------------------------


def _merged(folder: Path, base: str, tasks: Sequence[str]) -> None:
    out = folder / "out"
    try:
        merge_checkpoints(folder / base, [folder / task for task in tasks], out)
    except TmxError:
        if out.exists() or (folder / "out.partial").exists():
            raise FoundError("a merge that was refused left something behind") from None
    finally:
        shutil.rmtree(out, ignore_errors=True)
        (folder / "out.log").unlink(missing_ok=True)


def _inspected_and_merged(name: str, base: str, *tasks: str) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        tmx("inspect", folder / name, "--tensors")
        _merged(folder, base, tasks)

    return use


def _preference(folder: Path) -> None:
    with suppress(TmxError):
        read = Preference.load(folder / "preference.json")
        again = Preference.from_json(read.to_json())
        if again != read:
            raise FoundError("a preference that was written reads otherwise")
        read.budget(1000)
        if read.prior is not None:
            assert np.isfinite(read.prior.bias(["cat", "owl"])).all()
    arguments = ["--base", folder / "base.safetensors"]
    arguments += [part for name in ("task1", "task2") for part in ("--task", folder / f"{name}.safetensors")]
    tmx("merge", "--dry-run", *arguments, "--preference", folder / "preference.json")


def _profile(folder: Path) -> None:
    with suppress(TmxError):
        profile = Profile.load(folder / "profile.safetensors")
        profile.to_bytes()
        Preference.from_labels([dict(zip(profile.classes, profile.label_counts, strict=True))] * 2, profile.classes)


def _run(folder: Path) -> None:
    with suppress(TmxError):
        run = Run.open(folder)
        assert len(run.names) == len(run.tasks)
        with suppress(TmxError):
            _ = run.profiles
        _ = run.head, run.record.benchmark, run.checkpoints
    tmx("merge", "--dry-run", folder)


def _head(folder: Path) -> None:
    with suppress(TmxError):
        head = load_head(folder / "head.safetensors")
        assert np.isfinite(head.probabilities(np.ones((1, head.weight.shape[1]), np.float32))).all()


def _report(folder: Path) -> None:
    tmx("inspect", folder / "merged.safetensors")
    tmx("inspect", "--verify", folder / "merged.safetensors")


def _recipe(folder: Path) -> None:
    tmx("merge", "--dry-run", folder / "recipe.yml")


def _json(file: bytes, random: Random) -> bytes:
    return changed_json(json.loads(file), random)


def _yaml(file: bytes, random: Random) -> bytes:
    if random.random() < 0.3:
        return bytes_changed(file, random)
    return changed_json(yaml.safe_load(file), random)  # JSON is YAML, and written faster


def _holding(*metadata: str) -> Callable[[bytes, Random], bytes]:
    return lambda file, random: changed_safetensors(file, random, metadata)


_MERGED = _inspected_and_merged("task1.safetensors", "base.safetensors", "task1.safetensors", "task2.safetensors")
_SHARDED = _inspected_and_merged("sharded", "sharded", "task1.safetensors")
_ADAPTER = _inspected_and_merged("adapter", "base.safetensors", "adapter")
TARGETS = {
    "header": Target("task1.safetensors", _holding(), _MERGED),
    "index": Target("sharded/model.safetensors.index.json", _json, _SHARDED),
    "model config": Target("sharded/config.json", _json, _SHARDED),
    "adapter config": Target("adapter/adapter_config.json", _json, _ADAPTER),
    "adapter weights": Target("adapter/adapter_model.safetensors", _holding(), _ADAPTER),
    "preference": Target("preference.json", _json, _preference),
    "profile": Target("profile.safetensors", _holding("tunable_magmax_profile"), _profile),
    "run": Target("run.json", _json, _run),
    "head": Target("head.safetensors", _holding("classes"), _head),
    "report": Target("merged.report.json", _json, _report),
    "recipe": Target("recipe.yml", _yaml, _recipe),
}
