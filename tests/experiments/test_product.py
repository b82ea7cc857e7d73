"""What an experiment measures is what the product makes: the same merge, the same head, the same words."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file
from training import toy

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.experiments.config import Experiment, read_experiment
from tunable_magmax.experiments.environments import draw_environments, level_mixtures
from tunable_magmax.experiments.records import read_records
from tunable_magmax.experiments.reproduce import JobOptions, reproduce_all, results_folder
from tunable_magmax.experiments.results import load_results
from tunable_magmax.experiments.tables import expected_table
from tunable_magmax.experiments.workbench import Workbench, why_no_logistic
from tunable_magmax.workflows.options import Reading
from tunable_magmax.workflows.prefer import prefer
from tunable_magmax.workflows.site import SiteSources
from tunable_magmax.workflows.tailor import TailorOptions, tailor

ROWS = [
    "tailor:auto",
    "tailor:label",
    "tailor:both",
    "zero-shot+prior:auto",
    "zero-shot+fit+prior:auto",
    "sequential@1+fit+prior:auto",
    "tunable:auto@1+prior",
    "tunable:auto@1+fit+prior",
    "tsv:auto@1+fit+prior",
    "joint",
    "joint+fit+prior:auto",
    "logistic:auto+prior",
]
SIZES = {"size": "supply", "meta": 0.4}
CPU = Reading(device="cpu")


def written(root: Path, kind: str, **run) -> Experiment:
    """An experiment on tiny models: `bert-builtin` has a new classifier for each task."""
    given = {
        "setting": f"toy/{kind}-2",
        "run": toy.settings(root, kind.removesuffix("-builtin"), train={"epochs": 1}, **run),
        "seeds": [3],
        "environments": {
            "mixtures": {"A": [0.8, 0.2]},
            "levels": ["all"],
            "variants": [42],
            "size": "supply",
            "meta": 0.4,
        },
        "baselines": ["sequential", "magmax"],
        "preferences": ["auto"],
        "scales": [1.0],
        "rows": ROWS,
    }
    (root / "toy.yaml").write_text(yaml.safe_dump(given))
    return read_experiment(root / "toy.yaml")


@pytest.fixture(scope="module", params=["vit", "bert-builtin"])
def done(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    builtin = {"head": {"source": "builtin"}} if request.param == "bert-builtin" else {}
    experiment = written(root, request.param, **builtin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few samples, and perhaps no scikit-learn
        reproduce_all(experiment, root / "results", root / "work", JobOptions("cpu"))
    return root, experiment


def as_files(samples, place: Path) -> Path:
    """Samples as a site has them: pictures in a folder, or a table of texts."""
    place.mkdir()
    values = list(samples.load(range(len(samples))))
    if samples.kind == "image":
        for k, value in enumerate(values):
            value.save(place / f"{k:03}.png")
        return place
    with (place / "site.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([value] for value in values)])
    return place / "site.csv"


def rows_of(root: Path, experiment: Experiment) -> dict[str, dict[str, dict]]:
    records = read_records(results_folder(experiment, root / "results") / "records.jsonl")
    return {
        record["row"]: {part["name"]: part for part in record["environments"]}
        for record in records
        if record["kind"] == "row"
    }


def test_every_row_is_measured_and_says_what_was_chosen_and_told(done):
    root, experiment = done
    rows = rows_of(root, experiment)
    skipped = {"logistic:auto+prior"} if why_no_logistic() else set()
    assert set(ROWS) - skipped <= set(rows)
    for source in ("auto", "label", "both"):
        for part in rows[f"tailor:{source}"].values():
            assert part["head"] in ("fitted", "old")
            assert part["tried"] >= 4
            for value, low, high in part["expected"].values():
                assert 0 <= low <= value <= high <= 1
            assert set(part["expected"]) == {"tailored", "base", "last"}
            assert 0 <= part["error"] <= 1


def test_what_was_told_stands_beside_what_was_measured(done):
    root, _ = done
    table = expected_table(load_results(root / "results"))
    assert [line[2].text for line in table.rows[:3]] == ["tailored", "base", "last"]
    for line in table.rows:
        measured, told, difference = (cell.value for cell in line[3:6])
        assert 0 <= abs(measured - told) <= difference + 1e-9 <= 100


def test_a_row_is_what_the_command_writes(done, tmp_path):
    """One preference and the same inputs: the same merged bytes and the same head."""
    root, experiment = done
    config = experiment.training(3)
    benchmark = open_benchmark(config.benchmark)
    environments = draw_environments(benchmark, experiment.environments)
    place = root / "work" / experiment.setting / "seed-3"
    with Workbench(place, benchmark, environments, seed=config.seed, device="cpu") as bench:
        for k, environment in enumerate(environments):
            model, preference = bench.tailored("auto", environment)
            inputs = as_files(benchmark.test.subset(environment.meta), tmp_path / f"inputs-{k}")
            found = prefer(place, SiteSources(inputs=inputs), reading=CPU)
            np.testing.assert_allclose(found.weights, preference.weights, atol=1e-3)
            options = TailorOptions(seed=config.seed)
            made = tailor(place, SiteSources(inputs=inputs), tmp_path / str(k), options, CPU, preference=preference)
            written = load_file(tmp_path / str(k) / "model.safetensors")
            own = bench.bench.models.state(model.spec)
            builtin = bench.bench.is_builtin
            for name in written.keys() - {n for n in written if builtin and ("classifier" in n or "pooler" in n)}:
                one, other = written[name].numpy(), own[name].cpu().numpy()
                if model.spec.method in ("tsv", None):  # the last bits of tsv, and of a checkpoint that is merged
                    np.testing.assert_allclose(one, other, atol=1e-5)
                else:
                    assert one.tobytes() == other.tobytes(), (name, model.spec)
            assert made.record.head.kind == model.plan.head.kind
            assert made.record.head.log_loss == pytest.approx(model.plan.head.loss, abs=1e-6)
            assert {name: v[0] for name, v in made.record.expected.items()} == {
                name: round(each.value, 4) for name, each in model.plan.evidence.expected.items()
            }


def test_levels_stand_beside_the_mixtures(done):
    _, experiment = done
    assert experiment.environments.mixtures == {"A": (0.8, 0.2), "M2": (0.5, 0.5)}
    assert list(level_mixtures([5, 10, "all"], 10)) == ["M5", "M10"]
    assert list(level_mixtures([5, 10, "all"], 3)) == ["M3"]
