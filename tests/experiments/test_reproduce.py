"""Experiments in miniature: every kind of job, killed and resumed; and every shipped configuration is planned."""

from dataclasses import replace
from pathlib import Path

import pytest
from experiments.miniature import ROWS, written

from tunable_magmax.data.benchmark import FILE
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import find_experiment, read_experiment
from tunable_magmax.experiments.records import append_records, read_records
from tunable_magmax.experiments.reproduce import missing_jobs, plan_experiment, reproduce
from tunable_magmax.experiments.seed_jobs import plan_jobs

pytestmark = pytest.mark.filterwarnings("ignore:transport did not converge")  # of so few features
CONFIGS = Path(__file__).parents[2] / "configs"
DEAR = ("search", "samples=", "kept=")  # measured in the search's draws of the mixing ratios


def records_of(done, root=None):
    return read_records((root or done[0]) / "results" / done[1].setting / "records.jsonl")


def test_every_job_leaves_its_record(done):
    root, experiment, files = done
    names = {file.relative_to(root / "results").as_posix() for file in files}
    assert {"report.md", "summary.json", "toy/colours-2/report.md", "tables/expected.csv"} <= names
    records = records_of(done)
    planned = [(job.kind, job.name) for job in plan_jobs(experiment) if job.kind != "environment"]
    assert [(record.kind, record.name) for record in records if record.kind != "row"] == planned
    rows = {record.row: record.environments for record in records if record.kind == "row"}
    assert list(rows) == ROWS
    for name, environments in rows.items():
        wanted = ["D1/42", "M2/42", "D1/123", "M2/123"]
        if any(part in name for part in DEAR):
            wanted = ["D1/42"]
        assert [each.name for each in environments] == wanted
    for each in rows["tailor:auto"]:
        assert 0 <= each.expected_error <= 1
        assert set(each.weights) <= {"1", "2"}
        assert each.head in ("fitted", "old")
    assert any(each.expected for name in ("tailor:auto", "tailor:both") for each in rows[name])


def test_a_second_call_measures_nothing(done):
    root, experiment, _ = done
    before = (root / "results" / experiment.setting / "records.jsonl").read_bytes()
    assert missing_jobs(experiment, root / "results" / experiment.setting) == []
    reproduce(experiment, root / "results", root / "nowhere", "cpu")
    assert not (root / "nowhere").exists()
    assert (root / "results" / experiment.setting / "records.jsonl").read_bytes() == before


def test_stopped_in_the_middle_of_an_environment_it_ends_with_the_same_records(done, tmp_path):
    _, experiment, _ = done
    experiment = replace(experiment, rows=("magmax@best", "tailor:auto", "tunable:label@0.5"), alphas=())
    known = [record for record in records_of(done) if record.name in ("sequence", "magmax", *experiment.rows)]
    file = tmp_path / "results" / experiment.setting / "records.jsonl"
    row = next(record for record in known if record.name == "magmax@best")
    kept = [*(record for record in known if record.kind == "scale"), replace(row, environments=row.environments[:2])]
    append_records(file, kept)
    lacking = missing_jobs(experiment, file.parent)
    assert [len(job.rows) for job in lacking] == [0, 2, 2, 3, 3]
    reproduce(experiment, tmp_path / "results", tmp_path / "work", "cpu")  # trains again, too
    found = {record.key: record for record in read_records(file)}
    assert found.keys() == {record.key for record in known}
    for record in known:
        again = found[record.key]
        assert again == (replace(record, seconds=again.seconds) if record.kind == "sequence" else record)


def test_rows_in_other_environments_are_measured_there_alone(done):
    root, experiment, _ = done
    sizes = replace(experiment.environments, variants=(42, 123, 7))
    jobs = missing_jobs(replace(experiment, environments=sizes), root / "results" / experiment.setting)
    assert [job.name for job in jobs] == ["D1/7", "M2/7"]
    assert {row.name for job in jobs for row in job.rows} == {
        row for row in ROWS if not any(part in row for part in DEAR)
    }


# -- configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["glyphs/characters-5", "glyphs/characters-5.yaml", "configs/glyphs/characters-5"])
def test_an_experiment_of_this_package_is_found_by_its_name_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_experiment(name) == CONFIGS / "glyphs" / "characters-5.yaml"
    with pytest.raises(InputError, match="glyphs/characters-5"):
        find_experiment("glyphs/character-5")
    with pytest.raises(InputError, match="no experiment of this name"):
        find_experiment("minilm/common-clinc150")  # what others extend


SHIPPED = sorted(path for path in CONFIGS.glob("*/*.yaml") if not path.name.startswith("common-"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_configuration_is_planned_and_says_what_is_missing(path, tmp_path):
    experiment = read_experiment(path)
    plan = plan_experiment(experiment, tmp_path, tmp_path)
    assert len({(job.seed, job.kind, job.name) for job in plan.to_do}) == len(plan.to_do) == sum(plan.jobs.values())
    assert {job.seed for job in plan.to_do} == ({3} if path.parent.name == "glyphs" else {3, 4, 5})
    assert any("--set run.benchmark.data=PATH" in text for text in plan.missing) == (path.parent.name != "glyphs")
    if path.parent.name != "glyphs":
        recommended, base = "tailor:auto", "zero-shot+fit+prior:auto"
        assert {recommended, base, "magmax@best+fit+prior:auto", "joint+fit+prior:auto"} <= set(experiment.rows)
        assert {"logistic:auto+prior", "tailor:label", "tailor:both"} <= set(experiment.rows)


def test_the_papers_recipes_differ_in_the_warm_up_alone():
    for tasks in (5, 20, 50):
        published, again = (read_experiment(f"paper/cifar100-{tasks}{recipe}") for recipe in ("", "-warmup"))
        assert (published.training(3).train.warmup, again.training(3).train.warmup) == (500, 0.1)
        assert replace(published.training(3), train=again.training(3).train) == again.training(3)
        assert published.setting != again.setting


def test_the_command_says_what_is_missing(tmx, tmp_path, monkeypatch):
    planned = tmx("reproduce", "paper/imagenet-r-20", "-o", tmp_path / "r", "--dry-run", "--set", "run.model=./none")
    assert planned.code == 2
    for key in ("run.model", "run.benchmark.data", "run.benchmark.order.file"):
        assert f"--set {key}=PATH" in planned.err
    assert FILE in planned.err
    assert "seeds 3, 4, 5" in planned.out
    refused = tmx("reproduce", "paper/imagenet-r-20", "-o", tmp_path / "r", "--set", "run.model=./none")
    assert refused.code == 2
    assert not (tmp_path / "r").exists()
    (tmp_path / "file").touch()
    assert "is a file" in tmx("reproduce", "glyphs/characters-5", "-o", tmp_path / "file", "--dry-run").err
    monkeypatch.chdir(CONFIGS.parent)  # a path that is typed counts from the current directory
    found = tmx("reproduce", "paper/cifar100-5", "-o", tmp_path, "--set", "run.benchmark.data=README.md", "--dry-run")
    assert "run.benchmark.data" not in found.err


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"colour": 1}, "colour"),
        ({"rows": ["magmax"]}, "magmax@matched"),
        ({"seeds": 3}, "seeds is 3"),
        ({"order_from_seed": "false"}, "order_from_seed is 'false'"),
        ({"environments": {"mixtures": {"D1": [0]}}}, "environments.mixtures"),
        ({"environments": {"levels": ["some"]}}, "some"),
        ({"environments": {"size": "large"}}, "environments.size is 'large'"),
        ({"run": None}, "run"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_key_and_value(tmp_path, changed, told):
    with pytest.raises(InputError) as refused:
        read_experiment(written(tmp_path, **changed))
    assert told in str(refused.value)


def test_all_that_is_wrong_with_a_file_and_its_run_is_said_at_once(tmp_path):
    path = written(tmp_path, colour=1, environments={"size": "large"})
    with pytest.raises(InputError) as refused:
        read_experiment(path, ["run.train.lr=-1", "run.benchmark.name=none"])
    for told in ("'colour'", "environments.size is 'large'", "run.train.lr is -1", "run.benchmark.name is 'none'"):
        assert told in str(refused.value)


def test_a_file_is_laid_over_another_and_changes_over_both(tmp_path):
    written(tmp_path)
    (tmp_path / "over.yaml").write_text("extends: toy.yaml\nsetting: other\nrun: {train: {lr: 0.5}}\n")
    experiment = read_experiment(tmp_path / "over.yaml", ["seeds=[7]", "order_from_seed=true"])
    training = experiment.training(7)
    assert (experiment.setting, training.train.lr, training.train.epochs) == ("other", 0.5, 1)
    assert training.benchmark.order.seed == 7


def test_a_file_that_extends_itself_is_bad_input(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {other}.yaml\n")
    with pytest.raises(InputError, match="extends itself"):
        read_experiment(tmp_path / "a.yaml")
