"""An experiment of every kind on tiny models."""

from pathlib import Path

import pytest
import yaml
from training import toy

from tunable_magmax.experiments import sequence_bench
from tunable_magmax.experiments.config import read_experiment
from tunable_magmax.experiments.reproduce import reproduce

ROWS = [
    *("tailor:auto", "tailor:label", "tailor:both", "tailor:auto+prior", "tailor:wrong"),
    *("zero-shot", "zero-shot+fit+prior:auto", "single-best", "likeliest:auto", "sequential@1", "sequential@0.5"),
    *("magmax@best", "magmax@best+prior:wrong", "magmax@best+fit+prior:auto", "ties@matched", "average:label@1+prior"),
    *("tsv:auto@1+fit+prior", "tunable:label@matched,compare=active", "tunable:auto@1+fit+prior"),
    *(f"tunable:{source}@0.5" for source in ("label", "auto", "ot", "ot-raw", "cosine", "mmd", "search")),
    *("joint", "joint+prior:auto", "joint+fit+prior:auto", "logistic:auto+prior"),
    *("tailor:auto,samples=1", "tailor:auto,samples=2", "tailor:auto,kept=0", "tailor:auto,kept=1"),
]


def written(root: Path, kind: str = "vit", more: dict | None = None, **changed) -> Path:
    """Writes the file of an experiment on tiny models; `more`: further settings of its run."""
    run = toy.settings(root, kind, benchmark={"holdout": 0.3}, train={"epochs": 1}, **(more or {}))
    environments = {"mixtures": {"D1": [0.5, 0.5]}, "levels": ["all"], "variants": [42, 123], "size": "supply"}
    given = {
        "setting": "toy/colours-2",
        "run": run,
        "seeds": [3],
        "environments": environments,
        "grid": [0.5, 1.0],
        "alphas": [0.5, 2.0],
        "rows": ROWS,
        **changed,
    }
    path = root / "toy.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def reproduced(root: Path, kind: str = "vit", more: dict | None = None, **changed) -> tuple:
    """Reproduces such an experiment: where it lies, what it is, and the files that it made."""
    experiment = read_experiment(written(root, kind, more, **changed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_bench, "TRIALS", 3)
        return root, experiment, reproduce(experiment, root / "results", root / "work", "cpu")
