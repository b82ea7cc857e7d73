"""What a merge may use and how its output is written: one value each, and what an engine is asked to do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.writer import is_one_file
from tunable_magmax.engines.additions import Additions
from tunable_magmax.engines.ray_session import import_ray, refuse_address_form
from tunable_magmax.errors import InputError, closest
from tunable_magmax.files import parse_size
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.merging.resources import open_device

ENGINES = ("local", "ray")
DEFAULT_MEMORY = 1 << 30
DEFAULT_SHARD_SIZE = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Resources:
    """Where a merge runs and what it may use. With engine "ray", `memory` and `threads` are those of each worker."""

    engine: str = "local"
    device: str | None = None
    memory: int | str | None = None
    threads: int | None = None
    workers: int | None = None
    ray_address: str | None = None

    @property
    def on_cpu(self) -> bool:
        return self.device in (None, "cpu")

    @property
    def memory_bytes(self) -> int:
        return DEFAULT_MEMORY if self.memory is None else parse_size(self.memory, "memory")

    def check(self) -> None:
        """Raises an `InputError` for an engine or device that can't be used, and for options of another engine.

        >>> Resources(workers=2).check()
        Traceback (most recent call last):
        tunable_magmax.errors.InputError: workers is 2, but the engine is 'local', which has none: give engine 'ray'
        """
        if self.engine == "ray" and not self.on_cpu:
            raise InputError(
                f"device is {self.device!r}, but the engine is 'ray', whose workers merge on CPUs: leave it out"
            )
        _check_engine(self.engine, workers=self.workers, ray_address=self.ray_address)
        check_workers(self.workers)
        open_device(self.device)

    def check_method(self, name: str) -> None:
        """Raises an `InputError` for a method that does not run on this engine.

        >>> Resources(engine="ray").check_method("tsv")
        Traceback (most recent call last):
        tunable_magmax.errors.InputError: method 'tsv' merges matrices whole, and workers of engine 'ray' have parts of
        them: use engine 'local'
        """
        if name not in METHODS or not METHODS[name].whole:  # a plan may have an unknown one
            return
        if self.engine == "ray":
            raise InputError(
                f"method {name!r} merges matrices whole, and workers of engine 'ray' have parts of them: "
                "use engine 'local'"
            )


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """How an output is written. `names` are what its report and model card call the tasks."""

    shard_size: int | str | None = None
    overwrite: bool = False
    names: Sequence[str] | None = None
    additions: Additions | None = None

    @classmethod
    def take(cls, options: dict[str, Any]) -> OutputSettings:
        """Moves the settings of an output out of other keyword arguments.

        >>> options = {"overwrite": True, "seed": 7}
        >>> OutputSettings.take(options).overwrite, options
        (True, {'seed': 7})
        """
        return cls(**{name: options.pop(name) for name in cls.__slots__ if name in options})

    def shard_bytes(self, out: Path) -> int | None:
        """Returns the largest size of a weight file; None if the output is one file."""
        limit = DEFAULT_SHARD_SIZE if self.shard_size is None else parse_size(self.shard_size, "shard size")
        return None if is_one_file(out) else limit

    def task_names(self, tasks: int) -> tuple[str, ...] | None:
        """Returns the names of the tasks, one for each; None if no names were given."""
        if self.names is None:
            return None
        if isinstance(self.names, str) or not all(isinstance(name, str) for name in self.names):
            raise InputError(f"names are {self.names!r}, expected a list of texts, one for each task")
        if len(self.names) != tasks:
            raise InputError(f"{len(self.names)} names for {tasks} tasks: give one for each, in training order")
        return tuple(self.names)


def check_workers(workers: int | None) -> None:
    """Raises an `InputError` for a number of workers below 1."""
    if workers is not None and workers < 1:
        raise InputError(f"workers is {workers}, expected at least 1")


def check_jobs(engine: str, ray_address: str | None, device: str | None) -> None:
    """Raises an `InputError` if the jobs of an experiment can't run with this engine and device.

    >>> check_jobs("ray", None, "cuda:1")
    Traceback (most recent call last):
    tunable_magmax.errors.InputError: device is 'cuda:1', but engine 'ray' gives each job a GPU: give 'cuda' or 'cpu'
    """
    if engine == "ray" and device is not None and ":" in device:
        raise InputError(f"device is {device!r}, but engine 'ray' gives each job a GPU: give 'cuda' or 'cpu'")
    _check_engine(engine, ray_address=ray_address)


def _check_engine(engine: str, **for_ray: object) -> None:
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}{closest(engine, ENGINES)}; known: {', '.join(ENGINES)}")
    if engine == "local":
        for option, value in for_ray.items():
            if value is not None:
                raise InputError(f"{option} is {value!r}, but the engine is 'local', which has none: give engine 'ray'")
        return
    import_ray()
    if for_ray["ray_address"] is not None:
        refuse_address_form(str(for_ray["ray_address"]))
