"""What an encoder is trained against: one frozen head over all classes, or a new classifier for each task."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunable_magmax.checkpoints.hub import located
from tunable_magmax.data.arrays import unit_rows
from tunable_magmax.data.benchmark import Benchmark
from tunable_magmax.data.data_sets import imported
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.encoder import Encoder, load_encoder
from tunable_magmax.models.head import Head, load_head, mean_head, name_head, require_match
from tunable_magmax.models.prepared import embed_prepared, prepare
from tunable_magmax.models.pretrained import first_line, quiet
from tunable_magmax.training.config import GLYPHS, TrainConfig

# Of each class, for class means; more would hardly move them.
MEAN_SAMPLES = 200


def load_base(
    config: TrainConfig, benchmark: Benchmark, scratch: Path, device: str | None, progress: Progress | None
) -> Encoder:
    """Loads the pre-trained encoder that a configuration names; the built-in one is made in `scratch`."""
    if config.model == GLYPHS:
        glyph_base = imported("tunable_magmax.experiments.glyph_encoder:glyph_base")
        encoder = load_encoder(glyph_base(scratch, seed=config.seed, progress=progress), device)
    else:
        encoder = load_encoder(located(Path(config.model).expanduser(), config.root), device)
    texts = encoder.tokenizer is not None and not encoder.is_whole
    if not (texts if benchmark.kind == "text" else encoder.image_processor is not None):
        wanted = "a sentence encoder" if benchmark.kind == "text" else "a model of images, such as CLIP, SigLIP or ViT"
        raise InputError(
            f"{benchmark.name} holds {benchmark.kind}s, which {encoder.path} ({encoder.family}) does not learn to "
            f"encode: choose {wanted}"
        )
    return encoder


def make_head(config: TrainConfig, encoder: Encoder, benchmark: Benchmark, progress: Progress | None) -> Head:
    """Makes the frozen head over all classes of the benchmark, in their order."""
    options, classes = config.head, benchmark.classes
    source = _source(config, encoder)
    templates = options.templates or benchmark.prompts or "plain"
    if source == "file":
        assert options.file is not None
        head = load_head(config.root / options.file).select(classes)
    elif source == "glyphs":
        head = imported("tunable_magmax.experiments.glyph_encoder:glyph_head")(encoder, classes)
    elif source == "means":
        head = _mean_head(encoder, benchmark, config.seed, progress)
    else:
        head = name_head(encoder, classes, templates)
    if options.logit_scale is not None:
        head = Head.of(unit_rows(head.weight), classes, options.logit_scale, head.bias)
    require_match(encoder, head)
    return head


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


def _mean_head(encoder: Encoder, benchmark: Benchmark, seed: int, progress: Progress | None) -> Head:
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
    inputs = prepare(encoder, benchmark.train, sorted(chosen), progress=progress)
    return mean_head(embed_prepared(encoder, inputs), inputs.labels, benchmark.classes)


# -- a new classifier for each task -----------------------------------------------------------------------------------


def new_classifier(base: Encoder, inner: Mapping[str, Tensor], classes: Sequence[str], seed: int) -> Any:
    """Makes a classifier of transformers over some classes: the encoder's tensors `inner`, all else new, by a seed.

    New are the classifier and, where `inner` has none and the architecture wants one, the pooler.
    """
    config: Any = copy.deepcopy(base.module.config)
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: k for k, name in enumerate(classes)}
    config.problem_type = "single_label_classification"  # also where there is but one class
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module: Any = _auto_class(base).from_config(config)
        except ValueError as error:
            raise InputError(f"{base.path}: head.source is 'builtin', but {first_line(error)}") from None
    missing = sorted(module.base_model.load_state_dict(inner, strict=False).missing_keys)
    lacking = [name for name in missing if "pooler" not in name.split(".")]
    if lacking:
        raise InputError(
            f"{base.path}: head.source is 'builtin', but {type(module).__name__} does not begin with this encoder: it "
            f"lacks {len(lacking)} tensors, first {lacking[0]!r}; choose a BERT-like encoder of texts, or a ViT or DeiT"
        )
    return module.to(base.device)


def read_classifier(base: Encoder, path: Path) -> dict[str, Tensor]:
    """Returns the encoder's tensors in a classifier that `new_classifier` made and that was saved."""
    with quiet():
        module: Any = _auto_class(base).from_pretrained(path, local_files_only=True)
    tensors: dict[str, Tensor] = module.base_model.state_dict()
    return tensors


def _auto_class(base: Encoder) -> Any:
    import transformers

    kind = "Sequence" if base.tokenizer is not None else "Image"
    return getattr(transformers, f"AutoModelFor{kind}Classification")
