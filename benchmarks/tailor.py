"""Where the time of `tmx tailor` goes: a ViT-B/16-sized sequence, 100 pictures of a site, no labels.

    python benchmarks/tailor.py [--tasks 20] [--pictures 100] [--keep 20] [--folder /tmp]

Makes a random walk of checkpoints in a temporary folder (3.8 GB in float16 with 20 tasks; removed afterwards) with
`--keep` pictures of each of five classes a task, tailors once, and prints the seconds by phase and in all, and how many
samples were embedded. Exits with 1 if the merge takes more than a quarter of all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

SHARE = 0.25
MERGING = ("survey", "measure", "merge")
"""Phases of writing the merge; the first one of them has what came before it, too."""
CLASSES_EACH, ROWS = 5, 500


def write_run(folder: Path, tasks: int, keep: int) -> None:
    """Writes base, checkpoints, profiles and head; every task is a small random step from the one before it."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import ViTConfig, ViTModel

    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.head import Head, save_head
    from tunable_magmax.runs.run import Run

    torch.manual_seed(0)
    model: Any = ViTModel(ViTConfig())
    model.half()
    base = folder / "base"
    model.save_pretrained(base)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 224, "width": 224}, "resample": 2}
    processor |= {"do_resize": True, "do_rescale": True, "do_normalize": True}
    means = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (base / "preprocessor_config.json").write_text(json.dumps(processor | means))
    names = [f"task-{t:02}" for t in range(1, tasks + 1)]
    state = load_file(base / "model.safetensors")  # the names of the file are not those of the module
    for name in names:
        state = {key: tensor + (1e-3 * torch.randn(tensor.shape)).half() for key, tensor in state.items()}
        (folder / name).mkdir()
        save_file(state, folder / name / "model.safetensors", {"format": "pt"})
    entries = [{"name": name, "checkpoint": name} for name in names]
    (folder / "run.json").write_text(json.dumps({"version": 1, "base": "base", "tasks": entries}))
    encoder = load_encoder(base, "cpu")
    rng = np.random.default_rng(0)
    classes = [f"class-{k:03}" for k in range(CLASSES_EACH * tasks)]
    head = Head.of(rng.standard_normal((len(classes), encoder.dim)), classes, 20.0)
    save_head(head, folder / "classifier-head.safetensors")
    run = Run.open(folder)
    run.register_head(folder / "classifier-head.safetensors")
    for t, name in enumerate(names):
        write_profile(run.path / run.profile_name(name), name, t, classes, encoder)
        run.register(name, profile=run.profile_name(name), kept=keep_pictures(run, t, classes, keep))


def write_profile(path: Path, name: str, task: int, classes: list[str], encoder: Any) -> None:
    """Writes a profile of random features, in clusters of one for each class."""
    from tunable_magmax.models.pretrained import read_state
    from tunable_magmax.runs.profile import Profile

    rng = np.random.default_rng([1, task])
    own = range(CLASSES_EACH * task, CLASSES_EACH * (task + 1))
    labels = np.repeat(np.array(own), ROWS // CLASSES_EACH)
    centres = np.random.default_rng(2).standard_normal((len(classes), encoder.dim))
    rows = centres[labels] + rng.standard_normal((len(labels), encoder.dim))
    counts = [int((labels == k).sum()) for k in range(len(classes))]
    Profile(
        task=name,
        classes=tuple(classes),
        label_counts=tuple(counts),
        samples=len(labels),
        features=rows.astype(np.float32),
        encoder=read_state(path.parent.parent / name)[1],
        base=encoder.digest,
        base_features=rows.astype(np.float32),
        row_labels=labels,
    ).save(path)


def keep_pictures(run: Any, task: int, classes: list[str], keep: int) -> Any:
    """Keeps random pictures of each class of a task."""
    from tunable_magmax.data.source import open_labelled
    from tunable_magmax.runs.kept import keep_samples

    own = classes[CLASSES_EACH * task : CLASSES_EACH * (task + 1)]
    shape = (CLASSES_EACH * keep, 3, 224, 224)
    pictures = np.random.default_rng([4, task]).integers(0, 256, shape, dtype=np.uint8)
    data = list(zip(pictures, np.repeat(np.arange(CLASSES_EACH), keep).tolist(), strict=True))
    return keep_samples(
        run, run.names[task], open_labelled(data, dict(enumerate(own))), per_class=keep, source="training"
    )


def write_pictures(folder: Path, count: int) -> None:
    from PIL import Image

    folder.mkdir()
    rng = np.random.default_rng(3)
    for k in range(count):
        Image.fromarray(rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)).save(folder / f"{k:03}.png")


class Clock:
    """Adds up the time between reports of progress, by phase."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, str]] = [(time.perf_counter(), "")]

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.marks.append((time.perf_counter(), phase))

    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for (before, _), (now, phase) in pairwise(self.marks):
            found[phase] = found.get(phase, 0.0) + now - before
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=100)
    parser.add_argument("--keep", type=int, default=20, help="pictures of each class that the run keeps")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    from tunable_magmax.workflows.options import Reading, SiteSources, TailorOptions
    from tunable_magmax.workflows.tailor import tailor

    with tempfile.TemporaryDirectory(prefix="tmx-tailor-", dir=arguments.folder) as place:
        folder = Path(place)
        (folder / "run").mkdir()
        began = time.perf_counter()
        write_run(folder / "run", arguments.tasks, arguments.keep)
        write_pictures(folder / "site", arguments.pictures)
        print(f"{arguments.tasks} tasks and {arguments.pictures} pictures made in {time.perf_counter() - began:.0f} s")
        sources, reading = SiteSources(inputs=folder / "site"), Reading(device="cpu")
        clock = Clock()
        options = TailorOptions(folder / "out", sources, method=arguments.method, reading=reading)
        made = tailor(folder / "run", options, clock)
    spent, total = clock.seconds(), made.seconds
    for phase, seconds in spent.items():
        print(f"{phase:<12} {seconds:7.1f} s {seconds / total:6.1%}")
    print(f"{'all':<12} {total:7.1f} s")
    weighted = sum(weight > 0 for weight in made.preference.weights)
    print(f"{made.report.elements:,} elements, {weighted} tasks with a weight, by {made.report.method}")
    print(f"{made.record.head.embedded:,} forward passes of samples, without those for the mixture")
    share = sum(spent.get(phase, 0.0) for phase in MERGING) / total
    print(f"the merge takes {share:.0%}, at most {SHARE:.0%} allowed")
    return int(share > SHARE)


if __name__ == "__main__":
    sys.exit(main())
