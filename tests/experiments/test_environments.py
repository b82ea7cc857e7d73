"""Environments are drawn as the paper says, and say where the supply falls short."""

import pytest

from tunable_magmax.data.benchmark import Benchmark, Task
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.environments import PAPER, VARIANTS, EnvironmentOptions, draw_environments


def benchmark(tasks: int, test: int) -> Benchmark:
    """Task t has the class t and `test` test samples."""
    names = tuple(f"class {t}" for t in range(tasks))
    labels = tuple(t for t in range(tasks) for _ in range(test))
    samples = Samples("nowhere", "text", len(labels), lambda positions: iter(()), names, labels)
    parts = tuple(Task(f"task {t}", (t,), (), tuple(range(t * test, (t + 1) * test))) for t in range(tasks))
    return Benchmark("made up", names, samples, samples, parts, {})


def test_the_papers_environments():
    found = draw_environments(benchmark(20, 500), EnvironmentOptions())
    assert [one.name for one in found] == [f"{mixture}/{variant}" for mixture in PAPER for variant in VARIANTS]
    for one in found:
        assert len(one.meta) + len(one.rest) == 500
        assert not set(one.meta) & set(one.rest)
        assert len(set(one.tasks)) == len(one.ratio)
        for t, share in zip(one.tasks, one.ratio, strict=True):
            of_task = [p for p in (*one.meta, *one.rest) if p // 500 == t]
            meta = [p for p in one.meta if p // 500 == t]
            assert len(of_task) == pytest.approx(share * 500, abs=1)
            assert len(meta) == round(0.1 * len(of_task))


def test_variants_differ_and_one_seed_gives_one_environment():
    first, again = (draw_environments(benchmark(20, 100), EnvironmentOptions()) for _ in range(2))
    assert first == again
    assert len({one.tasks for one in first if one.mixture == "D1"}) > 1


def test_without_a_size_every_ratio_is_satisfied():
    found = draw_environments(benchmark(50, 90), EnvironmentOptions(size="supply"))
    assert {len(one.meta) + len(one.rest) for one in found} == {112}  # 90 / 0.8
    with_levels = draw_environments(benchmark(50, 90), EnvironmentOptions(levels=(1, "all"), size="supply"))
    assert [one for one in with_levels if one.mixture.startswith("D")] == found
    assert {one.mixture: len(one.meta) + len(one.rest) for one in with_levels[-6:]} == {"M1": 90, "M50": 112}
    largest = draw_environments(benchmark(5, 5000), EnvironmentOptions(size="supply"))
    assert {len(one.meta) + len(one.rest) for one in largest} == {1000}


def test_a_short_supply_is_told():
    found = draw_environments(benchmark(5, 90), EnvironmentOptions({"D2": (0.8, 0.2)}))[0]
    assert len(found.meta) + len(found.rest) == 180


@pytest.mark.parametrize("ratio", [(0.5, 0.6), (1.2, -0.2), (0.25,) * 4])
def test_a_ratio_that_cannot_be(ratio):
    with pytest.raises(InputError, match="D1"):
        draw_environments(benchmark(3, 10), EnvironmentOptions({"D1": ratio}))


def test_nothing_left_to_evaluate_on():
    with pytest.raises(InputError, match="D1/42 has 2 samples"):
        draw_environments(benchmark(2, 1), EnvironmentOptions({"D1": (0.5, 0.5)}, size="supply"))
