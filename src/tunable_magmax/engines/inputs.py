"""The checkpoints of a merge, opened together, and their values, for any range of a tensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.checkpoints.checkpoint import Checkpoint, Opened
from tunable_magmax.checkpoints.companions import companion_notes
from tunable_magmax.checkpoints.heads import Heads, match_heads
from tunable_magmax.checkpoints.hub import located, pinned
from tunable_magmax.checkpoints.source import ADAPTER_WEIGHTS, holds_adapter, open_checkpoint
from tunable_magmax.checkpoints.tensors import Signature, TensorInfo, torch_dtype
from tunable_magmax.errors import InputError
from tunable_magmax.files import show_size
from tunable_magmax.merging.layout import Layout, build_layout
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.walker import Source, Sources

if TYPE_CHECKING:
    from tunable_magmax.checkpoints.adapter import Adapter, LowRank

PathLike = str | Path


class Inputs:
    """Base and tasks, opened together: their headers matched (`layout`), their files known. A context manager."""

    def __init__(self, base: PathLike, tasks: Sequence[PathLike], options: Options) -> None:
        self._stack = ExitStack()
        self.labels = ["base", *(f"task {t}" for t in range(1, len(tasks) + 1))]
        self.paths = [Path(base), *map(Path, tasks)]
        self._options = options
        self.heads: Heads | None = None
        self.adapters: dict[int, Adapter] = {}
        """The tasks that are adapters, by source: 1 is the first task."""
        try:
            self.checkpoints = [self._stack.enter_context(checkpoint) for checkpoint in self._open_all()]
            stored = [
                self.adapters[k].stored if k in self.adapters else opened for k, opened in enumerate(self.checkpoints)
            ]
            self.sizes = {
                label: sum(info.nbytes for info in each.tensors.values())
                for label, each in zip(self.labels, stored, strict=True)
            }
            """Bytes of the stored tensors, by role; the same however their files are divided."""
            self.heads = match_heads(self.checkpoints, options.fitted_head)
            if self.heads is not None:
                self.checkpoints = [self.base_by(options), *self.heads.views[1:]]
            self.layout = replace(self._matched(), factor_bytes=sum(map(factor_bytes, self.adapters.values())))
        except BaseException:
            self._stack.close()
            raise

    def _open_all(self) -> list[Opened]:
        """Opens all checkpoints; if some can't be opened, one error names them all."""
        opened: list[Opened] = []
        problems: list[str] = []
        for k, path in enumerate(list(self.paths)):
            try:
                self.paths[k] = path = located(path)
                is_adapter = _is_adapter(path)
                if k == 0 or not is_adapter:  # a base that is an adapter is refused
                    opened.append(open_checkpoint(path))
                elif opened and opened[0].path == self.paths[0]:  # else nothing can be said of it
                    from tunable_magmax.checkpoints.adapter import Adapter

                    base = Signature(opened[0].tensors, opened[0].aliases)
                    self.adapters[k] = Adapter(path, base)
                    opened.append(self.adapters[k])
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
        return build_layout(signatures, names, options.include, exclude)

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
        """Yields which tasks are another task; a merge says of which the values are the base's."""
        known: dict[Path, str] = {}
        for label, path in zip(self.labels[1:], self.paths[1:], strict=True):
            if (same := known.setdefault(path.resolve(), label)) != label:
                yield f"{label} is the same checkpoint as {same}"

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
                yield (
                    f"{label} is a torch file of an old format or with transposed tensors, and so loaded whole: "
                    f"{show_size(checkpoint.in_memory)} beyond the bound on memory; `tmx convert` mends that"
                )

    def refuse_changed(self) -> None:
        """Raises an `InputError` if an input was changed since it was opened; for after the last read."""
        for checkpoint in self.checkpoints:
            checkpoint.refuse_changed()

    def refuse_as_output(self, out: Path) -> None:
        """Raises an `InputError` if an output would replace an input."""
        for label, checkpoint in zip(self.labels, self.checkpoints, strict=True):
            if checkpoint.would_be_replaced_by(out):
                raise InputError(f"the output {out} would replace {label} ({checkpoint.path}); choose another output")


def _is_adapter(path: Path) -> bool:
    """Whether this is an adapter; one beside a whole model, or without its directory, is an `InputError`."""
    if path.name in ADAPTER_WEIGHTS and path.is_file():
        raise InputError(f"{path} holds the weights of an adapter alone: give its directory, {path.parent}, as a task")
    if holds_adapter(path):
        return True
    if both := next((name for name in ADAPTER_WEIGHTS if (path / name).exists()), None):
        raise InputError(f"{path} holds a whole model and an adapter ({both}): put one of them in another directory")
    return False


# -- values ------------------------------------------------------------------------------------------------------------


def file_sources(checkpoints: Sequence[Opened], device: torch.device | None = None) -> list[Source]:
    """Returns the values of the base (first) and of tasks, read from their files when they are asked for."""
    base = checkpoints[0]
    assert isinstance(base, Checkpoint)
    first = LastRead(FileSource(base))
    sources: list[Source] = [first]
    for task in checkpoints[1:]:
        sources.append(
            FileSource(task) if isinstance(task, Checkpoint) else AdapterSource(cast("Adapter", task), first)
        )
    return sources if device is None or device.type == "cpu" else [DeviceSource(source) for source in sources]


class FileSource:
    """A checkpoint's files: bytes go straight to the scratch, or through a raw buffer if types differ."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._local = threading.local()

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        stored = _stored_dtype(self._checkpoint.tensors[name])
        if stored == scratch.dtype:
            self._checkpoint.read_into(name, start * stored.itemsize, scratch.view(torch.uint8).numpy().data)
            return scratch
        raw = _buffer(self._local, (stop - start) * stored.itemsize)
        self._checkpoint.read_into(name, start * stored.itemsize, raw.numpy().data)
        return widen(raw.view(stored), scratch)


class LastRead:
    """Another source, of which each thread remembers the values that it has read last.

    They are asked for again by adapters, whose values are computed from them; nobody changes them until then.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._local = threading.local()

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        asked, (last, values) = (name, start, stop), getattr(self._local, "last", (None, scratch))
        if asked != last or values.dtype != scratch.dtype:
            values = self._source.read(name, start, stop, scratch)
            self._local.last = asked, values
        return values

    def forget(self) -> None:
        """Forgets what this thread has read last."""
        self._local.last = None, torch.empty(0)


class DeviceSource:
    """Another source on a GPU: what it reads on the host, copied through page-locked memory."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._local = threading.local()

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        host = _buffer(self._local, scratch.nbytes, pin_memory=torch.cuda.is_available()).view(scratch.dtype)
        return scratch.copy_(self._source.read(name, start, stop, host))


class AdapterSource:
    """A LoRA adapter on a base: the base's values plus a product of two factors, which are read whole, into float64."""

    def __init__(self, adapter: Adapter, base: LastRead) -> None:
        self._adapter, self._base = adapter, base
        self._stored = FileSource(adapter.stored)
        self._factors: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._room = factor_bytes(adapter)
        self._lock = threading.Lock()

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        part = self._adapter.parts.get(name)
        if part is None:
            return self._base.read(name, start, stop, scratch)
        if part.whole is not None:
            self._stored.read(part.whole.name, start, stop, scratch)
        else:
            values = self._base.read(name, start, stop, scratch)
            if values.data_ptr() != scratch.data_ptr():
                scratch.copy_(values)
            else:  # they are about to change
                self._base.forget()
        if part.product is not None:
            left, right = self._whole(name, part.product)
            add_product(left, right, part.product.scaling, scratch, start)
        return scratch

    def _whole(self, name: str, product: LowRank) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the factors [n, r] and [r, m] of a tensor's product; those used last are kept."""
        with self._lock:
            pair = self._factors.pop(name, None)
            if pair is None:
                a, b = self._matrix(product.a), self._matrix(product.b)
                left, right = (a.T, b.T) if product.transposed else (b, a)
                pair = np.ascontiguousarray(left), np.ascontiguousarray(right)
            self._factors[name] = pair
            while sum(a.nbytes + b.nbytes for a, b in self._factors.values()) > self._room:
                del self._factors[next(iter(self._factors))]
            return pair

    def _matrix(self, info: TensorInfo) -> NDArray[np.float64]:
        stored = torch.empty(info.numel, dtype=_stored_dtype(info))
        return self._stored.read(info.name, 0, info.numel, stored).view(info.shape).double().numpy()


def factor_bytes(adapter: Adapter) -> int:
    """Returns the memory that an adapter's factors take: threads work on two tensors at a time, most often."""
    sizes = [8 * product.rank * sum(product.shape) for product in adapter.products]
    return 2 * max(sizes, default=0)


def add_product(left: NDArray[np.float64], right: NDArray[np.float64], scaling: float, out: Tensor, start: int) -> None:
    """Adds elements of scaling * (left @ right), flattened, to `out`, from the element `start` on.

    A matrix product of a library sums in an order that depends on the shapes. Here each element is a sum of its own:
    s = 0, then s = round(s + round(left[i, k] * right[k, j])) for k in order, all in float64; at the end
    out = round(out + delta), where delta is scaling * s rounded to float64 and then to the type of `out`.

    >>> out = torch.ones(3)
    >>> add_product(np.array([[1.0], [2.0]]), np.array([[1.0, 3.0]]), 0.5, out, 1)
    >>> out
    tensor([2.5000, 2.0000, 4.0000])
    """
    from tunable_magmax.merging.kernels import loops

    loops.add_product(left, right, scaling, out.numpy(), start)


def widen(stored: Tensor, out: Tensor) -> Tensor:
    """Writes values in a wider type, on this thread alone: torch would share each copy among threads of its own.

    >>> widen(torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.empty(2))
    tensor([ 1.5000, -2.0000])
    """
    if stored.dtype == torch.bfloat16 and out.dtype == torch.float32:
        bits = stored.view(torch.uint8).numpy().view(np.uint16)
        np.left_shift(bits, 16, out=out.numpy().view(np.uint32), dtype=np.uint32)
        return out
    return out.copy_(stored)


def _stored_dtype(info: TensorInfo) -> torch.dtype:
    dtype = torch_dtype(info.dtype)
    assert dtype is not None
    return dtype


def _buffer(held: threading.local, size: int, pin_memory: bool = False) -> Tensor:
    """Returns a thread's buffer of so many bytes."""
    buffer = getattr(held, "buffer", None)
    if buffer is None or buffer.numel() < size:
        held.buffer = buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
    assert isinstance(buffer, Tensor)
    return buffer[:size]
