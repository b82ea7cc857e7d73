"""Evaluates many checkpoints of one architecture on the same labelled data, which is decoded once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import choose_rows
from tunable_magmax.data.class_names import by_name
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.evaluation.accuracy import LEVEL, Accuracy, predict, task_of_class
from tunable_magmax.files import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.data.benchmark import Benchmark
    from tunable_magmax.models.encoder import Encoder, Refill
    from tunable_magmax.models.head import Head
    from tunable_magmax.models.prepared import Prepared


@dataclass(frozen=True, eq=False)
class Labelled:
    """Samples at ascending `positions`; `truth` [n] and the classes of `tasks` are indices into the head's classes.

    `sample_tasks` [n]: each sample's task, -1 for none; None where no tasks are known. `unknown`: how many samples were
    left out because their labels are no class of the head.
    """

    samples: Samples
    positions: tuple[int, ...]
    truth: NDArray[np.int64]
    tasks: Mapping[str, tuple[int, ...]]
    sample_tasks: NDArray[np.int64] | None
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, rows: Sequence[int]) -> Labelled:
        """Returns some of the samples; `rows` count from 0 and ascend."""
        index = np.asarray(rows, dtype=np.int64)
        owner = None if self.sample_tasks is None else self.sample_tasks[index]
        kept = tuple(self.positions[row] for row in index.tolist())
        return replace(self, positions=kept, truth=self.truth[index], sample_tasks=owner)

    def draw(self, limit: int | None, seed: int = 0) -> Labelled:
        """Draws at most `limit` samples; returns all if there is no limit or there are fewer."""
        if limit is None or limit >= len(self):
            return self
        if limit < 1:
            raise InputError(f"the limit is {limit}, expected at least 1 sample")
        return self.take(choose_rows(len(self), limit, seed))

    def draw_evenly(self, limit: int, seed: int = 0) -> Labelled:
        """Draws at most `limit` samples, as many of one task as of another where each has enough."""
        if self.sample_tasks is None or limit >= len(self):
            return self.draw(limit, seed)
        groups = [np.flatnonzero(self.sample_tasks == task) for task in np.unique(self.sample_tasks)]
        left, rows = limit, list[int]()
        for done, group in enumerate(sorted(groups, key=len)):  # what small groups leave goes to the larger ones
            share = min(len(group), -(-left // (len(groups) - done)))
            rows += group[choose_rows(len(group), share, seed)].tolist() if share else []
            left -= share
        return self.take(sorted(rows))


def mostly_known(known: int, total: int) -> bool:
    """Whether so many labels are known that the others may be left out: an accuracy on fewer would mislead."""
    return 2 * known >= total > 0


def known_labels(samples: Samples, classes: Sequence[str]) -> tuple[dict[int, int], list[str]]:
    """Returns the index in `classes` of each sample, by position; and the labels that are not among them.

    Labels go by name; if none is a name and all are numbers, they are indices into `classes`.
    """
    if samples.labels is None:
        raise InputError(
            f"{samples.origin} holds inputs without labels: put images into class folders, or add a column 'label'"
        )
    labels = [samples.classes[label] for label in samples.labels]
    if not labels:
        raise InputError(f"{samples.origin}: holds no samples; give at least one")
    names = by_name(labels, [tuple(classes)], [tuple(classes)], Path(samples.origin))
    place = {name: index for index, name in enumerate(classes)}
    known = {position: place[name] for position, name in enumerate(names) if name in place}
    return known, [name for name in names if name not in place]


def label_samples(
    samples: Samples,
    classes: Sequence[str],
    tasks: Mapping[str, Sequence[str]] | None = None,
    positions: Sequence[int] | None = None,
    *,
    strict: bool = False,
) -> Labelled:
    """Labels all samples, or those at `positions`, in the head's `classes`.

    Samples with unknown labels are left out with a warning. They are an error if they are more than half, among
    `positions`, and with `strict`. `tasks`: the class names of each. Where tasks share classes, a sample's task is its
    domain, if the samples have domains that are named as the tasks are; else the tasks are left out.
    """
    known, unknown = known_labels(samples, classes)
    wanted = range(len(samples)) if positions is None else sorted(positions)
    lacking = [position for position in wanted if position not in known]
    if lacking:
        shown = some_of(dict.fromkeys(unknown), show=lambda name: f"{name!r}{closest(name, classes)}")
        told = f"{samples.origin}: {len(lacking)} of {len(wanted)} labels are no class of the head"
        if strict or positions is not None or not mostly_known(len(known), len(wanted)):
            raise InputError(
                f"{told}: {shown}; it knows {len(classes)} classes, such as {some_of(classes, show=repr)}. "
                "Take these samples out, or give a head that knows them"
            )
        warnings.warn(f"{told}, and these samples are left out: {shown}", stacklevel=2)
        wanted = sorted(known)
    groups = task_indices(tasks or {}, classes)
    truth = np.array([known[position] for position in wanted], dtype=np.int64)
    home = task_of_class(list(groups.values()), len(classes))
    owner: NDArray[np.int64] | None = None
    domains = samples.domains
    if home is None and domains is not None and set(domains) <= set(groups):
        order = {name: t for t, name in enumerate(groups)}
        owner = np.array([order[domains[position]] for position in wanted], dtype=np.int64)
    elif home is not None and groups:
        owner = home[truth]
    return Labelled(samples, tuple(wanted), truth, {} if owner is None else groups, owner, len(lacking))


def label_benchmark(benchmark: Benchmark, classes: Sequence[str], split: Literal["train", "test"] = "test") -> Labelled:
    """Labels the samples of all tasks of a benchmark in the head's `classes`."""
    samples = benchmark.test if split == "test" else benchmark.train
    home = {
        position: t
        for t, task in enumerate(benchmark.tasks)
        for position in (task.test if split == "test" else task.train)
    }
    tasks = {task.name: [benchmark.classes[k] for k in task.classes] for task in benchmark.tasks}
    labelled = label_samples(samples, classes, None, list(home))
    owner = np.array([home[position] for position in labelled.positions], dtype=np.int64)
    return replace(labelled, tasks=task_indices(tasks, classes), sample_tasks=owner)


def task_indices(tasks: Mapping[str, Sequence[str]], classes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Returns the classes of each task as indices; one that the head lacks is an error."""
    place = {name: index for index, name in enumerate(classes)}
    missing = list(dict.fromkeys(name for names in tasks.values() for name in names if name not in place))
    if missing:
        shown = some_of(missing, show=lambda name: f"{name!r}{closest(name, classes)}")
        raise InputError(
            f"{len(missing)} classes of the tasks are no class of the head: {shown}; "
            "give the head that belongs to these tasks"
        )
    return {task: tuple(place[name] for name in names) for task, names in tasks.items()}


EVALUATION_BATCH = 256


class Evaluator:
    """Measures checkpoints with a frozen head on labelled data. The encoder is its own: its weights get replaced.

    Everything is computed in float32, on a GPU too unless told otherwise, so that a result does not depend on it.

        evaluator = Evaluator(load_encoder(base), load_head(file), label_samples(samples, head.classes, tasks))
        with MergeSession(base, tasks) as session:
            for weights in many:
                evaluator.measure(session.merge(weights=weights).state_dict).overall.value
    """

    def __init__(
        self,
        encoder: Encoder,
        head: Head,
        labelled: Labelled,
        *,
        batch: int = EVALUATION_BATCH,
        strict: bool = False,
        level: float = LEVEL,
        progress: Progress | None = None,
        prepared: Prepared | None = None,
        precise: bool = True,
    ) -> None:
        """Decodes the inputs; those that cannot be read are left out with a warning, or with `strict` an error.

        `prepared`: the inputs at the labelled positions where they are decoded already, by an equal encoder. Unless
        `precise`, a GPU may multiply in TF32, which is several times as fast and may change single answers.
        """
        import torch

        from tunable_magmax.models.head import require_match
        from tunable_magmax.models.prepared import prepare

        if batch < 1:
            raise InputError(f"the batch is {batch}, expected at least 1")
        require_match(encoder, head)
        self.encoder, self.head, self.batch, self.level, self.precise = encoder, head, batch, level, precise
        if prepared is None:
            prepared = prepare(encoder, labelled.samples, labelled.positions, strict=strict, progress=progress)
        row = {position: k for k, position in enumerate(labelled.positions)}
        self.prepared = prepared
        self.labelled = labelled.take([row[position] for position in prepared.positions])
        self._weight = torch.from_numpy(np.ascontiguousarray(head.weight)).to(encoder.device)
        self._bias = None if head.bias is None else torch.from_numpy(head.bias).to(encoder.device)
        self._refills: dict[tuple[str, ...], Refill] = {}

    def __len__(self) -> int:
        return len(self.prepared)

    @property
    def truth(self) -> NDArray[np.int64]:
        """Returns the right class of each readable sample, as an index into the head's classes."""
        return self.labelled.truth

    @property
    def unreadable(self) -> int:
        """Returns how many samples were left out because they cannot be read."""
        return self.prepared.failed

    @property
    def unknown_labels(self) -> int:
        """Returns how many samples were left out because the head does not know their class."""
        return self.labelled.unknown

    def measure(self, state: Mapping[str, Tensor] | None = None, progress: Progress | None = None) -> Accuracy:
        """Measures the accuracy with the tensors of a checkpoint; None: with the weights as they are now."""
        predicted, known = self.predict(state, progress)
        tasks = self.labelled.tasks
        return Accuracy.of(
            predicted,
            self.truth,
            self.head.classes,
            tasks,
            sample_tasks=self.labelled.sample_tasks if tasks else None,
            known=known if tasks else None,
            level=self.level,
        )

    def predict(
        self, state: Mapping[str, Tensor] | None = None, progress: Progress | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Predicts the class of each sample: among all, and among those of its own task (-1 without a task)."""
        if state is not None:
            self.fill(state)
        owner = self.labelled.sample_tasks
        owner = np.full(len(self), -1) if owner is None else owner
        members = list(self.labelled.tasks.values())
        parts = []
        done = 0
        for logits in self._logits():
            parts.append(predict(logits, owner[done : done + len(logits)], members))
            done += len(logits)
            if progress is not None:
                progress("evaluating", done, len(self))
        return np.concatenate([part for part, _ in parts]), np.concatenate([part for _, part in parts])

    def logits(self, state: Mapping[str, Tensor] | None = None, progress: Progress | None = None) -> Tensor:
        """Returns what the head gives [n, classes], on the encoder's device."""
        import torch

        if state is not None:
            self.fill(state)
        parts, done = [], 0
        for part in self._logits():
            parts.append(part)
            done += len(part)
            if progress is not None:
                progress("evaluating", done, len(self))
        return torch.cat(parts)

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Puts the weights of a checkpoint into the encoder."""
        from tunable_magmax.models.encoder import Refill

        names = tuple(state)
        if names not in self._refills:
            first = next(iter(self._refills), ())
            lacking = [name for name in first if name not in state]
            if lacking:  # they would silently stay what the last checkpoint left there
                raise InputError(
                    f"the weights lack {len(lacking)} tensors that those before them had, first {lacking[0]!r}: "
                    "checkpoints that are evaluated together must have one architecture"
                )
            self._refills[names] = Refill(self.encoder, state)
        self._refills[names](state)

    def _logits(self) -> Iterator[Tensor]:
        """Yields what the head gives, [b, classes] for each batch."""
        import torch

        from tunable_magmax.models.builtin import BuiltinEncoder
        from tunable_magmax.models.parallel import in_parallel

        weight, bias = self._weight, self._bias
        if isinstance(self.encoder, BuiltinEncoder):  # whose classifier is replaced with the other weights
            linear, device = self.encoder.linear, self.encoder.device
            weight = torch.from_numpy(linear.weight).float().to(device)
            bias = torch.from_numpy(linear.bias).float().to(device)

        def logits(rows: range) -> Tensor:
            with torch.inference_mode(), full_float32(self.encoder.device, self.precise):
                features = self.encoder.pool(self.prepared.batch(rows)).float()
                if not self.head.builtin:
                    features = torch.nn.functional.normalize(features, dim=1)
                scores = self.head.logit_scale * features @ weight.T
                return scores if bias is None else scores + bias

        try:
            with self.encoder.evaluating():
                yield from in_parallel(logits, len(self), self.batch, self.encoder.device)
        except torch.cuda.OutOfMemoryError:
            raise InputError(
                f"the device ran out of memory with {self.batch} samples at a time: give a smaller --batch, such as "
                f"{max(1, self.batch // 4)}, or --device cpu"
            ) from None


@contextmanager
def full_float32(device: Any, precise: bool = True) -> Iterator[None]:
    """Computes in float32 without autocast; if `precise`, also without the shorter TF32 of a GPU's matrix units."""
    import torch

    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest" if precise else "high")
        torch.backends.cudnn.allow_tf32 = not precise
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(products)
            torch.backends.cudnn.allow_tf32 = convolutions
