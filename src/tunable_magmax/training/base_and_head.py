"""Where a sequence starts: the base encoder as it will be trained, and the frozen head over all classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import Progress
from tunable_magmax.lottery import derived_seed
from tunable_magmax.training.config import GLYPHS, HeadOptions, TrainConfig

if TYPE_CHECKING:
    from tunable_magmax.data.benchmark import Benchmark
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head
    from tunable_magmax.models.prepared import Decoded

# Of each class, for class means; more would hardly move them.
MEAN_SAMPLES = 200


def load_base(
    config: TrainConfig, scratch: Path, device: str | None = None, progress: Progress | None = None
) -> Encoder:
    """Loads the pre-trained encoder that a configuration names; the built-in one is made in `scratch`."""
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.hub import resolve_model

    if config.model == GLYPHS:
        from tunable_magmax.models.glyph_encoder import glyph_base

        return load_encoder(glyph_base(scratch, seed=config.seed, progress=progress), device)
    return load_encoder(resolve_model(config.model, config.root), device)


def make_head(config: TrainConfig, encoder: Encoder, benchmark: Benchmark, decoded: Decoded) -> Head:
    """Makes the frozen head over all classes of the benchmark, in their order. `decoded`: the training data."""
    from tunable_magmax.models import head as heads
    from tunable_magmax.models.head import load_head, require_match
    from tunable_magmax.models.prompts import read_templates

    _require_kind(encoder, benchmark)
    options = config.head
    source = _source(config, encoder)
    if source == "file":
        assert options.file is not None
        head = load_head(config.root / options.file).select(benchmark.classes)
    elif source == "glyphs":
        from tunable_magmax.models.glyph_encoder import glyph_head

        head = glyph_head(encoder, benchmark.classes)
    elif source == "means":
        head = _mean_head(encoder, benchmark, decoded, options.logit_scale or heads.SCALE, config.seed)
    else:
        prompts = read_templates(options.templates or benchmark.prompts or "plain")
        if source == "text":
            head = heads.text_head(encoder, benchmark.classes, prompts)
        else:
            head = heads.name_head(encoder, benchmark.classes, prompts, options.logit_scale or heads.SCALE)
    if options.logit_scale is not None:
        from dataclasses import replace

        head = replace(head, logit_scale=options.logit_scale)
    require_match(encoder, head)
    return head


def _require_kind(encoder: Encoder, benchmark: Benchmark) -> None:
    if benchmark.kind == "image" and encoder.image_processor is None:
        raise InputError(
            f"{benchmark.name} holds images, but {encoder.path} ({encoder.family}) encodes texts: choose a model of "
            "images, such as CLIP, SigLIP or ViT"
        )
    if benchmark.kind == "text" and (encoder.tokenizer is None or encoder.is_whole):
        raise InputError(
            f"{benchmark.name} holds texts, but of {encoder.path} ({encoder.family}) what encodes images is trained: "
            "choose a sentence encoder"
        )


def _source(config: TrainConfig, encoder: Encoder) -> str:
    options: HeadOptions = config.head
    if options.source != "auto":
        return options.source
    if options.file is not None:
        return "file"
    if config.model == GLYPHS:
        return "glyphs"
    if encoder.image_processor is not None and encoder.tokenizer is not None:
        return "text"
    return "means" if encoder.tokenizer is None else "names"


def _mean_head(encoder: Encoder, benchmark: Benchmark, decoded: Decoded, logit_scale: float, seed: int) -> Head:
    """Makes a head of class means: the base encoder embeds some training samples of each class."""
    import torch

    from tunable_magmax.models.head import mean_head
    from tunable_magmax.models.prepared import embed_prepared

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
    assert inputs.labels is not None
    readable = set(inputs.labels.tolist())
    missing = [name for k, name in enumerate(benchmark.classes) if k not in readable]
    if missing:
        raise InputError(
            f"head.source is 'means', but there is no readable training sample of {some_of(missing, show=repr)}; "
            "give a head.file, or leave these classes out"
        )
    features = embed_prepared(encoder, inputs).cpu().numpy()
    return mean_head(features, inputs.labels.cpu().numpy(), benchmark.classes, logit_scale)
