"""The built-in demonstration: an encoder learns characters task by task and forgets; two sites get merges of their own.

Everything is made on the spot (the benchmark `glyphs`) and stays as files: run, sites, tailored models.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.labelled import Labelled, label_benchmark, label_samples
from tunable_magmax.experiments.glyphs import SITE_STREAM, alphabets, glyph_pictures
from tunable_magmax.experiments.rows import MERGED
from tunable_magmax.experiments.table import slug
from tunable_magmax.files import Progress
from tunable_magmax.lottery import derived_seed
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.merging.state_dicts import MergeSession
from tunable_magmax.models.encoder import Refill, load_encoder
from tunable_magmax.models.head import Head, load_head
from tunable_magmax.models.prepared import Prepared, embed_prepared, prepare
from tunable_magmax.models.state import read_tensors
from tunable_magmax.plots.demo import Bar, SitePanel, save_demo_picture
from tunable_magmax.runs.run import Run, is_run
from tunable_magmax.training.config import TrainConfig
from tunable_magmax.training.sequence import train_sequence
from tunable_magmax.workflows.options import Reading
from tunable_magmax.workflows.site import SiteSources
from tunable_magmax.workflows.tailor import TailorOptions, tailor
from tunable_magmax.workflows.tailored import HEAD, Tailored

# Five characters each, in the order in which the alphabet brings them.
TASKS = ("digits-1", "latin-1", "greek-1", "cyrillic", "signs", "digits-2", "latin-2", "greek-2")
EACH = 5
TRAIN, TEST = 200, 50  # pictures of each character
OPTIMISATION = {"epochs": 3, "batch": 64, "lr": 1e-3, "weight_decay": 0.05, "warmup": 0.1}
SITES: dict[str, dict[str, float]] = {
    "post office": {"digits-1": 0.25, "cyrillic": 0.5, "digits-2": 0.25},
    "maths class": {"greek-1": 0.3, "signs": 0.4, "greek-2": 0.3},
}
KNOWN, UNSEEN = 100, 1000  # pictures of a site: for the preference, and for the evaluation
SHOWN = ("average", "random_mix", "ties", "magmax")
"""The baselines of the table, as `rows.MERGED` names them, beside the base and the last checkpoint."""
SOURCES = {
    "labels": "its labels",
    "inputs": "its pictures",
    "inputs-ot": "its pictures, by transport",
    "labelled": "its labelled pictures",
}
"""What is known of a site; the last lets labels choose method and scale, too."""
HALF = 0.5
CONFIG, RESULTS, PICTURE = "run.yaml", "results.json", "demo.png"


@dataclass(frozen=True, slots=True)
class Scores:
    """A model's accuracy on the test pictures of each task and of each site.

    `prior`: on the sites with the prior of each, found from its pictures; a tailored model has its own. `half`: with
    the paper's scale 0.5 for the step from the base, without a prior; else merges have their default scale, tailored
    ones that of `tailor`. None where a model's scale was chosen. `own`: the site it was chosen or made for;
    `tailored`: whether `tailor` made it.
    """

    model: str
    tasks: tuple[float, ...]
    sites: tuple[float, ...]
    prior: tuple[float, ...]
    half: tuple[float, ...] | None
    own: str | None = None
    tailored: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """How a tailored model was merged, and its warnings."""

    method: str
    scale: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Demonstration:
    """What came out. `weights`: by site and source, one weight for each task; `forgetting` as `tmx eval` defines it.

    `made`: by site and source, how the model was merged, and what there was to warn of.
    `characters`: those of each task. `known`: how many pictures of a site its preferences come from. `learnt`: the
    accuracy on each task just after it was trained.
    """

    tasks: tuple[str, ...]
    characters: tuple[str, ...]
    sites: Mapping[str, Mapping[str, float]]
    known: int
    rows: tuple[Scores, ...]
    weights: Mapping[str, Mapping[str, tuple[float, ...]]]
    made: Mapping[str, Mapping[str, Made]]
    learnt: tuple[float, ...]
    forgetting: float
    picture: str

    def to_json(self) -> str:
        """Returns JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def run_demo(
    out: str | Path, *, seed: int = 0, progress: Progress | None = None, notify: Callable[[str], None] | None = None
) -> Demonstration:
    """Trains, makes two sites, tailors models to them and measures; everything is left in `out`.

    Called again, it continues the training where that stopped, and makes the rest anew.
    """
    _require_extras()
    from tunable_magmax.experiments.glyph_encoder import one_thread

    place = Path(out)
    report = progress or (lambda phase, done, total: None)
    with one_thread():
        config, news = _config(place, seed)
        if notify is not None:
            notify(news)
        learnt, forgetting = _train(config, place / "run", report)
        for folder in ("sites", "models"):
            shutil.rmtree(place / folder, ignore_errors=True)
        for k in range(len(SITES)):
            _write_site(place, k, seed, report)
        models = _tailor(place, report)
        rows = _measure(place, config, models, report)
    drawn = "".join(alphabets()[0].characters)
    demonstration = Demonstration(
        tasks=TASKS,
        characters=tuple(drawn[EACH * t : EACH * (t + 1)] for t in range(len(TASKS))),
        sites=SITES,
        known=KNOWN,
        rows=tuple(rows),
        weights={site: {name: model.preference.weights for name, model in own.items()} for site, own in models.items()},
        made={site: {name: _made(model) for name, model in own.items()} for site, own in models.items()},
        learnt=learnt,
        forgetting=forgetting,
        picture=str(place / PICTURE),
    )
    _draw(demonstration, place / PICTURE)
    (place / RESULTS).write_text(demonstration.to_json(), encoding="utf-8")
    return demonstration


# -- training ---------------------------------------------------------------------------------------------------------


def demo_config(seed: int) -> dict[str, Any]:
    """Returns the run.yaml of the demonstration."""
    names = alphabets()[0].first(EACH * len(TASKS)).names
    tasks = {task: list(names[EACH * t : EACH * (t + 1)]) for t, task in enumerate(TASKS)}
    sizes = {"classes": EACH * len(TASKS), "train": TRAIN, "test": TEST, "seed": seed}
    benchmark = {"name": "glyphs", **sizes, "tasks": tasks}
    return {"model": "glyphs", "benchmark": benchmark, "train": OPTIMISATION, "seed": seed}


def _config(place: Path, seed: int) -> tuple[TrainConfig, str]:
    """Writes run.yaml, and removes the run of another seed or version; also returns in words what is done."""
    file, run = place / CONFIG, place / "run"
    if place.exists() and not file.exists():
        raise InputError(f"{place} exists and is no earlier demonstration; choose another folder with --out")
    wanted = yaml.safe_dump(demo_config(seed), sort_keys=False, allow_unicode=True)
    news = f"everything goes to {place}; this takes about two minutes"
    if place.exists() and file.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(run, ignore_errors=True)
        news = f"{place} holds a demonstration of another seed or version, which is replaced"
    elif is_run(run):
        done = len(Run.open(run, begun=True).tasks)
        state = "its training is complete" if done == len(TASKS) else f"its training goes on after task {done}"
        news = f"{place} holds an earlier demonstration: {state}, and the rest is made again"
    place.mkdir(parents=True, exist_ok=True)
    file.write_text(wanted, encoding="utf-8")
    return TrainConfig.read(yaml.safe_load(wanted), place, str(file)), news


def _train(config: TrainConfig, run: Path, report: Progress) -> tuple[tuple[float, ...], float]:
    """Trains the sequence; returns each task's accuracy when it was new, and what was forgotten."""

    def watch(tick: Any) -> None:
        report("train", tick.task * tick.steps + tick.step, tick.tasks * tick.steps)

    matrix = train_sequence(config, run, device="cpu", progress=report, watch=watch).matrix
    assert matrix is not None
    forgetting = {metric.name: metric.value for metric in matrix.metrics()}["forgetting"]
    assert forgetting is not None
    return tuple(matrix.rows[t][t] for t in range(len(TASKS))), forgetting


# -- sites ------------------------------------------------------------------------------------------------------------


def _site_folder(place: Path, site: str) -> Path:
    return place / "sites" / slug(site)


def _write_site(place: Path, number: int, seed: int, report: Progress) -> None:
    """Writes a site's pictures: `inputs` and their `labels.txt`, which are known of it, and `test`, which is not.

    `labelled` holds the known pictures once more, in class folders.
    """
    site, shares = list(SITES.items())[number]
    folder = _site_folder(place, site)
    draw = random.Random(derived_seed(seed, "site", number))
    tasks = draw.choices(list(shares), weights=list(shares.values()), k=KNOWN + UNSEEN)
    labels = [EACH * TASKS.index(task) + draw.randrange(EACH) for task in tasks]
    pictures = glyph_pictures(labels, EACH * len(TASKS), seed, SITE_STREAM + number)
    (folder / "inputs").mkdir(parents=True)
    names = [pictures.classes[label] for label in labels]
    (folder / "labels.txt").write_text("\n".join(names[:KNOWN]) + "\n", encoding="utf-8")
    for position, picture in enumerate(pictures.load(range(len(labels)))):
        known = [folder / "inputs", folder / "labelled" / names[position]]
        for target in known if position < KNOWN else [folder / "test" / names[position]]:
            target.mkdir(parents=True, exist_ok=True)
            picture.save(target / f"{position:04}.png")
        report("drawing the sites", number * len(labels) + position + 1, len(SITES) * len(labels))


def _known_pictures(folder: Path, classes: tuple[str, ...]) -> Samples:
    """Returns the pictures that are known of a site, with their labels."""
    loose = open_samples(folder / "inputs")
    names = (folder / "labels.txt").read_text(encoding="utf-8").splitlines()
    return Samples(loose.origin, "image", len(loose), loose.load, classes, tuple(map(classes.index, names)))


# -- models and accuracies --------------------------------------------------------------------------------------------


def _tailor(place: Path, report: Progress) -> dict[str, dict[str, Tailored]]:
    """Tailors models to each site from what is known of it; returns them by site and source."""
    run = Run.open(place / "run")
    return {
        site: {
            source: tailor(
                run,
                _sources(_site_folder(place, site), source),
                place / "models" / f"{slug(site)}-{source}",
                TailorOptions(estimator="ot" if source == "inputs-ot" else "auto"),
                Reading(device="cpu"),
                progress=report,
            )
            for source in SOURCES
        }
        for site in SITES
    }


def _sources(folder: Path, source: str) -> SiteSources:
    if source == "labels":
        return SiteSources(labels=folder / "labels.txt")
    return SiteSources(labelled=folder / "labelled") if source == "labelled" else SiteSources(inputs=folder / "inputs")


def _made(model: Tailored) -> Made:
    return Made(model.report.method, model.report.scale, tuple(model.record.warnings))


def _measure(
    place: Path, config: TrainConfig, models: Mapping[str, Mapping[str, Tailored]], report: Progress
) -> list[Scores]:
    """Measures all models on the tasks' test pictures and on both sites', there with and without a prior."""
    total = 2 + len(SHOWN) + len(SITES) * (1 + len(SOURCES))
    rows: list[Scores] = []
    heads = {site: {source: load_head(model.out / HEAD) for source, model in models[site].items()} for site in SITES}
    run = Run.open(place / "run")
    assert run.head is not None
    encoder, frozen = load_encoder(run.base, "cpu"), load_head(run.head)
    priors = [models[site]["inputs"].preference.prior for site in SITES]
    usual = [frozen if prior is None else frozen.with_bias(prior.bias(frozen.classes)) for prior in priors]

    def opened(labelled: Labelled) -> tuple[Labelled, Prepared]:
        prepared = prepare(encoder, labelled.samples, labelled.positions)
        return labelled.readable(prepared.positions), prepared

    def on(samples: Samples) -> tuple[Labelled, Prepared]:
        return opened(label_samples(samples, frozen.classes, {}))

    everything = opened(label_benchmark(open_benchmark(config.benchmark), frozen.classes))
    base, *states = (read_tensors(path) for path in (run.base, *run.tasks))
    refill = Refill(encoder, base)

    def logits(state: Mapping[str, Tensor], data: tuple[Labelled, Prepared], heads: Sequence[Head]) -> list[Any]:
        """Returns what heads give for a model's features of some pictures."""
        refill(state)
        features = embed_prepared(encoder, data[1])
        return [head.logits(features) for head in heads]

    with MergeSession(base, states) as session:
        unseen = [on(open_samples(_site_folder(place, site) / "test")) for site in SITES]

        def merged(scale: float | str = "matched", **options: Any) -> dict[str, Tensor]:
            return session.merge(scale=scale, **options).state_dict

        def right(state: Mapping[str, Tensor], own: Sequence[Head]) -> list[tuple[float, float]]:
            """Returns for each site the accuracy of the plain head without a prior, and that with a site's head."""
            found = []
            for site, head in zip(unseen, own, strict=True):
                scores = logits(state, site, (frozen, head))
                plain, informed = (float((each.argmax(axis=1) == site[0].targets).mean()) for each in scores)
                found.append((plain, informed))
            return found

        def add(
            model: str,
            state: Mapping[str, Tensor],
            half: Mapping[str, Tensor] | None,
            own: str | None = None,
            made: Head | None = None,
        ) -> None:
            report("measuring", len(rows) + 1, total)
            used = [made if made and own == site else usual[k] for k, site in enumerate(SITES)]
            without, informed = zip(*right(state, used), strict=True)
            halved = None if half is None else tuple(pair[0] for pair in right(half, usual))
            accuracy = everything[0].accuracy(logits(state, everything, (frozen,))[0], frozen.classes)
            by_task = tuple(share.value for share in accuracy.by_task.values())
            rows.append(Scores(model, by_task, without, informed, halved, own, made is not None))

        add("base", base, base)
        add("last checkpoint", states[-1], merged(HALF, method=MERGED["sequential"]))
        for name in SHOWN:
            add(name, merged(method=MERGED[name]), merged(HALF, method=MERGED[name]))
        for site in SITES:
            known = on(_known_pictures(_site_folder(place, site), frozen.classes))
            counts = [(logits(s, known, (frozen,))[0].argmax(axis=1) == known[0].targets).sum() for s in states]
            best = counts.index(max(counts))
            alone = [float(t == best) for t in range(len(TASKS))]
            add("best single task", states[best], merged(HALF, weights=alone), site)
            for source, model in models[site].items():
                method = model.report.method
                weighs = METHODS[method].weights != "refused"
                own: dict[str, Any] = {"weights": model.preference.weights} if weighs else {}
                half = None if source == "labelled" else merged(HALF, method=method, **own)
                add(f"from {SOURCES[source]}", read_tensors(model.out), half, site, heads[site][source])
    return rows


def _draw(demonstration: Demonstration, path: Path) -> None:
    panels = []
    for k, (site, shares) in enumerate(demonstration.sites.items()):
        rows = [row for row in demonstration.rows if row.own in (None, site)]
        lines = {"true shares": [shares.get(task, 0.0) for task in demonstration.tasks]}
        lines |= {f"from {SOURCES[source]}": list(weights) for source, weights in demonstration.weights[site].items()}
        bars = [Bar(row.model, row.prior[k], row.sites[k], row.tailored) for row in rows]
        panels.append(SitePanel(site, bars, lines))
    title = (
        f"One encoder, {len(demonstration.tasks)} tasks, {len(panels)} sites: models tailored to a site, from "
        f"{demonstration.known} samples of it"
    )
    tasks = [f"{task}\n{drawn}" for task, drawn in zip(demonstration.tasks, demonstration.characters, strict=True)]
    save_demo_picture(title, tasks, panels, path)


def _require_extras() -> None:
    """Refuses, before anything is written, if what training and drawing need is not installed."""
    needed = {"transformers": "transformers", "PIL": "pillow", "matplotlib": "matplotlib"}
    missing = [name for module, name in needed.items() if find_spec(module) is None]
    if missing:
        raise InputError(
            f"the demonstration needs {' and '.join(missing)}, which this installation lacks: "
            'pip install "tunable-magmax[train,report]"'
        )
