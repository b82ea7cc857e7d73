"""Makes the profile of a task from its data and its encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunable_magmax.data.arrays import choose_rows
from tunable_magmax.data.samples import Samples, Unreadable, warn_unreadable
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.runs.profile import ROWS, Profile

EMBED_BATCH = 64


def make_profile(
    task: str,
    samples: Samples,
    encoder: Encoder,
    *,
    base: Encoder | None = None,
    rows: int = ROWS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Makes the profile of a task from its data; `rows` seeded samples are embedded.

    The base, if given, embeds them too. Samples that cannot be read are left out.
    """
    if samples.labels is None:
        raise InputError(
            f"{samples.origin} holds no labels, which a profile counts; put images into class folders, or add a column "
            "'label'"
        )
    chosen = choose_rows(len(samples), rows, seed)
    failed: dict[int, Unreadable] = {}
    embedded: list[Any] = []
    by_base: list[Any] = []
    row_labels: list[int] = []
    for where, inputs in samples.batches(chosen, EMBED_BATCH, failed):
        embedded.append(encoder.embed(inputs, EMBED_BATCH))
        row_labels += [samples.labels[position] for position in where]
        if base is not None:
            by_base.append(base.embed(inputs, EMBED_BATCH))
        if progress is not None:
            progress("embedding", len(row_labels), len(chosen))
    warn_unreadable(samples.origin, failed, len(chosen))
    left = [label for position, label in enumerate(samples.labels) if position not in failed]
    counts = class_counts(left, len(samples.classes))
    based: dict[str, Any] = {}
    if base is not None:
        based = {"base": base.digest, "base_features": np.concatenate(by_base), "row_labels": np.array(row_labels)}
    return Profile(task, samples.classes, counts, len(left), np.concatenate(embedded), encoder.digest, **based)


def class_counts(labels: Sequence[int], classes: int) -> tuple[int, ...]:
    """Returns how many of some class indices each class has."""
    return tuple(np.bincount(labels, minlength=classes).tolist())
