"""Speed of a merge as a ratio to a lower bound measured in the same run, on the tensors of ViT-B/16's image tower.

    python benchmarks/merge.py [--tasks 5 20] [--files] [--threads 2] [--mergekit mergekit-yaml]

The lower bound reads base and all T task checkpoints once, `abs().sum()` each, and clones the base, on as many threads.
`--files` also times file to file: against the in-memory merge plus reading the files, and as a fresh process.
`--mergekit` gives the same YAML to that program (0.1.5, in an environment of its own) and to `tmx merge`, in turn: TIES
and task arithmetic of five language models of about as many elements, from files to files, each as a fresh process.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vit import ELEMENTS, next_task, random_base

import tunable_magmax as tmx


def best(work: Callable[[], object], times: int = 3) -> float:
    """The best of some runs, in seconds."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def in_memory(tasks: int, threads: int, methods: bool) -> dict[str, float]:
    """Print the table for one number of tasks; return seconds by case."""
    base = random_base()
    sequence = [base]
    for t in range(tasks):
        sequence.append(next_task(sequence[-1], t + 1))
    vectors = sequence[1:]

    def lower_bound() -> None:
        for checkpoint in sequence:
            for tensor in checkpoint.values():
                tensor.abs().sum()
        _ = [tensor.clone() for tensor in base.values()]

    def reading_alone() -> None:
        for checkpoint in sequence:
            for tensor in checkpoint.values():
                tensor.sum()

    two_hot = [0.0] * tasks
    two_hot[0], two_hot[tasks // 2] = 0.3, 0.7
    cases: dict[str, dict[str, Any]] = {
        f"tunable_magmax, scope {scope}, {name} weights, scale {scale}": {
            "scope": scope,
            "weights": weights,
            "scale": scale,
        }
        for scope in ("model", "tensor")
        for name, weights in (("equal", None), ("two-hot", two_hot))
        for scale in ("matched", 0.5)
    }
    if methods:
        cases |= {f"{method}, scale matched": {"method": method} for method in list(tmx.METHODS)[1:]}
    tmx.merge_state_dicts(base, vectors, threads=threads)  # compiles, and touches every input once
    reference, lean = best(lower_bound), best(reading_alone)
    print(f"\nT = {tasks}, {threads} threads: lower bound {reference:.3f} s (reading alone {lean:.3f} s)")
    seconds = {}
    for name, options in cases.items():
        seconds[name] = best(partial(tmx.merge_state_dicts, base, vectors, threads=threads, **options))
        print(f"  {name:62} {seconds[name]:7.3f} s = {seconds[name] / reference:5.2f} x bound")
    return seconds


def from_files(tasks: int, threads: int, memory_seconds: float, folder: Path) -> None:
    """Print file-to-file times for one number of tasks."""
    current = random_base()
    save_file(current, folder / "base.safetensors")
    for t in range(tasks):
        current = next_task(current, t + 1)
        save_file(current, folder / f"task{t + 1}.safetensors")
    del current
    paths = [folder / "base.safetensors", *(folder / f"task{t + 1}.safetensors" for t in range(tasks))]
    out = folder / "out"

    def read() -> None:
        buffer = bytearray(1 << 22)
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def merge() -> None:
        tmx.merge_checkpoints(paths[0], paths[1:], out, overwrite=True, threads=threads)

    merge()
    reading, merging = best(read), best(merge)
    rival = memory_seconds + reading
    print(f"\nT = {tasks} from files: {merging:.3f} s; in memory {memory_seconds:.3f} s + reading {reading:.3f} s")
    print(f"  = {merging / rival:.2f} x (in-memory merge + reading)")
    command = [sys.executable, "-m", "tunable_magmax", "merge", "--base", str(paths[0]), "--overwrite", "-o", str(out)]
    for path in paths[1:]:
        command += ["--task", str(path)]
    process = best(lambda: subprocess.run([*command, "--threads", str(threads), "--quiet"], check=True))
    start = best(lambda: subprocess.run([sys.executable, "-c", "import torch, numba"], check=True))
    print(f"  as a process: {process:.2f} s, of which importing torch and numba alone is {start:.2f} s")


def beside_mergekit(program: str, tasks: int, threads: int, folder: Path) -> None:
    """Print how long mergekit and `tmx merge` take for the same files and YAML, each the best of three in turn."""
    import yaml
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 11, "num_attention_heads": 12}
    config = LlamaConfig(vocab_size=4000, tie_word_embeddings=False, **sizes)
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    print(f"\nmergekit, T = {tasks}: Llama with {sum(p.numel() for p in model.parameters()):,} elements, float32")
    for t in range(tasks + 1):
        model.save_pretrained(folder / f"model-{t}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.001 * torch.randn_like(parameter)
    for method, own in (("ties", {"weight": 0.5, "density": 0.5}), ("task_arithmetic", {"weight": 0.5})):
        models: Any = [{"model": str(folder / f"model-{t}"), "parameters": dict(own)} for t in range(1, tasks + 1)]
        recipe: dict[str, Any] = {
            "merge_method": method,
            "base_model": str(folder / "model-0"),
            "models": models,
            "dtype": "float32",
        }
        (folder / "merge.yml").write_text(yaml.safe_dump(recipe))
        given = [str(folder / "merge.yml")]
        ours = [sys.executable, "-m", "tunable_magmax", "merge", *given, "--quiet", "--overwrite", "-o"]
        commands = {
            "mergekit": [program, *given, str(folder / "theirs"), "--no-copy-tokenizer"],
            "tmx merge": [*ours, str(folder / "ours"), "--threads", str(threads)],
        }
        seconds = dict.fromkeys(commands, float("inf"))
        for _ in range(3):
            for name, command in commands.items():
                run = partial(subprocess.run, command, check=True, capture_output=True)
                seconds[name] = min(seconds[name], best(run, times=1))
        times = ", ".join(f"{name} {found:.2f} s" for name, found in seconds.items())
        print(f"  {method:16} {times}: {seconds['mergekit'] / seconds['tmx merge']:.1f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="*", default=[5, 20])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--methods", action="store_true", help="time the other methods too")
    parser.add_argument("--files", action="store_true", help="file to file too")
    parser.add_argument("--mergekit", help="the program mergekit-yaml, which is then timed beside `tmx merge`")
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"ViT-B/16 image tower: {ELEMENTS:,} elements, float32")
    for tasks in options.tasks:
        seconds = in_memory(tasks, options.threads, options.methods)
        if options.files:
            folder = Path(tempfile.mkdtemp(dir=options.folder))
            try:
                from_files(tasks, options.threads, next(iter(seconds.values())), folder)
            finally:
                shutil.rmtree(folder)
    if options.mergekit:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            beside_mergekit(options.mergekit, 5, options.threads, Path(place))


if __name__ == "__main__":
    main()
