"""Records of other people's training loops: by Trainer's callback, and by two lines of any loop."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import transformers
from models import tiny

import tunable_magmax as tmx
from tunable_magmax.data.source import open_labelled
from tunable_magmax.errors import InputError
from tunable_magmax.models.pretrained import load_image_processor, read_state
from tunable_magmax.runs.kept import open_kept
from tunable_magmax.runs.run import Run
from tunable_magmax.training import callback, record_base, record_task, recorded

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
    assert travel.encoder == read_state(run.tasks[0])[1]
    assert travel.base == read_state(run.base)[1]
    assert tmx.merge_checkpoints(run.base, run.checkpoints, tmp_path / "merged").names == ("travel", "bank")
    assert [entry.source for entry in run.kept] == ["training", "training"]
    assert sorted(open_kept(run, 1).load(range(2))) == ["my card", "pay my bill"]
    for path in run.tasks:  # with its own tokenizer
        answer = transformers.pipeline("text-classification", str(path), device="cpu")("pay my bill")[0]
        inputs = start[1]("pay my bill", return_tensors="pt")
        scores = model.from_pretrained(path).eval()(**inputs).logits.softmax(dim=1)
        assert answer["score"] == pytest.approx(float(scores.max().detach()), abs=1e-5)


def test_what_is_recorded_is_replaced_only_if_asked(start, tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        callback(tmp_path / "run", "travel", data="nowhere.csv")
    train(start, tmp_path, "travel")
    with pytest.raises(InputError, match=r"has the task 'travel' already.*replace=True"):
        callback(tmp_path / "run", "travel")
    old = recorded(tmp_path / "run")["travel"]
    train(start, tmp_path, "travel", replace=True, data=DATA["travel"])
    (new,) = recorded(tmp_path / "run").values()
    assert (old.exists(), new.is_dir()) == (False, True)
    assert Run.open(tmp_path / "run").profiles[0].encoder == read_state(new)[1]


def test_two_lines_of_any_loop(tmp_path):
    model = torch.nn.Linear(3, 2)
    with pytest.raises(InputError, match="has no base yet"):
        record_task(tmp_path / "run", "one", model)
    record_base(tmp_path / "run", model)
    with pytest.raises(InputError, match="the model is a str, expected the model itself"):
        record_task(tmp_path / "run", "one", "out/one")
    for name in ("one", "two"):
        with torch.no_grad():
            model.weight += 1
            model.bias += 1
        assert record_task(tmp_path / "run", name, model).is_dir()
    base, tasks = Run.open(tmp_path / "run").base, recorded(tmp_path / "run")
    assert tmx.merge_checkpoints(base, tasks, tmp_path / "merged", weights={"two": 1}).counts == (0, 8)
    with pytest.warns(UserWarning, match="three is recorded without a profile or samples"):
        record_task(tmp_path / "run", "three", model, [("hello", "greet")])
    assert list(recorded(tmp_path / "run")) == ["one", "two", "three"]
    with pytest.raises(InputError, match="has tasks already"):
        record_base(tmp_path / "run", model)


def test_no_name_of_a_task_leads_out_of_the_run_or_to_another_task(tmp_path):
    run, model = tmp_path / "run", torch.nn.Linear(2, 1)
    record_base(run, model)
    names = ["first", ".", "..", "../..", "a/b", "a_b", "A" * 300]
    for name in names:
        record_task(run, name, model)
    places = [place.relative_to(run / "tasks") for place in recorded(run).values()]
    assert len({*places}) == len(names)
    assert all(len(place.parts) == 1 and (run / "tasks" / place / "model.safetensors").is_file() for place in places)
    assert list(recorded(run)) == names


def test_a_process_killed_while_it_records_leaves_the_run_as_it_was(tmp_path):
    record_base(tmp_path / "run", torch.nn.Linear(3, 2))
    record_task(tmp_path / "run", "one", torch.nn.Linear(3, 2))
    code = """
import os, sys, torch
from tunable_magmax.runs.kept import open_kept
from tunable_magmax.runs.run import Run
from tunable_magmax.training import record_task
Run.save = lambda self: os._exit(9)
record_task(sys.argv[1], "two", torch.nn.Linear(3, 2))
"""
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "run"], check=False).returncode == 9
    assert list(recorded(tmp_path / "run")) == ["one"]
    record_task(tmp_path / "run", "two", torch.nn.Linear(3, 2))
    assert sorted(path.name for path in (tmp_path / "run" / "tasks").iterdir()) == ["one", "two"]


# -- what a task's data tells ------------------------------------------------------------------------------------------

COLOURS = {"red": (220, 20, 20), "blue": (20, 20, 220)}


class Folder(torch.utils.data.Dataset):
    """As torchvision's ImageFolder: pairs of a picture and a number, and the names of classes."""

    classes = ("red", "blue")

    def __init__(self, pictures, labels, transform=lambda picture: picture):
        self.pictures, self.targets, self.transform = pictures, labels, transform

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, position):
        return self.transform(self.pictures[position]), self.targets[position]


@pytest.fixture
def pictures(tmp_path):
    """A classifier of pictures without names for its classes, its image processor, pictures and their labels."""
    tiny.save(tiny.build("vit"), tmp_path / "pretrained")
    processor = load_image_processor(transformers, [tmp_path / "pretrained"])
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**tiny.VISION))
    labels = [k % 2 for k in range(8)]
    return model, processor, [tiny.picture([*COLOURS.values()][k], seed=n) for n, k in enumerate(labels)], labels


@pytest.mark.parametrize("form", ["pairs", "part"])
def test_pictures_give_a_profile_in_whatever_form_a_loop_has_them(tmp_path, pictures, form):
    model, processor, values, labels = pictures

    def pixels(picture):
        return processor(images=picture, return_tensors="pt")["pixel_values"][0]

    data = {
        "pairs": list(zip(values, [["red", "blue"][k] for k in labels], strict=True)),
        "part": torch.utils.data.Subset(Folder(values, labels, pixels), range(8)),
    }[form]
    record_base(tmp_path / "run", model, processor)
    record_task(tmp_path / "run", "colours", model, data)
    run = Run.open(tmp_path / "run")
    with torch.no_grad():
        expected = model.vit(torch.stack([pixels(value) for value in values])).last_hidden_state[:, 0]
    # Pixel values are rounded to the 256 values that they were made of.
    np.testing.assert_allclose(run.profiles[0].features, expected, atol=1e-3)
    assert run.profiles[0].label_table == {"red": 4, "blue": 4}
    assert sorted(run.classes["colours"]) == ["blue", "red"]
    assert run.kept[0].samples == 8
    labels_of = transformers.AutoConfig.from_pretrained(run.tasks[0]).id2label
    # What the untrained model answers does not tell which row is which class; a data set's own list of classes does.
    assert labels_of == ({0: "red", 1: "blue"} if form == "part" else {0: "colours/LABEL_0", 1: "colours/LABEL_1"})
    assert (run.tasks[0] / "preprocessor_config.json").is_file()


def test_tasks_whose_classes_have_no_names_stay_apart(start, tmp_path):
    tokenizer = start[1]
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**tiny.TEXT))
    record_base(tmp_path / "run", model, tokenizer)
    for task in DATA:
        numbered = [{"text": text, "label": k % 2} for k, (text, _) in enumerate(DATA[task])]
        record_task(tmp_path / "run", task, tiny.changed(model), numbered)
    run = Run.open(tmp_path / "run")
    assert run.classes == {task: (f"{task}/LABEL_0", f"{task}/LABEL_1") for task in DATA}
    assert model.config.id2label == {0: "LABEL_0", 1: "LABEL_1"}  # the model that goes on is as it was
    tmx.merge_checkpoints(run.base, run.checkpoints, tmp_path / "merged")
    labels = transformers.AutoConfig.from_pretrained(tmp_path / "merged").id2label
    assert sorted(labels.values()) == sorted(name for names in run.classes.values() for name in names)


@pytest.mark.parametrize("flipped", [False, True])
def test_rows_without_names_are_named_by_what_they_answer(start, tmp_path, flipped):
    """The classes are texts, and the model was trained to give one or the other row for them."""
    tokenizer = start[1]
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**tiny.TEXT))
    texts = tokenizer([text for text, _ in DATA["travel"]], padding=True, return_tensors="pt")
    rows = torch.tensor([(name == "part") != flipped for _, name in DATA["travel"]]).long()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimiser.zero_grad()
        model(**texts, labels=rows).loss.backward()
        optimiser.step()
    record_base(tmp_path / "run", model, tokenizer)
    record_task(tmp_path / "run", "travel", model, DATA["travel"])
    path = Run.open(tmp_path / "run").tasks[0]
    answers = transformers.pipeline("text-classification", str(path), device="cpu")(
        [text for text, _ in DATA["travel"]]
    )
    assert [answer["label"] for answer in answers] == [name for _, name in DATA["travel"]]


def test_samples_are_kept_of_what_was_not_trained_on_or_not_at_all(start, tmp_path):
    model, tokenizer = start
    record_base(tmp_path / "run", model, tokenizer)
    held = [("good bye my card", "part"), ("hello my card", "greet")]
    # Its classifier has the classes of later tasks, too: no reason for a warning, which would be an error here.
    record_task(tmp_path / "run", "travel", model, DATA["travel"], eval_data=held, keep=1)
    record_task(tmp_path / "run", "bank", model, DATA["bank"], keep=0)
    record_task(tmp_path / "run", "again", model, eval_data=held)
    run = Run.open(tmp_path / "run")
    assert (run.kept[0].source, run.kept[0].samples, run.kept[1]) == ("evaluation", 2, None)
    assert (run.kept[2].source, run.profiles[2].samples) == ("evaluation", 2)
    assert sorted(open_kept(run, 0).load(range(2))) == sorted(text for text, _ in held)
    assert all(profile is not None for profile in run.profiles)


def test_numbers_in_data_are_names(tmp_path):
    names = {0: "greet", 1: "bye"}
    (tmp_path / "data.csv").write_text("text,label\nhello,0\nso long,1\n")
    for data in (tmp_path / "data.csv", [("hello", 0), ("so long", np.int64(1))]):
        samples = open_labelled(data, names)
        assert [samples.classes[label] for label in samples.labels] == ["greet", "bye"]
