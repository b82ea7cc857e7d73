"""Models of transformers from tensors in memory, without its chatter."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def from_state(model_class: Any, config: Any, state: Mapping[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """A model with these tensors in float32, and what transformers tells of keys that were missing or did not fit.

    transformers knows all the rules by which names of older checkpoints and of those with a head become today's.
    """
    import torch
    import transformers

    kind = "dtype" if major_version(transformers) >= 5 else "torch_dtype"
    options: dict[str, Any] = {kind: torch.float32, "state_dict": dict(state), "output_loading_info": True}
    with quiet():
        module, told = model_class.from_pretrained(None, config=config, **options)
    return module, told


def major_version(transformers: Any) -> int:
    return int(transformers.__version__.split(".")[0])


def first_line(error: BaseException) -> str:
    """What an error of transformers says, short enough for a message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
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
