"""What the rows of a table are called, for readers who have not read the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tunable_magmax.experiments.results import row_parts

_MEANINGS: Mapping[str, str] = {
    "zero-shot": "the base, before any task",
    "sequential": "the last task's checkpoint: fine-tuning on one task after the other",
    "single-best": "the task checkpoint that gets most of the environment's labelled meta samples right",
    "random_mix": "each element from a random task",
    "average": "the mean of the task vectors",
    "ties": "the mean of the trimmed task vectors that agree in sign",
    "magmax": "each element from the task of largest magnitude, whatever the environment",
    "tunable": "Tunable MAGMAX: each task gives as many elements as the environment's preference grants it",
    ":cosine": "preference from unlabelled meta samples: cosine of mean embeddings",
    ":mmd": "preference from unlabelled meta samples: mean discrepancy of embeddings",
    ":ot": "preference from unlabelled meta samples: optimal transport (the paper's)",
    ":shift": "preference from unlabelled meta samples: shift of the base's predicted classes",
    ":pseudo": "preference from unlabelled meta samples: the base's predicted classes, counted",
    ":probe": "preference from unlabelled meta samples: a discriminant on the base's embeddings",
    ":auto": "preference from unlabelled meta samples: probe where it can be trusted, else shift, else ot",
    ":label": "preference from the labels of the meta samples",
    ":search": "preference that does best on the labelled meta samples, found by trials",
    "@matched": "the step from the base is as long as the last task's",
    "@best": "the step's factor does best on held-out training samples of all tasks",
}


def meanings(rows: Iterable[str]) -> dict[str, str]:
    """What the parts of some rows' names mean: methods, then preferences, then scales.

    >>> list(meanings(["magmax@best", "tunable:label@0.5"]))
    ['magmax', 'tunable', ':label', '@best', '@0.5']
    """
    parts: set[str] = set()
    numbers: dict[str, str] = {}
    for row in rows:
        base, preference, scale, _ = row_parts(row)
        parts |= {base, f":{preference}", f"@{scale}"}
        if scale and f"@{scale}" not in _MEANINGS:
            numbers[f"@{scale}"] = f"the step from the base is multiplied by {scale}"
    return {name: text for name, text in _MEANINGS.items() if name in parts} | numbers
