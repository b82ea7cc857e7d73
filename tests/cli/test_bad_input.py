"""What commands refuse: exit code 2, one line that names the value, and nothing is written."""

import json
import shutil

import pytest

from tunable_magmax import Preference

CASES = {
    "compare": [
        ("{run} --preference {new}/none.json --data {site}", "none.json"),
        ("{run} --preference {new}/site.json", "Give data"),
        ("{run} --preference {new}/site.json --data {new}/bare.csv", "bare.csv"),
        ("{new} --preference {new}/site.json --data {site}", "run.json"),
    ],
    "eval": [
        ("{new}/nothing --data {site}", "nothing"),
        ("{run}", "run.json names no benchmark"),
        ("{run} --checkpoint frist --data {site}", "did you mean 'first'"),
        ("{run} --checkpoint first --weights 1,2", "without options of a merge"),
        ("{run}/first --weights 1,2", "is a checkpoint"),
        ("{run}/first --data {site} --head {new}/nothing", "nothing"),
        ("{run}/first --data {site} --run {site}", "has no run.json"),
        ("{new}/model --data {site}", "which head"),
        ("{new}/run --weights 1,2 --data {site}", "names no classifier head"),
    ],
    "predict": [("{run}/first {site} -o {new}/a.xlsx", "a.xlsx")],
    "prefer": [
        ("{run}", "what is known of the site?"),
        ("{run} --weights 1,1,1", "3 weights for 2 tasks"),
        ("{run} --weights 1,x", "should be numbers with commas between them, as 3,1,0 or travel=7,bank=3. See tmx"),
        ("{run} --prefrence x --equal", ". See tmx prefer --help"),
        ("{run} --seeds 1 --equal", "Did you mean --seed? See tmx prefer --help"),
        ("{run} --weights 1/0,1", "'1/0', expected a finite number"),
        ("{run} --weights 1e500,1", "'1e500', expected a number that a float64 can hold"),
        ("{run} --alpha nan", "alpha must be a finite number"),
        ("{run} --alpha 1 --equal", "give one of them"),
        ("{run} --equal --labels {new}/labels.txt", "give one of them"),
        ("{run} --equal --method ot", "needs samples of the site"),
        ("{run} --labels {new}/labels.txt --method ot", "give inputs"),
        ("{run} --labels {new}/labels.txt --method probe", "method probe takes inputs"),
        ("{run} --inputs {site} --method label", "give labels"),
        ("{run} --inputs {site} --labels {new}/labels.txt --method ot", "takes inputs, not"),
        ("{run} --labels {new}/none.txt", "does not exist"),
        ("{run} --labels {new}/zebra.txt", "belong to no task"),
        ("{run} --labels {new}/empty.txt", "holds no samples"),
        ("{run} --inputs {new}/x.npy", "x.npy"),
        ("{run} --equal -o {new}/run/run.json", "exists and is no preference file"),
        ("{run} --equal --seed -1", "seed"),
        ("{run} --method search --labelled {site}/nothing", "nothing"),
        ("{run} --method search --labelled {site} --labels {site}", "labels and labelled"),
        ("{run} --method search --labelled {site} --equal", "equal"),
        ("{run} --method search --equal", "labelled"),
        ("{run} --method search --labelled {site} --seed -1", "-1"),
    ],
    "tailor": [
        ("{run} --equal", "where should the model go?"),
        ("{run} -o {new}/out", "what is known of the site?"),
        ("{run} --equal --method autos -o {new}/out", "unknown method 'autos' (did you mean 'auto'?)"),
        ("{run} --equal --scale far -o {new}/out", "far"),
        ("{run} --equal --scale -1 -o {new}/out", "scale is -1.0, a step away from what the tasks learned"),
        ("{run} --weights 1,2,3 -o {new}/out", "3 weights for 2 tasks"),
        ("{run} --inputs {new}/nowhere -o {new}/out", "nowhere"),
        ("{run} --equal --head best -o {new}/out", "best"),
        ("{run} --equal --seed -1 -o {new}/out", "seed is -1"),
        ("{run} --equal -o {new}/out.safetensors", "is one file, but a tailored model is a directory"),
    ],
}


@pytest.fixture(scope="module")
def site(image_run, tmp_path_factory):
    return image_run.pairs(tmp_path_factory.mktemp("site") / "site", {"red": 2, "green": 1})


@pytest.fixture(scope="module")
def new(image_run, tmp_path_factory):
    """A run and a model without a head, and files that are no samples."""
    folder = tmp_path_factory.mktemp("new")
    shutil.copytree(image_run.path / "base", folder / "model")
    record = json.loads((shutil.copytree(image_run.path, folder / "run") / "run.json").read_text())
    (folder / "run" / "run.json").write_text(json.dumps({**record, "classifier": None}))
    Preference((3, 1), tasks=("first", "second")).save(folder / "site.json")
    files = {
        "bare.csv": "text\nhello\n",
        "labels.txt": "red\n",
        "zebra.txt": "zebra\n",
        "empty.txt": "\n",
        "x.npy": "x",
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("command", "words", "value"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_bad_input(tmx, image_run, site, new, command, words, value):
    before = {path: path.stat().st_mtime_ns for path in new.rglob("*")}
    result = tmx(command, *words.format(run=image_run.path, site=site, new=new).split())
    assert (result.code, result.out) == (2, "")
    assert value in result.err
    assert result.err.startswith("error: ")
    assert {path: path.stat().st_mtime_ns for path in new.rglob("*")} == before
