"""A model sequence in files, and the program as a function."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tunable_magmax.cli import terminal
from tunable_magmax.cli.app import main

TASKS = 3


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Sequence:
    """Base and tasks as files, and as the state dicts that are in them."""

    folder: Path
    state_dicts: list[dict[str, Tensor]]

    @property
    def base(self) -> Path:
        return self.folder / "base.safetensors"

    @property
    def tasks(self) -> list[Path]:
        return [self.folder / f"task{t}.safetensors" for t in range(1, len(self.state_dicts))]

    @property
    def arguments(self) -> list[str]:
        return ["--base", str(self.base), *(part for task in self.tasks for part in ("--task", str(task)))]


@pytest.fixture
def tmx(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the program: `tmx("merge", ...)`. However slow the machine is, no lines of progress appear."""
    monkeypatch.setattr(terminal, "PATIENCE", math.inf)

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(stopped.value.code or 0, out, err)

    return run


@pytest.fixture
def sequence(tmp_path: Path) -> Sequence:
    """A sequence of three tasks over a small model with layers, an integer and a head."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"embed.weight": (11, 4), "head.weight": (4, 3), "head.bias": (3,)}
    shapes |= {f"layers.{k}.{part}": shape for k in (0, 1, 10) for part, shape in (("weight", (4, 4)), ("bias", (4,)))}
    current: dict[str, Tensor] = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    current["steps"] = torch.tensor([5, 6])
    state_dicts = [dict(current)]
    for _ in range(TASKS):
        current = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in current.items()
        }
        state_dicts.append(current)
    made = Sequence(tmp_path, state_dicts)
    for path, tensors in zip([made.base, *made.tasks], state_dicts, strict=True):
        save_file(tensors, path)
    return made
