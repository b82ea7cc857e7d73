"""A training to be killed at a given moment; `forked.py` has it done."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.errors import TmxError
from tunable_magmax.runs.run import Run
from tunable_magmax.training import sequence
from tunable_magmax.training.config import TrainConfig

CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "open")
"""System calls that change the disk, counted where a moment is a number."""


class Moment:
    """Kills this process when it gets there for the n-th time."""

    def __init__(self, deadly: int | None) -> None:
        self.count, self.deadly = 0, deadly

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)

        return counting


def work(order: dict[str, Any]) -> dict[str, Any]:
    """In the child: do it and say how it went."""
    moment = Moment(order.get("deadly"))
    place = order.get("place")
    if place is None:
        for name in CALLS:
            setattr(os, name, moment.before(getattr(os, name)))
    else:
        home: Any = Run if hasattr(Run, place) else sequence
        setattr(home, place, moment.before(getattr(home, place)))
    config = TrainConfig.read(order["settings"], Path(order["root"]))
    try:
        run = sequence.train_sequence(config, order["out"], device="cpu")
    except TmxError as error:
        return {"error": str(error)}
    return {"trained": run.trained, "count": moment.count}


def warm_up() -> None:
    """Load what training needs, which the children then have."""
    import PIL.Image
    import transformers

    torch.set_num_threads(1)
    for name in ("AutoConfig", "BertModel", "BertTokenizerFast", "ViTModel", "ViTImageProcessor", "AutoTokenizer"):
        getattr(transformers, name)
    PIL.Image.init()
