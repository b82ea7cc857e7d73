"""The paper's own numbers, as data: for comparison where a setting is the same, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIXTURES = ("D1", "D2", "D3", "D4", "D5")
TUNABLE_NOTE = (
    "The paper's Tunable MAGMAX numbers were made with `scope: tensor` and `compare: active` (its released code); its "
    "text describes `scope: model` and `compare: all`."
)


@dataclass(frozen=True)
class PaperRow:
    """A line of a table: accuracies as printed, from 0 to 1, with deviations over three runs; the average has none."""

    means: tuple[float, ...]
    deviations: tuple[float, ...]
    average: float


def _row(text: str) -> PaperRow:
    """From "0.78 1 0.77 0 ... 0.78": each mean, its deviation in hundredths, and the average."""
    numbers = text.split()
    return PaperRow(
        tuple(float(mean) for mean in numbers[:-1:2]),
        tuple(int(hundredths) / 100 for hundredths in numbers[1:-1:2]),
        float(numbers[-1]),
    )


_ROWS = (
    "sequential@0.5",  # "Baseline": the released code takes half of the last task vector
    "random_mix@0.5",
    "average@0.5",
    "ties@0.5",
    "magmax@0.5",
    "tunable:ot-raw@0.5",
    "tunable:label@0.5",
)
_PRINTED: Mapping[str, tuple[str, ...]] = {
    "clip-vit-b16/cifar100-5": (
        "0.82 1 0.82 1 0.81 1 0.83 1 0.82 1 0.82",
        "0.82 1 0.82 1 0.81 1 0.80 1 0.81 0 0.81",
        "0.82 1 0.81 1 0.81 1 0.80 1 0.81 0 0.81",
        "0.83 1 0.82 1 0.82 1 0.81 1 0.81 0 0.82",
        "0.83 1 0.83 0 0.83 1 0.83 1 0.83 0 0.83",
        "0.81 1 0.87 0 0.81 1 0.83 1 0.80 0 0.83",
        "0.85 1 0.86 1 0.83 0 0.85 0 0.85 1 0.85",
    ),
    "clip-vit-b16/cifar100-20": (
        "0.78 1 0.78 0 0.76 1 0.76 0 0.77 1 0.77",
        "0.77 0 0.77 2 0.75 2 0.77 1 0.76 2 0.76",
        "0.77 1 0.77 2 0.75 1 0.77 1 0.76 2 0.76",
        "0.77 1 0.78 2 0.76 1 0.77 0 0.76 2 0.77",
        "0.78 1 0.78 2 0.77 2 0.78 1 0.76 2 0.77",
        "0.79 2 0.81 1 0.78 1 0.80 2 0.78 2 0.79",
        "0.81 3 0.82 2 0.80 3 0.82 2 0.81 1 0.81",
    ),
    "clip-vit-b16/cifar100-50": (
        "0.77 1 0.74 2 0.74 3 0.75 4 0.78 4 0.76",
        "0.74 3 0.75 2 0.73 2 0.73 1 0.76 4 0.74",
        "0.75 3 0.74 1 0.73 3 0.73 2 0.77 3 0.74",
        "0.77 3 0.76 2 0.72 2 0.79 5 0.77 0 0.76",
        "0.77 1 0.77 1 0.75 2 0.75 2 0.78 2 0.77",
        "0.76 1 0.75 2 0.74 5 0.78 4 0.76 7 0.76",
        "0.78 3 0.80 4 0.78 4 0.77 6 0.79 2 0.78",
    ),
    "clip-vit-b16/imagenet-r-5": (
        "0.84 0 0.83 1 0.84 1 0.84 1 0.84 0 0.84",
        "0.83 1 0.83 1 0.84 1 0.83 0 0.84 1 0.83",
        "0.84 0 0.84 0 0.84 0 0.83 1 0.83 1 0.84",
        "0.84 0 0.84 1 0.84 1 0.84 0 0.84 1 0.84",
        "0.85 0 0.84 1 0.85 1 0.84 1 0.85 1 0.85",
        "0.84 0 0.85 0 0.83 1 0.85 0 0.83 1 0.84",
        "0.85 0 0.85 1 0.84 1 0.85 1 0.85 1 0.85",
    ),
    "clip-vit-b16/imagenet-r-20": (
        "0.83 2 0.81 1 0.82 1 0.82 1 0.81 2 0.82",
        "0.82 1 0.81 1 0.81 1 0.82 0 0.81 2 0.81",
        "0.82 1 0.81 1 0.81 1 0.82 1 0.81 1 0.81",
        "0.83 2 0.82 0 0.82 1 0.82 1 0.81 1 0.82",
        "0.84 1 0.82 0 0.83 1 0.83 1 0.82 2 0.83",
        "0.83 1 0.82 1 0.83 1 0.82 0 0.82 1 0.82",
        "0.83 1 0.82 1 0.82 1 0.82 2 0.83 2 0.83",
    ),
    "clip-vit-b16/imagenet-r-50": (
        "0.82 4 0.82 2 0.80 1 0.82 2 0.81 1 0.82",
        "0.83 4 0.82 2 0.79 1 0.82 1 0.80 1 0.81",
        "0.82 4 0.81 2 0.79 1 0.82 2 0.80 0 0.81",
        "0.82 4 0.81 3 0.79 1 0.82 3 0.80 1 0.81",
        "0.83 3 0.83 2 0.81 1 0.83 2 0.82 1 0.82",
        "0.80 2 0.79 3 0.80 3 0.80 2 0.80 1 0.80",
        "0.82 2 0.79 4 0.81 0 0.80 1 0.81 2 0.81",
    ),
}
TABLES: Mapping[str, Mapping[str, PaperRow]] = {
    setting: dict(zip(_ROWS, map(_row, lines), strict=True)) for setting, lines in _PRINTED.items()
}
"""Setting and row to the paper's line."""

SIMILARITY: Mapping[str, Mapping[str, float]] = {
    setting: dict(
        zip(
            ("magmax@0.5", "tunable:cosine@0.5", "tunable:mmd@0.5", "tunable:ot-raw@0.5", "tunable:label@0.5"),
            numbers,
            strict=True,
        )
    )
    for setting, numbers in {
        "clip-vit-b16/cifar100-5": (0.83, 0.84, 0.80, 0.83, 0.85),
        "clip-vit-b16/cifar100-20": (0.77, 0.78, 0.74, 0.79, 0.81),
        "clip-vit-b16/cifar100-50": (0.77, 0.75, 0.74, 0.76, 0.78),
    }.items()
}
"""Setting and row to the average accuracy in the paper's comparison of similarities."""

LEFTOVERS_AT_MOST = 0.1
"""The paper: elements assigned at random were at most this share of the model."""
LAST_TASK_AT_LEAST = 0.4
"""Reported for MAGMAX: the last task's share of the elements is more than this."""
_ELEMENTS = (85_000_000, 88_000_000)  # of CLIP ViT-B/16's image encoder


def same_setting(setting: str, tasks: int, elements: int) -> bool:
    """Whether a measured setting is one of the paper's: its name, and what was really trained.

    A miniature of a configuration keeps the configuration's name; the number of elements gives it away.

    >>> same_setting("clip-vit-b16/cifar100-20", 20, 86_192_640), same_setting("clip-vit-b16/cifar100-20", 20, 5000)
    (True, False)
    """
    return setting in TABLES and setting.endswith(f"-{tasks}") and _ELEMENTS[0] <= elements <= _ELEMENTS[1]
