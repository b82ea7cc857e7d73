"""`train_sequence`: trains the tasks of a configuration one after the other into a run directory."""

from __future__ import annotations

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
from tunable_magmax.files import Progress, write_folder
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.encoder import Encoder, load_encoder
from tunable_magmax.models.head import Head, load_head, save_head
from tunable_magmax.models.prepared import Prepared, prepare
from tunable_magmax.models.pretrained import put_companions, quiet
from tunable_magmax.models.profiling import profile_task
from tunable_magmax.models.tower import image_tower, save_encoder, trainable
from tunable_magmax.runs.run import Run
from tunable_magmax.training.config import BUILTIN, TrainConfig
from tunable_magmax.training.heads import load_base, make_head, new_classifier, read_classifier
from tunable_magmax.training.loop import Learner, TaskResult, Watch, train_task

if TYPE_CHECKING:
    from tunable_magmax.models.prepared import Batch


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its directory, its tasks, and what training each took. `trained`: how many this call trained."""

    path: Path
    tasks: tuple[str, ...]
    results: tuple[TaskResult, ...]
    trained: int


def train_sequence(
    config: TrainConfig,
    out: str | Path,
    *,
    device: str | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> TrainedRun:
    """Trains a model through the tasks of a benchmark into a run directory that `tailor`, `merge` and `eval` read.

    Called again with the same configuration, it goes on after the last finished task, and on the CPU ends with the same
    weights as if it had never stopped.

    >>> from tunable_magmax.training.config import read_config
    >>> train_sequence(read_config("run.yaml"), "run").tasks  # doctest: +SKIP
    ('task-1', 'task-2', 'task-3')
    """
    benchmark = open_benchmark(config.benchmark)
    tasks = benchmark.tasks
    with Run.training(out, config.record(), len(tasks)) as run:
        finished = len(run.tasks)
        base, head = _base_and_head(config, run, benchmark, device, progress)
        run.check_setup(_setup(config, base, head, benchmark))
        if finished < len(tasks):
            sequence: _Sequence = (
                _NewClassifiers(config, run, benchmark, base)
                if head is None
                else _FrozenHead(config, run, benchmark, base, head)
            )
            for t in range(finished, len(tasks)):
                sequence.train(t, prepare(base, benchmark.train, tasks[t].train, progress=progress), watch)
        facts = [task.training for task in run.record.tasks if task.training is not None]
        results = tuple(TaskResult(**each) for each in facts)
    return TrainedRun(run.path, tuple(task.name for task in tasks), results, len(tasks) - finished)


class _Sequence(ABC):
    """Trains task after task, each from where the one before ended."""

    def __init__(self, config: TrainConfig, run: Run, benchmark: Benchmark, base: Encoder) -> None:
        self.config, self.run, self.benchmark, self.base = config, run, benchmark, base

    @abstractmethod
    def learner(self, t: int) -> Learner:
        """Returns what learns task t (from 0)."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the checkpoint."""

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
        result = replace(result, seconds=round(result.seconds, 3))
        samples = self.benchmark.train.subset(inputs.positions)  # those that can be read
        held = self.benchmark.train.subset(task.held) if task.held else None
        encoder = load_encoder(checkpoint, str(self.base.device), assets=run.base)
        kept = profile_task(run, task.name, encoder, self.base, samples, held, keep=config.keep, seed=config.seed)
        names = [self.benchmark.classes[k] for k in task.classes]
        run.enter(task.name, checkpoint, names, profiled=True, kept=kept, training=asdict(result))
        run.save()


class _FrozenHead(_Sequence):
    """Trains one encoder against the rows of a frozen head that belong to the task."""

    def __init__(self, config: TrainConfig, run: Run, benchmark: Benchmark, base: Encoder, head: Head) -> None:
        super().__init__(config, run, benchmark, base)
        self.encoder = load_encoder((run.base, *run.tasks)[-1], str(base.device), assets=run.base)
        self.parameters = [parameter for _, parameter in trainable(self.encoder, config.train.freeze)]
        self.weight = torch.from_numpy(head.weight).to(base.device)

    def learner(self, t: int) -> Learner:
        rows = self.weight[list(self.benchmark.tasks[t].classes)]
        score = lambda pooled: normalize(pooled, dim=1) @ rows.T  # noqa: E731
        return Learner(self.encoder.module, self.parameters, self.encoder.pool, score)

    def save(self, folder: Path) -> None:
        save_encoder(self.encoder, folder)


class _NewClassifiers(_Sequence):
    """Trains classifiers of transformers: the encoder of the task before, and a new classifier for each task."""

    def __init__(self, config: TrainConfig, run: Run, benchmark: Benchmark, base: Encoder) -> None:
        super().__init__(config, run, benchmark, base)
        self.inner = read_classifier(base, run.tasks[-1]) if run.tasks else base.module.state_dict()
        self.module: Any = None

    def learner(self, t: int) -> Learner:
        classes = [self.benchmark.classes[k] for k in self.benchmark.tasks[t].classes]
        self.module = new_classifier(self.base, self.inner, classes, derived_seed(self.config.seed, "classifier", t))
        self.inner = self.module.base_model.state_dict()  # the same memory: after training, what the next begins with
        return Learner(self.module, [*self.module.parameters()], self._logits, torch.Tensor.float)

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


def _base_and_head(
    config: TrainConfig, run: Run, benchmark: Benchmark, device: str | None, progress: Progress | None
) -> tuple[Encoder, Head | None]:
    """Returns base and head, if there is one: made once, the base last, then read back from the run directory."""
    if not run.base.exists():
        scratch = run.empty_folder("pretrained.partial")
        try:
            encoder = load_base(config, benchmark, scratch, device, progress)
            if config.head.source == BUILTIN:
                # An architecture that does not fit is reported before anything is written.
                new_classifier(encoder, encoder.module.state_dict(), ["any"], 0)
            else:
                head = make_head(config, encoder, benchmark, progress)
                encoder = image_tower(encoder)
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
