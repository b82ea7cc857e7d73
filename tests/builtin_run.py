"""A run whose tasks have classifiers of their own: a bare encoder of texts, and two tasks with words of their own."""

import csv
import json
import random
from pathlib import Path

import torch

TASKS = {"pets": ("cat", "dog"), "tools": ("saw", "nail", "file")}
LABELS = tuple(label for labels in TASKS.values() for label in labels)
SIZES = {
    "bert": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "my", "cat", "dog", "saw", "nail", "file")


def write(file: Path, labels: tuple[str, ...], count: int, seed: int = 0) -> Path:
    """Writes labelled texts."""
    draw = random.Random(seed)
    fillers = ("a", "the", "my")
    rows = [(f"{draw.choice(fillers)} {label} {draw.choice(fillers)}", label) for label in labels * count]
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([("text", "label"), *rows])
    return file


def texts_of(file: Path) -> tuple[list[str], list[str]]:
    """Reads texts and labels."""
    with file.open(newline="") as rows:
        pairs = [(row["text"], row["label"]) for row in csv.DictReader(rows)]
    return [text for text, _ in pairs], [label for _, label in pairs]


def build_builtin(root: Path, kind: str = "bert") -> Path:
    """Makes the run as transformers saves its models, with data beside it; gpt2's last layer has no bias."""
    import transformers

    root.mkdir(exist_ok=True)
    (root / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    given = "vocab" if int(transformers.__version__.split(".")[0]) >= 5 else "vocab_file"
    tokenizer = transformers.BertTokenizerFast(**{given: str(root / "vocab.txt")})
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(WORDS), max_position_embeddings=12, **SIZES[kind])
    transformers.AutoModel.from_config(config).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    for name, labels in TASKS.items():
        named = {"id2label": dict(enumerate(labels)), "label2id": {label: k for k, label in enumerate(labels)}}
        model = transformers.AutoModelForSequenceClassification.from_pretrained(root / "base", **named)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        inputs = tokenizer([f"a {label} the" for label in labels], return_tensors="pt")
        for _ in range(12):
            loss = model(**inputs, labels=torch.arange(len(labels))).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        model.save_pretrained(root / name)
        write(root / f"{name}.csv", labels, 8)
    write(root / "all.csv", LABELS, 6, seed=1)
    tasks = [{"name": name, "checkpoint": name, "classes": list(labels)} for name, labels in TASKS.items()]
    (root / "run.json").write_text(json.dumps({"version": 1, "base": "base", "tasks": tasks}))
    return root
