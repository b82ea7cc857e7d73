"""How an output is written, what a merge may use, and where it runs: options that commands and Python share.

The module imports next to nothing, because `tmx --help` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tunable_magmax.errors import InputError, closest

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport


Settings = TypeVar("Settings")


def take(kind: type[Settings], given: dict[str, Any]) -> Settings:
    """Makes options of the keywords that belong to them, and removes these; None leaves the default.

    >>> given = {"threads": 2, "memory": None, "seed": 7}
    >>> take(Output, given), given
    (Output(memory='1GiB', threads=2, shard_size='5GB', overwrite=False), {'seed': 7})
    """
    own = {field.name: given.pop(field.name, None) for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in own.items() if value is not None})


@dataclass(frozen=True)
class Output:
    """How an output is written and what a merge may use."""

    memory: int | str = "1GiB"
    """Use at most this much working memory, such as 256MiB or 4GiB."""
    threads: int | None = None
    """Use this many threads. Default: all cores."""
    shard_size: int | str = "5GB"
    """Write no file of an output directory larger than this."""
    overwrite: bool = False
    """Replace an existing output."""

    @property
    def memory_bytes(self) -> int:
        from tunable_magmax.files import parse_size

        return parse_size(self.memory, "memory")

    def shard_bytes(self, out: Path) -> int | None:
        """Returns the largest size of a weight file; None if the output is one file."""
        from tunable_magmax.checkpoints.writer import is_one_file
        from tunable_magmax.files import parse_size

        limit = parse_size(self.shard_size, "shard size")
        return None if is_one_file(out) else limit


@dataclass(frozen=True)
class Place:
    """Where a merge runs."""

    engine: Literal["local", "ray"] = "local"
    """Merge on this machine, or by workers of a Ray cluster (docs/scale.md)."""
    device: str | None = None
    """Merge on a GPU: cuda or cuda:1. Default: the CPU."""
    workers: int | None = None
    """Share the work among this many Ray workers; --memory and --threads are for each."""
    ray_address: str | None = None
    """Join the Ray cluster whose head is at HOST:PORT. Default: a cluster on this machine."""

    def check(self) -> None:
        """Raises an `InputError` for an engine or device that can't be used, and for options of another engine.

        >>> Place(workers=2).check()
        Traceback (most recent call last):
        tunable_magmax.errors.InputError: workers is 2, but the engine is 'local': give engine 'ray'
        """
        if self.engine not in ("local", "ray"):
            known = ("local", "ray")
            raise InputError(f"unknown engine {self.engine!r}{closest(self.engine, known)}; known: {', '.join(known)}")
        if self.engine == "local":
            from tunable_magmax.merging.walker import open_device

            for option in ("workers", "ray_address"):
                if (value := getattr(self, option)) is not None:
                    raise InputError(f"{option} is {value!r}, but the engine is 'local': give engine 'ray'")
            open_device(self.device)
            return
        from tunable_magmax.engines.ray_workers import refuse_address_form, require_ray

        if self.device not in (None, "cpu"):
            raise InputError(f"device is {self.device!r}, but workers of the engine 'ray' merge on CPUs: leave it out")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers is {self.workers}, expected at least 1")
        require_ray()
        if self.ray_address is not None:
            refuse_address_form(self.ray_address)


@dataclass(frozen=True)
class AddedFiles:
    """More files of an output directory, by name, and a section at the end of its model card."""

    files: Mapping[str, bytes]
    card: str = ""


@dataclass(frozen=True)
class Additions:
    """What a caller adds to an output directory before it becomes visible."""

    make: Callable[[Path, MergeReport], AddedFiles]
    """Called with the folder of the finished weights, still out of sight, and their report."""
    fingerprint: Mapping[str, Any]
    """Goes to the log beside the output, where the caller can recognise its own work."""
