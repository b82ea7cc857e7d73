"""A merge to be killed or starved of disk space; `forked.py` has it done."""

import os
import resource
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import TmxError

STEPS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "write", "posix_fallocate")


class Steps:
    """Counts the system calls that change the disk; kills this process before or after the n-th."""

    def __init__(self, deadly: int | None) -> None:
        self.count, self.deadly = 0, deadly
        for name in STEPS:
            setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **named: Any) -> Any:
            self.step()
            result = call(*given, **named)
            self.step()
            return result

        return counting

    def step(self) -> None:
        self.count += 1
        if self.count == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)


def work(order: dict[str, Any]) -> dict[str, Any]:
    """In the child: do it and say how it went."""
    if order.get("largest_file") is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["largest_file"],) * 2)
    steps = Steps(order.get("deadly"))
    try:
        merge_checkpoints(order["base"], order["tasks"], order["out"], **order["options"])
    except TmxError as error:
        return {"error": type(error).__name__, "message": str(error), "steps": steps.count}
    return {"done": True, "steps": steps.count}


def warm_up() -> None:
    """Load all that a merge needs, which the children then have."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for k, name in enumerate(("base", "one", "two")):
            save_file({"w": torch.arange(99.0) ** (k / 2)}, f"{folder}/{name}.safetensors")
        paths = [f"{folder}/{name}.safetensors" for name in ("base", "one", "two")]
        merge_checkpoints(paths[0], paths[1:], f"{folder}/out", threads=1)
