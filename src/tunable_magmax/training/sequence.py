"""`train_sequence`: from a configuration to a run directory, task by task; started again, it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.data.benchmark import Benchmark, Task, open_benchmark
from tunable_magmax.evaluation.evaluator import Evaluator
from tunable_magmax.evaluation.metrics import AccuracyMatrix
from tunable_magmax.files import Progress
from tunable_magmax.models.encoder import Encoder, load_encoder
from tunable_magmax.models.head import Classifier, Head, load_head, save_head
from tunable_magmax.models.prepared import Decoded, Prepared, embed_prepared
from tunable_magmax.models.state import checkpoint_digest
from tunable_magmax.models.tower import image_tower, save_encoder, trainable
from tunable_magmax.preference.profile import choose_rows
from tunable_magmax.runs.directory import RunDirectory
from tunable_magmax.runs.run import profile_path
from tunable_magmax.training.beginning import load_base, make_head
from tunable_magmax.training.config import TrainConfig
from tunable_magmax.training.measuring import Matrix, Scores, or_null, score_tasks, task_evaluator
from tunable_magmax.training.profiling import assemble_profile
from tunable_magmax.training.tracking import Tracker
from tunable_magmax.training.trainer import TaskResult, Tick, Trainer, Watch

SNAPSHOT_SECONDS = 60.0


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its directory, tasks, what training took, and the accuracy matrix if the configuration asks.

    `results`: None for tasks that an earlier call had trained. `known`: after each task, the accuracy on it among its
    own classes.
    """

    path: Path
    tasks: tuple[str, ...]
    results: tuple[TaskResult | None, ...]
    matrix: AccuracyMatrix | None
    known: tuple[float, ...]


def train_sequence(
    config: TrainConfig,
    out: str | Path,
    *,
    device: str | None = None,
    strict: bool = False,
    tensorboard: bool = False,
    snapshot_seconds: float = SNAPSHOT_SECONDS,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> TrainedRun:
    """Train an encoder through the tasks of a benchmark into a run directory that `prefer`, `merge` and `eval` read.

    Called again with the same configuration, it goes on where it stopped, also inside a task, and on the CPU ends with
    the same weights as if it had never stopped. `strict`: inputs that cannot be read are an error.

    >>> from tunable_magmax.training.config import read_config
    >>> train_sequence(read_config("run.yaml"), "run").tasks  # doctest: +SKIP
    ('task-1', 'task-2', 'task-3')
    """
    benchmark = open_benchmark(config.benchmark)
    directory = RunDirectory(Path(out))
    directory.claim(config.record())
    with directory.alone():
        finished = directory.finished()
        reading: dict[str, Any] = {"strict": strict, "progress": progress}
        encoder, head = _beginning(config, directory, benchmark, device, reading)
        directory.check_setup(_setup(config, encoder, head, benchmark))
        matrix = Matrix(directory.path, benchmark, len(finished)) if config.matrix else None
        results: list[TaskResult | None] = [None] * len(finished)
        if len(finished) < len(benchmark.tasks):
            with Tracker(directory.path, tensorboard) as tracker:
                sequence = _Sequence(config, directory, benchmark, encoder, head, matrix, tracker, reading)
                results += sequence.train(finished, snapshot_seconds, watch)
        directory.drop_snapshot()  # of a run that was killed at its very end
        directory.drop_regulariser()
    return TrainedRun(
        directory.path,
        tuple(task.name for task in benchmark.tasks),
        tuple(results),
        None if matrix is None else matrix.value,
        () if matrix is None else tuple(matrix.known),
    )


class _Sequence:
    """The tasks that are left to train."""

    def __init__(
        self,
        config: TrainConfig,
        directory: RunDirectory,
        benchmark: Benchmark,
        encoder: Encoder,
        head: Head,
        matrix: Matrix | None,
        tracker: Tracker,
        reading: Mapping[str, Any],
    ) -> None:
        self._config, self._directory, self._benchmark = config, directory, benchmark
        self._encoder, self._head, self._matrix, self._tracker = encoder, head, matrix, tracker
        self._classifier = Classifier(encoder, head).digest
        self._train = Decoded(encoder, benchmark.train, [k for task in benchmark.tasks for k in task.train], **reading)
        self._evaluator: Evaluator | None = None
        if matrix is not None:
            test = Decoded(encoder, benchmark.test, [k for task in benchmark.tasks for k in task.test], **reading)
            self._evaluator = task_evaluator(encoder, head, benchmark, test)

    def train(
        self, finished: list[dict[str, Any]], snapshot_seconds: float, watch: Watch | None
    ) -> list[TaskResult | None]:
        """Train them, and enter each into the run directory when it is complete."""
        first, tasks = len(finished), self._benchmark.tasks
        # While the encoder still is the base.
        by_base = {t: self._embedded(tasks[t]) for t in range(first, len(tasks))}
        if self._matrix is not None and self._evaluator is not None and not first:
            self._matrix.start(score_tasks(self._evaluator))
        trainer = Trainer(self._encoder, self._head, self._benchmark, self._config)
        if first:
            self._resume(trainer, finished)
        results: list[TaskResult | None] = []
        for t in range(first, len(tasks)):
            inputs = self._train.take(tasks[t].train)
            result = self._train_task(t, trainer, inputs, snapshot_seconds, watch)
            checkpoint = self._directory.vacant(self._name(t))
            save_encoder(self._encoder, checkpoint)
            self._write_profile(tasks[t], inputs, by_base[t], checkpoint_digest(checkpoint))
            scores = None if self._evaluator is None else score_tasks(self._evaluator)
            finished.append(self._entry(tasks[t], checkpoint))
            self._commit(t, finished, trainer, result, scores)
            results.append(result)
        return results

    def _train_task(
        self, t: int, trainer: Trainer, inputs: Prepared, snapshot_seconds: float, watch: Watch | None
    ) -> TaskResult:
        start = self._directory.read_snapshot(t)
        self._tracker.rewind(t + 1, 0 if start is None else start.step)
        last = time.monotonic()

        def keep(step: int, state: Callable[[], Mapping[str, torch.Tensor]]) -> None:
            nonlocal last
            if time.monotonic() - last >= snapshot_seconds:
                self._directory.write_snapshot(t, step, state())
                last = time.monotonic()

        def tell(tick: Tick) -> None:
            self._tracker.tick(tick)
            if watch is not None:
                watch(tick)

        return trainer.train(t, inputs, start=start, watch=tell, keep=keep)

    def _resume(self, trainer: Trainer, finished: list[dict[str, Any]]) -> None:
        """Go on from the last finished task: its weights, and what the regulariser knew then."""
        checkpoint = self._directory.path / finished[-1]["checkpoint"]
        device = self._encoder.device
        last = load_encoder(checkpoint, str(device), assets=self._directory.base)
        self._encoder.module.load_state_dict(last.module.state_dict())
        if trainer.regulariser is not None:
            before = self._directory.read_regulariser(len(finished) - 1)
            trainer.regulariser.restore({name: value.to(device) for name, value in before.items()})

    def _commit(
        self,
        t: int,
        finished: list[dict[str, Any]],
        trainer: Trainer,
        result: TaskResult,
        scores: Scores | None,
    ) -> None:
        """Enter a finished task: run.json last, because it is what says so."""
        task = self._benchmark.tasks[t]
        if trainer.regulariser is not None:
            self._directory.write_regulariser(t, trainer.regulariser.state())
        told: dict[str, Any] = {
            "task": t + 1,
            "name": task.name,
            "steps": result.steps,
            "samples": result.samples,
            "loss": result.loss,
            "seconds": round(result.seconds, 3),
        }
        if self._matrix is not None and scores is not None:
            self._matrix.add(t, scores)
            self._matrix.write()
            names = [task.name for task in self._benchmark.tasks]
            accuracies = dict(zip(names, scores.unknown, strict=True))
            told["task_known_accuracy"] = or_null(scores.known[t])
            told["accuracies"] = {name: or_null(value) for name, value in accuracies.items()}
            self._tracker.accuracies(t + 1, accuracies)
        self._tracker.tell("task", **told)
        self._directory.write_run(finished, len(self._benchmark.tasks), self._config.benchmark.record())
        self._directory.drop_snapshot()

    # -- what a task leaves ----------------------------------------------------------------------------------------

    def _profiled(self, task: Task) -> Prepared:
        """The samples of a task that its profile embeds."""
        rows = choose_rows(len(task.train), self._config.profile_rows, self._config.seed)
        return self._train.take([task.train[row] for row in rows])

    def _embedded(self, task: Task) -> Any:
        """What the encoder as it is now makes of the samples that a task's profile embeds."""
        return embed_prepared(self._encoder, self._profiled(task)).cpu().numpy()

    def _write_profile(self, task: Task, inputs: Prepared, by_base: Any, digest: str) -> None:
        rows = self._profiled(task).labels
        assert inputs.labels is not None
        assert rows is not None
        labels = inputs.labels.tolist()
        profile = assemble_profile(task.name, self._benchmark.classes, labels, self._embedded(task), digest)
        # The encoder was loaded as the base, and keeps that digest.
        profile = profile.with_base(self._encoder.digest, by_base, rows.cpu().numpy())
        profile = profile.with_shares(self._classifier, self._head.classes, self._head.probabilities(by_base))
        profile.save(profile_path(self._directory.path, task.name))

    def _name(self, t: int) -> str:
        digits = max(2, len(str(len(self._benchmark.tasks))))
        return f"task-{t + 1:0{digits}}"

    def _entry(self, task: Task, checkpoint: Path) -> dict[str, Any]:
        root = self._directory.path
        return {
            "name": task.name,
            "checkpoint": checkpoint.name,
            "profile": profile_path(root, task.name).relative_to(root).as_posix(),
            "classes": [self._benchmark.classes[k] for k in task.classes],
        }


def _beginning(
    config: TrainConfig,
    directory: RunDirectory,
    benchmark: Benchmark,
    device: str | None,
    reading: Mapping[str, Any],
) -> tuple[Encoder, Head]:
    """Base and head: made once, then read back from the run directory."""
    if not directory.base.exists() or not directory.head.exists():
        with directory.scratch("pretrained") as scratch:
            encoder = load_base(config, scratch, device, reading["progress"])
            positions = [k for task in benchmark.tasks for k in task.train]
            head = make_head(config, encoder, benchmark, Decoded(encoder, benchmark.train, positions, **reading))
            if config.text_tower == "drop":
                encoder = image_tower(encoder)
            trainable(encoder, config.train.freeze)  # a wrong pattern is told before anything is written
            save_encoder(encoder, directory.vacant(directory.base.name))
            save_head(head, directory.head)
    return load_encoder(directory.base, device), load_head(directory.head)


def _setup(config: TrainConfig, encoder: Encoder, head: Head, benchmark: Benchmark) -> dict[str, Any]:
    """What the run stands on: versions, seed, digests, and the facts of the data."""
    import platform

    import transformers

    from tunable_magmax.version import __version__

    device = encoder.device
    return {
        "seed": config.seed,
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "versions": {
            "tunable_magmax": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "digests": {"base": encoder.digest, "head": head.digest},
        "benchmark": benchmark.facts,
    }
