"""Experiments in miniature: every kind of job, killed and resumed; and every shipped configuration is planned."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from training import toy

from tunable_magmax.data.orders import FILE
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import read_experiment
from tunable_magmax.experiments.environments import PAPER, VARIANTS
from tunable_magmax.experiments.jobs import missing_jobs, plan_jobs
from tunable_magmax.experiments.records import read_records, record_key
from tunable_magmax.experiments.reproduce import JobOptions, reproduce_all, results_folder
from tunable_magmax.runs.run import Run

CONFIGS = Path(__file__).parents[2] / "configs"
PREFERENCES = ["label", "ot", "ot-raw", "cosine", "mmd", "probe", "auto", "search"]
ROWS = [
    "tailor:auto",
    "tailor:label",
    "tailor:both",
    "zero-shot+fit+prior:auto",
    "sequential@1+fit+prior:auto",
    "magmax@best+fit+prior:auto",
    "average:auto@1+fit+prior",
    "tunable:auto@1+fit+prior",
    "tsv:auto@1+fit+prior",
    "joint+fit+prior:auto",
    "tailor:auto+prior",
    "tailor:label+prior",
    "tunable:label@matched+prior",
    "tsv:auto@1",
    "tsv:auto@1+prior",
    "average:label@1+prior",
    "likeliest:auto",
    "magmax@best+prior:label",
    "magmax@best+prior:wrong",
    "magmax@best+prior:wrong@0.02",
    "joint",
    "joint+prior:auto",
]


def written(root: Path, **changed) -> Path:
    """An experiment on tiny models."""
    run = toy.settings(root, benchmark={"holdout": 0.3}, train={"epochs": 1})
    given = {
        "name": "toy",
        "setting": "toy/colours-2",
        "run": run,
        "seeds": [3],
        "environments": {"mixtures": {"D1": [0.5, 0.5], "D2": [0.8, 0.2]}, "variants": [42], "size": "supply"},
        "baselines": ["zero-shot", "single-best", "sequential", "ties", "magmax"],
        "preferences": PREFERENCES,
        "scales": [0.5, "matched", "best"],
        "grid": [0.5, 1.0],
        "variations": [{"compare": "active"}, {"scope": "tensor"}],
        "search": {"trials": 3, "variants": [42]},
        "alphas": [0.5, 2.0],
        "meta_sizes": [1, 2],
        "rows": ROWS,
        **changed,
    }
    path = root / "toy.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def without_times(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in record.items() if k not in ("seconds", "samples_per_second")} for record in records]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    root = tmp_path_factory.mktemp("experiment")
    experiment = read_experiment(written(root))
    files = reproduce_all(experiment, root / "results", root / "work", JobOptions("cpu"))
    return root, experiment, files


def test_every_job_leaves_its_record(done):
    root, experiment, _ = done
    records = read_records(results_folder(experiment, root / "results") / "records.jsonl")
    planned = [(experiment.setting, job.kind, job.seed, job.name) for job in plan_jobs(experiment)]
    assert [record_key(record) for record in records] == planned
    rows = {record["row"]: record for record in records if record["kind"] == "row"}
    assert {f"tunable:{name}@matched" for name in PREFERENCES} <= set(rows)
    assert rows["magmax@best"]["environments"][0]["lambda"] in (0.5, 1.0)
    for row in rows.values():
        assert [part["name"] for part in row["environments"]] == ["D1/42", "D2/42"]
        for part in row["environments"]:
            assert 0 <= part["right"] <= part["known_right"] <= part["samples"]
    assert rows["tunable:label@0.5"]["environments"][0]["lambda"] == 0.5
    for part in rows["tunable:auto@matched"]["environments"]:
        assert part["chosen"] == "probe"
        assert 0 <= part["expected_error"] <= 1


def test_a_prior_changes_the_answers_and_not_the_model(done):
    root, experiment, _ = done
    records = read_records(results_folder(experiment, root / "results") / "records.jsonl")
    rows = {record["row"]: record["environments"] for record in records if record["kind"] == "row"}
    assert set(ROWS) <= set(rows)
    for name in ("magmax@best+prior:wrong", "magmax@best+prior:wrong@0.02", "magmax@best+prior:label"):
        for part, plain in zip(rows[name], rows["magmax@best"], strict=True):
            assert part["lambda"] == plain["lambda"]
            # Inside a task, classes with equal shares keep their order.
            assert part["known_right"] == plain["known_right"]
    eps = {name: {part.get("eps") for part in rows[name]} for name in rows}
    assert [*eps["magmax@best+prior:wrong"]] == [0.02]  # weights by hand
    assert eps["magmax@best+prior:wrong@0.02"] == {0.02}
    assert eps["magmax@best"] == {None}
    lambdas = {part["lambda"] for part in rows["tailor:auto+prior"]}
    assert lambdas == {1.0}  # not stretched, because of the prior


def test_joint_training_takes_as_many_steps_as_the_sequence(done):
    root, experiment, _ = done
    (joint,) = (root / "work" / "toy").glob("joint-*/seed-3")
    steps = {}
    for name, run in (("joint", joint), ("sequence", root / "work" / experiment.setting / "seed-3")):
        steps[name] = [facts["steps"] for facts in Run.open(run).training_facts]
    assert len(steps["joint"]) == 1 < len(steps["sequence"])
    assert sum(steps["joint"]) == sum(steps["sequence"])


def test_tables_figures_page_and_summary_are_there(done):
    root, experiment, files = done
    assert all(file.stat().st_size for file in files)
    names = {file.name for file in files}
    assert {"report.html", "report.md", "summary.json", "leads.png"} <= names
    summary = json.loads((root / "results" / "summary.json").read_text())
    assert set(summary[experiment.setting]["magmax@0.5"]) >= {"mean", "std", "seeds", "environments"}


def test_a_second_call_measures_nothing(done, monkeypatch):
    root, experiment, _ = done
    assert missing_jobs(experiment, results_folder(experiment, root / "results")) == []
    monkeypatch.setattr("tunable_magmax.experiments.seed_work.train_sequence", None)  # calling it would fail
    reproduce_all(experiment, root / "results", root / "work", JobOptions("cpu"))


def test_stopped_in_the_middle_it_ends_with_the_same_records(done, tmp_path):
    root, experiment, _ = done
    whole = (results_folder(experiment, root / "results") / "records.jsonl").read_bytes()
    folder = results_folder(experiment, tmp_path / "results")
    folder.mkdir(parents=True)
    lines = whole.splitlines(keepends=True)
    cut = len(lines) // 2
    (folder / "records.jsonl").write_bytes(b"".join(lines[:cut]) + lines[cut][:40])  # as a kill leaves it
    reproduce_all(experiment, tmp_path / "results", tmp_path / "work", JobOptions("cpu"))  # trains again, too
    again = read_records(folder / "records.jsonl")
    before = read_records(results_folder(experiment, root / "results") / "records.jsonl")
    assert without_times(again) == without_times(before)


def test_a_sequence_that_another_process_trained_has_its_time(done, tmp_path):
    root, experiment, _ = done
    work = shutil.copytree(root / "work", tmp_path / "work")
    run = work / experiment.setting / "seed-3"
    trained = sum(facts["seconds"] for facts in Run.open(run).training_facts)
    reproduce_all(replace(experiment, kinds=("sequence",)), tmp_path / "results", work, JobOptions("cpu"))
    (record,) = read_records(results_folder(experiment, tmp_path / "results") / "records.jsonl")
    assert record["seconds"] == round(trained, 2) > 0
    assert record["samples_per_second"] > 0


def test_parts_share_records(done):
    root, _, _ = done
    (root / "collection.yaml").write_text("about: parts\nparts: [toy.yaml]\nkinds: [row]\nonly: [magmax@0.5]\n")
    collection = read_experiment(root / "collection.yaml")
    assert [job.name for job in plan_jobs(collection)] == ["magmax@0.5"]
    files = reproduce_all(collection, root / "results", root / "work", JobOptions("cpu"))
    assert (root / "results" / "toy" / "collection" / "report.html") in files


def test_rows_at_their_best_scale_bring_the_search_for_it_along(done, tmp_path):
    root, experiment, _ = done
    rows = replace(experiment, kinds=("row",), only=("zero-shot", "magmax@best"))
    planned = [(job.kind, job.name) for job in plan_jobs(rows)]
    assert planned == [("scale", "magmax"), ("row", "zero-shot"), ("row", "magmax@best")]
    reproduce_all(rows, tmp_path / "results", root / "work", JobOptions("cpu"))
    found, before = (read_records(results_folder(rows, at / "results") / "records.jsonl") for at in (tmp_path, root))
    known = {record_key(record): record for record in without_times(before)}
    assert without_times(found) == [known[record_key(record)] for record in found]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"engine": "rai"}, r"unknown engine 'rai' \(did you mean 'ray'\?\)"),
        ({"ray_address": "head:6379"}, "ray_address is 'head:6379', but the engine is 'local'"),
        ({"engine": "ray", "device": "cuda:1"}, "device is 'cuda:1', but engine 'ray' gives each job a GPU"),
    ],
)
def test_a_place_that_there_is_not_is_refused_before_anything_is_made(done, tmp_path, asked, told):
    with pytest.raises(InputError, match=told):
        reproduce_all(done[1], tmp_path / "results", tmp_path / "work", JobOptions(**asked))
    assert not list(tmp_path.iterdir())


def test_changes_reach_every_part(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, setting=f"toy/{name}")
    (tmp_path / "both.yaml").write_text("parts: [one/toy.yaml, two/toy.yaml]\nkinds: [sequence, row]\n")
    changes = ["run.train.lr=0.5", "seeds=[7, 8]", "order_from_seed=true", "name=mine", "only=[magmax@0.5]"]
    both = read_experiment(tmp_path / "both.yaml", changes)
    assert both.name == "mine"
    assert [part.setting for part in both.parts] == ["toy/one", "toy/two"]
    for part in both.parts:
        assert (part.name, part.kinds, part.only) == ("toy", ("sequence", "row"), ("magmax@0.5",))
        assert [part.training(seed).train.lr for seed in part.seeds] == [0.5, 0.5]
        assert [part.training(seed).benchmark.order.seed for seed in part.seeds] == [7, 8]
    with pytest.raises(InputError, match=r"one/toy\.yaml:\n  - unknown key 'sedes'"):
        read_experiment(tmp_path / "both.yaml", ["sedes=[7]"])


def test_a_shipped_collection_takes_a_model_and_data():
    changes = ["run.model=elsewhere", "run.benchmark.data=there"]
    for part in read_experiment(CONFIGS / "paper" / "alpha.yaml", changes).parts:
        config = part.training(3)
        assert (config.model, Path(config.benchmark.data).name) == ("elsewhere", "there")


def test_paths_that_are_typed_count_from_the_current_directory(tmx, tmp_path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    typed = ["run.benchmark.data=README.md", "run.benchmark.order.file=docs/orders.json"]
    for part in read_experiment("configs/paper/alpha.yaml", typed).parts:
        benchmark = part.training(3).benchmark
        assert benchmark.data == str(CONFIGS.parent / "README.md")
        assert benchmark.order.file == str(CONFIGS.parent / "docs" / "orders.json")
    planned = tmx("reproduce", "configs/paper/cifar100-5.yaml", "-o", tmp_path, "--set", typed[0], "--dry-run")
    assert "the order of classes: " in planned.err
    assert "the data of cifar100" not in planned.err  # it was found where it was typed
    several = read_experiment("configs/paper/alpha.yaml", ["parts=[configs/minilm/clinc150-5.yaml]"])
    assert [part.setting for part in several.parts] == ["minilm/clinc150-5"]


@pytest.mark.parametrize("given", ["false", 0, 1, None])
def test_a_flag_is_true_or_false_and_nothing_that_looks_like_it(tmp_path, given):
    with pytest.raises(InputError, match=f"order_from_seed is {given!r}: must be true or false"):
        read_experiment(written(tmp_path, order_from_seed=given))


def test_defaults_are_chosen_on_no_environment_of_a_table():
    for path in CONFIGS.glob("*/choice.yaml"):
        chosen, table = read_experiment(path), read_experiment(path.with_name("m-sweep.yaml"))
        assert not set(chosen.seeds) & set(table.seeds)
        assert not set(chosen.environments.variants) & {*table.environments.variants, *VARIANTS}
        assert not {*chosen.environments.mixtures.values()} & {*PAPER.values()}
    for path in CONFIGS.glob("development/*.yaml"):
        chosen = read_experiment(path)
        assert not set(chosen.seeds) & {3, 4, 5}
        assert not set(chosen.environments.variants) & {*VARIANTS}


FROM_NOTHING = sorted((CONFIGS / "glyphs").glob("*.yaml"))
SHIPPED = sorted(path for path in CONFIGS.rglob("*.yaml") if not path.name.startswith("common-"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_configuration_is_planned(path):
    experiment = read_experiment(path)
    jobs = plan_jobs(experiment)
    # Each seed of what runs from nothing pre-trains an encoder first, so it has only one.
    chosen = 7 if path.parent.name == "development" else 11
    by_choice = path.stem == "choice" or path.parent.name == "development"
    seeds = {3} if path in FROM_NOTHING else {chosen} if by_choice else {3, 4, 5}
    assert {job.seed for job in jobs} == seeds
    for part in experiment.parts or (experiment,):
        own = plan_jobs(part)
        assert len({(job.seed, job.kind, job.name) for job in own}) == len(own)


@pytest.mark.parametrize("path", FROM_NOTHING, ids=lambda path: path.name)
def test_what_is_to_run_from_nothing_lacks_nothing(tmx, tmp_path, path):
    planned = tmx("reproduce", path, "-o", tmp_path / "results", "--work", tmp_path / "work", "--dry-run", "--json")
    found = json.loads(planned.out)
    assert (planned.code, found["problems"], found["notes"]) == (0, [], [])
    for page in ("docs/training.md", "docs/results.md"):
        assert f"tmx reproduce glyphs/{path.stem} -o " in (CONFIGS.parent / page).read_text()


def test_all_problems_of_a_configuration_at_once(tmp_path):
    search, environments = {"trials": 0.5}, {"mixtures": {"D1": [0]}, "size": "large", "colour": 1}
    path = written(
        tmp_path,
        preferences=["labels"],
        scales=["machted"],
        seeds=3,
        search=search,
        environments=environments,
        kinds=[],
        colour=1,
    )
    with pytest.raises(InputError) as told:
        read_experiment(path)
    text = str(told.value)
    assert "unknown key 'colour'" in text
    assert "preferences.0 is 'labels': must be 'label', 'ot'," in text
    assert "(did you mean 'label'?)" in text
    assert "scales.0 is 'machted': must be matched, best or a number above 0" in text
    assert "seeds is 3: must be a list" in text
    assert "kinds is []: must have at least one value" in text
    assert "search.trials is 0.5: must be a whole number" in text
    assert "environments.mixtures is {'D1': [0]}: must be paper, or a mapping of names to lists of numbers" in text
    assert "environments.size is 'large': must be paper, supply or a whole number of at least 1" in text
    assert "unknown key 'colour' in environments" in text
    assert text.count("\n") == 9  # each problem once


@pytest.mark.parametrize(
    ("given", "mixtures", "size"),
    [
        (None, PAPER, 1000),
        ({"mixtures": "paper", "size": "supply"}, PAPER, None),
        ({"equal": [1, 4], "variants": [7]}, {"M1": (1,), "M4": (0.25,) * 4}, 1000),
        ({"equal": [1, 4], "mixtures": {"mine": [0.9, 0.1]}, "size": 60}, {"mine": (0.9, 0.1)}, 60),
    ],
)
def test_environments_as_they_are_written(tmp_path, given, mixtures, size):
    found = read_experiment(written(tmp_path, environments=given)).environments
    assert (found.mixtures, found.size, found.meta) == (mixtures, size, 0.1)
    assert found.variants == ((7,) if given and "variants" in given else VARIANTS)


def test_a_configuration_that_extends_itself(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(InputError, match="extends itself"):
        read_experiment(tmp_path / "a.yaml")


def test_everything_that_is_missing_is_told_at_once_and_nothing_is_made(tmx, tmp_path):
    path = written(tmp_path)
    given = yaml.safe_load(path.read_text())
    given["run"] |= {"model": "../gone/model", "head": {"source": "file", "file": "gone/head.safetensors"}}
    given["run"]["benchmark"] |= {"data": "sub/../gone/data", "order": {"file": "orders.json"}}
    path.write_text(yaml.safe_dump(given))
    out = ["-o", tmp_path / "results", "--work", tmp_path / "work"]
    places = {
        "run.benchmark.data": tmp_path / "gone" / "data",
        "run.benchmark.order.file": tmp_path / "orders.json",
        "run.model": tmp_path.parent / "gone" / "model",
        "run.head.file": tmp_path / "gone" / "head.safetensors",
    }
    words = [f"{place} does not exist; say where it is with --set {key}=PATH" for key, place in places.items()]
    words[1] += f" ({FILE}: docs/training.md), or order the classes by the seed with --set order_from_seed=true"
    planned = tmx("reproduce", path, *out, "--dry-run")
    assert planned.code == 2
    assert [line.partition(": ")[2].partition(": ")[2] for line in planned.err.splitlines()] == words
    found = json.loads(tmx("reproduce", path, *out, "--dry-run", "--json").out)
    assert len(found["problems"]) == 4
    assert sum(row["missing"] for row in found["jobs"]) == len(plan_jobs(read_experiment(path)))
    run = tmx("reproduce", path, *out)
    assert run.code == 2
    assert all(word in run.err for word in words)
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "work").exists()
    by_seed = tmx("reproduce", path, *out, "--dry-run", "--set", "order_from_seed=true")
    assert "run.benchmark.data" in by_seed.err
    assert "orders.json" not in by_seed.err  # as it was told, a seed takes the file's place


def test_a_model_that_would_be_fetched_is_told_and_is_no_problem(done, tmx, tmp_path):
    root, _, _ = done
    command = ["reproduce", root / "toy.yaml", "-o", tmp_path / "results", "--work", tmp_path / "work", "--dry-run"]
    assert "note: " not in tmx(*command).out
    named = tmx(*command, "--set", "run.model=some/clpi")
    assert (named.code, named.err) == (0, "")
    (note,) = (line for line in named.out.splitlines() if line.startswith("note: "))
    assert "the model 'some/clpi' is not here" in note
    assert "would be fetched from the Hugging Face hub" in note
    found = json.loads(tmx(*command, "--set", "run.model=some/clpi", "--json").out)
    assert (found["problems"], [f"note: {text}" for text in found["notes"]]) == ([], [note])
    trained = [*command[:3], root / "results", "--work", root / "work", "--dry-run", "--set", "run.model=some/clpi"]
    assert "note: " not in tmx(*trained).out  # nothing is left to do, so nothing would be fetched


def test_warnings_are_one_plain_line_each(done, tmx, monkeypatch):
    def warned(*given, **options):
        for _ in range(2):
            warnings.warn("transport did not converge", stacklevel=1)
        return reproduce_all(*given, **options)

    monkeypatch.setattr("tunable_magmax.experiments.reproduce.reproduce_all", warned)
    root, _, _ = done
    shown = tmx("reproduce", root / "toy.yaml", "-o", root / "results", "--work", root / "work")
    assert (shown.code, shown.err) == (0, "warning: transport did not converge\n")


def test_what_is_not_needed_any_more_is_not_missed(done, tmx):
    """Records that are complete are shown without data and weights, and the last lines say what they hold and where."""
    root, _, _ = done
    gone = ["--set", "run.benchmark.data=gone", "--set", "run.model=gone/gone/gone"]
    command = ["reproduce", root / "toy.yaml", "-o", root / "results", "--work", root / "nowhere", *gone]
    assert tmx(*command, "--dry-run").code == 0
    shown = tmx(*command)
    assert shown.code == 0, shown.err
    *_, headline, page = shown.out.splitlines()
    assert headline.startswith("toy/colours-2: best ")
    assert page.startswith("all of it on one page: ")
    assert Path(page.rpartition(": ")[2]).is_file()
