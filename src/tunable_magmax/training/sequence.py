"""`train_sequence`: trains the tasks of a configuration one after the other into a run directory."""

from __future__ import annotations

import copy
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch.nn.functional import normalize

from tunable_magmax.data.arrays import limited, unit_rows
from tunable_magmax.data.benchmark import Benchmark, open_benchmark
from tunable_magmax.errors import InputError, required
from tunable_magmax.files import Progress
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.encoder import Encoder, arguments, image_tower, load_encoder, save_encoder, trainable
from tunable_magmax.models.head import Head, load_head, mean_head, name_head, require_match, save_head
from tunable_magmax.models.prepared import embed_prepared, prepare, profile_task
from tunable_magmax.models.pretrained import first_line, quiet
from tunable_magmax.runs.run import Run
from tunable_magmax.training.config import GLYPHS, TrainConfig
from tunable_magmax.training.loop import Learner, TaskResult, train_task
from tunable_magmax.version import __version__

TEMPLATES = ("cifar100", "imagenet-r", "clinc150")
"""Data sets whose class names have a set of templates of their own (`models/head.py`)."""
MEAN_SAMPLES = 200
"""Samples of each class for class means; more would hardly move them."""


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
        run.check_setup(_setup(base, head, benchmark))
        for t in range(finished, len(tasks)):
            _train(t, config, run, benchmark, base, head, progress)
        results = tuple(TaskResult(**task.training) for task in run.record.tasks if task.training is not None)
    return TrainedRun(run.path, tuple(task.name for task in tasks), results, len(tasks) - finished)


def _train(
    t: int,
    config: TrainConfig,
    run: Run,
    benchmark: Benchmark,
    base: Encoder,
    head: Head | None,
    progress: Progress | None,
) -> None:
    """Trains task t (from 0) from where the one before ended, and enters it into the run when it is complete."""
    task, count, seed = benchmark.tasks[t], len(benchmark.tasks), config.seed
    steps = [config.train.task_steps(len(each.train)) for each in benchmark.tasks]
    names = [benchmark.classes[k] for k in task.classes]

    def report(done: int) -> None:
        if progress is not None:
            progress("train", sum(steps[:t]) + done, sum(steps))

    inputs = prepare(base, benchmark.train, task.train, progress=progress)
    labels = benchmark.train.require_labels()
    targets = torch.tensor([task.classes.index(labels[k]) for k in inputs.positions], device=inputs.device)
    encoder = load_encoder((run.base, *run.tasks)[-1], str(base.device), assets=run.base)
    if head is None:
        module = _new_classifier(encoder, names, derived_seed(seed, "classifier", t))
        learner = Learner(module, lambda batch: module(**arguments(batch)).logits, torch.Tensor.float)
    else:
        trainable(encoder, config.train.freeze)
        rows = torch.from_numpy(head.select(names).weight).to(encoder.device)
        learner = Learner(encoder.module, encoder.pool, lambda pooled: normalize(pooled, dim=1) @ rows.T)
    result = train_task(learner, inputs, targets, config.train, seed=seed, task=t, report=report)
    checkpoint = run.path / f"task-{t + 1:0{max(2, len(str(count)))}}"
    save_encoder(base, checkpoint, learner.module)
    samples = benchmark.train.subset(inputs.positions)  # those that can be read
    held = benchmark.train.subset(task.held) if task.held else None
    encoder = load_encoder(checkpoint, str(base.device), assets=run.base)
    facts = profile_task(run, task.name, encoder, base, samples, held, keep=config.keep, seed=seed)
    run.enter(task.name, checkpoint, **facts, classes=tuple(names), training=asdict(result))
    run.save()  # last: run.json says what is finished


# -- base and head -----------------------------------------------------------------------------------------------------


def _base_and_head(
    config: TrainConfig, run: Run, benchmark: Benchmark, device: str | None, progress: Progress | None
) -> tuple[Encoder, Head | None]:
    """Returns base and head, if there is one: made once, the base last, then read back from the run directory."""
    if not run.base.exists():
        with tempfile.TemporaryDirectory() as scratch:
            model: str | Path = config.model
            if model == GLYPHS:
                glyph_base = resolve_name("tunable_magmax.experiments.glyph_encoder:glyph_base")
                model = glyph_base(scratch, seed=config.seed, progress=progress)
            encoder = load_encoder(model, device)
            trained = image_tower(encoder) if run.head is not None else encoder
            # What does not fit is told before anything is written.
            kind = benchmark.train.kind
            if (trained.tokenizer if kind == "text" else trained.image_processor) is None:
                raise InputError(f"{benchmark.name} holds {kind}s, which {model} does not learn to encode")
            if run.head is None:
                _new_classifier(trained, ["any"], 0)
            else:
                head = _make_head(config, encoder, benchmark, progress)
                trainable(trained, config.train.freeze)
                save_head(head, run.head)
            save_encoder(trained, run.base)
    return load_encoder(run.base, device), None if run.head is None else load_head(run.head)


def _make_head(config: TrainConfig, encoder: Encoder, benchmark: Benchmark, progress: Progress | None) -> Head:
    """Makes the frozen head over all classes of the benchmark, in their order."""
    options, classes, samples = config.head, benchmark.classes, benchmark.train
    labels = samples.require_labels()
    if options.file is not None:
        head = load_head(options.file).select(classes)
    elif options.source == "glyphs" or (options.source == "auto" and config.model == GLYPHS):
        head = resolve_name("tunable_magmax.experiments.glyph_encoder:glyph_head")(encoder, classes)
    elif options.source == "means" or (options.source == "auto" and encoder.tokenizer is None):
        positions = [position for task in benchmark.tasks for position in task.train]
        inputs = prepare(encoder, samples, limited(positions, labels, MEAN_SAMPLES, config.seed), progress=progress)
        head = mean_head(embed_prepared(encoder, inputs), [labels[k] for k in inputs.positions], classes)
    else:
        suiting = benchmark.name if benchmark.name in TEMPLATES else "plain"
        head = name_head(encoder, classes, options.templates or suiting)
    if options.logit_scale is not None:
        head = Head.of(unit_rows(head.weight), classes, options.logit_scale, head.bias)
    require_match(encoder, head)
    return head


def _setup(base: Encoder, head: Head | None, benchmark: Benchmark) -> dict[str, Any]:
    """Returns what the run depends on: versions, digests, and the facts of the data."""
    return {
        "device": "cpu" if base.device.type == "cpu" else torch.cuda.get_device_name(base.device),
        "versions": {
            "tunable_magmax": __version__,
            "torch": str(torch.__version__),
            "transformers": required("transformers").__version__,
            "python": platform.python_version(),
        },
        "digests": {"base": base.digest, **({} if head is None else {"head": head.digest})},
        "benchmark": benchmark.facts,
    }


# -- a new classifier for each task -----------------------------------------------------------------------------------


def _new_classifier(encoder: Encoder, classes: Sequence[str], seed: int) -> Any:
    """Makes a classifier of transformers over some classes: the encoder's tensors, all else new, by a seed.

    New are the classifier and, where the encoder has none and the architecture wants one, the pooler.
    """
    config: Any = copy.deepcopy(encoder.module.config)
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: k for k, name in enumerate(classes)}
    config.problem_type = "single_label_classification"  # also where there is but one class
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            kind = "Sequence" if encoder.tokenizer is not None else "Image"
            module: Any = getattr(required("transformers"), f"AutoModelFor{kind}Classification").from_config(config)
        except ValueError as error:
            raise InputError(f"{encoder.path}: head.source is 'builtin', but {first_line(error)}") from None
    missing = sorted(module.base_model.load_state_dict(encoder.module.state_dict(), strict=False).missing_keys)
    lacking = [name for name in missing if "pooler" not in name.split(".")]
    if lacking:
        raise InputError(
            f"{encoder.path}: head.source is 'builtin', but {type(module).__name__} does not begin with this encoder: "
            f"it lacks {len(lacking)} tensors, first {lacking[0]!r}; choose an encoder such as BERT, ViT or DeiT"
        )
    return module.to(encoder.device)
