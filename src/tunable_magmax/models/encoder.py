"""Loads, trains and saves encoders on transformers, which embed images or texts; each family has its own pooling.

| family (`model_type`) | embedding |
| --- | --- |
| CLIP, whole or its image tower with projection | projected pooled output, of images and (whole) of texts |
| SigLIP, whole or its image tower | pooled output, of images and (whole) of texts |
| any other image model, as ViT | pooled output; the first token's last state if the checkpoint has no pooler |
| any other text model, as BERT or MiniLM | mean of the last states over the tokens that are no padding |

Embeddings are raw: not normalised.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tunable_magmax.checkpoints.hub import located
from tunable_magmax.checkpoints.tensors import Signature, find_renaming
from tunable_magmax.errors import InputError, closest, required, some_of
from tunable_magmax.files import write_folder
from tunable_magmax.models.pretrained import (
    find_folders,
    first_line,
    load_image_processor,
    load_module,
    load_tokenizer,
    pools_first_token,
    put_companions,
    quiet,
    read_config,
    read_state,
    tensors_digest,
    text_length,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Pooling: TypeAlias = Literal["projected", "pooled", "first", "mean", "logits"]
WHOLE = ("clip", "siglip")
IMAGE_SIDE = ("vision_model.", "visual_projection.")


@dataclass(frozen=True, eq=False)
class Encoder:
    """A loaded encoder. `module` is the transformers model, `pooling` says how its output becomes an embedding.

    `pool(prepare_images(batch))` and `pool(prepare_texts(batch))` keep gradients; `prepared.embed_inputs` does not.
    `folders`: the directories of its configuration, image processor and tokenizer.
    """

    module: nn.Module
    pooling: Pooling
    dim: int
    digest: str
    path: Path
    image_processor: Any = None
    tokenizer: Any = None
    text_length: int | None = None
    folders: tuple[Path, ...] = ()

    @property
    def family(self) -> str:
        """ "clip" or "siglip" for whole models with two towers; else the model type."""
        module: Any = self.module
        return str(module.config.model_type)

    @property
    def is_whole(self) -> bool:
        """Returns whether this is a whole CLIP or SigLIP, with a text tower beside the image tower."""
        return self.family in WHOLE

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def picture_size(self) -> tuple[int, int] | None:
        """The height and width that the image processor makes of pictures before it crops them; None if it says none.

        A shortest edge counts as both.
        """
        size = getattr(self.image_processor, "size", None) or {}
        height, width = (size.get("shortest_edge") or size.get(name) for name in ("height", "width"))
        return (int(height), int(width)) if height and width else None

    def decode_images(self, images: Sequence[Any]) -> Tensor:
        """Makes pixels uint8 [n, 3, height, width] of PIL images, resized and cropped, on the processor."""
        if self.image_processor is None:
            raise InputError(f"{self.path} encodes texts, not images")
        with quiet():
            coloured = [image.convert("RGB") for image in images]
            made = self.image_processor(images=coloured, do_rescale=False, do_normalize=False, return_tensors="pt")
        pixels: Tensor = made["pixel_values"]
        return pixels.contiguous()

    def normalise(self, pixels: Tensor) -> Tensor:
        """Does what the image processor does after resizing: rescale to [0, 1] and normalise each channel."""
        processor = self.image_processor
        scaled = pixels.float() * (float(processor.rescale_factor) if getattr(processor, "do_rescale", True) else 1.0)
        if not getattr(processor, "do_normalize", True):
            return scaled
        mean, deviation = (scaled.new_tensor(v).view(1, -1, 1, 1) for v in (processor.image_mean, processor.image_std))
        return (scaled - mean) / deviation

    def prepare_images(self, images: Sequence[Any]) -> Tensor:
        """Makes pixel values [n, 3, height, width] of PIL images, on the module's device."""
        return self.normalise(self.decode_images(images).to(self.device))

    def prepare_texts(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Makes padded token ids of texts and, where the model takes one, the mask [n, tokens] of tokens to use."""
        if self.tokenizer is None:
            raise InputError(f"{self.path} encodes images, not texts")
        # SigLIP was trained on texts padded to full length, without a mask.
        full = self.family == "siglip"
        with quiet():
            tokens = self.tokenizer(
                list(texts),
                padding="max_length" if full else True,
                truncation=True,
                max_length=self.text_length,
                return_tensors="pt",
            )
        kept = ("input_ids",) if full else ("input_ids", "attention_mask")
        if not self.is_whole:
            kept = (*kept, "token_type_ids")
        return {name: tokens[name].to(self.device) for name in kept if name in tokens}

    def pool(self, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Returns embeddings [n, dim] of prepared inputs: a tensor is pixels, a mapping is tokens."""
        module: Any = self.module
        inputs = arguments(batch)
        texts = "input_ids" in inputs
        if self.is_whole:
            pooled: Tensor = (module.text_model if texts else module.vision_model)(**inputs).pooler_output
            if self.family != "clip":
                return pooled
            return (module.text_projection if texts else module.visual_projection)(pooled)  # type: ignore[no-any-return]
        output = module(**inputs)
        if self.pooling == "projected":
            return output.image_embeds  # type: ignore[no-any-return]
        if self.pooling == "pooled":
            return output.pooler_output.flatten(1)  # type: ignore[no-any-return]
        states: Tensor = output.last_hidden_state
        if self.pooling == "first":
            return states[:, 0]
        mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
        return (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def load_encoder(path: str | Path, device: str | None = None, *, assets: str | Path | None = None) -> Encoder:
    """Loads the encoder of a checkpoint: a directory with config.json and weights, or weights beside config.json.

    Configuration, image processor and tokenizer each come from the checkpoint's own directory if they are there, else
    from `assets`. Everything is computed in float32. `device`: by default the GPU if there is one.
    """
    transformers = required("transformers")
    path = located(path)
    folders = find_folders(path, assets)
    with quiet():
        config = read_config(folders[0])
        state, digest = read_state(path, assets)
        module = load_module(_model_class(transformers, config, state, folders[0]), config, state, path, "pooler")
        pooling: Pooling = "first" if getattr(module, "pooler", True) is None else "pooled"
        if config.model_type == "clip" or hasattr(module, "visual_projection"):
            pooling = "projected"
        elif module.main_input_name == "input_ids" and config.model_type not in WHOLE:
            pooling = "first" if pools_first_token(folders) else "mean"
        dim = int(config.projection_dim) if pooling == "projected" else _hidden_size(config, folders[0])
        return Encoder(module, pooling, dim, digest, path, **input_tools(module, path, folders, device))


def usable_device(name: str | None) -> str:
    """Returns the name of a device, by default of the GPU if there is one; refuses one that cannot be used."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used ({first_line(error)})") from None
    return name


def input_tools(module: Any, path: Path, folders: Sequence[Path], device: str | None) -> dict[str, Any]:
    """Moves a loaded model to its device; returns what prepares its inputs, from the first of `folders` that has it."""
    transformers = required("transformers")
    module.to(usable_device(device)).eval()
    whole = module.config.model_type in WHOLE
    images, texts = (whole or module.main_input_name == name for name in ("pixel_values", "input_ids"))
    if not images and not texts:
        raise InputError(f"{path}: {type(module).__name__} takes neither images nor texts")
    return {
        "image_processor": load_image_processor(transformers, folders) if images else None,
        "tokenizer": load_tokenizer(transformers, module.config, folders, required=not images) if texts else None,
        "text_length": text_length(module.config, folders) if texts else None,
        "folders": tuple(folders),
    }


def _model_class(transformers: Any, config: Any, state: Mapping[str, Any], home: Path) -> Any:
    if config.model_type == "clip_vision_model" and "visual_projection.weight" in state:
        return transformers.CLIPVisionModelWithProjection
    try:
        return transformers.AutoModel._model_mapping[type(config)]
    except KeyError:
        raise InputError(f"{home}: transformers has no encoder for the model type {config.model_type!r}") from None


def _hidden_size(config: Any, home: Path) -> int:
    sizes = getattr(getattr(config, "vision_config", config), "hidden_size", None)
    if sizes is None:
        sizes = (getattr(config, "hidden_sizes", None) or [None])[-1]
    if not isinstance(sizes, int):
        raise InputError(f"{home}: config.json does not say how wide the embeddings are (hidden_size)")
    return sizes


def arguments(batch: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns prepared inputs as a module takes them: a tensor is pixels, a mapping is tokens."""
    return batch if isinstance(batch, Mapping) else {"pixel_values": batch}


def put_weights(encoder: Encoder, state: Mapping[str, Tensor]) -> None:
    """Puts the tensors of a checkpoint into an encoder's module.

    Those of a model with a head are found under its prefix. Where that is not all, as with old names, a second module
    is made of the checkpoint by transformers, which knows all the rules.
    """
    module: Any = encoder.module
    own = module.state_dict()
    renaming = find_renaming(own, Signature({}, {name: name for name in state}))
    placed: dict[str, Any] = {name: state.get(renaming(name)) for name in own}
    if any(tensor is None or tensor.shape != own[name].shape for name, tensor in placed.items()):
        may_lack = "pooler" if getattr(module, "pooler", True) is None else ""
        placed = load_module(type(module), module.config, state, encoder.path, may_lack).state_dict()
    module.load_state_dict(placed)


# -- training and saving ----------------------------------------------------------------------------------------------


def image_tower(encoder: Encoder) -> Encoder:
    """Returns the image tower of a whole CLIP or SigLIP, with its own copy of the weights; other encoders as is.

    The tower embeds images exactly as the whole does. Its digest is that of the checkpoint it makes when it is saved.
    """
    if not encoder.is_whole:
        return encoder
    whole: Any = encoder.module
    config = copy.deepcopy(whole.config.vision_config)
    if encoder.family == "clip":
        config.projection_dim = whole.config.projection_dim  # the vision part may say something else
    named = "CLIPVisionModelWithProjection" if encoder.family == "clip" else "SiglipVisionModel"
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items() if name.startswith(IMAGE_SIDE)}
    module = load_module(getattr(required("transformers"), named), config, state, encoder.path)
    module = module.to(encoder.device).eval()
    # Over the names that were loaded: transformers saves under these, whatever the module calls them.
    return replace(encoder, module=module, digest=tensors_digest(state), tokenizer=None, text_length=None)


def trainable(encoder: Encoder, freeze: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    """Returns the parameters to train by name, in the module's order; only these require gradients afterwards.

    All, on the image side where there are two towers, less what a pattern of `freeze` (as in a shell: `*`, `?`,
    `[...]`) matches. A pooler that is not used or a mask token get no gradient, so they stay as they are.
    """
    named = dict(encoder.module.named_parameters())
    names = [name for name in named if not encoder.is_whole or name.startswith(IMAGE_SIDE)]
    idle = [pattern for pattern in freeze if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        shown = some_of(idle, show=lambda pattern: f"{pattern!r}{closest(pattern, names)}")
        raise InputError(
            f"nothing of {encoder.path} is called {shown}: patterns of what to freeze must match a parameter; it has "
            f"{len(names)}, such as {some_of(names, show=repr)}"
        )
    chosen = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in freeze)]
    if not chosen:
        raise InputError(f"all {len(names)} parameters of {encoder.path} are frozen: nothing is left to train")
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)
    return {name: named[name] for name in chosen}


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
