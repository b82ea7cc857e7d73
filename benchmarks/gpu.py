"""Speed of a merge on a GPU as a ratio to a lower bound measured in the same run: 86,192,640 elements in float32.

    python benchmarks/gpu.py [--tasks 5 20 50] [--check] [--files] [--profile]

The elements are one tensor, or the tensors of ViT-B/16's image tower. The lower bound is the time to read T task
vectors in float32 once at the bandwidth of a copy on the device (bytes read and written). "in place" is all from the
vectors in device memory to the merged tensors there, all waits included, with the layout made before;
"whole call" is `merge_state_dicts`; "again" a further merge of an open `MergeSession`. `--check` compares with the CPU
to the bit, on fresh random inputs, odd sizes and poisoned memory. `--files` merges from files to a file, by the GPU and
by the CPU, against the time to read the inputs, which the page cache holds.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from vit import ELEMENTS, shapes

import tunable_magmax as tmx
from tunable_magmax.merging.layout import Layout, build_layout
from tunable_magmax.merging.merge import Merge
from tunable_magmax.merging.methods import read_options
from tunable_magmax.merging.state_dicts import MemorySource, signature_of
from tunable_magmax.merging.walker import Sources, kernels_for

State = dict[str, torch.Tensor]


def best(work: Callable[[], object], times: int = 7) -> float:
    """The best of some runs in milliseconds, the device's work included."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return 1000 * min(found)


def bandwidth() -> float:
    """Bytes read and written in a second by a copy of 2 GiB."""
    source = torch.empty(1 << 29, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / (best(lambda: target.copy_(source), 20) / 1000)


def sequence(tasks: int, sizes: dict[str, tuple[int, ...]], seed: int) -> list[State]:
    """Base and tasks on the device, each a step from the one before."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def noise(shape: tuple[int, ...], size: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda") * size

    found = [{name: noise(shape, 0.02) for name, shape in sizes.items()}]
    for _ in range(tasks):
        found.append({name: tensor + noise(tuple(tensor.shape), 0.001) for name, tensor in found[-1].items()})
    return found


@dataclass(frozen=True)
class Case:
    """A sequence on the device, and all that is known of it before values are looked at."""

    base: State
    vectors: list[State]
    labels: list[str]
    layout: Layout

    @classmethod
    def make(cls, tasks: int, sizes: dict[str, tuple[int, ...]]) -> Case:
        base, *vectors = sequence(tasks, sizes, seed=tasks)
        labels = ["base", *(f"task {t}" for t in range(1, tasks + 1))]
        signatures = [signature_of(state, label) for state, label in zip([base, *vectors], labels, strict=True)]
        return cls(base, vectors, labels, build_layout(signatures, labels, None, None))

    def choices(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Options, each with a line that names them."""
        two_hot = [0.0] * len(self.vectors)
        two_hot[0], two_hot[len(self.vectors) // 2] = 0.3, 0.7
        for scope in ("model", "tensor"):
            for name, weights in (("equal", None), ("two-hot", two_hot)):
                for scale in ("matched", 0.5):
                    label = f"scope {scope:6} {name:7} scale {scale!s:7}"
                    yield label, {"scope": scope, "weights": weights, "scale": scale}

    def in_place(self, given: dict[str, Any]) -> None:
        """A whole merge of what lies on the device, with the layout made before."""
        options = read_options(len(self.vectors), **given)
        states = MemorySource.of(self.layout, [self.base, *self.vectors])
        sources = Sources(self.layout, states, self.labels, in_memory=True)
        with Merge(sources, options, kernels_for(torch.device("cuda"))) as merge:
            merge.survey()
            merge.decide()
            merge.values()


def measure(case: Case, speed: float) -> None:
    """Print the table for one number of tasks."""
    lower_bound = 1000 * len(case.vectors) * ELEMENTS * 4 / speed
    print(f"\nT = {len(case.vectors)}, {len(case.base)} tensors: lower bound {lower_bound:.3f} ms", flush=True)
    for label, given in case.choices():
        in_place = best(partial(case.in_place, given))
        whole = best(partial(tmx.merge_state_dicts, case.base, case.vectors, **given), 3)
        with tmx.MergeSession(case.base, case.vectors) as session:
            session.merge(**given)
            again = best(partial(session.merge, **given))
        print(
            f"  {label}  in place {in_place:7.2f} ms = {in_place / lower_bound:5.2f} x bound; "
            f"whole call {whole:7.2f} ms; again {again:7.2f} ms",
            flush=True,
        )


def show_kernels(case: Case) -> None:
    """Where the device's time goes. A profiler slows down every launch after it, so this comes last."""
    from torch.profiler import ProfilerActivity, profile

    print(f"\nThe device's time, T = {len(case.vectors)}, {len(case.base)} tensors", flush=True)
    for label, given in case.choices():
        case.in_place(given)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            case.in_place(given)
            torch.cuda.synchronize()
        rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
        parts = ", ".join(f"{row.key[:24]} {row.device_time_total / 1000:.3f} ({row.count})" for row in rows[:9])
        print(f"  {label}  {sum(row.device_time_total for row in rows) / 1000:.2f} ms: {parts}", flush=True)


def from_files(case: Case) -> None:
    """Print the times from file to file."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{k}.safetensors" for k in range(len(case.vectors) + 1)]
        for path, state in zip(paths, [case.base, *case.vectors], strict=True):
            save_file({name: tensor.cpu() for name, tensor in state.items()}, path)
        outs = {device: Path(folder) / f"{device}.safetensors" for device in ("cuda", "cpu")}

        def read() -> None:
            for path in paths:
                with open(path, "rb", buffering=0) as file:
                    while file.read(1 << 22):
                        pass

        def merge(device: str) -> None:
            tmx.merge_checkpoints(paths[0], paths[1:], outs[device], overwrite=True, device=device)

        seconds = {device: best(partial(merge, device), 3) / 1000 for device in outs}
        reading = best(read, 3) / 1000
        same = len({hashlib.sha256(out.read_bytes()).digest() for out in outs.values()}) == 1
        print(
            f"  from files, T = {len(case.vectors)}: reading by one thread {reading:.2f} s; "
            f"GPU {seconds['cuda']:.2f} s = {seconds['cuda'] / reading:.2f} x; "
            f"CPU with {torch.get_num_threads()} threads {seconds['cpu']:.2f} s; {'same' if same else 'OTHER'} bytes",
            flush=True,
        )


def check(rounds: int) -> None:
    """Every method and option against the CPU, to the bit."""
    differ = compared = 0
    exact = [method for method in tmx.METHODS if method != "tsv"]
    for k in range(rounds):
        sizes = {"a": (1000, 777 + k), "b": (65,), "c": (1,), "d": (513, 511), "e": (), "f": (128 * k,)}
        kinds = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float16]
        if k % 3 == 2:
            kinds[3] = torch.float64
        tasks = (1, 3, 7, 33, 65)[k % 5]
        states = [
            {name: tensor.to(kind) for (name, tensor), kind in zip(state.items(), kinds, strict=True)}
            for state in sequence(tasks, sizes, seed=1000 + k)
        ]
        here = [{name: tensor.cpu() for name, tensor in state.items()} for state in states]
        weights = [float(3 * t % 7) for t in range(tasks - 1)] + [1.0]
        cases: list[dict[str, Any]] = [
            {"weights": weights, "scope": scope, "compare": compare, "scale": scale}
            for scope in ("model", "tensor")
            for compare in ("all", "active")
            for scale in (0.5, "matched")
        ]
        cases += [{"method": method, "scale": scale} for method in exact for scale in (0.5, "matched")]
        cases += [{"out_dtype": "bfloat16"}, {"seed": k}]
        with tmx.MergeSession(states[0], states[1:]) as session:
            for given in cases:
                poison = torch.full((1 << 24,), float("nan"), device="cuda")
                del poison
                ours = tmx.merge_state_dicts(states[0], states[1:], **given)
                theirs = tmx.merge_state_dicts(here[0], here[1:], **given)
                again = session.merge(**given)
                compared += 1
                same = ours.report == theirs.report == again.report and all(
                    torch.equal(_bits(other.state_dict[name]), _bits(tensor))
                    for other in (ours, again)
                    for name, tensor in theirs.state_dict.items()
                )
                if not same:
                    differ += 1
                    print("  differs:", k, tasks, given, flush=True)
    print(f"{compared} merges compared with the CPU, {differ} differ", flush=True)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().reshape(-1).view(torch.uint8)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", default=[5, 20, 50])
    parser.add_argument("--check", type=int, nargs="?", const=5, default=0, help="rounds of comparison with the CPU")
    parser.add_argument("--files", action="store_true", help="file to file too")
    parser.add_argument("--profile", action="store_true", help="show the kernels' times as well")
    given = parser.parse_args()
    if given.check:
        check(given.check)
    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies {speed / 1e12:.2f} TB/s")
    one: dict[str, tuple[int, ...]] = {"w": (ELEMENTS,)}
    shown = [(tasks, sizes) for tasks in given.tasks for sizes in (one, shapes())]
    for tasks, sizes in shown:
        measure(Case.make(tasks, sizes), speed)
    for tasks in given.tasks if given.files else ():
        from_files(Case.make(tasks, shapes()))
    for tasks, sizes in shown if given.profile else ():
        show_kernels(Case.make(tasks, sizes))


if __name__ == "__main__":
    main()
