"""Records of other people's training loops: by Trainer's callback, and by two lines of any loop."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

import transformers
from models import tiny

import tunable_magmax as tmx
from tunable_magmax.errors import InputError
from tunable_magmax.models.state import checkpoint_digest
from tunable_magmax.runs.profile import Profile
from tunable_magmax.runs.run import Run
from tunable_magmax.training import callback, record_base, record_task, recorded
from tunable_magmax.training.task_data import task_samples

NAMES = ("greet", "part", "owe", "card")
DATA = {
    "travel": [("hello", "greet"), ("good bye", "part")] * 4,
    "bank": [("pay my bill", "owe"), ("my card", "card")] * 4,
}


class Tokens(torch.utils.data.Dataset):
    """A plain data set of torch, whose items are dicts of tokens and a label."""

    def __init__(self, pairs, tokenizer):
        self.items = [
            {**tokenizer(text, padding="max_length", max_length=8), "labels": NAMES.index(name)} for text, name in pairs
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, position):
        return self.items[position]


@pytest.fixture
def start(tmp_path):
    """A classifier over all labels, and its tokenizer."""
    tiny.save(tiny.build("bert"), tmp_path / "pretrained")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "pretrained")
    torch.manual_seed(0)
    config = transformers.BertConfig(**tiny.TEXT, id2label=dict(enumerate(NAMES)))
    return transformers.BertForSequenceClassification(config), tokenizer


def trainer(start, tmp_path, task, **options):
    model, tokenizer = start
    args = transformers.TrainingArguments(
        str(tmp_path / "out"),
        max_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    record = callback(tmp_path / "run", task, **options)
    data = Tokens(DATA[task], tokenizer)
    return transformers.Trainer(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[record])


def train(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and accelerate
        trainer(*arguments, **options).train()


def test_a_sequence_by_the_callback(start, tmp_path):
    before = {name: value.clone() for name, value in start[0].state_dict().items()}
    for task in DATA:
        train(start, tmp_path, task)
    run = Run.open(tmp_path / "run")
    assert run.names == ("travel", "bank")
    model = transformers.BertForSequenceClassification
    base, last = (model.from_pretrained(path).state_dict() for path in (run.base, run.tasks[1]))
    assert all(torch.equal(base[name], value) for name, value in before.items())
    assert all(torch.equal(last[name], value) for name, value in start[0].state_dict().items())
    assert not all(torch.equal(base[name], last[name]) for name in base)
    travel, bank = run.profiles
    assert {name for name, count in bank.label_table.items() if count} == {"owe", "card"}
    assert travel.encoder == checkpoint_digest(run.tasks[0])
    assert travel.base == checkpoint_digest(run.base)
    assert tmx.merge_checkpoints(run.base, run.checkpoints, tmp_path / "merged").names == ("travel", "bank")


def test_what_is_recorded_is_replaced_only_if_asked(start, tmp_path):
    train(start, tmp_path, "travel")
    with pytest.raises(InputError, match=r"has the task 'travel' already.*replace=True"):
        callback(tmp_path / "run", "travel")
    old = recorded(tmp_path / "run")["travel"]
    train(start, tmp_path, "travel", replace=True, data=DATA["travel"])
    (new,) = recorded(tmp_path / "run").values()
    assert (old.exists(), new.is_dir()) == (False, True)
    assert Profile.load(Run.open(tmp_path / "run").profile_files[0]).encoder == checkpoint_digest(new)


def test_an_interrupted_training_records_nothing_and_can_be_done_again(start, tmp_path):
    class Killed(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            raise KeyboardInterrupt

    stopped = trainer(start, tmp_path, "travel")
    stopped.add_callback(Killed())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(KeyboardInterrupt):
            stopped.train()
    assert recorded(tmp_path / "run") == {}
    with pytest.raises(InputError, match="has no tasks"):
        Run.open(tmp_path / "run")
    train(start, tmp_path, "travel")
    assert list(recorded(tmp_path / "run")) == ["travel"]


def test_numbers_in_data_are_rows_of_the_models_classifier(tmp_path):
    model = SimpleNamespace(config=SimpleNamespace(id2label={1: "bye", 0: "greet"}))
    (tmp_path / "data.csv").write_text("text,label\nhello,0\nso long,1\n")
    for data in (tmp_path / "data.csv", [("hello", 0), ("so long", np.int64(1))]):
        samples = task_samples(data, model)
        assert [samples.classes[label] for label in samples.labels] == ["greet", "bye"]
    with pytest.raises(InputError, match="-1, which stands for none"):
        task_samples([("hello", -1)], model)


def test_two_lines_of_any_loop(tmp_path):
    model = torch.nn.Linear(3, 2)
    with pytest.raises(InputError, match="has no base yet"):
        record_task(tmp_path / "run", "one", model)
    record_base(tmp_path / "run", model)
    for name in ("one", "two"):
        with torch.no_grad():
            model.weight += 1
            model.bias += 1
        assert record_task(tmp_path / "run", name, model).is_dir()
    base, tasks = Run.open(tmp_path / "run").base, recorded(tmp_path / "run")
    assert tmx.merge_checkpoints(base, tasks, tmp_path / "merged", weights={"two": 1}).counts == (0, 8)
    with pytest.warns(UserWarning, match="three is recorded without a profile"):
        record_task(tmp_path / "run", "three", model, [("hello", "greet")])
    assert list(recorded(tmp_path / "run")) == ["one", "two", "three"]
    with pytest.raises(InputError, match="has tasks already"):
        record_base(tmp_path / "run", model)


def test_a_process_killed_while_it_records_leaves_the_run_as_it_was(tmp_path):
    record_base(tmp_path / "run", torch.nn.Linear(3, 2))
    record_task(tmp_path / "run", "one", torch.nn.Linear(3, 2))
    code = """
import os, sys, torch
from tunable_magmax.runs.run import Run
from tunable_magmax.training import record_task
Run.save = lambda self: os._exit(9)
record_task(sys.argv[1], "two", torch.nn.Linear(3, 2))
"""
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "run"], check=False).returncode == 9
    assert list(recorded(tmp_path / "run")) == ["one"]
    record_task(tmp_path / "run", "two", torch.nn.Linear(3, 2))
    assert sorted(path.name for path in (tmp_path / "run" / "tasks").iterdir()) == ["one", "two"]


def test_importing_needs_no_transformers():
    code = "import tunable_magmax as tmx, sys; tmx.training.callback; assert 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
