"""Decodes inputs once, and embeds them: images as the bytes that the encoder's processor makes, texts as token ids.

Training reads a task's inputs many times, and experiments evaluate hundreds of models on the same ones. So files are
opened, decoded and resized once; what is left for each batch is to gather rows and to normalise them on the device.
A task's profile is made of embeddings, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import choose_rows
from tunable_magmax.data.images import map_in_threads
from tunable_magmax.data.samples import Kind, Samples, Unreadable, warn_unreadable
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.runs.kept import KEEP, keep_samples
from tunable_magmax.runs.profile import ROWS, Profile
from tunable_magmax.runs.run import Run

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Batch: TypeAlias = Tensor | dict[str, Tensor]

IMAGES_AT_ONCE = 256
# Decoding threads beyond this gain nothing: the parts that hold the interpreter's lock take over.
DECODING_THREADS = 8
CPU_BATCH, DEVICE_BATCH = 64, 512
SMALLEST_PART = 32
"""Samples of a thread's part, at least: below, the interpreter is busier than the processor."""
MOST_THREADS = 16
# The share of a GPU's free memory that inputs may take before they stay in pinned host memory.
DEVICE_SHARE = 0.25
_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class Prepared:
    """Readable inputs of one kind, ready for an encoder; `positions` [n] are theirs among the samples.

    `inputs` by name: `pixels` uint8 [n, 3, height, width], or token ids and mask [n, tokens].
    """

    positions: tuple[int, ...]
    inputs: dict[str, Tensor]
    device: torch.device
    normalise: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.positions)

    def batch(self, rows: Sequence[int] | Tensor) -> Batch:
        """Returns rows as the encoder takes them, on its device: normalised pixels [b, 3, h, w], or tokens by name."""
        import torch

        index = torch.as_tensor(rows, dtype=torch.int64)
        if "pixels" in self.inputs:
            return self.normalise(self.pixels(index))
        tokens = {name: _rows(values, index).to(self.device, non_blocking=True) for name, values in self.inputs.items()}
        if self.device.type == "cpu" and "attention_mask" in tokens:
            # Shorter batches are faster; on a GPU, looking for their length would mean waiting for it.
            used = tokens["attention_mask"].any(dim=0).nonzero()
            longest = int(used.max()) + 1 if len(used) else 1
            tokens = {name: values[:, :longest] for name, values in tokens.items()}
        return tokens

    def pixels(self, rows: Tensor) -> Tensor:
        """Returns raw pixels uint8 [b, 3, h, w] of some rows, on the encoder's device, for augmentation."""
        return _rows(self.inputs["pixels"], rows).to(self.device, non_blocking=True)

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
        inputs = {name: _rows(values, index) for name, values in self.inputs.items()}
        return replace(self, positions=positions, inputs=inputs)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    return values[index.to(values.device, non_blocking=True)]


def prepare(
    encoder: Encoder,
    samples: Samples,
    positions: Sequence[int] | None = None,
    *,
    progress: Progress | None = None,
) -> Prepared:
    """Decodes samples, all or those at some positions (in ascending order), for an encoder.

    What cannot be read is named in one warning and left out.
    """
    import torch

    wanted = range(len(samples)) if positions is None else sorted(positions)
    if not wanted:
        raise InputError(f"{samples.origin}: there is no sample to prepare")
    failed: dict[int, Unreadable] = {}
    kept: list[int] = []
    parts: list[dict[str, Tensor]] = []
    # A tokenizer refuses to be used from two threads at once, and pads what it is given to the longest.
    threads, size = min(DECODING_THREADS, torch.get_num_threads()), IMAGES_AT_ONCE
    if samples.kind == "text":
        threads, size = 1, len(wanted)
    batches = samples.batches(wanted, size, failed)
    # A few batches at a time: hundreds of decoded images each, before they are made smaller.
    for where, part in map_in_threads(
        lambda batch: (batch[0], _decode(encoder, batch[1], samples.kind)), batches, threads, DECODING_THREADS
    ):
        kept += where
        parts.append(part)
        if progress is not None:
            progress("reading", len(kept) + len(failed), len(wanted))
    warn_unreadable(samples.origin, failed, len(wanted))
    inputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    device = encoder.device
    if device.type == "cuda":  # if there is no room, pinned memory, from which copies are fast
        fits = sum(table.nbytes for table in inputs.values()) <= torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE
        inputs = {name: table.to(device) if fits else table.pin_memory() for name, table in inputs.items()}
    return Prepared(tuple(kept), inputs, device, encoder.normalise)


def embed_inputs(encoder: Encoder, inputs: Sequence[Any]) -> NDArray[np.float32]:
    """Returns embeddings [n, dim] of inputs that are all texts or all PIL images."""
    if not len(inputs):
        return np.zeros((0, encoder.dim), np.float32)
    kind: Kind = "text" if isinstance(inputs[0], str) else "image"
    samples = Samples("the inputs", kind, len(inputs), lambda wanted: (inputs[position] for position in wanted))
    return embed_prepared(encoder, prepare(encoder, samples))


def embed_prepared(
    encoder: Encoder,
    prepared: Prepared,
    batch: int | None = None,
    *,
    precise: bool = True,
    progress: Progress | None = None,
) -> NDArray[np.float32]:
    """Returns embeddings [n, dim] of prepared inputs, in their order, without gradients.

    On the processor, texts of one length go together and parts of a batch run in threads. `batch`: inputs at a time.
    Unless `precise`, a GPU may multiply in TF32. `progress` may raise, to stop it.
    """
    device = encoder.device
    size = (CPU_BATCH if device.type == "cpu" else DEVICE_BATCH) if batch is None else batch
    order = prepared.by_length()
    parts: list[NDArray[np.float32]] = []
    done = 0
    encoder.module.eval()
    work = lambda rows: _embed(encoder, prepared.batch(order[rows.start : rows.stop]), precise)  # noqa: E731
    for part in in_parallel(work, len(prepared), size, device):
        parts.append(part)
        done += len(part)
        if progress is not None:
            progress("embedding", done, len(prepared))
    found = np.concatenate(parts)
    found[order] = found.copy()
    return found


def _embed(encoder: Encoder, batch: Batch, precise: bool) -> NDArray[np.float32]:
    """Returns embeddings [n, dim] of a batch, computed in float32; may be called by several threads."""
    import torch

    try:
        with torch.inference_mode(), full_float32(encoder.device, precise):
            rows: NDArray[np.float32] = encoder.pool(batch).float().cpu().numpy()
    except torch.cuda.OutOfMemoryError:
        raise InputError("the device ran out of memory: give --device cpu (device='cpu')") from None
    if not np.isfinite(rows).all():
        raise InputError(
            f"embeddings by {encoder.path}, or by weights put into it, hold NaN or infinity: the numbers are broken "
            "(training diverged, or the scale is far too large)"
        )
    return rows


@contextmanager
def full_float32(device: Any, precise: bool = True) -> Iterator[None]:
    """Computes in float32 without autocast; if `precise`, also without the shorter TF32 of a GPU's matrix units."""
    import torch

    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest" if precise else "high")
        torch.backends.cudnn.allow_tf32 = not precise
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(products)
            torch.backends.cudnn.allow_tf32 = convolutions


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


def _decode(encoder: Encoder, inputs: Sequence[Any], kind: Kind) -> dict[str, Tensor]:
    if kind == "image":
        return {"pixels": encoder.decode_images(inputs)}
    return {name: values.cpu() for name, values in encoder.prepare_texts(inputs).items()}


# -- profiles ----------------------------------------------------------------------------------------------------------


def make_profile(
    task: str,
    samples: Samples,
    encoder: Encoder,
    *,
    base: Encoder,
    rows: int = ROWS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Makes the profile of a task from its data; `rows` seeded samples are embedded, by the base, too.

    Samples that cannot be read are left out.
    """
    labels = np.array(samples.require_labels())
    chosen = choose_rows(len(samples), rows, seed)
    prepared = prepare(encoder, samples, chosen, progress=progress)
    read = list(prepared.positions)
    left = np.delete(labels, list(set(chosen).difference(read)))
    counts = tuple(np.bincount(left, minlength=len(samples.classes)).tolist())
    by_base, features = (embed_prepared(each, prepared, progress=progress) for each in (base, encoder))
    digests = encoder.digest, base.digest
    return Profile(task, len(left), samples.classes, *digests, counts, features, by_base, labels[read])


def profile_task(
    run: Run,
    task: str,
    encoder: Encoder,
    base: Encoder,
    samples: Samples,
    held: Samples | None = None,
    *,
    keep: int = KEEP,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Writes the profile of a task, and keeps `keep` samples of each class, of those `held` out if there are such.

    `options`: of `make_profile`. Returns what is to be entered into the run.
    """
    make_profile(task, samples, encoder, base=base, seed=seed, **options).save(run.path / run.profile_name(task))
    kept = keep_samples(
        run,
        task,
        samples if held is None else held,
        per_class=keep,
        source="training" if held is None else "evaluation",
        size=encoder.picture_size,
        seed=seed,
    )
    return {"profile": run.profile_name(task), "kept": kept}
