"""Reads the tensors of checkpoints, and loads models of transformers and the files beside their weights."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.checkpoint import Checkpoint, read_tensor
from tunable_magmax.checkpoints.hub import located
from tunable_magmax.checkpoints.source import as_checkpoint, holds_adapter, open_checkpoint
from tunable_magmax.checkpoints.tensors import Signature, dtype_code, torch_dtype
from tunable_magmax.errors import InputError, required
from tunable_magmax.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.checkpoints.adapter import Adapter


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of tensors in sorted order of names: the same however a checkpoint of them is sharded.

    >>> import torch
    >>> tensors_digest({"w": torch.tensor([1.0, 2.0])})[:15]
    'sha256:9ed77913'
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(f"{name}\n{dtype_code(tensor.dtype)}\n{','.join(map(str, tensor.shape))}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def read_state(path: str | Path, base: str | Path | None = None) -> tuple[dict[str, Tensor], str]:
    """Reads all tensors of a checkpoint, or of an adapter on `base`, tied names included; and their digest."""
    state, aliases = _read(Path(path), base)
    return state, tensors_digest({name: tensor for name, tensor in state.items() if name not in aliases})


def read_tensors(path: str | Path, base: str | Path | None = None) -> dict[str, Tensor]:
    """Reads all tensors of a checkpoint, or of an adapter on `base`, tied names included."""
    return _read(Path(path), base)[0]


def _read(path: Path, base: str | Path | None) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Returns the tensors, and the names that are tied to one of these."""
    adapted = holds_adapter(path)
    if adapted and base is None:
        raise InputError(f"{path} is a LoRA adapter, which has no values without its base: {as_checkpoint(path)}")
    with open_checkpoint(path if base is None or not adapted else base) as opened:
        state = tensors_of(opened)
        if adapted:
            from tunable_magmax.checkpoints.adapter import Adapter

            with Adapter(path, Signature(opened.tensors, opened.aliases)) as adapter:
                state = tensors_of(adapter, state)
        return state, opened.aliases


def tensors_of(
    opened: Checkpoint | Adapter, base: Mapping[str, Tensor] = {}, without: Collection[str] = ()
) -> dict[str, Tensor]:
    """Returns the tensors of an open checkpoint, or of an adapter on those of its base; tied names included."""
    if isinstance(opened, Checkpoint):
        state = {name: read_tensor(opened, name) for name in opened.tensors if name not in without}
    else:
        state = {**base, **_adapted(opened, base)}
    return state | {alias: state[kept] for alias, kept in opened.aliases.items() if kept in state}


def _adapted(adapter: Adapter, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that an adapter changes: base + scaling * B @ A, or what it holds in the base's place."""
    found = {}
    for name, part in adapter.parts.items():
        whole = base[name] if part.whole is None else read_tensor(adapter.stored, part.whole.name)
        if part.product is not None:
            a, b = (read_tensor(adapter.stored, info.name).double() for info in (part.product.a, part.product.b))
            step = part.product.scaling * (b @ a)
            whole = (whole.double() + (step.T if part.product.transposed else step)).to(
                torch_dtype(adapter.tensors[name].dtype)
            )
        found[name] = whole
    return found


# -- transformers -----------------------------------------------------------------------------------------------------


def read_config(home: Path) -> Any:
    """Reads a model's config.json by transformers."""
    try:
        config = required("transformers").AutoConfig.from_pretrained(home, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{home}: its config.json cannot be used ({first_line(error)})") from None
    config._name_or_path = ""  # older versions of transformers would save the path of this machine with the model
    return config


def load_module(model_class: Any, config: Any, state: Mapping[str, Tensor], path: Path, may_lack: str = "") -> Any:
    """Makes a model of a checkpoint's tensors in float32, all of which must be there, or be of the part `may_lack`.

    transformers knows all the rules by which names of older checkpoints and of those with a head become today's. A part
    that is missing is taken out: it would be made up from random numbers, which must be neither used nor trained nor
    saved. (Classifiers and masked language models are saved without a pooler.)
    """
    import torch

    kind = "dtype" if major_version(required("transformers")) >= 5 else "torch_dtype"
    options: dict[str, Any] = {kind: torch.float32, "output_loading_info": True}
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    try:
        with quiet():
            module, report = model_class.from_pretrained(None, config=config, state_dict=wide, **options)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"{path}: its tensors do not fit {model_class.__name__} ({first_line(error)})") from None
    missing = sorted(report["missing_keys"])
    wrong = [name for name in missing if may_lack not in name.split(".")]
    wrong += sorted(str(key[0] if isinstance(key, tuple) else key) for key in report.get("mismatched_keys", ()))
    if wrong:
        raise InputError(
            f"{path}: {len(wrong)} tensors of {model_class.__name__} are missing or have another shape, first "
            f"{wrong[0]!r}; the weights belong to another architecture than config.json says"
        )
    if missing:
        setattr(module, may_lack, None)
    return module


def major_version(transformers: Any) -> int:
    return int(transformers.__version__.split(".")[0])


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Turns off the progress bars and load reports of transformers; what matters is raised as an error."""
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


PROCESSOR_FILE = "preprocessor_config.json"
IMAGE_FILES = (PROCESSOR_FILE, "processor_config.json")
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
POOLING_FILE = "1_Pooling/config.json"
LENGTH_FILE = "sentence_bert_config.json"
SENTENCE_FILES = (LENGTH_FILE, POOLING_FILE, "modules.json", "config_sentence_transformers.json")
TOKENIZER_FILES = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEXT_FILES = (*VOCABULARIES, *TOKENIZER_FILES, *SENTENCE_FILES)


def find_folders(path: Path, assets: str | Path | None) -> tuple[Path, ...]:
    """Returns the directories to look for config.json, image processor and tokenizer; the first has a config.json."""
    places = [path] if assets is None else [path, located(assets)]
    tried = [place if place.is_dir() else place.parent for place in places]
    for k, folder in enumerate(tried):
        if (folder / "config.json").is_file():
            return tuple(tried[k:])
    if not path.exists():
        raise InputError(f"{path} does not exist: give a checkpoint file or a directory that holds one")
    raise InputError(
        f"{' and '.join(map(str, dict.fromkeys(tried)))}: no config.json, so the model's architecture is unknown; put "
        "the model's config.json (and its processor or tokenizer files) beside the weights"
    )


def load_image_processor(transformers: Any, folders: Sequence[Path]) -> Any:
    home = _holding(folders, IMAGE_FILES)
    if home is None:
        raise InputError(f"{folders[0]}: no {PROCESSOR_FILE}, which says how images are resized and normalised; add it")
    required("PIL")
    # Pillow's resizing wherever there is a choice: embeddings must not depend on what else is installed.
    options = {"backend": "pil"} if major_version(transformers) >= 5 else {"use_fast": False}
    try:
        # Under its top-level name, some versions of transformers ask for torchvision, even with this backend.
        auto: Any = import_module("transformers.models.auto.image_processing_auto")
        return auto.AutoImageProcessor.from_pretrained(home, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise InputError(f"{home}: the image processor cannot be loaded ({first_line(error)})") from None


def load_tokenizer(transformers: Any, config: Any, folders: Sequence[Path], required: bool) -> Any:
    # Without any of these, transformers makes an empty tokenizer and says nothing.
    home = _holding(folders, VOCABULARIES)
    if home is None:
        if not required:
            return None
        raise InputError(f"{folders[0]}: no tokenizer; add its files: {', '.join(VOCABULARIES)}, as the model has them")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(home, local_files_only=True)
    except (OSError, ValueError, ImportError, AttributeError, TypeError, KeyError) as error:
        if not required:
            return None
        raise InputError(f"{home}: the tokenizer cannot be loaded ({first_line(error)}); add its files") from None
    # Decoders that were saved without a padding token get the one that their model names, or that ends a text.
    if tokenizer.pad_token is None:
        known = getattr(config, "pad_token_id", None)
        tokenizer.pad_token = tokenizer.eos_token if known is None else tokenizer.convert_ids_to_tokens(known)
    if tokenizer.pad_token is None:
        raise InputError(f"{home}: its tokenizer has neither a padding token nor one that ends a text; give it one")
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def text_length(config: Any, folders: Sequence[Path]) -> int:
    """Returns how many tokens of a text the model takes at most."""
    text = getattr(config, "text_config", config)
    longest = int(getattr(text, "max_position_embeddings", 512))
    if text.model_type in ("roberta", "xlm-roberta", "mpnet"):
        longest -= 2  # their positions start behind the padding's
    configured = _json(folders, LENGTH_FILE).get("max_seq_length")
    return min(longest, configured) if isinstance(configured, int) and configured > 0 else longest


def pools_first_token(folders: Sequence[Path]) -> bool:
    """Returns whether a sentence encoder's own files say that its first token stands for the text."""
    return _json(folders, POOLING_FILE).get("pooling_mode_cls_token") is True


def put_companions(folders: Sequence[Path], folder: Path, images: bool = True, texts: bool = True) -> None:
    """Copies the files of image processor and tokenizer, where there are such, into a directory that has none."""
    patterns = (*(IMAGE_FILES if images else ()), *(TEXT_FILES if texts else ()))
    for home in folders:
        for file in (file for pattern in patterns for file in home.glob(pattern)):
            target = folder / file.relative_to(home)
            if file.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)


def _holding(folders: Sequence[Path], patterns: Sequence[str]) -> Path | None:
    """Returns the first directory that holds one of these files."""
    return next((home for home in folders if any(any(home.glob(pattern)) for pattern in patterns)), None)


def _json(folders: Sequence[Path], name: str) -> dict[str, Any]:
    home = _holding(folders, [name])
    return {} if home is None else read_json(home / name)
