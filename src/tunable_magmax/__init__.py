"""Merge the checkpoints of a continually trained model into the one model that a given deployment needs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunable_magmax.engines.local import merge_checkpoints as merge_checkpoints
    from tunable_magmax.merging.budget import budget as budget
    from tunable_magmax.merging.methods import METHODS as METHODS
    from tunable_magmax.merging.report import MergeReport as MergeReport
    from tunable_magmax.merging.running import RunningMagmax as RunningMagmax
    from tunable_magmax.merging.state_dicts import Merged as Merged
    from tunable_magmax.merging.state_dicts import MergeSession as MergeSession
    from tunable_magmax.merging.state_dicts import merge_state_dicts as merge_state_dicts
    from tunable_magmax.preference.preference import Preference as Preference
    from tunable_magmax.training.config import TrainConfig as TrainConfig
    from tunable_magmax.training.sequence import train_sequence as train_sequence
    from tunable_magmax.workflows.classifier import load_classifier as load_classifier
    from tunable_magmax.workflows.convert import convert_checkpoint as convert_checkpoint
    from tunable_magmax.workflows.evaluate import evaluate as evaluate
    from tunable_magmax.workflows.plan import plan_merge as plan_merge
    from tunable_magmax.workflows.sweep import sweep_checkpoints as sweep_checkpoints
    from tunable_magmax.workflows.verify import verify_checkpoint as verify_checkpoint

from tunable_magmax.errors import ClusterError, ExactnessError, InputError, StorageError, TmxError
from tunable_magmax.version import __version__

# Loaded on first use: importing torch takes a second, and `tmx --help` should not.
_HOMES = {
    "convert_checkpoint": "tunable_magmax.workflows.convert",
    "sweep_checkpoints": "tunable_magmax.workflows.sweep",
    "plan_merge": "tunable_magmax.workflows.plan",
    "verify_checkpoint": "tunable_magmax.workflows.verify",
    "budget": "tunable_magmax.merging.budget",
    "merge_checkpoints": "tunable_magmax.engines.local",
    "merge_state_dicts": "tunable_magmax.merging.state_dicts",
    "Merged": "tunable_magmax.merging.state_dicts",
    "MergeSession": "tunable_magmax.merging.state_dicts",
    "MergeReport": "tunable_magmax.merging.report",
    "METHODS": "tunable_magmax.merging.methods",
    "RunningMagmax": "tunable_magmax.merging.running",
    "Preference": "tunable_magmax.preference.preference",
    "evaluate": "tunable_magmax.workflows.evaluate",
    "load_classifier": "tunable_magmax.workflows.classifier",
    "TrainConfig": "tunable_magmax.training.config",
    "train_sequence": "tunable_magmax.training.sequence",
}
__all__ = ["ClusterError", "ExactnessError", "InputError", "StorageError", "TmxError", "__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
