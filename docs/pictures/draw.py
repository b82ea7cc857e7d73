"""Draws the pictures of README and docs: python docs/pictures/draw.py (needs the extra `report`)."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ROWS = {
    "sequential@1": ("last checkpoint", "#cfd6dd"),
    "magmax@best": ("MAGMAX, at its best scale", "#a3afbb"),
    "magmax@best+prior:auto": ("MAGMAX with the site prior", "#6f7f8f"),
    "tailor:auto+prior": ("tailored to the site, from its unlabelled inputs", "#0b5fa5"),
    "joint": ("trained on all data at once", "#e0a458"),
}
ROOMS = (
    ("cli", "one short file per command: parses options, prints results"),
    ("studio", "the page: its server, what it measures, its files"),
    ("experiments", "environments, rows, records, tables, reports, the demo"),
    ("plots", "every picture, drawn from results"),
    ("workflows", "what each command does, one function each"),
    ("training", "a sequence of tasks, checkpoints and profiles"),
    ("evaluation", "accuracy with intervals, forgetting"),
    ("models", "encoders and heads on transformers"),
    ("data", "data sets, class orders, benchmarks"),
    ("runs", "the run directory; merge recipes"),
    ("preference", "profiles and samples → weights"),
    ("engines", "where a merge of files runs: this process, a GPU, a Ray cluster"),
    ("merging", "tensors → tensors: methods, auction, kernels"),
    ("checkpoints", "files ↔ tensors: safetensors, torch, LoRA"),
    ("config, files, lottery, errors", "what every room may use"),
)


def draw_accuracy() -> None:
    """Accuracy of five models in each setting, from results/summary.json."""
    summary = json.loads((HERE.parents[1] / "results" / "summary.json").read_text(encoding="utf-8"))
    settings = [setting for setting in summary if "/" in setting]
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    width = 0.8 / len(ROWS)
    for k, (row, (label, colour)) in enumerate(ROWS.items()):
        measured = [place for place, setting in enumerate(settings) if row in summary[setting]]
        heights = [100 * summary[settings[place]][row]["mean"] for place in measured]
        places = [place + (k - (len(ROWS) - 1) / 2) * width for place in measured]
        bars = axes.bar(places, heights, width * 0.94, color=colour, label=label)
        if row.startswith("tailor"):
            axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8.5, color=colour, fontweight="bold")
    names = [s.split("/")[1].replace("cifar100", "CIFAR-100").replace("clinc150", "CLINC150") for s in settings]
    axes.set_xticks(range(len(settings)), [f"{n.rsplit('-', 1)[0]}\n{n.rsplit('-', 1)[1]} tasks" for n in names])
    axes.set_ylabel("accuracy at a site, %")
    axes.set_ylim(0, 100)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    save(figure, "accuracy.svg")


def draw_house() -> None:
    """The rooms, each of which imports only from those below it."""
    figure, axes = plt.subplots(figsize=(8.4, 5.2), layout="constrained")
    for k, (room, idea) in enumerate(reversed(ROOMS)):
        axes.barh(k, 1, 0.82, color="#e8eef4" if k % 2 else "#f3f6f9", edgecolor="#9fb2c4")
        axes.text(0.02, k, room, va="center", fontsize=10, fontweight="bold", color="#0b3c6f")
        axes.text(0.36, k, idea, va="center", fontsize=9, color="#333333")
    axes.annotate("", (1.03, 0), (1.03, len(ROOMS) - 1), arrowprops={"arrowstyle": "->", "color": "#6f7f8f"})
    axes.text(1.05, (len(ROOMS) - 1) / 2, "imports", rotation=270, va="center", fontsize=9, color="#6f7f8f")
    axes.set_xlim(0, 1.08)
    axes.axis("off")
    save(figure, "house.svg")


def save(figure: plt.Figure, name: str) -> None:
    """Write an SVG that is the same each time, on a white ground so that it reads in dark pages, too."""
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.savefig(HERE / name, facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    draw_accuracy()
    draw_house()
