"""A run of two tasks on a tiny encoder, each of which knows two of the head's four classes; and labelled data."""

import copy
import csv
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from models import tiny
from safetensors.torch import save_file

from tunable_magmax.models.encoder import Encoder, load_encoder
from tunable_magmax.models.prepared import embed_inputs, make_profile
from tunable_magmax.runs.run import Run

TASKS = {"first": ("red", "blue"), "second": ("green", "grey")}
COLOURS = {"red": (220, 20, 20), "blue": (20, 20, 220), "green": (20, 200, 20), "grey": (120, 120, 120)}
WORDS = {"red": "hello", "blue": "pay", "green": "bill", "grey": "card"}


@dataclass(frozen=True)
class LabelledRun:
    """`path` is the run, with profiles and a head; `pairs(name, counts)` makes labelled data."""

    path: Path
    kind: str

    def inputs(self, name: str, count: int, seed: int) -> list:
        if self.kind == "vit":
            return [tiny.picture(COLOURS[name], seed + k) for k in range(count)]
        fillers = ["my", "good", "my good", "good good my"]
        return [f"{fillers[(seed + k) % 4]} {WORDS[name]}" for k in range(count)]

    def mean_embedding(self, encoder: Encoder, name: str) -> np.ndarray:
        """Where a class lies: the mean direction of some inputs of it."""
        embedded = embed_inputs(encoder, self.inputs(name, 8, 0))
        return (embedded / np.linalg.norm(embedded, axis=1, keepdims=True)).mean(axis=0)

    def pairs(self, where: Path, counts: dict[str, int], seed: int = 500) -> Path:
        """A folder of class folders, or a table."""
        if self.kind == "vit":
            for name, count in counts.items():
                (where / name).mkdir(parents=True)
                for k, image in enumerate(self.inputs(name, count, seed)):
                    image.save(where / name / f"{k}.png")
            return where
        path = where.with_suffix(".csv")
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            rows.writerows([text, name] for name, count in counts.items() for text in self.inputs(name, count, seed))
        return path


def keeping(run: LabelledRun, folder: Path, each: int, source: str = "evaluation") -> LabelledRun:
    """A copy of a run that keeps so many samples of each class."""
    from runs.keeping import keep_samples

    from tunable_magmax.data.source import open_samples

    copied = LabelledRun(shutil.copytree(run.path, folder), run.kind)
    for t, classes in enumerate(TASKS.values()):
        data = run.pairs(folder / f"kept-data-{t}", dict.fromkeys(classes, each), seed=900)
        keep_samples(Run.open(folder), t, open_samples(data), source=source)
    return copied


def enter(path: Path, rows: dict[str, np.ndarray], logit_scale: float) -> Run:
    """Writes run.json and a head of these rows, by class, beside checkpoints that are there; profiles are to follow."""
    tasks = [{"name": task, "checkpoint": task} for task in TASKS]
    (path / "run.json").write_text(json.dumps({"version": 1, "base": "base", "tasks": tasks}))
    weight = torch.from_numpy(np.stack([row / np.linalg.norm(row) for row in rows.values()]))
    metadata = {"classes": json.dumps(list(rows)), "logit_scale": str(logit_scale)}
    save_file({"weight": weight}, path / "head.safetensors", metadata)
    return Run.open(path)


def build(path: Path, kind: str, profiled: bool = True) -> LabelledRun:
    """Each head row is the mean embedding of its class under the task that holds it: there, the head is right."""
    from tunable_magmax.data.source import open_samples

    run = LabelledRun(path, kind)
    base = tiny.build(kind)
    tiny.save(base, path / "base")
    rows = {}
    for t, (task, classes) in enumerate(TASKS.items(), 1):
        tiny.changed(copy.deepcopy(base), 0.3, seed=t).save_pretrained(path / task)
        encoder = load_encoder(path / task, "cpu", assets=path / "base")
        for name in classes:
            rows[name] = run.mean_embedding(encoder, name)
    trained = enter(path, rows, logit_scale=50)
    trained.register_head(path / "head.safetensors")
    for task, classes in TASKS.items() if profiled else ():
        samples = open_samples(run.pairs(path / f"data-{task}", dict.fromkeys(classes, 8), seed=0))
        encoder = load_encoder(path / task, "cpu", assets=path / "base")
        make_profile(task, samples, encoder, base=load_encoder(path / "base", "cpu")).save(
            trained.path / trained.profile_name(task)
        )
        trained.register(task, profile=trained.profile_name(task))
    return run
