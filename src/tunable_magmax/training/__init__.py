"""From a pre-trained encoder to theta_1 .. theta_T: the loop of `tmx train`, and records of other loops."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunable_magmax.training.recording import callback as callback
    from tunable_magmax.training.recording import record_base as record_base
    from tunable_magmax.training.recording import record_task as record_task
    from tunable_magmax.training.recording import recorded as recorded

__all__ = ["callback", "record_base", "record_task", "recorded"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("tunable_magmax.training.recording"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
