"""What training leaves for a probe."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from training import toy

from tunable_magmax.data.source import open_samples
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.profiling import make_profile
from tunable_magmax.runs.run import Run
from tunable_magmax.training.sequence import train_sequence
from tunable_magmax.workflows.options import PreferOptions, Reading, SiteSources
from tunable_magmax.workflows.prefer import prefer


@pytest.mark.filterwarnings("ignore")
def test_training_leaves_the_rows_under_the_base(tmp_path):
    run = train_sequence(toy.config(tmp_path, "bert"), tmp_path / "run", device="cpu")
    samples = open_samples(tmp_path / "texts" / "train.csv")
    base = load_encoder(run.path / "base", "cpu")
    found = Run.open(run.path)
    for t, (name, classes) in enumerate((("task-01", ("card", "hello")), ("task-02", ("pay", "bill")))):
        encoder = load_encoder(run.path / name, "cpu")
        own = samples.subset([k for k, label in enumerate(samples.labels) if samples.classes[label] in classes])
        expected = make_profile(name, own, encoder, base=base, rows=500, seed=0)
        made = found.profiles[t]
        assert made.base == expected.base == base.digest
        assert made.row_labels.tolist() == expected.row_labels.tolist()
        assert {made.classes[k] for k in made.row_labels} <= set(classes)
        np.testing.assert_allclose(made.base_features, expected.base_features, atol=1e-5)
    (tmp_path / "site.txt").write_text("pay\nbill\n" * 5)
    sources, reading = SiteSources(inputs=tmp_path / "site.txt"), Reading(device="cpu")
    assert prefer(found, PreferOptions(sources=sources, method="probe", reading=reading)).method == "probe"
