"""Searches for the weights whose merge classifies inputs with labels best (the paper's fourth case)."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.evaluation.comparison import sign_test
from tunable_magmax.evaluation.evaluator import Evaluator, Labelled, known_labels
from tunable_magmax.evaluation.run_models import BuiltinModels, read_each, scoring_encoder
from tunable_magmax.files import Progress
from tunable_magmax.preference.estimate import JSON
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.search import Search, SearchWatch, Trial, check_study_file, require_optuna, search
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.target import BATCH, TargetSamples

if TYPE_CHECKING:
    from tunable_magmax.models.head import Head

LEVEL = 0.9
RULE = "tried weights that are not clearly worse than the best by a sign test, and on to the next tried ones"


def search_preference(
    target: TargetSamples,
    pairs: Samples,
    settings: Search,
    *,
    watch: SearchWatch | None = None,
) -> Preference:
    """Returns the weights, and the scale if that is searched, whose merge of the target's run classifies `pairs` best.

    A trial merges the tasks in memory, puts the weights into the encoder in place, and counts how many samples it gets
    right with the frozen head among all the head's classes. Files are read before the first trial only. Unless the
    scale is searched, every merge has the default one, `matched`. Equal weights and, where all tasks have profiles, the
    label preference are tried first: the result is no worse than they are on these samples. Head, device and the
    largest number of samples are those of `target.reading`.
    """
    require_optuna()
    check_study_file(settings.study_file)
    run, reading, head = target.run, target.reading, target.head()
    if head is None:
        raise InputError(
            f"{run.path}: a search scores merges with a frozen classifier head, and the run names none: enter it "
            "with `tmx init RUN_DIR --head HEAD`; labels alone need no head (--method label)"
        )
    known = labelled_pairs(run, pairs, head)
    left_out: dict[str, JSON] = {"unknown_labels": len(pairs) - len(known)} if len(known) < len(pairs) else {}
    drawn = known.draw(reading.max_samples, settings.seed)
    encoder = scoring_encoder(run, head, reading.device)
    evaluator = Evaluator(encoder, head, drawn, batch=BATCH, progress=target.progress)
    if evaluator.unreadable:
        left_out["unreadable"] = evaluator.unreadable
    starts = _starts(run, [head.classes[index] for index in evaluator.truth.tolist()])
    with closing(_Scorer(run, evaluator, target.progress)) as scorer:
        result = search(
            scorer.score,
            len(run.tasks),
            settings,
            starts=list(starts.values())[1:],
            start_scale=scorer.matched_scale,
            problem={"problem": scorer.digest, "starts": [*starts]},
            watch=watch,
        )
    best, samples = result.best, len(evaluator)
    record: dict[str, JSON] = {
        "samples": samples,
        "accuracy": best.value,
        "scale": "matched" if best.scale is None else best.scale,
        "scale_searched": None if settings.scale is None else list(settings.scale),
        "trials": len(result.history),
        "stopped": result.stopped,
        "patience": settings.patience,
        "seed": settings.seed,
        "classes": len(head.classes),
        "starts": [
            {"source": name, "weights": list(weights), "accuracy": _accuracy(weights, result.history)}
            for name, weights in starts.items()
        ],
        "read": {"pairs": Path(pairs.origin).name, "given": len(pairs), **left_out},
        "intervals": {"level": LEVEL, "rule": RULE},
    }
    intervals = _intervals(result.history, best, samples, LEVEL)
    return Preference(best.weights, "search", record, intervals, tasks=run.names, scale=best.scale)


# -- the labelled sample -------------------------------------------------------------------------------------------


def labelled_pairs(run: Run, pairs: Samples, head: Head) -> Labelled:
    """Returns the samples whose class the head knows; warns of the labels of the others."""
    lists = [profile.classes for profile in run.profiles if profile is not None]
    place, unknown = known_labels(pairs, head.classes, lists)
    if unknown:
        shown = some_of(dict.fromkeys(unknown), show=repr)
        if not place:
            raise InputError(
                f"{pairs.origin}: none of the {len(pairs)} labels ({shown}) is one of the classifier's "
                f"{len(head.classes)} classes, such as {some_of(head.classes, show=repr)}; give labels in "
                "its class names, or a head that knows these"
            )
        warnings.warn(
            f"{len(unknown)} ({shown}) of {len(pairs)} labels are no class of the classifier; left out", stacklevel=3
        )
    return Labelled(pairs, tuple(place), np.array(list(place.values()), dtype=np.int64), {}, None)


def _starts(run: Run, labels: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Returns what is tried first: equal weights, and the label preference if there is one that differs."""
    starts = {"equal": Preference.equal(len(run.tasks)).weights}
    profiles = [profile for profile in run.profiles if profile is not None]
    if len(profiles) < len(run.profiles):
        return starts
    counts = [profile.label_table for profile in profiles]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            by_labels = Preference.from_labels(counts, labels)
        except InputError:  # no label is of a task
            return starts
    return starts if _same(by_labels.weights, starts["equal"]) else {**starts, "label": by_labels.weights}


def _accuracy(weights: Sequence[float], history: Sequence[Trial]) -> float | None:
    return next((trial.value for trial in history if _same(trial.weights, weights)), None)


def _same(first: Sequence[float], second: Sequence[float]) -> bool:
    return all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(first, second, strict=True))


# -- scoring merges ------------------------------------------------------------------------------------------------


class _Scorer:
    """Counts the samples that a merge of the run gets right, with checkpoints, encoder and inputs in memory."""

    def __init__(self, run: Run, evaluator: Evaluator, progress: Progress | None) -> None:
        from tunable_magmax.merging.state_dicts import MergeSession
        from tunable_magmax.models.state import checkpoint_digest, read_state

        self._evaluator = evaluator
        self._own = BuiltinModels.read(run.base, run.tasks, run.heads, progress) if evaluator.head.builtin else None
        if self._own is None:
            states, digests = zip(*read_each((run.base, *run.tasks), read_state, progress), strict=True)
        else:
            states = self._own.states
            digests = tuple(map(checkpoint_digest, (run.base, *run.tasks)))
        self.digest = self._problem(digests)
        copied = None if self._own is None else self._own.copied or None
        self._session = MergeSession(states[0], states[1:], exclude=copied)
        if not self._session.elements:
            raise InputError(f"{run.path}: no task changed anything, so all merges are the base; check the run")

    def close(self) -> None:
        self._session.close()

    def score(self, weights: tuple[float, ...], scale: float | None) -> tuple[float, str]:
        """Returns the accuracy of one merge, and which samples it got right."""
        merged = self._session.merge(weights=weights, scale="matched" if scale is None else scale)
        state = merged.state_dict if self._own is None else self._own.with_heads(merged.state_dict, weights)
        predicted, _ = self._evaluator.predict(state)
        right: NDArray[np.bool_] = predicted == self._evaluator.truth
        return float(right.mean()), np.packbits(right).tobytes().hex()

    def matched_scale(self, weights: tuple[float, ...]) -> float:
        """Returns the scale that a merge with these weights has by default."""
        return float(self._session.merge(weights=weights).report.scale)

    def _problem(self, digests: Sequence[str]) -> str:
        """Returns a digest of everything that a score depends on, so that a study of other data is not continued."""
        head = self._evaluator.head
        about = [digests, [head.digest, list(head.classes), head.logit_scale], self._evaluator.truth.tolist()]
        digest = hashlib.sha256(json.dumps(about).encode())
        for tensor in self._evaluator.prepared.inputs.values():
            digest.update(tensor.cpu().numpy().tobytes())
        return f"sha256:{digest.hexdigest()}"


# -- how sure it is ------------------------------------------------------------------------------------------------


def _intervals(history: Sequence[Trial], best: Trial, samples: int, level: float) -> tuple[tuple[float, float], ...]:
    """Returns for each task how far its weight can move before a tried point is clearly worse than the best.

    Clearly worse: by a one-sided sign test on the samples that just one of the two gets right. The interval spans the
    points that are not, and goes on to the next tried weight on each side (or 0 and 1), for nothing is known between.
    A bootstrap of the best point would not do: accuracy is flat in places, and whichever point of a plateau was tried
    wins every draw, so intervals would be narrowest where least is known.
    """
    packed = np.array([list(bytes.fromhex(trial.detail or "")) for trial in history], dtype=np.uint8)
    right = np.unpackbits(packed, axis=1, count=samples).astype(bool)
    winner = right[history.index(best)]
    lost, won = (winner & ~right).sum(axis=1).tolist(), (right & ~winner).sum(axis=1).tolist()
    alpha = (1 - level) / 2
    worse = np.array([sign_test(b, c) <= alpha for b, c in zip(lost, won, strict=True)])
    weights = np.array([trial.weights for trial in history])
    intervals = []
    for column in weights.T:
        low, high = column[~worse].min(), column[~worse].max()
        below, above = column[column < low], column[column > high]
        intervals.append((float(below.max()) if below.size else 0.0, float(above.min()) if above.size else 1.0))
    return tuple(intervals)
