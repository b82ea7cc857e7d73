"""The built-in demonstration: an encoder learns characters task by task and forgets; two sites get models of their own.

Everything is made on the spot (the benchmark `glyphs`) and stays as files: run, sites, tailored models.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tunable_magmax.data.arrays import one_thread
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError, required
from tunable_magmax.evaluation.bench import Bench, BenchData
from tunable_magmax.evaluation.run_models import BASE, MergeSpec
from tunable_magmax.experiments.glyphs import SITE_STREAM, alphabets, glyph_pictures
from tunable_magmax.files import Progress
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.head import Linear
from tunable_magmax.plots.demo import SitePanel, save_demo_picture
from tunable_magmax.runs.run import Run
from tunable_magmax.training.config import TrainConfig
from tunable_magmax.training.sequence import train_sequence
from tunable_magmax.workflows.evaluate import evaluate
from tunable_magmax.workflows.material import open_material
from tunable_magmax.workflows.options import Reading, SiteSources, TailorOptions
from tunable_magmax.workflows.tailor import tailor
from tunable_magmax.workflows.tailored import Tailored

# Five characters each, in the order in which the alphabet brings them.
TASKS = ("digits-1", "latin-1", "greek-1", "cyrillic", "signs", "digits-2", "latin-2", "greek-2")
EACH = 5
HOLDOUT = 0.1
SITES: dict[str, dict[str, float]] = {
    "post office": {"digits-1": 0.25, "cyrillic": 0.5, "digits-2": 0.25},
    "maths class": {"greek-1": 0.3, "signs": 0.4, "greek-2": 0.3},
}
CONFIG, RESULTS, PICTURE = "run.yaml", "results.json", "demo.png"
LAST, MAGMAX, FITTED, TAILORED = (
    "last checkpoint",
    "MAGMAX, one model for all",
    "base, head fitted",
    "tailored to the site",
)


@dataclass(frozen=True)
class DemoSize:
    """How much is trained and drawn. `train`, `test`: pictures of each character, `known`, `unseen`: of each site."""

    train: int = 200
    test: int = 50
    known: int = 100
    unseen: int = 1000
    epochs: int = 4
    batch: int = 64


@dataclass(frozen=True)
class SiteStory:
    """What came out for one site. `accuracy`: by model, on pictures that none has seen.

    `expected`: the accuracy that tailoring expected, with the 90% interval. `weights`: by task.
    """

    site: str
    shares: Mapping[str, float]
    accuracy: Mapping[str, float]
    expected: tuple[float, float, float]
    weights: Mapping[str, float]
    merge: str
    seconds: float


@dataclass(frozen=True)
class Story:
    """The demonstration. `learnt`, `left`: accuracy on each task right after its training, and at the end."""

    tasks: tuple[str, ...]
    characters: tuple[str, ...]
    known: int
    unseen: int
    learnt: tuple[float, ...]
    left: tuple[float, ...]
    sites: tuple[SiteStory, ...]
    picture: str

    def to_json(self) -> str:
        """Returns JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def run_demo(
    out: str | Path,
    *,
    seed: int = 0,
    size: DemoSize = DemoSize(),  # noqa: B008  (frozen)
    progress: Progress | None = None,
) -> Story:
    """Trains, makes two sites, tailors a model to each and measures; everything is left in `out`.

    Called again, it continues the training where that stopped, and makes the rest anew.
    """
    for module in ("transformers", "PIL", "matplotlib"):
        required(module)

    place = Path(out)
    report = progress or (lambda phase, done, total: None)
    with one_thread():
        config = _config(place, seed, size)
        train_sequence(config, place / "run", device="cpu", progress=report)
        for folder in ("sites", "models"):
            shutil.rmtree(place / folder, ignore_errors=True)
        made = {}
        for number, site in enumerate(SITES):
            _write_site(place, number, seed, size, report)
            sources = SiteSources(inputs=_folder(place, site) / "inputs")
            options = TailorOptions(place / "models" / site.replace(" ", "-"), sources, reading=Reading(device="cpu"))
            made[site] = tailor(place / "run", options, report)
        story = _measure(place, made, size, report)
    tasks = [f"{task}\n{drawn}" for task, drawn in zip(story.tasks, story.characters, strict=True)]
    panels = [SitePanel(site.site, site.shares, site.accuracy, site.expected, TAILORED) for site in story.sites]
    save_demo_picture(tasks, story.learnt, story.left, panels, place / PICTURE)
    (place / RESULTS).write_text(story.to_json(), encoding="utf-8")
    return story


# -- training ---------------------------------------------------------------------------------------------------------


def demo_config(seed: int, size: DemoSize) -> dict[str, Any]:
    """Returns the run.yaml of the demonstration."""
    names = alphabets()[0].first(EACH * len(TASKS)).names
    tasks = {task: list(names[EACH * t : EACH * (t + 1)]) for t, task in enumerate(TASKS)}
    sizes = {"classes": EACH * len(TASKS), "train": size.train, "test": size.test, "seed": seed}
    recipe = {"epochs": size.epochs, "batch": size.batch, "lr": 4e-4, "weight_decay": 0.05, "warmup": 0.1}
    # What is held out is kept, so that it tells the truth of models that were trained on the rest.
    benchmark = {"name": "glyphs", **sizes, "tasks": tasks, "holdout": HOLDOUT}
    return {"model": "glyphs", "benchmark": benchmark, "train": recipe, "seed": seed}


def _config(place: Path, seed: int, size: DemoSize) -> TrainConfig:
    """Writes run.yaml, and removes the run of another seed or version."""
    file = place / CONFIG
    earlier = file.read_text(encoding="utf-8") if file.exists() else ""
    if place.exists() and not earlier.startswith("model: glyphs\n"):
        raise InputError(f"{place} exists and is no earlier demonstration; choose another folder with --out")
    wanted = yaml.safe_dump(demo_config(seed, size), sort_keys=False, allow_unicode=True)
    config = TrainConfig.read(yaml.safe_load(wanted), place, str(file))
    if earlier != wanted:
        shutil.rmtree(place / "run", ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    file.write_text(wanted, encoding="utf-8")
    return config


# -- sites ------------------------------------------------------------------------------------------------------------


def _folder(place: Path, site: str) -> Path:
    return place / "sites" / site.replace(" ", "-")


def _write_site(place: Path, number: int, seed: int, size: DemoSize, report: Progress) -> None:
    """Writes a site's pictures: `inputs`, which are known of it without labels, and `test` in class folders."""
    site, shares = list(SITES.items())[number]
    folder = _folder(place, site)
    draw = random.Random(derived_seed(seed, "site", number))
    tasks = draw.choices(list(shares), weights=list(shares.values()), k=size.known + size.unseen)
    labels = [EACH * TASKS.index(task) + draw.randrange(EACH) for task in tasks]
    pictures = glyph_pictures(labels, EACH * len(TASKS), seed, SITE_STREAM + number)
    for position, picture in enumerate(pictures.load(range(len(labels)))):
        name = pictures.classes[labels[position]]
        target = folder / "inputs" if position < size.known else folder / "test" / name
        target.mkdir(parents=True, exist_ok=True)
        picture.save(target / f"{position:04}.png")
        report("drawing the sites", number * len(labels) + position + 1, len(SITES) * len(labels))


# -- what came out ----------------------------------------------------------------------------------------------------


def _measure(place: Path, made: Mapping[str, Tailored], size: DemoSize, report: Progress) -> Story:
    """Measures the last checkpoint, MAGMAX, the base and the tailored model on the unseen pictures of each site."""
    measured = evaluate(place / "run", reading=Reading(device="cpu")).matrix
    assert measured is not None
    rows, sites = measured.rows, []
    with Bench(Run.open(place / "run"), device="cpu") as bench:

        def share(spec: MergeSpec, data: BenchData, head: Linear | None = None) -> float:
            return float(np.mean(bench.logits(spec, data, head).argmax(axis=1) == data.labels))

        for number, (site, model) in enumerate(made.items(), 1):
            report("measuring", number, len(made))
            test = _folder(place, site) / "test"
            data = bench.open(site, open_samples(test))
            head = bench.fit(BASE, open_material(bench, model.preference).all).linear
            accuracy = {
                LAST: share(MergeSpec(checkpoint=len(TASKS)), data),
                MAGMAX: share(MergeSpec("magmax"), data),
                FITTED: share(BASE, data, head),
                TAILORED: evaluate(model.out, test).accuracy.overall.value,
            }
            sites.append(_story(site, model, accuracy))
    drawn = "".join(alphabets()[0].characters)
    return Story(
        tasks=TASKS,
        characters=tuple(drawn[EACH * t : EACH * (t + 1)] for t in range(len(TASKS))),
        known=size.known,
        unseen=size.unseen,
        learnt=tuple(rows[t][t] for t in range(len(TASKS))),
        left=tuple(rows[-1]),
        sites=tuple(sites),
        picture=str(place / PICTURE),
    )


def _story(site: str, model: Tailored, accuracy: Mapping[str, float]) -> SiteStory:
    record = model.record
    value, low, high = record.expected["tailored"]
    is_base = record.merge.method == "last_task" and record.merge.scale == 0
    return SiteStory(
        site=site,
        shares=SITES[site],
        accuracy=accuracy,
        expected=(value, low, high),
        weights=record.mixture.weights,
        merge="the base as it is" if is_base else f"{record.merge.method}, scale {record.merge.scale}",
        seconds=model.seconds,
    )
