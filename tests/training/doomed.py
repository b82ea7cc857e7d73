"""A warmed-up process that forks a child for every training it is asked for, to be killed at a given moment.

One JSON object a line on stdin, one answer a line on stdout. Importing torch and transformers costs seconds, a fork
milliseconds. No thread is started before the fork. Nothing waits for the disk: what a killed process has written is
there without it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.errors import TmxError
from tunable_magmax.training import sequence
from tunable_magmax.training.config import TrainConfig
from tunable_magmax.training.run_directory import RunDirectory

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
    os.fsync = lambda descriptor: None
    moment = Moment(order.get("deadly"))
    place = order.get("place")
    if place is None:
        for name in CALLS:
            setattr(os, name, moment.before(getattr(os, name)))
    else:
        home: Any = RunDirectory if hasattr(RunDirectory, place) else sequence
        setattr(home, place, moment.before(getattr(home, place)))
    config = TrainConfig.read(order["settings"], Path(order["root"]))
    try:
        run = sequence.train_sequence(config, order["out"], device="cpu", snapshot_seconds=0)
    except TmxError as error:
        return {"error": str(error)}
    return {"trained": [result is not None for result in run.results], "count": moment.count}


def serve(order: dict[str, Any]) -> dict[str, Any]:
    answers, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.close(answers)
            answer = json.dumps(work(order)).encode()
            with open(writing, "wb") as pipe:
                pipe.write(answer)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(answers, "rb") as pipe:
        content = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return {"killed": os.WTERMSIG(status)}
    return json.loads(content) if content else {"crashed": os.waitstatus_to_exitcode(status)}


def warm_up() -> None:
    """Load what training needs, which the children then have."""
    import PIL.Image
    import transformers

    torch.set_num_threads(1)
    for name in ("AutoConfig", "BertModel", "BertTokenizerFast", "ViTModel", "ViTImageProcessor", "AutoTokenizer"):
        getattr(transformers, name)
    PIL.Image.init()


if __name__ == "__main__":
    warm_up()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line))) + "\n")
        sys.stdout.flush()
