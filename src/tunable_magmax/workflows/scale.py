"""Chooses the scale of a merge by labelled samples of the site: some are scored, and cross-validation decides."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import Share
from tunable_magmax.evaluation.comparison import ALPHA, paired, sign_test
from tunable_magmax.evaluation.evaluator import Evaluator
from tunable_magmax.evaluation.run_models import refuse_adapters, scoring_encoder
from tunable_magmax.files import Progress
from tunable_magmax.lottery import MASK, lottery_state, ticket
from tunable_magmax.workflows.candidates import Candidate, Candidates, right_answers, tunable
from tunable_magmax.workflows.search import labelled_pairs
from tunable_magmax.workflows.target import BATCH, TargetSamples

if TYPE_CHECKING:
    from tunable_magmax.models.head import Head
    from tunable_magmax.preference.preference import Preference

FACTORS = (0.25, 0.315, 0.4, 0.5, 0.63, 0.8, 1.0, 1.26, 1.6, 2.0)
"""Scales that are tried, as multiples of the default one; 1 is tried as well."""
LEAST_PAIRS = 8
"""With fewer labelled samples nothing is chosen by them."""
BASE = "the base"
"""What `ScaleChoice.better` calls the base."""
MOST_FOLDS, LEAST_FOLD = 5, 4
# A stream of the lottery of its own: merges use 0 to 3, data sets 16 to 18, the probe 24.
STREAM = 25


@dataclass(frozen=True)
class ScaleChoice:
    """What labelled samples say about the scale, with the weights fixed.

    `right`: for each of `scales`, how many of `samples` it gets right. `tuned_right`: how many are right if the scale
    is chosen on the other folds each time, `default_right` at the `default`. `scale`: the one to use, None if choosing
    is no better than the default or was not allowed. `used`: the scale of the merge in the end. `interval`: the scales
    that are not clearly worse than the best one. `better`: a model that is clearly better than the merge at the scale
    that is used, and its count; `base_right`: the base's.
    """

    samples: int
    scales: tuple[float, ...]
    right: tuple[int, ...]
    default: float
    default_right: int
    tuned_right: int
    scale: float | None
    used: float
    interval: tuple[float, float]
    base_right: int
    better: tuple[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {
            "samples": self.samples,
            "scales": list(self.scales),
            "right": list(self.right),
            "default": self.default,
            "default_right": self.default_right,
            "cross_validated_right": self.tuned_right,
            "chosen": self.scale,
            "used": self.used,
            "not_clearly_worse": list(self.interval),
            "base_right": self.base_right,
        }

    @property
    def best(self) -> float:
        """The scale with the highest count; of equal ones, the one nearest to the default."""
        return min(
            zip(self.scales, self.right, strict=True), key=lambda pair: (-pair[1], _apart(pair[0], self.default))
        )[0]

    @property
    def sentence(self) -> str:
        """What came out, in words."""
        tuned, default = Share(self.tuned_right, self.samples), Share(self.default_right, self.samples)
        low, high = self.interval
        range_ = f"scales from {low:g} to {high:g} are not clearly worse than the best"
        if self.scale is None and (self.used != self.default or self.tuned_right > self.default_right):
            best = self.right[self.scales.index(self.best)] / self.samples
            own = self.right[self.scales.index(self.used)] / self.samples
            return f"{own:.0%} of the pairs are right at the scale {self.used:g}, {best:.0%} at {self.best:g}; {range_}"
        if self.scale is None:
            gain = f"choosing it by pairs gains nothing ({_against(tuned, default)})"
            return f"the scale stays {self.default:g}: {gain}; {range_}"
        return f"the scale {self.scale:g} is chosen by pairs ({_against(tuned, default)} at {self.default:g}); {range_}"


def _apart(scale: float, default: float) -> float:
    return abs(math.log(scale / (default or 1.0))) if scale > 0 else math.inf


def _against(one: Share, other: Share) -> str:
    return f"{one.value:.0%} against {other.value:.0%} right with the final weights"


def scaled_by_pairs(target: TargetSamples, preference: Preference) -> Preference:
    """Returns the preference with the scale that the target's pairs choose for a Tunable MAGMAX merge, if they do."""
    from tunable_magmax.preference.calibration import site_head

    plain = target.head()
    if plain is None:
        raise InputError(
            f"{target.run.path}: scoring scales needs a frozen classifier head, and the run names none: enter it "
            "with `tmx init RUN_DIR --head HEAD`"
        )
    refuse_adapters(target.run, "leave out --choose-scale, or ")
    head = site_head(plain, preference, target.run.profiles)
    with open_pairs(target, head) as candidates:
        found = choose_scale(candidates, tunable(), preference, progress=target.progress)
        samples = len(candidates.truth)
    if found is None:
        pairs = "1 pair is" if samples == 1 else f"{samples} pairs are"
        warnings.warn(f"{pairs} too few to choose a scale; {LEAST_PAIRS} are needed", stacklevel=2)
        return preference
    return with_scale(preference, found)


def with_scale(preference: Preference, found: ScaleChoice) -> Preference:
    """Returns the preference with the scale that was chosen, if one was, and what was found in its provenance."""
    return replace(preference.with_facts(scale_by_pairs=found.to_dict()), scale=found.scale)


@contextmanager
def open_pairs(target: TargetSamples, head: Head, seed: int = 0) -> Iterator[Candidates]:
    """Yields what scores models of the run on the target's pairs: their labels must be classes of the head."""
    reading, run = target.reading, target.run
    assert target.sources.pairs is not None
    samples = open_samples(target.sources.pairs, reading.split, reading.text_column, reading.label_column)
    labelled = labelled_pairs(run, samples, head).draw(reading.max_samples, target.seed)
    encoder = scoring_encoder(run, head, reading.device)
    evaluator = Evaluator(encoder, head, labelled, batch=BATCH, progress=target.progress)
    with Candidates(run, evaluator, seed=seed, progress=target.progress) as candidates:
        yield candidates


def choose_scale(
    candidates: Candidates,
    merge: Candidate,
    preference: Preference,
    *,
    fixed: float | None = None,
    free: bool = True,
    progress: Progress | None = None,
) -> ScaleChoice | None:
    """Scores a merge at about ten scales, with the preference's weights and prior; None with too few samples.

    The default scale is that of `merge`. A scale is chosen if choosing on the other folds gets more held-out samples
    right than the default scale does; equal counts go to the scale nearest to the default. `fixed`: the scale that is
    used whatever comes out; not `free`: that is the default, or `fixed`.

    >>> choose_scale(candidates, tunable(), preference).scale  # doctest: +SKIP
    0.63
    """
    truth = candidates.truth
    if len(truth) < LEAST_PAIRS:
        return None
    bias = None if preference.prior is None else preference.prior.bias(candidates.evaluator.head.classes)

    def score(candidate: Candidate) -> NDArray[np.bool_]:
        return right_answers(candidates.logits(candidate, preference.weights), truth, bias)

    at_default = score(merge)
    default = float(candidates.reports[merge].scale)
    extra = {1.0} if fixed is None else {1.0, fixed}
    scales = sorted({default, *(round(factor * default, 6) for factor in FACTORS if factor != 1), *extra})
    rows = []
    for done, scale in enumerate(scales, 1):
        rows.append(at_default if scale == default else score(replace(merge, scale=scale)))
        if progress is not None:
            progress("trying scales", done, len(scales))
    right = np.array(rows)
    apart = [_apart(scale, default) for scale in scales]

    def best(columns: NDArray[np.bool_]) -> int:
        return int(np.lexsort((apart, -right[:, columns].sum(axis=1)))[0])

    folds = deal(truth, candidates.seed)
    tuned = sum(int(right[best(folds != k), folds == k].sum()) for k in range(int(folds.max()) + 1))
    winner = best(np.ones(len(truth), dtype=bool))
    gains = free and fixed is None and tuned > at_default.sum() and scales[winner] != default
    fine = [scale for scale, row in zip(scales, right, strict=True) if not clearly_better(right[winner], row)]
    base = score(Candidate("base", checkpoint=0))
    used = scales[winner] if gains else default if fixed is None else fixed
    now = right[scales.index(used)]
    rivals = {f"the scale {scales[winner]:g}": right[winner], BASE: base}
    better = [(name, int(row.sum())) for name, row in rivals.items() if clearly_better(row, now)]
    return ScaleChoice(
        samples=len(truth),
        scales=tuple(scales),
        right=tuple(right.sum(axis=1).tolist()),
        default=default,
        default_right=int(at_default.sum()),
        tuned_right=tuned,
        scale=scales[winner] if gains else None,
        used=used,
        interval=(min(fine), max(fine)),
        base_right=int(base.sum()),
        better=max(better, key=lambda pair: pair[1], default=None),
    )


def clearly_better(one: Any, other: Any) -> bool:
    """Whether one model gets more of the same samples right than another, by a one-sided exact sign test at 5%.

    >>> clearly_better([True] * 5, [False] * 5), clearly_better([True] * 4, [False] * 4)
    (True, False)
    """
    pair = paired(one, other)
    return sign_test(pair.won, pair.lost) <= ALPHA


def deal(labels: Sequence[int] | NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Deals samples to folds, at most 5: classes are spread evenly, and folds are of about the same size.

    >>> np.bincount(deal([0, 0, 1, 1, 2, 2, 3, 3], seed=0)).tolist()
    [4, 4]
    """
    truth = np.asarray(labels)
    count = max(1, min(MOST_FOLDS, len(truth) // LEAST_FOLD))
    start = lottery_state(seed & MASK, STREAM, 0)
    order = sorted(range(len(truth)), key=lambda row: (truth[row], ticket(start, row), row))
    folds = np.empty(len(truth), dtype=np.int64)
    folds[order] = np.arange(len(truth)) % count
    return folds
