"""The engine against the oracle, to the last bit, and the facts that hold for every merge."""

import math
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from models.tiny import classifier
from naive import Unrepresentable, lottery, naive_merge
from sequences import raw
from strategies import FEW_TASKS, SEEDS, merges, models, weights

from tunable_magmax import METHODS, merge_state_dicts
from tunable_magmax.errors import ExactnessError, InputError
from tunable_magmax.merging.kernels.numba_ops import NumbaKernels

COUNTED = {"tunable_magmax", "magmax", "random_mix", "last_task"}


def examples(number):
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def assert_same_bytes(found, expected):
    assert raw(found) == raw(expected)


def copy_of(state_dict):
    return {name: tensor.detach().clone() for name, tensor in state_dict.items()}


def near_a_rounding_boundary(ratio):
    """Whether another order of summation could round `ratio` to other 6 digits."""
    if not ratio:
        return False
    digits = ratio / 10.0 ** (math.floor(math.log10(ratio)) - 5)
    return abs(digits - math.floor(digits) - 0.5) < 1e-9 * digits


def merge(base, tasks, **options):
    """`merge_state_dicts`, with the warning that is due when nothing is merged expected rather than raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merged = merge_state_dicts(base, tasks, **options)
    assert len(caught) == (merged.report.elements == 0), [str(w.message) for w in caught]
    return merged


def assert_equals_oracle(base, tasks, options, **oracle_options):
    try:
        expected = naive_merge(base, tasks, **options, **oracle_options)
    except Unrepresentable:
        with pytest.raises(InputError):
            merge_state_dicts(base, tasks, **options)
        return None
    if near_a_rounding_boundary(expected.ratio):
        assume(False)
    merged = merge(base, tasks, **options)
    report = merged.report
    assert report.method == options.get("method", "tunable_magmax")
    assert report.seed == options.get("seed", 0)
    assert report.elements == expected.elements
    assert report.scale == expected.scale
    assert (report.budget and list(report.budget)) == expected.budget
    assert (report.counts and list(report.counts)) == expected.counts
    if report.method == "tunable_magmax":
        assert report.leftovers == expected.leftovers
        assert list(report.counts) == list(report.budget)
    else:
        assert not report.leftovers
        assert report.budget is None
    assert (report.counts is not None) == (report.method in COUNTED)
    assert_same_bytes(merged.state_dict, expected.state_dict)
    return merged


# --- against the oracle -----------------------------------------------------------------------------


@examples(300)
@given(merges("tunable_magmax"))
def test_tunable_magmax(call):
    assert_equals_oracle(call.base, call.tasks, call.options)


@pytest.mark.parametrize("method", ["magmax", "average", "random_mix", "ties", "task_arithmetic", "last_task"])
@examples(80)
@given(data=st.data())
def test_other_methods(method, data):
    call = data.draw(merges(method))
    assert_equals_oracle(call.base, call.tasks, call.options)


@pytest.mark.parametrize("T", [63, 64, 65, 66, 70])
@pytest.mark.parametrize("compare", ["all", "active"])
@pytest.mark.parametrize("zeros", [0, 3])
@pytest.mark.parametrize("walk", [False, True])
def test_more_active_tasks_than_a_word_has_bits(T, compare, zeros, walk):
    generator = torch.Generator().manual_seed(T)
    steps = torch.randint(-9, 10, (T, 211), generator=generator) / 4
    # Along a walk the late tasks are the large ones, so that tasks beyond the 64th compete with each other.
    vectors = steps.cumsum(0) if walk else steps
    base = {"a": torch.zeros(100), "b": torch.zeros(3, 37)}
    tasks = [{"a": tau[:100], "b": tau[100:].reshape(3, 37)} for tau in vectors]
    options = {"weights": [0] * zeros + [1 + t % 3 for t in range(T - zeros)], "compare": compare, "seed": T}
    merged = assert_equals_oracle(base, tasks, options)
    assert sum(n > 0 for n in merged.report.counts) == T - zeros


def test_random_mix_at_the_very_threshold():
    base, tasks = {"w": torch.zeros(1)}, [{"w": torch.tensor([float(t)])} for t in (1, 2, 3)]
    for seed in range(5):
        number = lottery(seed, 2, 0, 0)  # the shares below sum to 1 in 64 binary digits

        def chosen(*weights, seed=seed):
            options = {"method": "random_mix", "weights": weights, "scale": 1, "seed": seed}
            return merge(base, tasks, **options).state_dict["w"].item()

        assert chosen(number, 0, 2**64 - number) == 3  # the key is not below its own value
        assert chosen(number + 1, 0, 2**64 - number - 1) == 1
        assert chosen(0, number + 1, 2**64 - number - 1) == 2
        assert chosen(1, number, 2**64 - number - 1) == 2
        assert chosen(1, number - 1, 2**64 - number) == 3


@pytest.mark.parametrize(("density", "kept"), [(0.29, 29), ("0.57", 57), (0.2, 20), (0.999, 99), (1, 100), (0, 0)])
def test_density_is_the_decimal_it_prints_as(density, kept):
    # 0.29 * 100 == 28.999999999999996
    task = {"w": torch.arange(1.0, 101.0)}
    merged = merge({"w": torch.zeros(100)}, [task], method="ties", density=density, scale=1)
    assert_same_bytes(merged.state_dict, {"w": torch.where(task["w"] > 100 - kept, task["w"], 0)})


# --- facts ------------------------------------------------------------------------------------------


@examples(60)
@given(models(), st.data())
def test_a_budget_of_magmax_counts_gives_magmax(drawn, data):
    options = {"scale": data.draw(st.sampled_from([0.5, "matched"])), "out_dtype": torch.float64}
    magmax = merge(drawn.base, drawn.tasks, method="magmax", **options)
    options |= {"compare": data.draw(st.sampled_from(["all", "active"])), "seed": data.draw(SEEDS)}
    tunable = merge(drawn.base, drawn.tasks, budget=magmax.report.counts, **options)
    assert tunable.report.leftovers == 0
    assert tunable.report.scale == magmax.report.scale
    assert_same_bytes(tunable.state_dict, magmax.state_dict)


@examples(60)
@given(models(), st.data())
def test_one_hot_weights_give_that_task_vector(drawn, data):
    t = data.draw(st.integers(0, len(drawn.tasks) - 1))
    options = {
        "scope": data.draw(st.sampled_from(["model", "tensor"])),
        "compare": data.draw(st.sampled_from(["all", "active"])),
        "seed": data.draw(SEEDS),
        "scale": data.draw(st.sampled_from([1.0, 0.5, 0.3])),
    }
    weights = [0.7 if s == t else 0 for s in range(len(drawn.tasks))]
    merged = merge(drawn.base, drawn.tasks, weights=weights, **options)
    for name, start in drawn.base.items():
        if not start.is_floating_point():
            continue
        held = {c[name].dtype for c in [drawn.base, *drawn.tasks]}
        working = torch.float64 if torch.float64 in held else torch.float32
        theta, tau = start.to(working), drawn.tasks[t][name].to(working) - start.to(working)
        step = torch.tensor(options["scale"], dtype=working) * tau
        out = merged.state_dict[name]
        assert torch.equal(out, (theta + step).to(out.dtype)), name


@examples(60)
@given(
    models(tasks=FEW_TASKS, only_merged=True, max_tensors=1, scalar=False), st.sampled_from(sorted(METHODS)), st.data()
)
def test_splitting_a_tensor_changes_nothing(drawn, method, data):
    (name,) = drawn.base
    whole = [{name: c[name].reshape(-1)} for c in [drawn.base, *drawn.tasks]]
    cut = data.draw(st.integers(0, whole[0][name].numel()))
    parts = [{"part.0": c[name][:cut], "part.1": c[name][cut:]} for c in whole]
    assume(all(any(not torch.equal(c[part], parts[0][part]) for c in parts[1:]) for part in ("part.0", "part.1")))

    options = {"method": method, "seed": data.draw(SEEDS), "scale": 0.5}
    if METHODS[method].weights != "refused":
        options["weights"] = data.draw(weights(len(drawn.tasks)))
    one = merge(whole[0], whole[1:], **options)
    two = merge(parts[0], parts[1:], **options)
    assert_same_bytes({name: torch.cat([two.state_dict["part.0"], two.state_dict["part.1"]])}, one.state_dict)
    assert (two.report.counts, two.report.leftovers) == (one.report.counts, one.report.leftovers)


@examples(60)
@given(st.sampled_from(sorted(METHODS)).flatmap(lambda m: merges(m, tasks=FEW_TASKS)))
def test_inputs_are_left_alone(call):
    before = [copy_of(c) for c in [call.base, *call.tasks]]
    try:
        merged = merge(call.base, call.tasks, **call.options)
    except InputError:
        assume(False)
    for tensor in merged.state_dict.values():
        tensor.zero_()  # nor may the result share memory with them
    for after, earlier in zip([call.base, *call.tasks], before, strict=True):
        assert_same_bytes(after, earlier)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_tasks_equal_to_the_base_give_a_copy_and_a_warning(method):
    base = {"w": torch.tensor([0.0, -0.0, 1.5, float("nan")]), "steps": torch.tensor([3]), "empty": torch.zeros(0)}
    task = {"w": torch.tensor([-0.0, 0.0, 1.5, float("nan")]), "steps": torch.tensor([9]), "empty": torch.zeros(0)}
    with pytest.warns(UserWarning, match="base"):
        merged = merge_state_dicts(base, [task, task], method=method)
    assert_same_bytes(merged.state_dict, base)
    assert (merged.report.elements, merged.report.scale) == (0, 1)
    assert merged.state_dict["w"].data_ptr() != base["w"].data_ptr()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 64, 1), (5, 3, 7), (63, 1, 65), (64, 64, 64), (100, 130, 30)])
@pytest.mark.parametrize("large", [0, 1])
@pytest.mark.parametrize("options", [{}, {"compare": "active"}, {"scope": "tensor"}], ids=str)
def test_a_frozen_tensor_between_merged_ones(sizes, large, options):
    # The task of large values is refused half of what it could have; the other gets that as leftovers, or first.
    def checkpoint(value):
        return {name: torch.full((n,), value * (name != "b")) for name, n in zip("abc", sizes, strict=True)}

    tasks = [checkpoint(1.0), checkpoint(1.0)]
    tasks[large] = checkpoint(2.0)
    assert_equals_oracle(checkpoint(0.0), tasks, {"scale": 1, **options})


def test_include_and_exclude():
    names = ["enc.0.weight", "enc.1.weight", "enc.1.bias", "head.weight", "Enc.0.weight"]
    base = {name: torch.zeros(2) for name in names}
    task = {name: torch.ones(2) for name in names}

    def merged_names(**patterns):
        merged = merge(base, [task], scale=1, **patterns)
        changed = {name for name, tensor in merged.state_dict.items() if tensor.any()}
        assert merged.report.elements == 2 * len(changed)
        return changed

    assert merged_names() == set(names)
    for include, says in (([], "include"), ("enc.*", "expected a list of patterns")):
        with pytest.raises(InputError, match=says):
            merge(base, [task], include=include)
    assert merged_names(include=["enc.*"]) == {"enc.0.weight", "enc.1.weight", "enc.1.bias"}
    assert merged_names(include=["enc.?.weight"]) == {"enc.0.weight", "enc.1.weight"}
    assert merged_names(exclude=["enc"]) == set(names)  # whole names, not substrings
    assert merged_names(include=["[eE]nc.0.*"]) == {"enc.0.weight", "Enc.0.weight"}
    assert merged_names(include=["*.weight"], exclude=["enc.1*", "head*"]) == {"enc.0.weight", "Enc.0.weight"}
    assert merged_names(exclude=["*.weight"]) == {"enc.1.bias"}


def test_an_include_pattern_that_matches_nothing_is_refused():
    base, task = {"enc.0.weight": torch.zeros(2)}, {"enc.0.weight": torch.ones(2)}
    for pattern, meant in {"enc": "'enc.*'", "endc.*": "'enc.*'", "zzz": "'enc.0.weight'"}.items():
        with pytest.raises(InputError, match=rf"'{re.escape(pattern)}' .*{re.escape(meant)}"):
            merge(base, [task], include=["enc.*", pattern])
    # One that matches tensors which nobody changed is none of this.
    assert merge(base, [base], include=["enc.*"]).report.elements == 0


def test_what_is_excluded_is_not_looked_at_in_the_tasks():
    base = {"w": torch.zeros(2), "odd": torch.zeros(3), "other": torch.zeros(2)}
    tasks = [
        {"w": torch.ones(2), "odd": torch.full((3,), float("nan")), "other": torch.tensor([1, 2])},
        {"w": torch.ones(2), "odd": torch.zeros(5)},
    ]
    merged = merge(base, tasks, exclude=["o*"])
    assert_same_bytes(merged.state_dict, base | {"w": torch.ones(2)})


def test_tied_tensors_count_once():
    def tied(value):
        shared = torch.full((40,), value)
        return {"z.first": torch.full((3,), value), "head": shared, "embed": shared}

    base, tasks = tied(0.0), [tied(1.0), tied(2.0)]
    merged = assert_equals_oracle(base, tasks, {"scale": 1})
    assert merged.report.elements == 43
    assert torch.equal(merged.state_dict["head"], merged.state_dict["embed"])
    tasks[1]["head"] = tasks[1]["head"].clone()
    assert assert_equals_oracle(base, tasks, {"scale": 1}).report.elements == 83


def test_views_of_one_buffer_are_not_tied():
    def views(value):
        flat = torch.full((12,), value)
        return {"a": flat[:4], "b": flat[4:8], "c": flat[8:].view(2, 2)}

    merged = assert_equals_oracle(views(0.0), [views(1.0), views(2.0)], {"scale": 1})
    assert merged.report.elements == 12


def test_parameters_with_gradients():
    base, task = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    merged = merge(dict(base.named_parameters()), [dict(task.named_parameters())], method="last_task", scale=1)
    assert not any(tensor.requires_grad for tensor in merged.state_dict.values())
    assert merged.report.elements == 8


def test_lambda_is_rounded_to_the_working_type_first_and_operations_are_not_fused():
    base, task = {"w": torch.zeros(1)}, {"w": torch.full((1,), 9.0)}
    out = merge(base, [task], scale=0.1)
    assert out.state_dict["w"].item() == 0.9000000357627869  # and not float32(0.1 * 9) = 0.8999999761581421
    assert out.report.scale == 0.1
    base, task = {"w": torch.tensor([-1 - 2.0**-22])}, {"w": torch.tensor([-(2.0**-23)])}
    assert merge(base, [task], scale=1 + 2.0**-23).state_dict["w"].item() == 0.0


# --- what is refused --------------------------------------------------------------------------------

BASE = {"enc.weight": torch.zeros(2, 3), "enc.bias": torch.zeros(3), "steps": torch.tensor([1])}
TASKS = [{name: tensor + t for name, tensor in BASE.items()} for t in (1, 2, 3)]
NAN, INF = float("nan"), float("inf")


def refusal(base=BASE, tasks=TASKS, **options):
    with pytest.raises(InputError) as caught:
        merge_state_dicts(base, tasks, **options)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"weights": [1, 1, INF]}, ["weight", "inf"]),
        ({"weights": [1, 1, 1], "budget": [3, 3, 3]}, ["weights", "budget"]),
        ({"weights": [1, INF, 1], "method": "task_arithmetic"}, ["weight", "inf"]),
        ({"weights": [1, 1, 1], "method": "last_task"}, ["weights", "last_task"]),
        ({"budget": [1, 2, 3]}, ["budget", "6", "9"]),
        ({"budget": [-1, 5, 5]}, ["budget", "-1"]),
        ({"budget": [3.5, 3, 2.5]}, ["budget", "3.5"]),
        ({"budget": [4, 5]}, ["budget", "2", "3"]),
        ({"budget": [3, 3, 3], "method": "magmax"}, ["budget", "magmax"]),
        ({"budget": [3, 3, 3], "scope": "tensor"}, ["budget", "scope", "model"]),
        ({"scale": -INF}, ["scale", "-inf"]),
        ({"method": "ties", "density": -0.1}, ["density", "-0.1"]),
        ({"method": "ties", "density": 1.1}, ["density", "1.1"]),
        ({"seed": 2**64}, ["seed", "18446744073709551616"]),
        ({"seed": 1.5}, ["seed", "1.5"]),
        ({"compare": "activ"}, ["compare", "active", "all"]),
        ({"tasks": []}, ["task"]),
    ],
    ids=str,
)
def test_bad_options(options, fragments):
    message = refusal(**options).lower()
    for fragment in fragments:
        assert fragment in message, message


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_nan_in_the_base_too(value, method):
    # The same everywhere at that place, but the tensor is merged because it changed elsewhere.
    base = {"w": torch.tensor([value, 0.0])}
    message = refusal(base, [{"w": torch.tensor([value, 1.0])}], method=method)
    assert re.search(r"\bbase\b", message)
    assert "w" in message


def test_nan_in_the_last_element_of_a_tensor_that_only_nan_changes():
    base = {"w": torch.zeros(130)}
    bad = torch.tensor([0.0] * 129 + [NAN])
    assert "task 1" in refusal(base, [{"w": bad}])


def test_quantised_weights():
    """Merging the units and keeping the base's numbers would give a model that is neither's."""
    base, task = (
        {"l.qweight": torch.full((256, 99), k, dtype=torch.int32), "l.scales": torch.full((9, 9), k, dtype=torch.half)}
        for k in (1, 2)
    )
    message = refusal(base, [task])
    for fragment in ("l.qweight", "quantised", "exclude"):
        assert fragment in message, message
    kept = merge(base, [task], exclude=["*.qweight"], scale=1).state_dict
    assert kept["l.qweight"].unique().tolist() == [1]
    assert kept["l.scales"].unique().tolist() == [2]
    masked = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "position_ids": torch.arange(512)[None]}
    assert merge({"w": torch.zeros(40)} | masked, [{"w": torch.ones(40)} | masked]).report.copied == tuple(masked)


def test_a_step_that_is_stretched_far_is_told() -> None:
    base = {"w": torch.zeros(100)}
    tasks = [{"w": torch.ones(100)}, {"w": torch.full((100,), 3.0)}]
    assert sum("matched scale is 3" in w for w in merge_state_dicts(base, tasks, weights=[1, 0]).report.warnings) == 1
    assert merge_state_dicts(base, tasks, weights=[1, 0], scale=3).report.warnings == ()
    assert merge_state_dicts(base, tasks, weights=[0, 1]).report.warnings == ()


def test_rows_of_classifiers_with_other_labels_are_told() -> None:
    def warnings_of(*labels, architecture=None, **options):
        base, *tasks = (classifier("bert", names, seed, architecture) for seed, names in enumerate(labels))
        return [w for w in merge_state_dicts(base, tasks, **options).report.warnings if "stand for other labels" in w]

    generic, pets, tools = ("LABEL_0", "LABEL_1"), ("cat", "dog"), ("saw", "nail")
    assert "classifier.weight" in warnings_of(generic, pets, tools)[0]
    assert not warnings_of(generic, pets, pets)
    assert not warnings_of(generic, pets, tools, exclude=["classifier.*"])
    assert not warnings_of(generic, pets, tools, architecture="BertModel")


def test_counts_are_exact_inside_each_tensor(monkeypatch) -> None:
    names, found = iter("ab"), NumbaKernels.gather
    moved = {"a": np.array([1, -1]), "b": np.array([-1, 1])}
    monkeypatch.setattr(NumbaKernels, "gather", lambda *given: [found(*given)[0] + moved[next(names)]])
    base, task = ({name: torch.full((20,), float(value)) for name in "ab"} for value in (0, 1))
    with pytest.raises(ExactnessError, match=r"of a, the tasks own \(11, 9\) elements, not \(10, 10\)"):
        merge_state_dicts(base, [task, task], scope="tensor", scale=1, threads=1)


def test_tensors_without_values_are_refused() -> None:
    base, task = {"w": torch.zeros(3)}, {"w": torch.zeros(3, device="meta")}
    assert "task 1: 'w'" in refusal(base, [task])
    assert "base: 'w'" in refusal(task, [base])
