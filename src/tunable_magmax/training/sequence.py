"""`train_sequence`: trains the tasks of a configuration one after the other into a run directory."""

from __future__ import annotations

import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tunable_magmax.data.benchmark import Benchmark, open_benchmark
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import Accuracy
from tunable_magmax.evaluation.labelled import label_benchmark
from tunable_magmax.evaluation.metrics import AccuracyMatrix
from tunable_magmax.files import Progress, write_folder
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.encoder import Encoder, load_encoder
from tunable_magmax.models.head import Head, load_head, save_head
from tunable_magmax.models.prepared import Prepared, embed_prepared, prepare
from tunable_magmax.models.pretrained import put_companions, quiet
from tunable_magmax.models.profiling import make_profile
from tunable_magmax.models.tower import image_tower, save_encoder, trainable
from tunable_magmax.runs.kept import write_kept
from tunable_magmax.runs.run import METRICS, Run
from tunable_magmax.training.config import BUILTIN, TrainConfig
from tunable_magmax.training.heads import load_base, make_head, new_classifier, read_classifier, unfrozen
from tunable_magmax.training.loop import Learner, TaskResult, Watch, train_task

if TYPE_CHECKING:
    from tunable_magmax.models.prepared import Batch

TEST_BATCH = 1024


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its directory, its tasks, and what training each took and gave.

    `trained`: how many of them this call trained. `matrix`: the accuracies on all tasks after each, if the
    configuration asks for it and one head serves all tasks.
    """

    path: Path
    tasks: tuple[str, ...]
    results: tuple[TaskResult, ...]
    trained: int
    matrix: AccuracyMatrix | None


def train_sequence(
    config: TrainConfig,
    out: str | Path,
    *,
    device: str | None = None,
    strict: bool = False,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> TrainedRun:
    """Trains a model through the tasks of a benchmark into a run directory that `tailor`, `merge` and `eval` read.

    Called again with the same configuration, it goes on after the last finished task, and on the CPU ends with the same
    weights as if it had never stopped. `strict`: inputs that cannot be read are an error.

    >>> from tunable_magmax.training.config import read_config
    >>> train_sequence(read_config("run.yaml"), "run").tasks  # doctest: +SKIP
    ('task-1', 'task-2', 'task-3')
    """
    benchmark = open_benchmark(config.benchmark)
    tasks = benchmark.tasks
    reading: dict[str, Any] = {"strict": strict, "progress": progress}
    with Run.training(out, config.record(), len(tasks)) as run:
        finished = len(run.tasks)
        base, head = _base_and_head(config, run, benchmark, device, reading)
        run.check_setup(_setup(config, base, head, benchmark))
        if finished < len(tasks):
            tested = sorted({k for task in tasks for k in task.test}) if config.matrix else []
            test = prepare(base, benchmark.test, tested, **reading) if tested else None
            sequence: _Sequence = (
                _NewClassifiers(config, run, benchmark, base, test)
                if head is None
                else _FrozenHead(config, run, benchmark, base, test, head)
            )
            for t in range(finished, len(tasks)):
                sequence.train(t, prepare(base, benchmark.train, tasks[t].train, **reading), watch)
        results = tuple(TaskResult(**facts) for facts in run.training_facts)
        matrix = _matrix(run, benchmark) if config.matrix and head is not None else None
    return TrainedRun(run.path, tuple(task.name for task in tasks), results, len(tasks) - finished, matrix)


class _Sequence(ABC):
    """Trains task after task, each from where the one before ended."""

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        benchmark: Benchmark,
        base: Encoder,
        test: Prepared | None,
    ) -> None:
        self.config, self.run, self.benchmark, self.base, self.test = config, run, benchmark, base, test

    @abstractmethod
    def learner(self, t: int) -> Learner:
        """Returns what learns task t (from 0)."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the checkpoint."""

    @abstractmethod
    def measure(self, t: int) -> float:
        """Returns the accuracy on task t among its own classes, NaN without readable tests."""

    def train(self, t: int, inputs: Prepared, watch: Watch | None) -> None:
        """Trains task t, and enters it into the run when it is complete: run.json last, which says what is finished."""
        config, run, task, count = self.config, self.run, self.benchmark.tasks[t], len(self.benchmark.tasks)
        position = torch.full((len(self.benchmark.classes),), -1, dtype=torch.int64, device=inputs.device)
        position[list(task.classes)] = torch.arange(len(task.classes), device=inputs.device)
        assert inputs.labels is not None
        targets, place = position[inputs.labels], {"seed": config.seed, "task": t, "tasks": count}
        result = train_task(self.learner(t), inputs, targets, config.train, **place, watch=watch)
        checkpoint = run.empty_folder(f"task-{t + 1:0{max(2, len(str(count)))}}")
        self.save(checkpoint)
        known = self.measure(t) if self.test is not None else math.nan
        result = replace(result, seconds=round(result.seconds, 3), accuracy=None if math.isnan(known) else known)
        samples = self.benchmark.train.subset(inputs.positions)  # those that can be read
        make_profile(
            task.name,
            samples,
            load_encoder(checkpoint, str(self.base.device), assets=run.base),
            base=self.base,
            rows=config.profile.rows,
            seed=config.seed,
        ).save(run.profile_path(task.name))
        kept = write_kept(
            run,
            task.name,
            self.benchmark.train.subset(task.held) if task.held else samples,
            per_class=config.keep,
            source="evaluation" if task.held else "training",
            size=self.base.picture_size,
            seed=config.seed,
        )
        names = [self.benchmark.classes[k] for k in task.classes]
        run.enter(task.name, checkpoint, names, profiled=True, kept=kept, training=asdict(result))
        run.save()


class _FrozenHead(_Sequence):
    """Trains one encoder against the rows of a frozen head that belong to the task."""

    def __init__(
        self, config: TrainConfig, run: Run, benchmark: Benchmark, base: Encoder, test: Prepared | None, head: Head
    ) -> None:
        super().__init__(config, run, benchmark, base, test)
        self.encoder = load_encoder((run.base, *run.tasks)[-1], str(base.device), assets=run.base)
        self.parameters = [parameter for _, parameter in trainable(self.encoder, config.train.freeze)]
        self.weight = torch.from_numpy(head.weight).to(base.device)
        self.matrix = _matrix(run, benchmark)
        if test is not None:
            self.head, self.tests = head, test
            self.labelled = label_benchmark(benchmark, head.classes).readable(test.positions)
            if not run.tasks:
                self.matrix = replace(self.matrix, base=_shares(self._accuracy().by_task))

    def learner(self, t: int) -> Learner:
        rows = self.weight[list(self.benchmark.tasks[t].classes)]
        score = lambda pooled: normalize(pooled, dim=1) @ rows.T  # noqa: E731
        return Learner(self.encoder.module, self.parameters, self.encoder.pool, score)

    def save(self, folder: Path) -> None:
        save_encoder(self.encoder, folder)

    def _accuracy(self) -> Accuracy:
        logits = self.head.logits(embed_prepared(self.encoder, self.tests, TEST_BATCH))
        return self.labelled.accuracy(logits, self.head.classes)

    def measure(self, t: int) -> float:
        measured = self._accuracy()
        rows = [*self.matrix.rows[:t], _shares(measured.by_task)]
        self.matrix = AccuracyMatrix.of(self.matrix.tasks, rows, self.matrix.base, self.matrix.samples)
        self.run.write_metrics(self.matrix.to_dict())
        return _shares(measured.known_by_task or {})[t]


class _NewClassifiers(_Sequence):
    """Trains classifiers of transformers: the encoder of the task before, and a new classifier for each task."""

    def __init__(
        self, config: TrainConfig, run: Run, benchmark: Benchmark, base: Encoder, test: Prepared | None
    ) -> None:
        super().__init__(config, run, benchmark, base, test)
        self.inner = read_classifier(base, run.tasks[-1]) if run.tasks else base.module.state_dict()
        self.module: Any = None

    def learner(self, t: int) -> Learner:
        classes = [self.benchmark.classes[k] for k in self.benchmark.tasks[t].classes]
        self.module = new_classifier(self.base, self.inner, classes, derived_seed(self.config.seed, "classifier", t))
        self.inner = self.module.base_model.state_dict()  # the same memory: after training, what the next begins with
        parameters = unfrozen(self.module, self.config.train.freeze, self.base.path)
        return Learner(self.module, parameters, self._logits, torch.Tensor.float)

    def _logits(self, batch: Batch) -> Tensor:
        inputs = batch if isinstance(batch, Mapping) else {"pixel_values": batch}
        logits: Tensor = self.module(**inputs).logits
        return logits

    def save(self, folder: Path) -> None:
        def fill(place: Path) -> None:
            with quiet():
                self.module.save_pretrained(place, max_shard_size="1000GB")
                put_companions(self.base.folders, self.base.image_processor, self.base.tokenizer, place)

        write_folder(folder, fill)

    def measure(self, t: int) -> float:
        task = self.benchmark.tasks[t]
        if self.test is None or not len(tests := self.test.at(task.test)):
            return math.nan
        assert tests.labels is not None
        classes, right = torch.tensor(task.classes, device=tests.device), 0
        with torch.inference_mode():
            for rows in torch.split(torch.arange(len(tests)), TEST_BATCH // 4):
                right += int((classes[self._logits(tests.batch(rows)).argmax(dim=1)] == tests.labels[rows]).sum())
        return right / len(tests)


def _shares(by_task: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns the accuracy on each task, NaN for a task without tests."""
    return tuple(share.value for share in by_task.values())


def _matrix(run: Run, benchmark: Benchmark) -> AccuracyMatrix:
    """Returns what training measured so far; what is gone is not known any more."""
    names, counts = [task.name for task in benchmark.tasks], [len(task.test) for task in benchmark.tasks]
    metrics = run.read_metrics()
    try:
        return AccuracyMatrix.of(names, [], None, counts) if metrics is None else AccuracyMatrix.from_dict(metrics)
    except InputError as error:
        raise InputError(f"{run.path / METRICS}: damaged ({error}); remove {run.path} and train again") from None


def _base_and_head(
    config: TrainConfig, run: Run, benchmark: Benchmark, device: str | None, reading: Mapping[str, Any]
) -> tuple[Encoder, Head | None]:
    """Returns base and head, if there is one: made once, the base last, then read back from the run directory."""
    if not run.base.exists():
        scratch = run.empty_folder("pretrained.partial")
        try:
            encoder = load_base(config, benchmark, scratch, device, reading["progress"])
            if config.head.source == BUILTIN:
                # A wrong pattern or architecture is reported before anything is written.
                unfrozen(
                    new_classifier(encoder, encoder.module.state_dict(), ["any"], 0), config.train.freeze, encoder.path
                )
            else:
                head = make_head(config, encoder, benchmark, reading)
                encoder = image_tower(encoder) if config.text_tower == "drop" else encoder
                trainable(encoder, config.train.freeze)
                assert run.head is not None
                save_head(head, run.head)
            save_encoder(encoder, run.base)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return load_encoder(run.base, device), None if run.head is None else load_head(run.head)


def _setup(config: TrainConfig, base: Encoder, head: Head | None, benchmark: Benchmark) -> dict[str, Any]:
    """Returns what the run depends on: versions, seed, digests, and the facts of the data."""
    import platform

    import transformers

    from tunable_magmax.version import __version__

    versions = {
        "tunable_magmax": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }
    return {
        "seed": config.seed,
        "device": "cpu" if base.device.type == "cpu" else torch.cuda.get_device_name(base.device),
        "versions": {**versions, "python": platform.python_version()},
        "digests": {"base": base.digest, **({} if head is None else {"head": head.digest})},
        "benchmark": benchmark.facts,
    }
