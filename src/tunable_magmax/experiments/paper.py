"""The paper's own numbers in percent, as data: for comparison where a setting is the same, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

MODEL = "clip-vit-b16"
MIXTURES = ("D1", "D2", "D3", "D4", "D5")
DATA_SETS: Mapping[str, Sequence[int]] = {"cifar100": (5, 20, 50), "imagenet-r": (5, 20, 50)}
"""The paper's data sets, each with its numbers of tasks."""
NOTE = (
    "The paper's Tunable MAGMAX numbers were made with `scope: tensor` and `compare: active` (its released code); its "
    "text describes `scope: model` and `compare: all`."
)
AGAIN_NOTE = (
    "The authors ran CIFAR-100 again with a warm-up of 10% of each task's steps (published: 500 steps, which the short "
    "tasks never leave) and with the same environments for all methods."
)
ROWS = (
    "sequential@0.5",  # "Baseline": the released code takes half of the last task vector
    "random_mix@0.5",
    "average@0.5",
    "ties@0.5",
    "magmax@0.5",
    "tunable:ot-raw@0.5",
    "tunable:label@0.5",
)
_TABLES: Mapping[str, str] = {
    "cifar100-5": """
        82 82 81 83 82
        82 82 81 80 81
        82 81 81 80 81
        83 82 82 81 81
        83 83 83 83 83
        81 87 81 83 80
        85 86 83 85 85""",
    "cifar100-20": """
        78 78 76 76 77
        77 77 75 77 76
        77 77 75 77 76
        77 78 76 77 76
        78 78 77 78 76
        79 81 78 80 78
        81 82 80 82 81""",
    "cifar100-50": """
        77 74 74 75 78
        74 75 73 73 76
        75 74 73 73 77
        77 76 72 79 77
        77 77 75 75 78
        76 75 74 78 76
        78 80 78 77 79""",
    "imagenet-r-5": """
        84 83 84 84 84
        83 83 84 83 84
        84 84 84 83 83
        84 84 84 84 84
        85 84 85 84 85
        84 85 83 85 83
        85 85 84 85 85""",
    "imagenet-r-20": """
        83 81 82 82 81
        82 81 81 82 81
        82 81 81 82 81
        83 82 82 82 81
        84 82 83 83 82
        83 82 83 82 82
        83 82 82 82 83""",
    "imagenet-r-50": """
        82 82 80 82 81
        83 82 79 82 80
        82 81 79 82 80
        82 81 79 82 80
        83 83 81 83 82
        80 79 80 80 80
        82 79 81 80 81""",
}
PRINTED: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    f"{MODEL}/{name}": {
        row: tuple(map(int, line.split())) for row, line in zip(ROWS, text.split("\n")[1:], strict=True)
    }
    for name, text in _TABLES.items()
}
"""Setting and row to the accuracies for the five ratios, as printed."""

AGAIN: Mapping[str, Mapping[str, float]] = {
    name: dict(zip(ROWS, numbers, strict=True))
    for name, numbers in {
        "cifar100-5": (82.9, 80.9, 80.8, 81.8, 83.2, 83.0, 84.9),
        "cifar100-20": (78.0, 78.4, 78.3, 78.2, 76.9, 80.0, 82.8),
        "cifar100-50": (70.4, 72.6, 72.7, 73.0, 71.0, 76.1, 79.9),
    }.items()
}
"""Data set with tasks, and row, to the mean over the five ratios in the authors' second run."""

SIMILARITY: Mapping[str, tuple[float, float]] = {
    "cifar100-5": (84, 80),
    "cifar100-20": (78, 74),
    "cifar100-50": (75, 74),
}
"""The averages by cosine and by MMD in the paper's comparison of similarities."""
_ELEMENTS = (85_000_000, 88_000_000)  # of CLIP ViT-B/16's image encoder


def average(means: Sequence[int]) -> float:
    """Returns the mean over the ratios; the paper prints it in whole percent."""
    return fmean(means)


def same_setting(setting: str, tasks: int, elements: int) -> bool:
    """Whether a measured setting is one of the paper's: its name, and what was really trained.

    A miniature of a configuration keeps the configuration's name; the number of elements gives it away.

    >>> same_setting("clip-vit-b16/cifar100-20", 20, 86_192_640), same_setting("clip-vit-b16/cifar100-20", 20, 5000)
    (True, False)
    """
    return setting in PRINTED and setting.endswith(f"-{tasks}") and _ELEMENTS[0] <= elements <= _ELEMENTS[1]
