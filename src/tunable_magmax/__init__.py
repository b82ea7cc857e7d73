"""Merge the checkpoints of a continually trained model into the one model that a given deployment needs.

    import tunable_magmax as tmx

    run = tmx.open_run("run")                          # as tmx train leaves it
    site = run.prefer(inputs=images)                   # how much each task matters there
    model = run.tailor("site-model", preference=site)  # the model that the site needs
    tmx.load_classifier(model).predict(images[0])

docs/python.md shows all of it.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunable_magmax import training as training
    from tunable_magmax.engines.local import merge_checkpoints as merge_checkpoints
    from tunable_magmax.merging.budget import budget as budget
    from tunable_magmax.merging.methods import METHODS as METHODS
    from tunable_magmax.merging.methods import Method as Method
    from tunable_magmax.merging.report import MergeReport as MergeReport
    from tunable_magmax.merging.state_dicts import Merged as Merged
    from tunable_magmax.merging.state_dicts import MergeSession as MergeSession
    from tunable_magmax.merging.state_dicts import RunningMagmax as RunningMagmax
    from tunable_magmax.merging.state_dicts import merge_state_dicts as merge_state_dicts
    from tunable_magmax.preference.preference import Preference as Preference
    from tunable_magmax.runs.profile import Profile as Profile
    from tunable_magmax.training.config import TrainConfig as TrainConfig
    from tunable_magmax.training.sequence import train_sequence as train_sequence
    from tunable_magmax.workflows.convert import convert_checkpoint as convert_checkpoint
    from tunable_magmax.workflows.evaluate import evaluate as evaluate
    from tunable_magmax.workflows.open_run import Run as Run
    from tunable_magmax.workflows.open_run import open_run as open_run
    from tunable_magmax.workflows.predict import load_classifier as load_classifier
    from tunable_magmax.workflows.verify import verify_checkpoint as verify_checkpoint

from tunable_magmax.errors import ClusterError as ClusterError
from tunable_magmax.errors import ExactnessError as ExactnessError
from tunable_magmax.errors import InputError as InputError
from tunable_magmax.errors import StorageError as StorageError
from tunable_magmax.errors import TmxError as TmxError
from tunable_magmax.version import __version__ as __version__

# Loaded on first use: importing torch takes a second, and `tmx --help` should not.
_MODULES = {
    "engines.local": ("merge_checkpoints",),
    "merging.budget": ("budget",),
    "merging.methods": ("METHODS", "Method"),
    "merging.report": ("MergeReport",),
    "merging.state_dicts": ("MergeSession", "Merged", "RunningMagmax", "merge_state_dicts"),
    "preference.preference": ("Preference",),
    "runs.profile": ("Profile",),
    "training.config": ("TrainConfig",),
    "training.sequence": ("train_sequence",),
    "workflows.convert": ("convert_checkpoint",),
    "workflows.evaluate": ("evaluate",),
    "workflows.open_run": ("Run", "open_run"),
    "workflows.predict": ("load_classifier",),
    "workflows.verify": ("verify_checkpoint",),
}
_EAGER = ["ClusterError", "ExactnessError", "InputError", "StorageError", "TmxError", "__version__"]
__all__ = sorted([*chain(*_MODULES.values()), *_EAGER])


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return globals()[name]
    if name == "training":
        return import_module("tunable_magmax.training")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
