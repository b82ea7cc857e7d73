"""What an experiment measures is what the product makes: the same merge, the same head, the same words."""

import csv
from pathlib import Path

import numpy as np
import pytest
from experiments.miniature import reproduced
from safetensors.torch import load_file

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.experiments.environments import draw_environments
from tunable_magmax.experiments.records import read_records
from tunable_magmax.experiments.sequence_bench import EnvironmentBench, SequenceBench
from tunable_magmax.workflows.evaluate import evaluate
from tunable_magmax.workflows.options import PreferOptions, Reading, SiteSources, TailorOptions
from tunable_magmax.workflows.prefer import prefer
from tunable_magmax.workflows.tailor import tailor

pytestmark = pytest.mark.filterwarnings("ignore:transport did not converge")  # of so few features
CPU = Reading(device="cpu")
ROWS = ["tailor:auto", "tailor:both", "tailor:auto+prior", "zero-shot+fit+prior:auto", "magmax@1+fit+prior:auto"]


@pytest.fixture(scope="module")
def own_heads(tmp_path_factory):
    """Tasks with classifiers of their own."""
    rows = [*ROWS, "joint+fit+prior:auto", "logistic:auto+prior"]
    builtin = {"head": {"source": "builtin"}}
    return reproduced(tmp_path_factory.mktemp("own"), "bert", builtin, rows=rows, alphas=[])


def as_files(samples, place: Path, labels: bool = False) -> Path:
    """Samples as a site has them: pictures in a folder or in class folders, or a table of texts."""
    place.mkdir()
    names = [samples.classes[label] for label in samples.labels]
    if samples.kind == "image":
        for k, value in enumerate(samples.load(range(len(samples)))):
            folder = place / names[k] if labels else place
            folder.mkdir(exist_ok=True)
            value.save(folder / f"{k:03}.png")
        return place
    rows = zip(samples.load(range(len(samples))), names, strict=True)
    with (place / "site.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *rows] if labels else [["text"], *([text] for text, _ in rows)])
    return place / "site.csv"


@pytest.mark.parametrize("made", ["done", "own_heads"])
def test_a_row_is_what_the_command_writes(made, request, tmp_path):
    """From the same inputs: the same weights, merged bytes, head, expected accuracy, and samples that are right."""
    root, experiment, _ = request.getfixturevalue(made)
    config, place = experiment.training(3), root / "work" / experiment.setting / "seed-3"
    benchmark = open_benchmark(config.benchmark)
    environments = draw_environments(benchmark, experiment.environments)[:1]
    records = read_records(root / "results" / experiment.setting / "records.jsonl")
    [row] = [record for record in records if record.kind == "row" and record.row == "tailor:auto"]
    with SequenceBench(place, benchmark, environments, seed=config.seed, device="cpu") as bench:
        for k, environment in enumerate(environments):
            with EnvironmentBench(bench, environment) as place_bench:
                own = place_bench.tailored("auto", "fitted")
            score = row.environments[k]
            inputs = as_files(benchmark.test.subset(environment.meta), tmp_path / f"inputs-{k}")
            found = prefer(place, PreferOptions(sources=SiteSources(inputs=inputs), seed=config.seed, reading=CPU))
            np.testing.assert_allclose(found.weights, own.preference.weights, atol=1e-6)
            sources = SiteSources(inputs=inputs)
            out = tailor(
                place, TailorOptions(tmp_path / str(k), sources, own.preference, seed=config.seed, reading=CPU)
            )
            assert (out.record.merge.method, out.record.merge.scale) == tuple(own.merge_options.values())[:2]
            assert out.record.head.kind == own.head.kind == score.head
            assert out.record.head.log_loss == pytest.approx(own.head.loss, abs=1e-6)
            for name, (value, _, _) in out.record.expected.items():
                assert value == pytest.approx(score.expected[name][0], abs=1e-4)
            state, merged = load_file(out.out / "model.safetensors"), bench.trained.bench.models.state(own.spec)
            for name in [n for n in state if "classifier" not in n and "pooler" not in n]:
                np.testing.assert_allclose(state[name].numpy(), merged[name].cpu().numpy(), atol=1e-5)
            data = as_files(benchmark.test.subset(environment.rest), tmp_path / f"rest-{k}", labels=True)
            assert evaluate(out.out, data).accuracy.overall.right == score.right


def test_rows_of_tasks_with_heads_of_their_own_are_measured(own_heads):
    root, experiment, _ = own_heads
    records = read_records(root / "results" / experiment.setting / "records.jsonl")
    rows = {record.row: record.environments for record in records if record.kind == "row"}
    assert list(rows) == list(experiment.rows)
    assert all(set(each.expected) == {"tailored", "base", "last"} for each in rows["tailor:both"])
    assert all(not each.expected and each.head == "old" for each in rows["tailor:auto+prior"])
