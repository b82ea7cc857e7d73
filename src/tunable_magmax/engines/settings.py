"""Where a merge of files runs, what it may use, and how its output is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.writer import is_one_file
from tunable_magmax.errors import InputError, closest
from tunable_magmax.files import parse_size
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.resources import open_device

ENGINES = ("local", "ray")
DEFAULT_MEMORY, DEFAULT_SHARD_SIZE = "1GiB", "5GB"


@dataclass(frozen=True, slots=True)
class Resources:
    """Where a merge runs and what it may use."""

    engine: str = "local"
    """Where it runs: "local", in this process, or "ray", by workers of a Ray cluster."""
    device: str | None = None
    """The device of a local merge, such as "cuda:1" (default: the CPU)."""
    memory: int | str | None = None
    """Bound on working memory, such as 256MiB, of each worker (default: 1GiB)."""
    threads: int | None = None
    """Threads of each worker (default: one for each core)."""
    workers: int | None = None
    """How many Ray workers share the work (default: one on each node)."""
    ray_address: str | None = None
    """HOST:PORT of the Ray cluster's head (default: a cluster that is started on this machine)."""

    @property
    def on_cpu(self) -> bool:
        return self.device in (None, "cpu")

    @property
    def memory_bytes(self) -> int:
        return parse_size(DEFAULT_MEMORY if self.memory is None else self.memory, "memory")

    def check(self) -> None:
        """Raises an `InputError` for an engine or device that can't be used, and for options of another engine.

        >>> Resources(workers=2).check()
        Traceback (most recent call last):
        tunable_magmax.errors.InputError: workers is 2, but the engine is 'local', which has none: give engine 'ray'
        """
        if self.engine not in ENGINES:
            raise InputError(f"unknown engine {self.engine!r}{closest(self.engine, ENGINES)}; known: local, ray")
        if self.engine == "local":
            for option in ("workers", "ray_address"):
                if (value := getattr(self, option)) is not None:
                    raise InputError(
                        f"{option} is {value!r}, but the engine is 'local', which has none: give engine 'ray'"
                    )
            open_device(self.device)
            return
        from tunable_magmax.engines.ray_workers import refuse_address_form, require_ray

        if not self.on_cpu:
            raise InputError(
                f"device is {self.device!r}, but the engine is 'ray', whose workers merge on CPUs: leave it out"
            )
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers is {self.workers}, expected at least 1")
        require_ray()
        if self.ray_address is not None:
            refuse_address_form(self.ray_address)


@dataclass(frozen=True, slots=True)
class AddedFiles:
    """More files of an output directory, by name, and a section at the end of its model card."""

    files: Mapping[str, bytes]
    card: str = ""


@dataclass(frozen=True, slots=True)
class Additions:
    """What a caller adds to an output directory before it becomes visible."""

    make: Callable[[Path, MergeReport], AddedFiles]
    """Called with the folder of the finished weights, still out of sight, and their report."""
    fingerprint: Mapping[str, Any]
    """Goes to the log beside the output, where the caller can recognise its own work."""


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """How an output is written, and what it holds beside the weights."""

    shard_size: int | str | None = None
    """The largest weight file of an output directory, such as 2GB (default: 5GB)."""
    overwrite: bool = False
    """Whether an output that is there is replaced."""
    names: Sequence[str] | None = None
    """What report, configuration and model card call the tasks."""
    additions: Additions | None = None
    """What a caller adds to an output directory."""

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
        limit = parse_size(DEFAULT_SHARD_SIZE if self.shard_size is None else self.shard_size, "shard size")
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


def check_jobs(engine: str, ray_address: str | None, device: str | None) -> None:
    """Raises an `InputError` if the jobs of an experiment can't run with this engine and device.

    >>> check_jobs("ray", None, "cuda:1")
    Traceback (most recent call last):
    tunable_magmax.errors.InputError: device is 'cuda:1', but engine 'ray' gives each job a GPU: give 'cuda' or 'cpu'
    """
    if engine == "ray" and device is not None and ":" in device:
        raise InputError(f"device is {device!r}, but engine 'ray' gives each job a GPU: give 'cuda' or 'cpu'")
    Resources(engine, ray_address=ray_address).check()
