"""Small data and tiny models to train, and ways to look at what a run left."""

import csv
import re
from pathlib import Path

import yaml
from models import tiny

from tunable_magmax.training.config import TrainConfig

CLASSES = {"hello": (220, 20, 20), "pay": (20, 20, 220), "bill": (20, 200, 20), "card": (120, 120, 120)}
"""Words of the tiny tokenizer, so that text towers can tell them apart; in images, colours."""
FILLERS = ("my", "good", "my good", "good good my", "my my", "good my bye")
TRAIN, TEST = 7, 3


def images(root: Path, classes=CLASSES, train: int = TRAIN, test: int = TEST) -> Path:
    """train/CLASS and test/CLASS."""
    for side, count, seed in (("train", train, 0), ("test", test, 100)):
        for name in classes:
            (root / side / name).mkdir(parents=True)
            for k in range(count):
                picture = tiny.picture(classes[name], seed + k + 10 * len(name))
                picture.save(root / side / name / f"{k}.png")
    return root


def texts(root: Path, classes=CLASSES, train: int = TRAIN, test: int = TEST) -> Path:
    """train.csv and test.csv."""
    root.mkdir(parents=True)
    for side, count, start in (("train", train, 0), ("test", test, 3)):
        with (root / f"{side}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            rows.writerows(
                [f"{FILLERS[(start + k) % len(FILLERS)]} {name}", name] for name in classes for k in range(count)
            )
    return root


def settings(root: Path, kind: str = "vit", model=None, **sections) -> dict:
    """run.yaml of two tasks, with model and data written to `root`; sections are joined with these."""
    folder = root / kind
    if not folder.exists():
        tiny.save(model or tiny.build(kind), folder)
    sort = "texts" if kind.startswith("bert") else "images"
    if not (root / sort).exists():
        {"images": images, "texts": texts}[sort](root / sort)
    given = {
        "model": kind,
        "benchmark": {"name": sort, "data": sort, "tasks": 2, "order": ["card", "hello", "pay", "bill"]},
        "train": {"epochs": 2, "batch": 4, "lr": "1e-3", "warmup": 0.2},
    }
    for name, value in sections.items():
        given[name] = {**given.get(name, {}), **value} if isinstance(value, dict) else value
    return given


def config(root: Path, kind: str = "vit", model=None, **sections) -> TrainConfig:
    return TrainConfig.read(settings(root, kind, model, **sections), root)


def file(root: Path, kind: str = "vit", model=None, **sections) -> Path:
    """The same as a file."""
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(settings(root, kind, model, **sections), sort_keys=False))
    return path


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run by path; run.json without the seconds that training took."""
    files = {path.relative_to(run).as_posix(): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    return files | {"run.json": re.sub(rb'"seconds": [0-9.]+', b"", files["run.json"])}


def differing(one: Path, other: Path) -> list[str]:
    """The files in which two runs differ."""
    left, right = contents(one), contents(other)
    return sorted(name for name in {*left, *right} if left.get(name) != right.get(name))
