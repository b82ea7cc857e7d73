"""Makes a task's profile from its data, or from ready features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.samples import Samples, Unreadable, warn_unreadable
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.preference.arrays import feature_matrix
from tunable_magmax.preference.profile import ROWS, Profile, choose_rows

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Classifier

EMBED_BATCH = 64


def make_profile(
    task: str,
    samples: Samples,
    encoder: Encoder,
    *,
    classifier: Classifier | None = None,
    base: Encoder | None = None,
    rows: int = ROWS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Makes the profile of a task from its data; `rows` seeded samples are embedded.

    The classifier, if given, predicts a class for each of those; the base, if given, embeds them too. Samples that
    cannot be read are left out.
    """
    if samples.labels is None:
        raise InputError(
            f"{samples.origin} holds no labels, which a profile counts; put images into class folders, or add a column "
            "'label'"
        )
    chosen = choose_rows(len(samples), rows, seed)
    failed: dict[int, Unreadable] = {}
    embedded: list[NDArray[np.float32]] = []
    by_base: list[NDArray[np.float32]] = []
    shares: list[NDArray[np.float32]] = []
    row_labels: list[int] = []
    done = 0
    for where, inputs in samples.batches(chosen, EMBED_BATCH, failed):
        embedded.append(encoder.embed(inputs, EMBED_BATCH))
        row_labels += [samples.labels[position] for position in where]
        if base is not None:
            by_base.append(base.embed(inputs, EMBED_BATCH))
        if classifier is not None:
            shared = base is classifier.encoder
            shares.append(classifier.head.probabilities(by_base[-1]) if shared else classifier.probabilities(inputs))
        done += len(inputs)
        if progress is not None:
            progress("embedding", done, len(chosen))
    warn_unreadable(samples.origin, failed, len(chosen))
    left = [label for position, label in enumerate(samples.labels) if position not in failed]
    profile = assemble_profile(task, samples.classes, left, np.concatenate(embedded), encoder.digest)
    if base is not None:
        profile = profile.with_base(base.digest, np.concatenate(by_base), row_labels)
    if classifier is None:
        return profile
    return profile.with_shares(classifier.digest, classifier.classes, np.concatenate(shares))


def assemble_profile(
    task: str, classes: Sequence[str], labels: Sequence[int], features: NDArray[Any], encoder: str
) -> Profile:
    """Returns a profile: the labels of all the task's samples are counted, `features` are of some of them."""
    return Profile(
        task=task,
        classes=tuple(classes),
        label_counts=_count(labels, len(classes)),
        samples=len(labels),
        features=features,
        encoder=encoder,
    )


def profile_from_features(
    task: str, features: Any, labels: Sequence[str], encoder: str, *, rows: int = ROWS, seed: int = 0
) -> Profile:
    """Makes the profile of a task from ready features [n, width] and one label for each; `encoder` is its digest."""
    from tunable_magmax.data.tables import indexed

    matrix = feature_matrix(features, "features")
    if len(labels) != len(matrix):
        raise InputError(f"{len(matrix)} rows of features and {len(labels)} labels: give one label for each row")
    classes, indices = indexed(labels)
    chosen = np.asarray(matrix[choose_rows(len(matrix), rows, seed)], dtype=np.float32)
    return assemble_profile(task, classes, indices, chosen, encoder)


def _count(labels: Iterable[int], classes: int) -> tuple[int, ...]:
    return tuple(np.bincount(np.array(list(labels), dtype=np.int64), minlength=classes).tolist())
