"""Selects and saves what of an encoder is trained: the image tower of a two-tower model, all of any other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.files import write_folder
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.pretrained import load_module, put_companions, quiet, tensors_digest

if TYPE_CHECKING:
    from torch import nn

IMAGE_SIDE = ("vision_model.", "visual_projection.")


def image_tower(encoder: Encoder) -> Encoder:
    """Returns the image tower of a whole CLIP or SigLIP, with its own copy of the weights; other encoders as is.

    The tower embeds images exactly as the whole does. Its digest is that of the checkpoint it makes when it is saved.
    """
    if not encoder.is_whole:
        return encoder
    import transformers

    whole: Any = encoder.module
    config = copy.deepcopy(whole.config.vision_config)
    if encoder.family == "clip":
        config.projection_dim = whole.config.projection_dim  # the vision part may say something else
    named = "CLIPVisionModelWithProjection" if encoder.family == "clip" else "SiglipVisionModel"
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items() if name.startswith(IMAGE_SIDE)}
    module = load_module(getattr(transformers, named), config, state, encoder.path)
    module = module.to(encoder.device).train(whole.training)
    # Over the names that were loaded: transformers saves under these, whatever the module calls them.
    return replace(encoder, module=module, digest=tensors_digest(state), tokenizer=None, text_length=None)


def trainable(encoder: Encoder, freeze: Sequence[str] = ()) -> list[tuple[str, nn.Parameter]]:
    """Returns names and parameters to train, in the module's order; only these require gradients afterwards.

    All, on the image side where there are two towers, less what a pattern of `freeze` (as in a shell: `*`, `?`,
    `[...]`) matches. A pooler that is not used or a mask token get no gradient, so they stay as they are.
    """
    named = [
        (name, parameter)
        for name, parameter in encoder.module.named_parameters()
        if not encoder.is_whole or name.startswith(IMAGE_SIDE)
    ]
    names = [name for name, _ in named]
    idle = [pattern for pattern in freeze if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        shown = some_of(idle, show=lambda pattern: f"{pattern!r}{closest(pattern, names)}")
        raise InputError(
            f"nothing of {encoder.path} is called {shown}: patterns of what to freeze must match a parameter; it has "
            f"{len(names)}, such as {some_of(names, show=repr)}"
        )
    for parameter in encoder.module.parameters():
        parameter.requires_grad_(False)
    chosen = [(name, p) for name, p in named if not any(fnmatchcase(name, pattern) for pattern in freeze)]
    for _, parameter in chosen:
        parameter.requires_grad_(True)
    if not chosen:
        raise InputError(f"all {len(names)} parameters of {encoder.path} are frozen: nothing is left to train")
    return chosen


def save_encoder(encoder: Encoder, path: Path, classifier: Any = None) -> None:
    """Writes an encoder, or a classifier on it, as a directory that transformers and `load_encoder` read.

    config.json, model.safetensors in float32, and what prepares the inputs: completely or not at all.
    """

    def fill(folder: Path) -> None:
        model: Any = encoder.module if classifier is None else classifier
        with quiet():
            # transformers' own way, which gives tensors back the names that they were loaded with.
            model.save_pretrained(folder, max_shard_size="1000GB")
            put_companions(encoder.folders, folder, encoder.image_processor is not None, encoder.tokenizer is not None)

    write_folder(path, fill)
