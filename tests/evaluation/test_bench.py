"""A bench's models are those of the files, one never changes another, and their features are made once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builtin_run import build_builtin, texts_of

from tunable_magmax import merge_checkpoints
from tunable_magmax.data.arrays import unit_rows
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation import bench as benches
from tunable_magmax.evaluation.bench import Bench, SiteFacts
from tunable_magmax.evaluation.choosing import choose_kept, draw_mixtures, expected_accuracy, gather_evidence
from tunable_magmax.evaluation.run_models import BASE, MergeSpec, RunModels
from tunable_magmax.models.builtin import load_builtin
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.fitting import FittedHead
from tunable_magmax.models.head import Linear
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.runs.run import Run

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to mend
COUNTS = {"red": 6, "blue": 4, "green": 5, "grey": 3}
WEIGHTS = (0.7, 0.3)
SPECS = [
    BASE,
    MergeSpec("tunable_magmax", 0.5, WEIGHTS),
    MergeSpec("average", 1.0, WEIGHTS),
    MergeSpec("tsv", 0.5, WEIGHTS),
    MergeSpec(checkpoint=1),
    MergeSpec(checkpoint=2),
]


@pytest.fixture(scope="module", params=["bert", "distilbert"])
def builtin(request, tmp_path_factory):
    return build_builtin(tmp_path_factory.mktemp("builtin"), request.param)


def written(run: Run, spec: MergeSpec, out):
    if spec.checkpoint is not None:
        return (run.base, *run.tasks)[spec.checkpoint]
    merge_checkpoints(run.base, run.tasks, out, method=spec.method, scale=spec.scale, weights=list(spec.weights))
    return out


def test_features_are_those_of_a_written_merge_whatever_was_made_before(any_run, tmp_path):
    run = Run.open(any_run.path)
    samples = open_samples(any_run.pairs(tmp_path / "site", COUNTS))
    inputs = list(samples.load(range(len(samples))))
    with Bench(run, device="cpu") as bench:
        data = bench.open("site", samples)
        found = {spec: bench.features(spec, data) for spec in [*SPECS, *SPECS[::-1]]}
        for k, spec in enumerate(SPECS):
            encoder = load_encoder(written(run, spec, tmp_path / f"{k}"), "cpu", assets=run.base)
            np.testing.assert_allclose(unit_rows(found[spec]), unit_rows(embed_inputs(encoder, inputs)), atol=1e-5)
        np.testing.assert_allclose(bench.logits(BASE, data), bench.old_head(BASE).logits(unit_rows(found[BASE])))
        assert data.labels.tolist() == [bench.classes.index(samples.classes[k]) for k in samples.labels]


def test_builtin_models_give_the_logits_of_the_written_merge(builtin, tmp_path):
    run = Run.open(builtin)
    samples = open_samples(builtin / "all.csv")
    inputs = list(samples.load(range(len(samples))))
    specs = [*SPECS, MergeSpec("magmax", 0.5), MergeSpec("last_task", 1.0), MergeSpec("last_task", 0.5)]
    with Bench(run, device="cpu") as bench:
        data = bench.open("site", samples)
        made = {spec: bench.logits(spec, data) for spec in [*specs, *specs[::-1]]}
    for k, spec in enumerate(specs):
        if spec.checkpoint == 1:
            continue
        options = {"method": spec.method or "last_task", "scale": spec.scale, "weights": spec.weights}
        if spec.checkpoint is not None:  # as `tailor` writes them
            options["scale"] = float(not spec.is_base)
        merge_checkpoints(run.base, run.tasks, tmp_path / f"{k}", **options)
        encoder = load_builtin(tmp_path / f"{k}", "cpu", assets=run.base)
        rows = np.concatenate([embed_inputs(encoder, inputs[n : n + 8]) for n in range(0, len(inputs), 8)])
        np.testing.assert_allclose(made[spec], encoder.head.logits(rows), atol=1e-4, err_msg=spec.title)
    own = load_builtin(run.tasks[1], "cpu", assets=run.base)
    rows = np.concatenate([embed_inputs(own, inputs[n : n + 8]) for n in range(0, len(inputs), 8)])
    np.testing.assert_allclose(made[MergeSpec(checkpoint=2)][:, 2:], own.head.logits(rows), atol=1e-4)


def test_features_are_made_once_and_the_oldest_are_forgotten(image_run, tmp_path, monkeypatch):
    run = Run.open(image_run.path)
    with Bench(run, device="cpu") as bench:
        data = bench.open("site", open_samples(image_run.pairs(tmp_path / "site", COUNTS)))
        for _ in range(3):
            bench.features(SPECS[1], data)
        assert bench.embedded == len(data)
        some = data.take([0, 3], "some")
        np.testing.assert_allclose(bench.features(SPECS[1], some), bench.features(SPECS[1], data)[[0, 3]], atol=1e-5)
        bench.forget("some")
        assert bench.keeps(SPECS[1], some)  # as a part of all
        assert bench.embedded == len(data)
        monkeypatch.setattr(benches, "CACHE_BYTES", bench.features(BASE, data).nbytes * 2)
        bench.features(SPECS[2], data)
        assert [bench.keeps(spec, data) for spec in (SPECS[1], BASE, SPECS[2])] == [False, True, True]


@pytest.mark.parametrize("kind", ["frozen", "builtin"])
def test_two_threads_get_what_one_gets(kind, image_run, builtin, tmp_path):
    run = Run.open(builtin if kind == "builtin" else image_run.path)
    site = builtin / "all.csv" if kind == "builtin" else image_run.pairs(tmp_path / "site", COUNTS)
    with Bench(run, device="cpu") as bench:
        data = bench.open("site", open_samples(site))
        alone = [bench.features(spec, data) for spec in SPECS]
        bench.forget("site")
        with ThreadPoolExecutor(2) as threads:
            together = list(threads.map(lambda spec: bench.features(spec, data), SPECS))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_that_does_not_fit_into_memory_is_refused_before_it_is_read(image_run, monkeypatch):
    monkeypatch.setattr("tunable_magmax.merging.walker.available_memory", lambda: 1000)
    monkeypatch.setattr("tunable_magmax.models.pretrained.read_tensors", None)
    run = Run.open(image_run.path)
    with pytest.raises(InputError, match=r"2 tasks are held in memory.* needs .*1000 B are free"):
        RunModels(run.base, run.tasks).state(SPECS[1])


def test_a_broken_model_is_refused_and_an_unknown_checkpoint(image_run, tmp_path):
    with Bench(Run.open(image_run.path), device="cpu") as bench:
        data = bench.open("site", open_samples(image_run.pairs(tmp_path / "site", COUNTS)))
        with pytest.raises(InputError, match="NaN or infinity"):
            bench.features(MergeSpec("average", 1e30, WEIGHTS), data)
        with pytest.raises(InputError, match="no checkpoint 3"):
            bench.features(MergeSpec(checkpoint=3), data)


def test_a_fitted_head_is_for_one_site(builtin):
    run = Run.open(builtin)
    with Bench(run, device="cpu") as bench:
        texts, labels = texts_of(builtin / "all.csv")
        data = bench.open("kept", open_samples(builtin / "all.csv"))
        assert len(data) == len(texts) == len(labels)
        spec = MergeSpec("average", 1.0, WEIGHTS)
        even = bench.fit(spec, SiteFacts(WEIGHTS, np.full(5, 0.2), data))
        first = bench.fit(spec, SiteFacts(WEIGHTS, np.array([0.5, 0.5, 0, 0, 0]), data))
        assert even is bench.fit(spec, SiteFacts(WEIGHTS, np.full(5, 0.2), data))
        assert first is not even
        assert first.row_weights[data.labels[first.judged] < 2].sum() == pytest.approx(1.0)
        assert even.accuracy > 0.9
        nothing = bench.fit(spec, SiteFacts(WEIGHTS, np.full(5, 0.2)))
        assert (nothing.kind, nothing.loss) == ("old", None)


# -- what to expect ---------------------------------------------------------------------------------------------------


def judged(right: np.ndarray) -> FittedHead:
    rows = len(right)
    return FittedHead(
        Linear(np.zeros((2, 1)), np.zeros(2)), "fitted", "input", rows, 0.1, 1.0, 1.0, 0.5, 0.6,
        right, np.full(rows, 0.5), np.full(rows, 1 / max(1, rows)), np.arange(rows),
    )  # fmt: skip


@pytest.mark.parametrize("trained_on", [False, True])
def test_the_last_checkpoint_is_as_good_by_samples_alone_that_it_never_saw(builtin, monkeypatch, trained_on):
    monkeypatch.setattr(FittedHead, "surely_better", lambda *_: False)
    with Bench(Run.open(builtin), device="cpu") as bench:
        samples = open_samples(builtin / "all.csv")
        site = SiteFacts(WEIGHTS, np.full(5, 0.2), bench.open("kept", samples, tasks=[0] * len(samples)))
        mixtures = draw_mixtures(WEIGHTS, 0.1)
        for chosen, simpler in ((BASE, None if trained_on else "last"), (SPECS[2], "base")):
            found = gather_evidence(bench, site, chosen, bench.fit(chosen, site), mixtures, trained_on=trained_on)
            assert found.simpler == simpler, chosen
            ends = found.expected["base"]
            assert ends.high - ends.low >= (0.2 if trained_on else 0.1) * np.sqrt(ends.value * (1 - ends.value))


def test_the_expected_accuracy_is_that_of_the_tasks_by_their_weights():
    right = np.array([True] * 90 + [False] * 10 + [True] * 50 + [False] * 50)
    tasks = np.array([0] * 100 + [1] * 100)
    sure = expected_accuracy(judged(right), tasks, draw_mixtures((0.8, 0.2), 0.0))
    assert sure.value == pytest.approx(0.8 * 0.9 + 0.2 * 0.5)
    assert sure.low < sure.value < sure.high
    unsure = expected_accuracy(judged(right), tasks, draw_mixtures((0.8, 0.2), 0.2))
    assert unsure.high - unsure.low > sure.high - sure.low
    unknown = expected_accuracy(judged(right), np.full(200, -1), draw_mixtures((0.8, 0.2), 0.0))
    assert unknown.value == pytest.approx(right.mean())
    assert expected_accuracy(judged(right[:0]), tasks[:0], draw_mixtures((1, 0), 0.0)) is None


def test_ninety_in_a_hundred_intervals_hold_the_truth():
    rng, truth, hits = np.random.default_rng(0), np.array([0.85, 0.6]), 0
    for _ in range(200):
        weights = rng.dirichlet([2, 2])
        right = np.concatenate([rng.random(60) < truth[0], rng.random(60) < truth[1]])
        found = expected_accuracy(judged(right), np.repeat([0, 1], 60), draw_mixtures(weights, 0.0))
        hits += found.low <= weights @ truth <= found.high
    assert 0.82 <= hits / 200 <= 0.97


def test_kept_samples_are_chosen_by_what_the_site_has():
    labels = np.repeat([0, 1, 2], 50)
    chosen = choose_kept(labels, np.array([0.9, 0.1, 0.0]), 40)
    counts = np.bincount(labels[chosen])
    assert counts.sum() == 40
    assert counts[0] > counts[1] >= counts[2] == 2
    assert chosen == choose_kept(labels, np.array([0.9, 0.1, 0.0]), 40)
    assert choose_kept(labels, np.array([1.0, 0, 0]), 1000) == list(range(150))
