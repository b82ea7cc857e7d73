"""`tmx tailor`: what it prints, what it leaves, and what it refuses."""

import json

import pytest

CPU = ("--device", "cpu")


@pytest.fixture
def labels(tmp_path):
    file = tmp_path / "labels.txt"
    file.write_text("red\n" * 15 + "blue\n" * 9 + "green\n" * 8)
    return file


def test_a_model_from_labels(tmx, image_run, labels, tmp_path):
    out = tmp_path / "site-model"
    result = tmx("tailor", image_run.path, "--labels", labels, "-o", out, *CPU)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    heads = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert heads[:3] == ["mixture", "merge", "head"]
    assert len(lines) <= 14
    assert max(map(len, lines[:-1])) <= 80
    # A posterior mean of 24 against 8 labels: a little nearer to the middle.
    assert 0.65 < float(lines[0].split()[2]) <= 0.75
    assert "from 32 samples by label" in lines[1]
    assert lines[-1].endswith(f"tmx predict {out} INPUTS")
    assert tmx("inspect", "--verify", out, "-q").code == 0
    again = tmx("tailor", image_run.path, "--labels", labels, "-o", out, *CPU)
    assert (again.code, again.out.startswith(f"{out} is complete, made from the same inputs")) == (0, True)
    assert again.out.splitlines()[1 : len(lines)] == lines[:-1]
    other = tmx("tailor", image_run.path, "--labels", labels, "--scale", 0.5, "-o", out, *CPU)
    assert (other.code, "already exists: choose another output" in other.err) == (2, True)
    assert tmx("tailor", image_run.path, "--labels", labels, "--scale", 0.5, "-o", out, "--overwrite", "-q").code == 0


def test_a_method_of_the_users_own(tmx, text_run, tmp_path):
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(
        "from tunable_magmax.merging.methods import Method\n"
        "class First(Method):\n"
        "    def vector(self, vectors):\n"
        "        return vectors[0]\n"
    )
    command = ("tailor", text_run.path, "--equal", "--method", f"{file}:First", "--scale", 1, "-o", out, *CPU)
    result = tmx(*command)
    assert result.code == 0, result.err
    assert json.loads((out / "tmx-report.json").read_text())["method"] == "mine.py:First"
    assert "is complete" in tmx(*command).out
    file.write_text(file.read_text() + "# changed\n")
    assert "already exists" in tmx(*command).err


def test_json(tmx, text_run, tmp_path):
    pairs, out = text_run.pairs(tmp_path / "pairs", {"red": 6, "blue": 3, "green": 3, "grey": 3}), tmp_path / "out"
    result = tmx("tailor", text_run.path, "--labelled", pairs, "-o", out, "--json", *CPU)
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["sources"] == {"labelled": "pairs.csv"}
    assert told["seconds"] > 0
    stored = json.loads((out / "tmx-tailor.json").read_text())
    assert "seconds" not in stored
    assert {key: told[key] for key in stored if key != "warnings"} == {
        k: v for k, v in stored.items() if k != "warnings"
    }
    assert told["warnings"][: len(stored["warnings"])] == stored["warnings"]
    assert set(told["files"]) == {file.name for file in out.iterdir()} - {"tmx-report.json"}
    again = json.loads(tmx("tailor", text_run.path, "--labelled", pairs, "-o", out, "--json", *CPU).out)
    assert (told["already_complete"], again["already_complete"], again["merge"]) == (False, True, told["merge"])
