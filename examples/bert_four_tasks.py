"""A small BERT learns four tasks one after the other, and is then tailored to one site: from Trainer to prediction.

    python examples/bert_four_tasks.py

Nothing is downloaded: the model is made from a configuration, its vocabulary from the texts, and the texts from
templates. With `--model DIR` it starts from a BERT of yours, and with `--data FOLDER` it learns your tasks: one
TASK.csv (text, label) for each, in alphabetical order.

The story: an assistant was trained on travel, then bank, kitchen and music. What it learned last, it knows best. A
hotel now uses it; its guests ask mostly about travel. Fifty of their questions, without labels, are enough to make
the model that the hotel needs out of the checkpoints that training left behind.
"""

from __future__ import annotations

import argparse
import csv
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import tunable_magmax as tmx

Pair = tuple[str, str]
"""A text and its label."""

# Each task has intents, and each intent a few ways to say it.
SLOTS = {
    "city": ["paris", "london", "rome", "tokyo", "oslo", "cairo", "lima", "delhi"],
    "day": ["monday", "tuesday", "friday", "sunday", "tomorrow", "tonight"],
    "money": ["ten", "fifty", "hundred", "thousand"],
    "food": ["soup", "bread", "rice", "curry", "pasta", "cake", "salad", "stew"],
    "artist": ["mozart", "adele", "miles", "nina", "bowie", "bach"],
    "please": ["please", "can you", "i want to", "i would like to", "could you", ""],
}
TASKS = {
    "travel": {
        "book_flight": ["{please} book a flight to {city}", "fly me to {city} on {day}", "a plane ticket to {city}"],
        "book_hotel": ["{please} reserve a room in {city}", "find me a hotel in {city} for {day}"],
        "weather": ["how is the weather in {city}", "will it rain in {city} on {day}"],
        "lost_luggage": ["my suitcase is lost in {city}", "where is my luggage from {city}"],
    },
    "bank": {
        "balance": ["how much money is on my account", "{please} show my balance on {day}"],
        "transfer": ["{please} send {money} euros to my sister", "transfer {money} euros on {day}"],
        "lost_card": ["my credit card was stolen on {day}", "{please} block my card"],
        "loan": ["can i borrow {money} euros", "what does a loan of {money} euros cost"],
    },
    "kitchen": {
        "recipe": ["how do i cook {food}", "{please} tell me a recipe for {food}"],
        "timer": ["{please} set a timer for the {food}", "wake me when the {food} is done"],
        "shopping": ["{please} put {food} on the shopping list", "we need more {food} by {day}"],
        "calories": ["how many calories has {food}", "is {food} healthy"],
    },
    "music": {
        "play": ["{please} play {artist}", "put on a song by {artist}"],
        "volume": ["{please} turn it up", "this is too loud for {day}"],
        "concert": ["when does {artist} play in {city}", "are there tickets for {artist} on {day}"],
        "who_sings": ["who sings this song", "is this a song by {artist}"],
    },
}
SITE = {"travel": 0.7, "bank": 0.2, "kitchen": 0.1}
"""What the hotel's guests ask about."""


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Does everything, and returns the accuracy of each model at the site."""
    options = _options(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # a model this small is slower on several
    set_seed(options.seed)
    out, run = options.out, options.out / "run"
    tasks = written_tasks(options.samples) if options.data is None else read_tasks(options.data)
    train = {name: pairs[len(pairs) // 5 :] for name, pairs in tasks.items()}
    test = {name: pairs[: len(pairs) // 5] for name, pairs in tasks.items()}
    print(f"1. {len(tasks)} tasks: {', '.join(tasks)}; {sum(map(len, train.values()))} texts to learn from")

    base = options.model or pretrained(train, out / "base", options.steps)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tmx.training.record_base(run, base)
    print(f"2. the base: {base}")

    print("3. the tasks, one after the other; each starts from the last one's encoder and gets a classifier of its own")
    last = base
    for name, pairs in train.items():
        last = learn(name, pairs, last, tokenizer, run, options)
        print(f"   {name:<8} learned, recorded as {last}")

    print("4. the site: fifty texts without labels")
    seen, unseen = site_texts(test, random.Random(options.seed))
    write_table(out / "site" / "inputs.csv", ["text"], [(text,) for text, _ in seen])
    write_table(out / "site" / "test.csv", ["text", "label"], unseen)
    opened = tmx.open_run(run)
    model = opened.tailor(out / "site-model", inputs=[text for text, _ in seen])
    weights = dict(zip(opened.names, model.preference.weights, strict=True))
    print("   found: " + ", ".join(f"{name} {weight:.0%}" for name, weight in weights.items()))

    print(f"5. who is best here? {len(unseen)} other texts of the site, which are labelled")
    accuracies = at_the_site(opened.compare(out / "site-model", unseen))

    print("6. the tailored model at work")
    classifier = tmx.load_classifier(out / "site-model")
    for text, _ in unseen[:3]:
        guess = classifier.predict([text])[0]
        print(f"   {text!r}: {guess.label} ({guess.probability:.0%})")
    print("accuracy at the site: " + ", ".join(f"{name} {share:.1%}" for name, share in accuracies.items()))
    return accuracies


def at_the_site(compared: Any) -> dict[str, float]:
    """Returns the accuracies of base, last checkpoint, MAGMAX (each with a head fitted to it) and tailored model."""
    shown = {"base": "base", "last": "last", "magmax": "MAGMAX"}
    shares = {row.model: row.share.value for row in compared.rows if row.head == "fitted"}
    named = {title: value for name, title in shown.items() for model, value in shares.items() if model.startswith(name)}
    return {**named, "tailored": compared.tailored.share.value}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bert-four-tasks"), help="a new folder for everything")
    parser.add_argument("--model", type=Path, help="a BERT to begin with, instead of a small new one")
    parser.add_argument("--data", type=Path, help="a folder with one TASK.csv of text and label for each task")
    parser.add_argument("--samples", type=int, default=400, help="texts of each task that are made")
    parser.add_argument("--steps", type=int, default=80, help="steps of training for each task")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.out.exists():
        parser.error(f"{options.out} exists: remove it, or choose another folder with --out")
    return options


# -- texts ------------------------------------------------------------------------------------------------------------


def written_tasks(samples: int) -> dict[str, list[Pair]]:
    """Fills the templates: `samples` texts for each task."""
    draw = random.Random(0)
    tasks = {}
    for task, intents in TASKS.items():
        labels = [list(intents)[k % len(intents)] for k in range(samples)]
        draw.shuffle(labels)
        tasks[task] = [(_filled(draw.choice(intents[label]), draw), label) for label in labels]
    return tasks


def _filled(template: str, draw: random.Random) -> str:
    return template.format(**{slot: draw.choice(words) for slot, words in SLOTS.items()}).strip()


def read_tasks(folder: Path) -> dict[str, list[Pair]]:
    """Reads one TASK.csv for each task."""
    tasks = {}
    for file in sorted(folder.glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as rows:
            tasks[file.stem] = [(row["text"], row["label"]) for row in csv.DictReader(rows)]
    return tasks


def site_texts(test: dict[str, list[Pair]], draw: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Draws what is asked at the site: fifty texts to tailor with, and others to measure with."""
    shares = SITE if SITE.keys() <= test.keys() else {next(iter(test)): 1.0}
    size = min(int(len(test[task]) / share) for task, share in shares.items())
    chosen = [pair for task, share in shares.items() for pair in draw.sample(test[task], int(share * size))]
    draw.shuffle(chosen)
    known = min(50, len(chosen) // 2)
    return chosen[:known], chosen[known:]


def write_table(file: Path, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a CSV, such as the commands take."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as table:
        csv.writer(table).writerows([head, *rows])


# -- training ---------------------------------------------------------------------------------------------------------


def pretrained(train: dict[str, list[Pair]], folder: Path, steps: int) -> Path:
    """Makes a small BERT with its vocabulary, and lets it guess masked words of all texts for a while."""
    texts = [text for pairs in train.values() for text, _ in pairs]
    words = sorted({word for text in texts for word in text.lower().split()})
    letters = sorted({letter for word in words for letter in word})
    folder.mkdir(parents=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *letters, *(f"##{x}" for x in letters)]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary)) + "\n", encoding="utf-8")
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    model = BertForMaskedLM(config)
    masked = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2)
    data = [tokenizer(text, truncation=True, max_length=64) for text in texts]
    train_quietly(Trainer(model, arguments(folder, 2 * steps, 2e-3), train_dataset=data, data_collator=masked))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def learn(
    name: str, pairs: list[Pair], start: Path, tokenizer: BertTokenizerFast, run: Path, options: argparse.Namespace
) -> Path:
    """Fine-tunes a classifier of a task's labels from a checkpoint, and records it in the run directory."""
    labels = sorted({label for _, label in pairs})
    model = AutoModelForSequenceClassification.from_pretrained(
        start,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: k for k, label in enumerate(labels)},
        ignore_mismatched_sizes=True,
    )
    torch.nn.init.normal_(model.classifier.weight, std=0.02)
    data = [{**tokenizer(text, truncation=True, max_length=64), "labels": labels.index(label)} for text, label in pairs]
    trainer = Trainer(
        model,
        arguments(options.out / "trainer", options.steps, 5e-4),
        train_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        callbacks=[tmx.training.callback(run, task=name, data=pairs)],
    )
    train_quietly(trainer)
    return tmx.training.recorded(run)[name]


def train_quietly(trainer: Trainer) -> None:
    """Trains without a table of losses."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def arguments(folder: Path, steps: int, rate: float) -> TrainingArguments:
    """Returns Trainer's options: so many steps, and nothing printed or saved, because the callback records."""
    return TrainingArguments(
        str(folder),
        max_steps=steps,
        learning_rate=rate,
        per_device_train_batch_size=32,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


if __name__ == "__main__":
    main()
