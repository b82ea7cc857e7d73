"""`train_sequence`: trains the tasks of a configuration one after the other into a run directory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.data.arrays import choose_rows
from tunable_magmax.data.benchmark import Benchmark, Task, open_benchmark
from tunable_magmax.data.data_sets import imported
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.evaluator import Evaluator
from tunable_magmax.evaluation.metrics import AccuracyMatrix
from tunable_magmax.files import Progress
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.encoder import Encoder, load_encoder
from tunable_magmax.models.head import (
    Classifier,
    Head,
    load_head,
    mean_head,
    name_head,
    require_match,
    save_head,
    text_head,
)
from tunable_magmax.models.prepared import Decoded, Prepared, embed_prepared
from tunable_magmax.models.pretrained import resolve_model
from tunable_magmax.models.state import checkpoint_digest
from tunable_magmax.models.tower import image_tower, save_encoder, trainable
from tunable_magmax.runs.profile import Profile
from tunable_magmax.runs.run import Run
from tunable_magmax.training.config import GLYPHS, TrainConfig
from tunable_magmax.training.tracking import RunMatrix, Tracker, or_null, task_evaluator
from tunable_magmax.training.trainer import Snapshot, TaskResult, Tick, Trainer, Watch

SNAPSHOT_SECONDS = 60.0
SNAPSHOT = "snapshot"
REGULARISER = "regulariser"
# Of each class, for class means; more would hardly move them.
MEAN_SAMPLES = 200


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
    """Trains an encoder through the tasks of a benchmark into a run directory that `prefer`, `merge` and `eval` read.

    Called again with the same configuration, it goes on where it stopped, also inside a task, and on the CPU ends with
    the same weights as if it had never stopped. `strict`: inputs that cannot be read are an error.

    >>> from tunable_magmax.training.config import read_config
    >>> train_sequence(read_config("run.yaml"), "run").tasks  # doctest: +SKIP
    ('task-1', 'task-2', 'task-3')
    """
    benchmark = open_benchmark(config.benchmark)
    with Run.training(out, config.record(), len(benchmark.tasks)) as run:
        finished = len(run.tasks)
        reading: dict[str, Any] = {"strict": strict, "progress": progress}
        encoder, head = _base_and_head(config, run, benchmark, device, reading)
        run.check_setup(_setup(config, encoder, head, benchmark))
        matrix = RunMatrix(run, benchmark) if config.matrix else None
        results: list[TaskResult | None] = [None] * finished
        if finished < len(benchmark.tasks):
            with Tracker(run.path, tensorboard) as tracker:
                sequence = _Sequence(config, run, benchmark, encoder, head, matrix, tracker, reading)
                results += sequence.train(snapshot_seconds, watch)
        run.drop_state(SNAPSHOT)  # of a run that was killed at its very end
        run.drop_state(REGULARISER)
    return TrainedRun(
        run.path,
        tuple(task.name for task in benchmark.tasks),
        tuple(results),
        None if matrix is None else matrix.value,
        () if matrix is None else tuple(matrix.known),
    )


class _Sequence:
    """Trains the tasks that are left."""

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        benchmark: Benchmark,
        encoder: Encoder,
        head: Head,
        matrix: RunMatrix | None,
        tracker: Tracker,
        reading: Mapping[str, Any],
    ) -> None:
        self._config, self._run, self._benchmark = config, run, benchmark
        self._encoder, self._head, self._matrix, self._tracker = encoder, head, matrix, tracker
        self._classifier = Classifier(encoder, head).digest
        self._train = Decoded(encoder, benchmark.train, [k for task in benchmark.tasks for k in task.train], **reading)
        self._evaluator: Evaluator | None = None
        if matrix is not None:
            test = Decoded(encoder, benchmark.test, [k for task in benchmark.tasks for k in task.test], **reading)
            self._evaluator = task_evaluator(encoder, head, benchmark, test)

    def train(self, snapshot_seconds: float, watch: Watch | None) -> list[TaskResult | None]:
        """Trains them, and enters each into the run directory when it is complete."""
        first, tasks = len(self._run.tasks), self._benchmark.tasks
        # While the encoder still is the base.
        by_base = {t: self._embedded(tasks[t]) for t in range(first, len(tasks))}
        if self._matrix is not None and self._evaluator is not None and not first:
            self._matrix.start(self._evaluator.measure())
        trainer = Trainer(self._encoder, self._head, self._benchmark, self._config)
        if first:
            self._resume(trainer)
        results: list[TaskResult | None] = []
        for t in range(first, len(tasks)):
            inputs = self._train.take(tasks[t].train)
            result = self._train_task(t, trainer, inputs, snapshot_seconds, watch)
            digits = max(2, len(str(len(tasks))))
            checkpoint = self._run.empty_folder(f"task-{t + 1:0{digits}}")
            save_encoder(self._encoder, checkpoint)
            self._write_profile(tasks[t], inputs, by_base[t], checkpoint_digest(checkpoint))
            self._commit(t, checkpoint, trainer, result)
            results.append(result)
        return results

    def _train_task(
        self, t: int, trainer: Trainer, inputs: Prepared, snapshot_seconds: float, watch: Watch | None
    ) -> TaskResult:
        start = self._snapshot(t)
        self._tracker.rewind(t + 1, 0 if start is None else start.step)
        last = time.monotonic()

        def keep(step: int, state: Callable[[], Mapping[str, torch.Tensor]]) -> None:
            nonlocal last
            if time.monotonic() - last >= snapshot_seconds:
                self._run.save_state(SNAPSHOT, state(), {"task": str(t), "step": str(step)})
                last = time.monotonic()

        def record(tick: Tick) -> None:
            self._tracker.tick(tick)
            if watch is not None:
                watch(tick)

        return trainer.train(t, inputs, start=start, watch=record, keep=keep)

    def _snapshot(self, t: int) -> Snapshot | None:
        """Returns the snapshot of task t, if an interrupted call left one."""
        kept = self._run.load_state(SNAPSHOT)
        if kept is None or kept[1].get("task") != str(t):
            return None
        return Snapshot(int(kept[1]["step"]), kept[0])

    def _resume(self, trainer: Trainer) -> None:
        """Goes on from the last finished task: its weights, and the state of the regulariser then."""
        device = self._encoder.device
        last = load_encoder(self._run.tasks[-1], str(device), assets=self._run.base)
        self._encoder.module.load_state_dict(last.module.state_dict())
        kept = self._run.load_state(f"{REGULARISER}/{len(self._run.tasks) - 1}")
        if trainer.regulariser is not None and kept is not None:
            trainer.regulariser.restore({name: value.to(device) for name, value in kept[0].items()})

    def _commit(self, t: int, checkpoint: Path, trainer: Trainer, result: TaskResult) -> None:
        """Enters a finished task into the run: run.json last, because it says which tasks are finished."""
        task = self._benchmark.tasks[t]
        measured = None if self._evaluator is None else self._evaluator.measure()
        state = {} if trainer.regulariser is None else trainer.regulariser.state()
        if state:
            self._run.save_state(f"{REGULARISER}/{t}", state)
            # The state before this task is needed again if this call is killed now.
            self._run.drop_state(f"{REGULARISER}/{t - 2}")
        record: dict[str, Any] = {
            "task": t + 1,
            "name": task.name,
            "steps": result.steps,
            "samples": result.samples,
            "loss": result.loss,
            "seconds": round(result.seconds, 3),
        }
        if self._matrix is not None and measured is not None:
            self._matrix.add(t, measured)
            accuracies = {name: share.value for name, share in measured.by_task.items()}
            record["task_known_accuracy"] = or_null(self._matrix.known[t])
            record["accuracies"] = {name: or_null(value) for name, value in accuracies.items()}
            self._tracker.accuracies(t + 1, accuracies)
        self._tracker.write("task", **record)
        self._run.add_task(task.name, checkpoint, [self._benchmark.classes[k] for k in task.classes])
        self._run.drop_state(SNAPSHOT)

    # -- profiles --------------------------------------------------------------------------------------------------

    def _profiled(self, task: Task) -> Prepared:
        """Returns the samples of a task that its profile embeds."""
        rows = choose_rows(len(task.train), self._config.profile_rows, self._config.seed)
        return self._train.take([task.train[row] for row in rows])

    def _embedded(self, task: Task) -> Any:
        """Embeds the samples of a task's profile with the encoder as it is now."""
        return embed_prepared(self._encoder, self._profiled(task)).cpu().numpy()

    def _write_profile(self, task: Task, inputs: Prepared, by_base: Any, digest: str) -> None:
        rows = self._profiled(task).labels
        assert inputs.labels is not None
        assert rows is not None
        classes = self._benchmark.classes
        counts = tuple(torch.bincount(inputs.labels, minlength=len(classes)).tolist())
        profile = Profile(task.name, classes, counts, len(inputs), self._embedded(task), digest)
        # The encoder was loaded as the base, and keeps that digest.
        profile = profile.with_base(self._encoder.digest, by_base, rows.cpu().numpy())
        profile = profile.with_shares(self._classifier, self._head.classes, self._head.probabilities(by_base))
        profile.save(self._run.profile_path(task.name))


def _base_and_head(
    config: TrainConfig, run: Run, benchmark: Benchmark, device: str | None, reading: Mapping[str, Any]
) -> tuple[Encoder, Head]:
    """Returns base and head: made once, then read back from the run directory."""
    assert run.head is not None
    if not Run.has_begun(run.path):
        scratch = run.empty_folder("pretrained.partial")
        try:
            encoder = load_base(config, scratch, device, reading["progress"])
            positions = [k for task in benchmark.tasks for k in task.train]
            head = make_head(config, encoder, benchmark, Decoded(encoder, benchmark.train, positions, **reading))
            if config.text_tower == "drop":
                encoder = image_tower(encoder)
            trainable(encoder, config.train.freeze)  # a wrong pattern is reported before anything is written
            save_encoder(encoder, run.empty_folder(run.base.name))
            save_head(head, run.head)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return load_encoder(run.base, device), load_head(run.head)


def _setup(config: TrainConfig, encoder: Encoder, head: Head, benchmark: Benchmark) -> dict[str, Any]:
    """Returns what the run depends on: versions, seed, digests, and the facts of the data."""
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


# -- base and head ----------------------------------------------------------------------------------------------------


def load_base(
    config: TrainConfig, scratch: Path, device: str | None = None, progress: Progress | None = None
) -> Encoder:
    """Loads the pre-trained encoder that a configuration names; the built-in one is made in `scratch`."""
    if config.model == GLYPHS:
        glyph_base = imported("tunable_magmax.experiments.glyph_encoder:glyph_base")
        return load_encoder(glyph_base(scratch, seed=config.seed, progress=progress), device)
    return load_encoder(resolve_model(config.model, config.root), device)


def make_head(config: TrainConfig, encoder: Encoder, benchmark: Benchmark, decoded: Decoded) -> Head:
    """Makes the frozen head over all classes of the benchmark, in their order. `decoded`: the training data."""
    _require_kind(encoder, benchmark)
    options, classes = config.head, benchmark.classes
    source = _source(config, encoder)
    templates = options.templates or benchmark.prompts or "plain"
    if source == "file":
        assert options.file is not None
        head = load_head(config.root / options.file).select(classes)
    elif source == "glyphs":
        head = imported("tunable_magmax.experiments.glyph_encoder:glyph_head")(encoder, classes)
    elif source == "means":
        head = _mean_head(encoder, benchmark, decoded, config.seed)
    elif source == "text":
        head = text_head(encoder, classes, templates)
    else:
        head = name_head(encoder, classes, templates)
    if options.logit_scale is not None:
        head = replace(head, logit_scale=options.logit_scale)
    require_match(encoder, head)
    return head


def _require_kind(encoder: Encoder, benchmark: Benchmark) -> None:
    texts = encoder.tokenizer is not None and not encoder.is_whole
    if not (texts if benchmark.kind == "text" else encoder.image_processor is not None):
        wanted = "a sentence encoder" if benchmark.kind == "text" else "a model of images, such as CLIP, SigLIP or ViT"
        raise InputError(
            f"{benchmark.name} holds {benchmark.kind}s, which {encoder.path} ({encoder.family}) does not learn to "
            f"encode: choose {wanted}"
        )


def _source(config: TrainConfig, encoder: Encoder) -> str:
    if config.head.source != "auto":
        return config.head.source
    if config.head.file is not None:
        return "file"
    if config.model == GLYPHS:
        return "glyphs"
    if encoder.image_processor is not None and encoder.tokenizer is not None:
        return "text"
    return "means" if encoder.tokenizer is None else "names"


def _mean_head(encoder: Encoder, benchmark: Benchmark, decoded: Decoded, seed: int) -> Head:
    """Makes a head of class means: the base encoder embeds some training samples of each class."""
    labels: Any = benchmark.train.labels
    generator = torch.Generator().manual_seed(derived_seed(seed, "class means"))
    by_class: dict[int, list[int]] = {}
    for position in sorted({k for task in benchmark.tasks for k in task.train}):
        by_class.setdefault(labels[position], []).append(position)
    chosen: list[int] = []
    for positions in by_class.values():
        order = torch.randperm(len(positions), generator=generator)[:MEAN_SAMPLES].tolist()
        chosen += [positions[k] for k in order]
    inputs = decoded.take(sorted(chosen))
    return mean_head(embed_prepared(encoder, inputs), inputs.labels, benchmark.classes)
