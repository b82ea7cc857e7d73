"""`memory` bounds what a merge needs beyond the interpreter and its imports: the peak that the system saw."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapters import factors, save_adapter
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status tells the peak on Linux only")

TESTS = Path(__file__).parents[1]
MIB = 1 << 20
SHAPES = {"a": (2000, 3001), "b": (3_999_999,), "c": (1000, 5000), "d": (4_998_000,)}
"""20 million elements."""

# With arguments it merges; without, it only does what every merge has to do first, on next to nothing.
SCRIPT = """
import json, re, sys, tempfile
import torch
from pathlib import Path
from safetensors.torch import save_file
from adapters import factors, save_adapter
from tunable_magmax.engines.local import merge_checkpoints
with tempfile.TemporaryDirectory() as folder:
    for k in range(3):
        save_file({"w.weight": torch.arange(1000.0).reshape(50, 20) * k}, f"{folder}/{k}.safetensors")
    base, *tasks = (f"{folder}/{k}.safetensors" for k in range(3))
    tasks.append(save_adapter(Path(folder) / "adapter", {"w": factors(50, 20, 5, seed=0)}))
    merge_checkpoints(base, tasks, f"{folder}/out", **OPTIONS)
if len(sys.argv) > 1:
    merge_checkpoints(sys.argv[1], sys.argv[2:-1], sys.argv[-1], memory=MEMORY, **OPTIONS)
status = Path("/proc/self/status").read_text()
print(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
"""


def peak(options: dict[str, object], memory: str = "", *arguments: object) -> int:
    """The largest resident set of a process that merges `arguments`, in bytes."""
    script = SCRIPT.replace("OPTIONS", repr(options)).replace("MEMORY", repr(memory))
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(done.stdout) * 1024


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[Path]:
    """A base and six tasks in two files: each task comes three times."""
    folder = tmp_path_factory.mktemp("large")
    random = torch.Generator().manual_seed(0)
    noise = torch.empty(1_000_003).normal_(generator=random)
    files = [folder / f"{k}.safetensors" for k in range(3)]
    for k, file in enumerate(files):
        sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
        turned = {name: noise.roll(1000 * k).repeat(-(-size // noise.numel()))[:size] for name, size in sizes.items()}
        save_file({name: values.reshape(SHAPES[name]) for name, values in turned.items()}, file)
    return [files[0], *files[1:] * 3]


@pytest.fixture(scope="module")
def baseline() -> int:
    return peak({})


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        ("20MiB", {}),  # planes on disk
        pytest.param("256MiB", {}, marks=pytest.mark.stress),
        pytest.param("64MiB", {"scope": "tensor", "method": "ties", "scale": 0.5}, marks=pytest.mark.stress),
        pytest.param("64MiB", {"method": "ties", "threads": 3}, marks=pytest.mark.stress),
    ],
    ids=str,
)
def test_peak(paths, baseline, tmp_path, memory, options) -> None:
    check(paths, baseline, tmp_path, memory, options)


def test_peak_of_adapters(baseline, tmp_path) -> None:
    """Four adapters whose dense models would be 153 MiB."""
    save_file({"a.weight": torch.zeros(2000, 3001), "b.weight": torch.zeros(500, 8000)}, tmp_path / "base.safetensors")
    tasks = [
        save_adapter(tmp_path / f"{t}", {"a": factors(2000, 3001, 16, t), "b": factors(500, 8000, 16, t)}, lora_alpha=1)
        for t in range(4)
    ]
    check([tmp_path / "base.safetensors", *tasks], baseline, tmp_path, "64MiB", {"method": "magmax", "scale": 1})


def check(paths: list[Path], baseline: int, tmp_path: Path, memory: str, options: dict[str, object]) -> None:
    """Merge and compare the peak with the bound."""
    bound = int(memory.removesuffix("MiB")) * MIB
    used = peak(options, memory, *paths, tmp_path / "out.safetensors")
    figures = {"peak MiB": used // MIB, "baseline MiB": baseline // MIB, "bound MiB": bound // MIB}
    sys.stdout.write(f"{figures}\n")  # pytest -rP shows it
    assert used <= (bound + baseline) * 1.15, figures
    (tmp_path / "out.safetensors").unlink()
