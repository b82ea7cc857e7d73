"""Makes the profile of a task from its data and its encoder, and has the run keep some samples."""

from __future__ import annotations

import numpy as np

from tunable_magmax.data.arrays import choose_rows
from tunable_magmax.data.samples import Samples
from tunable_magmax.files import Progress
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.prepared import embed_prepared, prepare
from tunable_magmax.runs.kept import KEEP, keep_samples
from tunable_magmax.runs.profile import ROWS, Profile
from tunable_magmax.runs.run import Evidence, KeptEntry, Run


def make_profile(
    task: str,
    samples: Samples,
    encoder: Encoder,
    *,
    base: Encoder,
    rows: int = ROWS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Makes the profile of a task from its data; `rows` seeded samples are embedded, by the base, too.

    Samples that cannot be read are left out.
    """
    all_labels = samples.require_labels()
    chosen = choose_rows(len(samples), rows, seed)
    prepared = prepare(encoder, samples, chosen, progress=progress)
    unreadable = set(chosen).difference(prepared.positions)
    left = [label for position, label in enumerate(all_labels) if position not in unreadable]
    labels = np.array([all_labels[position] for position in prepared.positions])
    counts = tuple(np.bincount(left, minlength=len(samples.classes)).tolist())
    by_base, features = (embed_prepared(each, prepared, progress=progress) for each in (base, encoder))
    return Profile(task, len(left), samples.classes, encoder.digest, base.digest, counts, features, by_base, labels)


def profile_task(
    run: Run,
    task: str,
    encoder: Encoder,
    base: Encoder,
    samples: Samples,
    held: Samples | None = None,
    *,
    keep: int = KEEP,
    seed: int = 0,
) -> KeptEntry | None:
    """Writes the profile of a task that was just trained, and keeps `keep` samples of each class.

    Of those that were `held` out, or else of the `samples`. Whoever calls it enters the task with what it returns.
    """
    make_profile(task, samples, encoder, base=base, seed=seed).save(run.profile_path(task))
    source: Evidence = "training" if held is None else "evaluation"
    kept = samples if held is None else held
    return keep_samples(run, task, kept, per_class=keep, source=source, size=encoder.picture_size, seed=seed)
