"""Encoders on transformers: images or texts -> embeddings, one rule of pooling for each family of models.

| family (`model_type`) | embedding |
| --- | --- |
| CLIP, whole or its image tower with projection | projected pooled output, of images and (whole) of texts |
| SigLIP, whole or its image tower | pooled output, of images and (whole) of texts |
| any other image model, as ViT | pooled output; the first token's last state if the checkpoint has no pooler |
| any other text model, as BERT or MiniLM | mean of the last states over the tokens that are no padding |

Embeddings are raw: not normalised.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tunable_magmax.errors import InputError
from tunable_magmax.models.state import read_state

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

Pooling: TypeAlias = Literal["projected", "pooled", "first", "mean"]
BATCH = 64
PROCESSOR_FILE = "preprocessor_config.json"
VOCABULARIES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)


@dataclass(frozen=True, eq=False)
class Encoder:
    """A loaded encoder. `module` is the transformers model, `pooling` says how its output becomes an embedding.

    To train: `pool_images(prepare_images(batch))` and `pool_texts(prepare_texts(batch))` keep gradients. To use:
    `embed_images` and `embed_texts`, which do not.
    """

    module: nn.Module
    pooling: Pooling
    dim: int
    digest: str
    path: Path
    image_processor: Any = None
    tokenizer: Any = None
    text_length: int | None = None

    # -- differentiable parts --------------------------------------------------------------------------------------

    def prepare_images(self, images: Sequence[Any]) -> Tensor:
        """PIL images as pixel values [n, 3, height, width] on the module's device."""
        if self.image_processor is None:
            raise InputError(f"{self.path} encodes texts, not images")
        with _quiet():
            coloured = [image.convert("RGB") for image in images]
            pixels: Tensor = self.image_processor(images=coloured, return_tensors="pt")["pixel_values"]
        return pixels.to(self._device())

    def prepare_texts(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Texts as padded token ids and, where the model takes one, the mask [n, tokens] of what is no padding."""
        if self.tokenizer is None:
            raise InputError(f"{self.path} encodes images, not texts")
        # SigLIP was trained on texts padded to full length, without a mask.
        whole = _family(self.module) == "siglip"
        with _quiet():
            tokens = self.tokenizer(
                list(texts),
                padding="max_length" if whole else True,
                truncation=True,
                max_length=self.text_length,
                return_tensors="pt",
            )
        kept = ("input_ids",) if whole else ("input_ids", "attention_mask", "token_type_ids")
        return {name: tokens[name].to(self._device()) for name in kept if name in tokens}

    def pool_images(self, pixels: Tensor) -> Tensor:
        """Embeddings [n, dim] of pixel values."""
        module: Any = self.module
        family = _family(module)
        if family in ("clip", "siglip"):
            pooled: Tensor = module.vision_model(pixel_values=pixels).pooler_output
            return _tensor(module.visual_projection(pooled)) if family == "clip" else pooled
        output = module(pixel_values=pixels)
        if self.pooling == "projected":
            return _tensor(output.image_embeds)
        if self.pooling == "first":
            return _tensor(output.last_hidden_state[:, 0])
        return _tensor(output.pooler_output).flatten(1)

    def pool_texts(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Embeddings [n, dim] of tokens."""
        module: Any = self.module
        family = _family(module)
        if family in ("clip", "siglip"):
            pooled: Tensor = module.text_model(**tokens).pooler_output
            return _tensor(module.text_projection(pooled)) if family == "clip" else pooled
        states: Tensor = module(**tokens).last_hidden_state
        if self.pooling == "first":
            return states[:, 0]
        mask = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
        return (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)

    # -- without gradients -----------------------------------------------------------------------------------------

    def embed_images(self, images: Sequence[Any], batch: int = BATCH) -> NDArray[np.float32]:
        """Embeddings [n, dim] of PIL images."""
        return self._embed(images, batch, lambda part: self.pool_images(self.prepare_images(part)))

    def embed_texts(self, texts: Sequence[str], batch: int = BATCH) -> NDArray[np.float32]:
        """Embeddings [n, dim] of texts."""
        return self._embed(texts, batch, lambda part: self.pool_texts(self.prepare_texts(part)))

    def embed(self, inputs: Sequence[Any], batch: int = BATCH) -> NDArray[np.float32]:
        """Embeddings [n, dim] of inputs that are all texts or all images."""
        if inputs and isinstance(inputs[0], str):
            return self.embed_texts(inputs, batch)
        return self.embed_images(inputs, batch)

    def _embed(
        self, inputs: Sequence[Any], batch: int, encode: Callable[[Sequence[Any]], Tensor]
    ) -> NDArray[np.float32]:
        import numpy as np
        import torch

        training = self.module.training
        self.module.eval()
        try:
            with torch.inference_mode():
                parts = [
                    encode(inputs[start : start + batch]).float().cpu().numpy()
                    for start in range(0, len(inputs), batch)
                ]
        finally:
            self.module.train(training)
        rows: NDArray[np.float32] = np.concatenate(parts) if parts else np.zeros((0, self.dim), np.float32)
        if rows.shape[1] != self.dim:
            raise InputError(f"{self.path}: embeddings have width {rows.shape[1]}, its configuration says {self.dim}")
        return rows

    def _device(self) -> Any:
        return next(self.module.parameters()).device


def load_encoder(path: str | Path, device: str | None = None, *, assets: str | Path | None = None) -> Encoder:
    """Load the encoder of a checkpoint: a directory with config.json and weights, or a weights file beside config.json.

    Configuration, image processor and tokenizer each come from the checkpoint's own directory if they are there, else
    from `assets`. Everything is computed in float32. `device`: by default the GPU if there is one.
    """
    try:
        import torch
        import transformers
    except ImportError:
        raise InputError('encoders need transformers: pip install "tunable-magmax[train]"') from None
    path = Path(path)
    homes = _homes(path, None if assets is None else Path(assets))
    home = homes[0]
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with _quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(home, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{home}: its config.json cannot be used ({_first_line(error)})") from None
        state, digest = read_state(path)
        model_class = _model_class(transformers, config, state, home)
        module, missing = _filled(model_class, config, state, path)
        try:
            module = module.to(where).eval()
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"device {where!r} cannot be used ({_first_line(error)})") from None
        images = _family(module) in ("clip", "siglip") or module.main_input_name == "pixel_values"
        texts = _family(module) in ("clip", "siglip") or module.main_input_name == "input_ids"
        if not images and not texts:
            raise InputError(f"{path}: {model_class.__name__} takes neither images nor texts")
        return Encoder(
            module=module,
            pooling=_pooling(module, images, missing, homes),
            dim=_width(module, config, home),
            digest=digest,
            path=path,
            image_processor=_image_processor(transformers, homes) if images else None,
            tokenizer=_tokenizer(transformers, homes, required=not images) if texts else None,
            text_length=_text_length(config, homes) if texts else None,
        )


def _homes(path: Path, assets: Path | None) -> list[Path]:
    """Directories in which to look for config.json, image processor and tokenizer; the first has a config.json."""
    tried = [path if path.is_dir() else path.parent]
    if assets is not None:
        tried.append(assets if assets.is_dir() else assets.parent)
    if any((folder / "config.json").is_file() for folder in tried):
        return tried if (tried[0] / "config.json").is_file() else tried[1:]
    if not path.exists():
        raise InputError(f"{path} does not exist: give a checkpoint file or a directory that holds one")
    raise InputError(
        f"{' and '.join(map(str, dict.fromkeys(tried)))}: no config.json, so the model's architecture is unknown; put "
        "the model's config.json (and its processor or tokenizer files) beside the weights, or give ready features"
    )


def _holding(homes: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first directory that holds one of these files."""
    return next((home for home in homes if any((home / name).is_file() for name in names)), None)


def _model_class(transformers: Any, config: Any, state: Mapping[str, Any], home: Path) -> Any:
    named = {
        "clip": "CLIPModel",
        "siglip": "SiglipModel",
        "clip_vision_model": "CLIPVisionModelWithProjection"
        if "visual_projection.weight" in state
        else "CLIPVisionModel",
    }.get(config.model_type)
    if named is not None:
        return getattr(transformers, named)
    try:
        return transformers.AutoModel._model_mapping[type(config)]
    except KeyError:
        raise InputError(f"{home}: transformers has no encoder for the model type {config.model_type!r}") from None


def _filled(model_class: Any, config: Any, state: dict[str, Tensor], path: Path) -> tuple[Any, list[str]]:
    """The model with the checkpoint's weights, and which of its pooler's weights the checkpoint lacks."""
    import torch
    import transformers

    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    kind = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    options: dict[str, Any] = {kind: torch.float32, "state_dict": wide, "output_loading_info": True}
    try:
        module, told = model_class.from_pretrained(None, config=config, **options)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"{path}: its tensors do not fit {model_class.__name__} ({_first_line(error)})") from None
    if told.get("mismatched_keys"):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in told["mismatched_keys"])
        raise InputError(f"{path}: {len(names)} tensors have another shape than config.json says, first {names[0]!r}")
    missing = sorted(told["missing_keys"])
    needed = [name for name in missing if not name.startswith("pooler.")]
    if needed:
        raise InputError(
            f"{path}: the weights lack {len(needed)} tensors of {model_class.__name__}, first {needed[0]!r}; they "
            "belong to another architecture than config.json says"
        )
    return module, missing


def _pooling(module: Any, images: bool, missing: Sequence[str], homes: Sequence[Path]) -> Pooling:
    if _family(module) == "clip" or hasattr(module, "visual_projection"):
        return "projected"
    if images:
        lacks_pooler = any(name.startswith("pooler.") for name in missing)
        return "first" if lacks_pooler or getattr(module, "pooler", True) is None else "pooled"
    told = _json(homes, "1_Pooling/config.json")
    return "first" if told.get("pooling_mode_cls_token") is True else "mean"


def _width(module: Any, config: Any, home: Path) -> int:
    if _family(module) == "clip" or hasattr(module, "visual_projection"):
        return int(config.projection_dim)
    sizes = getattr(getattr(config, "vision_config", config), "hidden_size", None)
    if sizes is None:
        sizes = (getattr(config, "hidden_sizes", None) or [None])[-1]
    if not isinstance(sizes, int):
        raise InputError(f"{home}: config.json does not say how wide the embeddings are (hidden_size)")
    return sizes


def _image_processor(transformers: Any, homes: Sequence[Path]) -> Any:
    home = _holding(homes, (PROCESSOR_FILE, "processor_config.json"))
    if home is None:
        raise InputError(f"{homes[0]}: no {PROCESSOR_FILE}, which says how images are resized and normalised; add it")
    # Pillow's resizing wherever there is a choice: embeddings must not depend on what else is installed.
    options = {"backend": "pil"} if int(transformers.__version__.split(".")[0]) >= 5 else {"use_fast": False}
    try:
        return transformers.AutoImageProcessor.from_pretrained(home, local_files_only=True, **options)
    except ImportError:
        raise InputError('images need pillow: pip install "tunable-magmax[train]"') from None
    except (OSError, ValueError) as error:
        raise InputError(f"{home}: the image processor cannot be loaded ({_first_line(error)})") from None


def _tokenizer(transformers: Any, homes: Sequence[Path], required: bool) -> Any:
    # Without any of these, transformers makes an empty tokenizer and says nothing.
    home = _holding(homes, VOCABULARIES)
    if home is None:
        if not required:
            return None
        raise InputError(f"{homes[0]}: no tokenizer; add its files: {', '.join(VOCABULARIES)}, as the model has them")
    try:
        return transformers.AutoTokenizer.from_pretrained(home, local_files_only=True)
    except (OSError, ValueError, ImportError, AttributeError, TypeError, KeyError) as error:
        if not required:
            return None
        raise InputError(f"{home}: the tokenizer cannot be loaded ({_first_line(error)}); add its files") from None


def _text_length(config: Any, homes: Sequence[Path]) -> int:
    text = getattr(config, "text_config", config)
    longest = int(getattr(text, "max_position_embeddings", 512))
    if text.model_type in ("roberta", "xlm-roberta", "mpnet"):
        longest -= 2  # their positions start behind the padding's
    told = _json(homes, "sentence_bert_config.json").get("max_seq_length")
    return min(longest, told) if isinstance(told, int) and told > 0 else longest


def _family(module: Any) -> str:
    """ "clip" or "siglip" for whole models with two towers; else the model type."""
    return str(module.config.model_type)


def _tensor(value: Any) -> Tensor:
    found: Tensor = value
    return found


def _json(homes: Sequence[Path], name: str) -> dict[str, Any]:
    home = _holding(homes, [name])
    try:
        found = {} if home is None else json.loads((home / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and load reports of transformers: what matters is raised as an error here."""
    from importlib import import_module

    chatter: Any = import_module("transformers.utils.logging")

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity(logging.CRITICAL)
    chatter.disable_progress_bar()
    try:
        yield
    finally:
        chatter.set_verbosity(level)
        if bars:
            chatter.enable_progress_bar()
