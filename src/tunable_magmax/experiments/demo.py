"""The built-in demonstration: an encoder learns characters task by task and forgets; two sites get merges of their own.

Everything is made on the spot (the benchmark `glyphs`) and stays as files: run, sites, preferences, merged models.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.lottery import derived_seed

if TYPE_CHECKING:
    from tunable_magmax.data.samples import Samples
    from tunable_magmax.evaluation.evaluator import Evaluator
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.runs.run import Run


# Five characters each, in the order in which the alphabet brings them.
TASKS = ("digits-1", "latin-1", "greek-1", "cyrillic", "signs", "digits-2", "latin-2", "greek-2")
EACH = 5
SITES: dict[str, dict[str, float]] = {
    "post office": {"digits-1": 0.25, "cyrillic": 0.5, "digits-2": 0.25},
    "maths class": {"greek-1": 0.3, "signs": 0.4, "greek-2": 0.3},
}
KNOWN, UNSEEN = 100, 1000  # pictures of a site: for the preference, and for the evaluation


def slug(name: str) -> str:
    """A name for folders.

    >>> slug("post office")
    'post-office'
    """
    return name.replace(" ", "-")


def characters() -> tuple[str, ...]:
    """Those of each task."""
    from tunable_magmax.data.glyphs import alphabets

    drawn = "".join(alphabets()[0].characters)
    return tuple(drawn[EACH * t : EACH * (t + 1)] for t in range(len(TASKS)))


def write_site(place: Path, shares: Mapping[str, float], seed: int, number: int, report: Progress) -> None:
    """Pictures of a site: `inputs` and their `labels.txt`, which are known of it, and `test`, which is not."""
    from tunable_magmax.data.glyphs import SITE, glyph_pictures

    draw = random.Random(derived_seed(seed, "site", number))
    tasks = draw.choices(list(shares), weights=list(shares.values()), k=KNOWN + UNSEEN)
    labels = [EACH * TASKS.index(task) + draw.randrange(EACH) for task in tasks]
    pictures = glyph_pictures(labels, EACH * len(TASKS), seed, SITE + number)
    (place / "inputs").mkdir(parents=True)
    names = [pictures.classes[label] for label in labels]
    (place / "labels.txt").write_text("\n".join(names[:KNOWN]) + "\n", encoding="utf-8")
    for position, picture in enumerate(pictures.load(range(len(labels)))):
        folder = place / "inputs" if position < KNOWN else place / "test" / names[position]
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{position:04}.png")
        report("drawing the sites", number * len(labels) + position + 1, len(SITES) * len(labels))


def known_pictures(place: Path, classes: tuple[str, ...]) -> Samples:
    """The pictures that are known of a site, with their labels."""
    from tunable_magmax.data.samples import Samples
    from tunable_magmax.data.source import open_samples

    loose = open_samples(place / "inputs")
    names = (place / "labels.txt").read_text(encoding="utf-8").splitlines()
    return Samples(loose.origin, "image", len(loose), loose.load, classes, tuple(map(classes.index, names)))


TRAIN, TEST = 200, 50  # pictures of each character
OPTIMISATION = {"epochs": 3, "batch": 64, "lr": 1e-3, "weight_decay": 0.05, "warmup": 0.1}
BASELINES = ("average", "random_mix", "ties", "magmax")
SOURCES = {"labels": "its labels", "inputs": "its pictures", "inputs-ot": "its pictures, by transport"}
HALF = 0.5
CONFIG, RESULTS, PICTURE = "run.yaml", "results.json", "demo.png"


@dataclass(frozen=True, slots=True)
class Row:
    """A model and its accuracy on the test pictures of each task and of each site.

    Merges have the scale `matched`; `half`: the accuracy on the sites with the paper's 0.5 for the step from the base.
    `own`: the site it was chosen or made for; `tailored`: whether it is a merge by that site's preference.
    """

    model: str
    tasks: tuple[float, ...]
    sites: tuple[float, ...]
    half: tuple[float, ...]
    own: str | None = None
    tailored: bool = False


@dataclass(frozen=True)
class Demonstration:
    """What came out. `weights`: by site and source, one weight for each task; `forgetting` as `tmx eval` defines it."""

    tasks: tuple[str, ...]
    characters: tuple[str, ...]
    """Of each task."""
    sites: Mapping[str, Mapping[str, float]]
    known: int
    """Pictures of a site that its preferences come from."""
    rows: tuple[Row, ...]
    weights: Mapping[str, Mapping[str, tuple[float, ...]]]
    learnt: tuple[float, ...]
    """The accuracy on each task just after it was trained."""
    forgetting: float
    picture: str

    def to_json(self) -> str:
        """JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def run_demo(out: str | Path, *, seed: int = 0, progress: Progress | None = None) -> Demonstration:
    """Train, make two sites, find their preferences, merge and measure; everything is left in `out`.

    Called again, it goes on with the training where that stopped, and makes the rest anew.
    """
    _require_extras()
    from tunable_magmax.models.glyph_encoder import one_thread
    from tunable_magmax.plots.demo import save_demo_picture

    place = Path(out)
    report = progress or (lambda phase, done, total: None)
    with one_thread():
        learnt, forgetting = _train(place, seed, report)
        for folder in ("sites", "models", "preferences"):
            shutil.rmtree(place / folder, ignore_errors=True)
        for k, (site, shares) in enumerate(SITES.items()):
            write_site(place / "sites" / slug(site), shares, seed, k, report)
        rows, weights = _merge_and_measure(place, report)
    found = Demonstration(
        tasks=TASKS,
        characters=characters(),
        sites=SITES,
        known=KNOWN,
        rows=tuple(rows),
        weights=weights,
        learnt=learnt,
        forgetting=forgetting,
        picture=str(place / PICTURE),
    )
    save_demo_picture(found, place / PICTURE)
    (place / RESULTS).write_text(found.to_json(), encoding="utf-8")
    return found


def demo_config(seed: int) -> dict[str, Any]:
    """The run.yaml of the demonstration."""
    from tunable_magmax.data.glyphs import alphabets

    names = alphabets()[0].first(EACH * len(TASKS)).names
    tasks = {task: list(names[EACH * t : EACH * (t + 1)]) for t, task in enumerate(TASKS)}
    sizes = {"classes": EACH * len(TASKS), "train": TRAIN, "test": TEST, "seed": seed}
    benchmark = {"name": "glyphs", **sizes, "tasks": tasks}
    return {"model": "glyphs", "benchmark": benchmark, "train": OPTIMISATION, "seed": seed}


# -- training ---------------------------------------------------------------------------------------------------------


def _train(place: Path, seed: int, report: Progress) -> tuple[tuple[float, ...], float]:
    """Train the sequence into `place`/run; what each task's accuracy was when it was new, and what was forgotten."""
    import yaml

    from tunable_magmax.training.config import TrainConfig
    from tunable_magmax.training.sequence import train_sequence

    file = place / CONFIG
    if place.exists() and not file.exists():
        raise InputError(f"{place} exists and is no earlier demonstration; choose another folder with --out")
    wanted = yaml.safe_dump(demo_config(seed), sort_keys=False, allow_unicode=True)
    if place.exists() and file.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(place / "run", ignore_errors=True)  # of another seed or version
    place.mkdir(parents=True, exist_ok=True)
    file.write_text(wanted, encoding="utf-8")

    def watch(tick: Any) -> None:
        report("train", (tick.task - 1) * tick.steps + tick.step, tick.tasks * tick.steps)

    config = TrainConfig.read(yaml.safe_load(wanted), place, str(file))
    run = train_sequence(config, place / "run", device="cpu", progress=report, watch=watch)
    assert run.matrix is not None
    metrics = {metric.name: metric.value for metric in run.matrix.metrics()}
    assert metrics["forgetting"] is not None
    return tuple(run.matrix.rows[t][t] for t in range(len(TASKS))), metrics["forgetting"]


# -- preferences, merges, accuracies ----------------------------------------------------------------------------------


def _merge_and_measure(place: Path, report: Progress) -> tuple[list[Row], dict[str, dict[str, tuple[float, ...]]]]:
    from tunable_magmax.engines.local import merge_checkpoints
    from tunable_magmax.merging.state_dicts import MergeSession
    from tunable_magmax.models.state import read_state
    from tunable_magmax.runs.run import Run

    run = Run.open(place / "run")
    base, *tasks = (read_state(path)[0] for path in (run.base, *run.tasks))
    measure = _Measure(place, run, report)
    weights: dict[str, dict[str, tuple[float, ...]]] = {}
    with MergeSession(base, tasks) as session:

        def half(**given: Any) -> Mapping[str, Any]:
            return session.merge(scale=HALF, **given).state_dict

        rows = [measure("base", base, base), measure("last checkpoint", tasks[-1], half(method="last_task"))]
        rows += [measure(name, session.merge(method=name).state_dict, half(method=name)) for name in BASELINES]
        for site in SITES:
            best = measure.best(site, tasks)
            alone = [float(t == best) for t in range(len(tasks))]
            rows.append(measure("best single task", tasks[best], half(weights=alone), site))
            found = {source: _preference(run, place, site, source) for source in SOURCES}
            weights[site] = {source: preference.weights for source, preference in found.items()}
            for source, preference in found.items():
                preference.save(_made(place / "preferences" / f"{slug(site)}-{source}.json"))
                model = _made(place / "models" / f"{slug(site)}-{source}")
                merge_checkpoints(run.base, run.tasks, model, weights=preference.weights, names=run.names)
                states = read_state(model)[0], half(weights=preference.weights)
                rows.append(measure(f"from {SOURCES[source]}", *states, site, tailored=True))
    return rows, weights


class _Measure:
    """Accuracies of models on the tasks' test pictures and on both sites'."""

    def __init__(self, place: Path, run: Run, report: Progress) -> None:
        import yaml

        from tunable_magmax.data.benchmark import BenchmarkOptions, open_benchmark
        from tunable_magmax.data.source import open_samples
        from tunable_magmax.evaluation.evaluator import Evaluator, label_benchmark, label_samples
        from tunable_magmax.models.encoder import load_encoder
        from tunable_magmax.models.head import load_head

        assert run.head is not None
        head, encoder = load_head(run.head), load_encoder(run.base, "cpu")
        section = yaml.safe_load((place / CONFIG).read_text(encoding="utf-8"))["benchmark"]
        benchmark = open_benchmark(BenchmarkOptions.read(section, place))
        self._tasks = Evaluator(encoder, head, label_benchmark(benchmark, head.classes))
        self._sites: dict[str, Evaluator] = {}
        self._known: dict[str, Evaluator] = {}
        for site in SITES:
            folder = place / "sites" / slug(site)
            unseen = open_samples(folder / "test")
            known = known_pictures(folder, head.classes)
            self._sites[site] = Evaluator(encoder, head, label_samples(unseen, head.classes, {}))
            self._known[site] = Evaluator(encoder, head, label_samples(known, head.classes, {}))
        self._report, self._done = report, 0

    def __call__(
        self,
        model: str,
        state: Mapping[str, Any],
        half: Mapping[str, Any],
        own: str | None = None,
        tailored: bool = False,
    ) -> Row:
        self._done += 1
        self._report("measuring", self._done, 2 + len(BASELINES) + len(SITES) * (1 + len(SOURCES)))
        tasks = tuple(share.value for share in self._tasks.measure(state).by_task.values())
        return Row(model, tasks, self._on_sites(state), self._on_sites(half), own, tailored)

    def _on_sites(self, state: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple(self._sites[site].measure(state).overall.value for site in SITES)

    def best(self, site: str, tasks: Sequence[Mapping[str, Any]]) -> int:
        """The task checkpoint that gets most of the site's labelled pictures right."""
        scores = [self._known[site].measure(state).overall.right for state in tasks]
        return scores.index(max(scores))


def _preference(run: Run, place: Path, site: str, source: str) -> Preference:
    """As `tmx prefer` finds it: from labels, from inputs, or from inputs by transport."""
    from tunable_magmax.workflows.prefer import Estimation, prefer
    from tunable_magmax.workflows.target import Reading, Sources

    folder = place / "sites" / slug(site)
    if source == "labels":
        return prefer(run, Sources(labels=folder / "labels.txt")).preference
    estimation = Estimation(method="ot" if source == "inputs-ot" else "auto")
    return prefer(run, Sources(inputs=folder / "inputs"), estimation, Reading(device="cpu")).preference


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _require_extras() -> None:
    """Before anything is written: what training and drawing need."""
    needed = {"transformers": "transformers", "PIL": "pillow", "matplotlib": "matplotlib"}
    missing = [name for module, name in needed.items() if find_spec(module) is None]
    if missing:
        raise InputError(
            f"the demonstration needs {' and '.join(missing)}, which this installation lacks: "
            'pip install "tunable-magmax[train,report]"'
        )
