"""The package imports without what only some commands need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tunable_magmax.preference

HEAVY = ("optuna", "matplotlib", "transformers", "scipy", "ot", "safetensors")


def test_no_heavy_import() -> None:
    names = sorted(path.stem for path in Path(tunable_magmax.preference.__path__[0]).glob("[a-z]*.py"))
    assert "distances" in names
    lines = [f"import tunable_magmax.preference.{name}" for name in names]
    code = "\n".join(
        ["import sys", *[f"sys.modules[{name!r}] = None" for name in HEAVY], *lines]  # None makes an import fail
    )
    subprocess.run([sys.executable, "-c", code], check=True)
