"""A data set is one function and one line of the table."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tunable_magmax.data.benchmark import BenchmarkOptions, open_benchmark
from tunable_magmax.data.data_sets import DATA_SETS, DataSet
from tunable_magmax.data.options import DataOptions, Split
from tunable_magmax.data.tables import text_samples
from tunable_magmax.errors import InputError
from tunable_magmax.models.prompts import read_templates


def open_toy(options: DataOptions) -> Split:
    """Texts that repeat their class, `options.numbers["each"]` of each class."""
    labels = [name for name in ("no", "perhaps", "yes") for _ in range(options.numbers["each"])]
    samples = text_samples("toy", [f"I say {label}" for label in labels], labels)
    return Split(samples, samples, {"split": "the same"})


def test_a_line_is_all_that_a_data_set_needs(monkeypatch):
    monkeypatch.setitem(DATA_SETS, "toy", DataSet(open_toy, "text", prompts=("a text: {}",), numbers={"each": 2}))
    options = BenchmarkOptions(name="toy", tasks=3, numbers={"each": 4})
    benchmark = open_benchmark(options)
    assert (benchmark.classes, benchmark.kind) == (("no", "perhaps", "yes"), "text")
    assert [task.train for task in benchmark.tasks] == [tuple(range(4 * t, 4 * t + 4)) for t in range(3)]
    assert read_templates(benchmark.prompts) == ("a text: {}",)
    assert benchmark.facts["options"]["each"] == 4
    assert benchmark.facts["split"] == "the same"
    monkeypatch.setitem(DATA_SETS, "toy", DataSet(open_toy, "image", numbers={"each": 2}))
    with pytest.raises(InputError, match="toy holds texts, but the benchmark toy is of images"):
        open_benchmark(options)


@pytest.mark.parametrize("name", DATA_SETS)
def test_what_the_table_names_is_there(name):
    data_set = DATA_SETS[name]
    known = {field.name for field in fields(BenchmarkOptions)}
    assert set(data_set.keys) - set(data_set.numbers) <= known
    assert len(set(data_set.keys)) == len(data_set.keys)
    if data_set.prompts is not None:
        assert read_templates(data_set.prompts)
