"""Decodes inputs once: images to the bytes that the encoder's processor makes of them, texts to token ids.

Training reads a task's inputs many times, and experiments evaluate hundreds of models on the same ones. So files are
opened, decoded and resized once; what is left for each batch is to gather rows and to normalise them on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tunable_magmax.data.images import in_order
from tunable_magmax.data.samples import Kind, Samples, Unreadable, warn_unreadable
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.models.encoder import EMBEDDING_BATCH, Encoder

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    Batch: TypeAlias = Tensor | dict[str, Tensor]

INPUTS_AT_ONCE = 256
# Decoding threads beyond this gain nothing: the parts that hold the interpreter's lock take over.
DECODING_THREADS = 8
DEVICE_BATCH = 512
SMALLEST_PART = 32
"""Samples of a thread's part, at least: below, the interpreter is busier than the processor."""
MOST_THREADS = 16
_Result = TypeVar("_Result")
# The share of a GPU's free memory that inputs may take before they stay in pinned host memory.
DEVICE_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class Prepared:
    """Readable inputs of one kind, ready for an encoder; `labels` int64 [n] are indices into the samples' classes.

    `inputs` by name: `pixels` uint8 [n, 3, height, width], or token ids and mask [n, tokens].
    """

    kind: Kind
    positions: tuple[int, ...]
    labels: Tensor | None
    inputs: dict[str, Tensor]
    device: torch.device
    normalise: Callable[[Tensor], Tensor]
    failed: int = 0

    def __len__(self) -> int:
        return len(self.positions)

    def batch(self, rows: Sequence[int] | Tensor) -> Batch:
        """Returns rows as the encoder takes them, on its device: normalised pixels [b, 3, h, w], or tokens by name."""
        import torch

        index = torch.as_tensor(rows, dtype=torch.int64)
        if self.kind == "image":
            return self.normalise(self.pixels(index))
        tokens = {name: self._gather(values, index) for name, values in self.inputs.items()}
        if self.device.type == "cpu" and "attention_mask" in tokens:
            # Shorter batches are faster; on a GPU, looking for their length would mean waiting for it.
            used = tokens["attention_mask"].any(dim=0).nonzero()
            longest = int(used.max()) + 1 if len(used) else 1
            tokens = {name: values[:, :longest] for name, values in tokens.items()}
        return tokens

    def pixels(self, rows: Tensor) -> Tensor:
        """Returns raw pixels uint8 [b, 3, h, w] of some rows, on the encoder's device, for augmentation."""
        return self._gather(self.inputs["pixels"], rows)

    def by_length(self) -> list[int]:
        """Returns the rows in ascending order of their tokens, so that batches need little padding."""
        mask = self.inputs.get("attention_mask")
        if mask is None or self.device.type != "cpu":
            return list(range(len(self)))
        order: list[int] = mask.sum(dim=1).argsort(stable=True).tolist()
        return order

    def subset(self, rows: Sequence[int]) -> Prepared:
        """Returns some of the inputs, as if only they had been prepared."""
        import torch

        index = torch.as_tensor(rows, dtype=torch.int64)
        positions = tuple(self.positions[row] for row in index.tolist())
        labels = None if self.labels is None else _rows(self.labels, index)
        inputs = {name: _rows(values, index) for name, values in self.inputs.items()}
        return replace(self, positions=positions, labels=labels, inputs=inputs, failed=0)

    def _gather(self, values: Tensor, index: Tensor) -> Tensor:
        return _rows(values, index).to(self.device, non_blocking=True)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    return values[index.to(values.device, non_blocking=True)]


def prepare(
    encoder: Encoder,
    samples: Samples,
    positions: Sequence[int] | None = None,
    *,
    strict: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Decodes samples, all or those at ascending `positions`, for an encoder.

    What cannot be read is counted, named in one warning and left out; with `strict` it is an error.
    """
    import torch

    wanted = range(len(samples)) if positions is None else positions
    if not wanted:
        raise InputError(f"{samples.origin}: there is no sample to prepare")
    decode = Encoder.decode_images if samples.kind == "image" else _tokens
    failed: dict[int, Unreadable] = {}
    kept: list[int] = []
    parts: list[Any] = []
    # Tokenizers refuse to be used from two threads at once.
    threads = min(DECODING_THREADS, torch.get_num_threads()) if samples.kind == "image" else 1
    batches = samples.batches(wanted, INPUTS_AT_ONCE, failed)
    # A few batches at a time: hundreds of decoded images each, before they are made smaller.
    for where, part in in_order(
        lambda batch: (batch[0], decode(encoder, batch[1])), batches, threads, DECODING_THREADS
    ):
        kept += where
        parts.append(part)
        if progress is not None:
            progress("reading", len(kept) + len(failed), len(wanted))
    warn_unreadable(samples.origin, failed, len(wanted), strict)
    device = encoder.device
    labels = None if samples.labels is None else torch.tensor([samples.labels[k] for k in kept], dtype=torch.int64)
    joined = {"pixels": torch.cat(parts)} if samples.kind == "image" else _padded(parts, encoder)
    return Prepared(
        samples.kind,
        tuple(kept),
        None if labels is None else labels.to(device),
        _placed(joined, device),
        device,
        encoder.normalise,
        len(failed),
    )


def joined(parts: Sequence[Prepared], encoder: Encoder) -> Prepared:
    """Returns several inputs as one, in order; all are of one encoder, and their labels are left out."""
    import torch

    first = parts[0]
    if first.kind == "image":
        inputs = {"pixels": torch.cat([part.inputs["pixels"] for part in parts])}
    else:
        inputs = _padded([part.inputs for part in parts], encoder)
    positions = tuple(range(sum(map(len, parts))))
    return replace(first, positions=positions, labels=None, inputs=inputs, failed=sum(part.failed for part in parts))


def embed_prepared(
    encoder: Encoder,
    prepared: Prepared,
    batch: int | None = None,
    *,
    precise: bool = True,
    check: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> NDArray[np.float32]:
    """Returns embeddings [n, dim] of prepared inputs, in their order, without gradients.

    On the processor, texts of one length go together and parts of a batch run in threads. `batch`: inputs at a time.
    Unless `precise`, a GPU may multiply in TF32. `check` is called now and then, and may raise to stop it.
    """
    import numpy as np

    device = encoder.device
    size = batch or (EMBEDDING_BATCH if device.type == "cpu" else DEVICE_BATCH)
    if size < 1:
        raise InputError(f"the batch is {size}, expected at least 1")
    order = prepared.by_length()
    parts: list[NDArray[np.float32]] = []
    done = 0
    with encoder.evaluating():
        work = lambda rows: encoder.embed_batch(prepared.batch(order[rows.start : rows.stop]), precise)  # noqa: E731
        for part in in_parallel(work, len(prepared), size, device):
            parts.append(part)
            done += len(part)
            if check is not None:
                check()
            if progress is not None:
                progress("embedding", done, len(prepared))
    found = np.concatenate(parts)
    found[order] = found.copy()
    return found


def in_parallel(work: Callable[[range], _Result], samples: int, batch: int, device: torch.device) -> Iterator[_Result]:
    """Yields what `work` returns for consecutive rows, at most `batch` at a time over all threads, in order.

    On the processor each thread has a part of the samples, instead of threads inside each operation: these wait for
    each other after each of them, which with a small encoder, or beside other programs, is most of the time. On another
    device, or with few samples, `work` is called in this thread.
    """
    import torch

    threads = min(torch.get_num_threads(), MOST_THREADS, -(-min(samples, batch) // SMALLEST_PART))
    alone = device.type != "cpu" or threads < 2
    size = batch if alone else -(-batch // threads)
    pieces = [range(start, min(start + size, samples)) for start in range(0, samples, size)]
    if alone:
        yield from map(work, pieces)
        return
    before = torch.get_num_threads()
    with ThreadPoolExecutor(threads, "forward", torch.set_num_threads, (1,)) as pool:
        try:
            yield from pool.map(work, pieces)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)  # threads that others begin would have the number that was set last


def _tokens(encoder: Encoder, texts: Sequence[str]) -> dict[str, Tensor]:
    return {name: values.cpu() for name, values in encoder.prepare_texts(texts).items()}


def _padded(parts: Sequence[dict[str, Tensor]], encoder: Encoder) -> dict[str, Tensor]:
    """Joins the token tables of several chunks, padded to the longest as the tokenizer does."""
    import torch

    longest = max(part["input_ids"].shape[1] for part in parts)
    filler = {"input_ids": int(getattr(encoder.tokenizer, "pad_token_id", None) or 0)}
    return {
        name: torch.cat(
            [
                torch.nn.functional.pad(part[name], (0, longest - part[name].shape[1]), value=filler.get(name, 0))
                for part in parts
            ]
        )
        for name in parts[0]
    }


def _placed(tables: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Moves inputs to the GPU if there is room, else to pinned memory, from which copies are fast."""
    import torch

    if device.type != "cuda":
        return tables
    room = torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE
    fits = sum(table.nbytes for table in tables.values()) <= room
    return {name: table.to(device) if fits else table.pin_memory() for name, table in tables.items()}


KEEP_BYTES = 4 << 30


class Decoded:
    """The samples at `positions` (all if None) of a data set, for encoders of one architecture.

    If they take up to `keep` bytes, all are decoded at once and kept; otherwise those that are asked for, each time.
    """

    def __init__(
        self,
        encoder: Encoder,
        samples: Samples,
        positions: Sequence[int] | None = None,
        *,
        strict: bool = False,
        keep: int = KEEP_BYTES,
        progress: Progress | None = None,
    ) -> None:
        self._encoder, self._samples, self._strict, self._progress = encoder, samples, strict, progress
        self._positions = sorted(set(range(len(samples)) if positions is None else positions))
        self._keep = keep
        self._whole: Prepared | None = None
        self._rows: dict[int, int] = {}

    def take(self, positions: Sequence[int]) -> Prepared:
        """Returns the readable ones among some samples, in ascending order."""
        if self._whole is None and self._fits():
            self._whole = self._prepare(self._positions)
            self._rows = {position: row for row, position in enumerate(self._whole.positions)}
        if self._whole is None:
            return self._prepare(sorted(positions))
        rows = [self._rows[k] for k in sorted(positions) if k in self._rows]
        if not rows:
            count = len(positions)
            raise InputError(f"{self._samples.origin}: {count} of {count} samples cannot be read")
        return self._whole.subset(rows)

    def _prepare(self, positions: Sequence[int]) -> Prepared:
        return prepare(self._encoder, self._samples, positions, strict=self._strict, progress=self._progress)

    def _fits(self) -> bool:
        if self._samples.kind == "text":
            return True
        processor = self._encoder.image_processor
        size = getattr(processor, "crop_size", None) or getattr(processor, "size", None) or {}
        side = [size.get(name) for name in ("height", "width")]
        height, width = (value or size.get("shortest_edge") or 224 for value in side)
        return 3 * height * width * len(self._positions) <= self._keep
