"""The checkpoints of a merge, opened together."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.adapter import Adapter, open_task
from tunable_magmax.checkpoints.checkpoint import Checkpoint, Opened
from tunable_magmax.checkpoints.companions import companion_notes
from tunable_magmax.checkpoints.heads import Heads, match_heads
from tunable_magmax.checkpoints.hub import located, pinned
from tunable_magmax.checkpoints.source import ADAPTER_WEIGHTS, as_checkpoint, holds_adapter, open_checkpoint
from tunable_magmax.checkpoints.tensors import Signature
from tunable_magmax.engines.sources import factor_bytes
from tunable_magmax.errors import InputError
from tunable_magmax.files import identities, show_size
from tunable_magmax.merging.layout import Layout, build_layout
from tunable_magmax.merging.methods import unused_options
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.walker import Source, Sources

PathLike = str | Path


class Inputs:
    """Base and tasks, opened together: their headers matched (`layout`), their files known. A context manager."""

    def __init__(self, base: PathLike, tasks: Sequence[PathLike], options: Options) -> None:
        self._stack = ExitStack()
        self.labels = ["base", *(f"task {t}" for t in range(1, len(tasks) + 1))]
        self.paths = [Path(base), *map(Path, tasks)]
        self._options = options
        self.heads: Heads | None = None
        try:
            self.checkpoints = [self._stack.enter_context(checkpoint) for checkpoint in self._open_all()]
            self.sizes = dict(zip(self.labels, map(stored_bytes, self.checkpoints), strict=True))
            """Bytes of the stored tensors, by role; the same however their files are divided."""
            self.heads = match_heads(self.checkpoints, options.fitted_head)
            if self.heads is not None:
                self.checkpoints = [self.base_by(options), *self.heads.views[1:]]
            self.layout = self._with_adapters(self._matched())
        except BaseException:
            self._stack.close()
            raise

    def _open_all(self) -> list[Opened]:
        """Opens all checkpoints; if some can't be opened, one error names them all."""
        opened: list[Opened] = []
        problems: list[str] = []
        base: Checkpoint | None = None
        for k, path in enumerate(list(self.paths)):
            try:
                self.paths[k] = path = located(path)
                if k == 0:
                    base = _open_base(path)
                    opened.append(base)
                elif base is not None:
                    opened.append(open_task(path, base))
                elif not holds_adapter(path):  # of which nothing can be said without a base
                    opened.append(open_checkpoint(path))
            except InputError as error:
                problems.append(f"{self.labels[k]}: {error}")
        if problems:
            for checkpoint in opened:
                checkpoint.close()
            several = "several checkpoints can't be opened:\n" if len(problems) > 1 else ""
            raise InputError(several + "\n".join(problems), problems=tuple(problems))
        return opened

    def _matched(self) -> Layout:
        """Matches the headers of base and tasks."""
        signatures = [Signature(checkpoint.tensors, checkpoint.aliases) for checkpoint in self.checkpoints]
        names = [f"{label} ({path})" for label, path in zip(self.labels, self.paths, strict=True)]
        options, heads = self._options, self.heads
        exclude = options.exclude if heads is None else (*(options.exclude or ()), *map(escape, heads.copied))
        return build_layout(signatures, names, options.include, exclude, unused_options(options))

    @property
    def base(self) -> Checkpoint:
        base = self.checkpoints[0]
        assert isinstance(base, Checkpoint)
        return base

    def base_by(self, options: Options) -> Checkpoint:
        """Returns the base, with heads of the tasks by the weights of some options, where heads are made of theirs."""
        if self.heads is None:
            return self.base
        return self.heads.base(options.head_weights(len(self.paths) - 1))

    @property
    def adapters(self) -> dict[int, Adapter]:
        """Returns the tasks that are adapters, by source: 1 is the first task."""
        return {k: task for k, task in enumerate(self.checkpoints) if isinstance(task, Adapter)}

    def _with_adapters(self, layout: Layout) -> Layout:
        return replace(layout, factor_bytes=sum(map(factor_bytes, self.adapters.values())))

    def sources(self, sources: Sequence[Source]) -> Sources:
        """Returns what a merge of the inputs works on, if it reads values from these sources."""
        return Sources(self.layout, sources, self.labels, tuple(self.warnings()))

    def described(self) -> dict[str, str]:
        """Returns descriptions of the tasks that are adapters, by role."""
        return {self.labels[k]: adapter.describe() for k, adapter in self.adapters.items()}

    def pins(self) -> dict[str, str]:
        """Returns the hub's name and commit of the checkpoints that come from there, by role."""
        both = zip(self.labels, self.paths, strict=True)
        return {label: pin for label, path in both if (pin := pinned(path)) is not None}

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def warnings(self) -> Iterator[str]:
        for label, path in zip(self.labels[1:], self.paths[1:], strict=True):
            if path.resolve() == self.paths[0].resolve():
                yield f"{label} is the base checkpoint itself"
        first: dict[Path, str] = {}
        for label, path in zip(self.labels[1:], self.paths[1:], strict=True):
            if first.setdefault(path.resolve(), label) != label:
                yield f"{label} is the same checkpoint as {first[path.resolve()]}"

    def notes(self) -> Iterator[str]:
        """Yields notes for the user before a merge begins."""
        if self.heads is not None:
            yield from self.heads.notes
        yield from companion_notes(self.paths[0])
        for k, adapter in self.adapters.items():
            renamed = f"; the base's names are found by {adapter.renaming.words()}" if adapter.renaming else ""
            yield f"{self.labels[k]} is a {adapter.describe()}{renamed}"
        for label, checkpoint in zip(self.labels, self.checkpoints, strict=True):
            if checkpoint.in_memory:
                path, size = checkpoint.path, show_size(checkpoint.in_memory)
                new = path.with_name(f"{path.name}-converted") if path.is_dir() else path.with_suffix(".safetensors")
                convert = shlex.join(["tmx", "convert", str(path), "-o", str(new)])
                yield (
                    f"{label} is a torch file in the old format (no zip archive) or with transposed tensors, so it is "
                    f"loaded whole: {size} beyond the bound on memory; to have it streamed, convert it first: {convert}"
                )

    def identity(self) -> list[Any]:
        """Returns paths, sizes and times of the files, by which a finished merge is recognised."""
        return identities(file for checkpoint in self.checkpoints for file in checkpoint.files)

    def refuse_changed(self) -> None:
        """Raises an `InputError` if an input was changed since it was opened; for after the last read."""
        for checkpoint in self.checkpoints:
            checkpoint.refuse_changed()

    def refuse_as_output(self, out: Path) -> None:
        """Raises an `InputError` if an output would replace an input."""
        for label, checkpoint in zip(self.labels, self.checkpoints, strict=True):
            if checkpoint.would_be_replaced_by(out):
                raise InputError(f"the output {out} would replace {label} ({checkpoint.path}); choose another output")


def stored_bytes(checkpoint: Opened) -> int:
    """Returns the bytes of the tensors in a checkpoint's or adapter's files."""
    stored = checkpoint.stored if isinstance(checkpoint, Adapter) else checkpoint
    return sum(info.nbytes for info in stored.tensors.values())


def _open_base(path: Path) -> Checkpoint:
    adapter = path.parent if path.name in ADAPTER_WEIGHTS and path.is_file() else path
    if holds_adapter(adapter):
        raise InputError(
            f"{path} is an adapter, which is no base: give the model that it was trained on. To start from what the "
            f"adapter makes of that, make a checkpoint of it: {as_checkpoint(adapter)}"
        )
    return open_checkpoint(path)
