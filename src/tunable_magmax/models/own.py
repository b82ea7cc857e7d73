"""Models of transformers with a classifier of their own, as encoders whose embeddings are the classifier's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.hub import located
from tunable_magmax.checkpoints.model_config import ModelConfig
from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import Encoder, make_encoder, read_config
from tunable_magmax.models.pretrained import find_homes, first_line, from_state, quiet
from tunable_magmax.models.state import read_state

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = ("ForSequenceClassification", "ForImageClassification")


def own_labels(path: str | Path) -> tuple[str, ...] | None:
    """Returns the labels of a checkpoint's own classifier; None if it has none, by its config.json."""
    config = ModelConfig.of(Path(path))
    return None if config is None or not any(kind in config.architecture for kind in _KINDS) else config.labels


def load_own(path: str | Path, device: str | None = None, *, assets: str | Path | None = None) -> Encoder:
    """Loads a checkpoint with its own classifier; what prepares inputs comes from there, or else from `assets`."""
    path = located(path)
    homes = find_homes(path, None if assets is None else located(assets))
    state, digest = read_state(path)
    config = ModelConfig.of(homes[0])
    assert config is not None
    return own_encoder(config.content, state, digest, path, homes, device)


def own_encoder(
    content: Mapping[str, Any],
    state: Mapping[str, Tensor],
    digest: str,
    path: Path,
    homes: Sequence[Path],
    device: str | None = None,
) -> Encoder:
    """Makes an encoder of tensors and of what config.json is to hold; the first of `homes` has one of that type."""
    try:
        import transformers
    except ImportError:
        raise InputError('classifiers need transformers: pip install "tunable-magmax[train]"') from None
    named = str((content.get("architectures") or [""])[0])
    model_class = getattr(transformers, named, None)
    if not any(kind in named for kind in _KINDS):
        raise InputError(
            f"{path} is a {named or 'model of no named architecture'}, which has no classifier of its own: give a head "
            "file, or evaluate it as the base of a run whose tasks have classifiers"
        )
    if model_class is None:
        raise InputError(f"{path}: transformers has no classifier {named!r}; use a version that has it")
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    with quiet():
        config = type(read_config(homes[0])).from_dict(dict(content))
        config._name_or_path = ""
        try:
            module, report = from_state(model_class, config, wide)
        except (RuntimeError, ValueError, OSError) as error:
            raise InputError(f"{path}: its tensors do not fit {named} ({first_line(error)})") from None
        wrong = sorted(map(str, [*report["missing_keys"], *report.get("mismatched_keys", ())]))
        if wrong:
            raise InputError(
                f"{path}: {len(wrong)} tensors of {named} are missing or have another shape, first {wrong[0]!r}; the "
                "weights belong to another model than config.json says"
            )
        texts = module.main_input_name == "input_ids"
        return make_encoder(module, "logits", int(config.num_labels), digest, path, homes, device, texts)
