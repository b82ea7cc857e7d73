"""MAGMAX as a running merge is MAGMAX."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunable_magmax import RunningMagmax, merge_state_dicts
from tunable_magmax.errors import InputError


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.integers(1, 12),
    st.integers(0, 2**32),
    st.sampled_from([0.5, "matched"]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_a_running_merge_equals_the_merge_of_all_tasks(tasks, seed, scale, dtype):
    random = torch.Generator().manual_seed(seed)

    def walk(state):
        steps = {
            name: torch.randint(-2, 3, v.shape, generator=random) / 4 for name, v in state.items() if name != "frozen"
        }
        return {name: v + steps.get(name, 0) for name, v in state.items()}

    base = {"a": torch.zeros(5, 7, dtype=dtype), "b": torch.ones(13, dtype=dtype), "frozen": torch.ones(3)}
    sequence = [walk(base)]
    for _ in range(tasks - 1):
        sequence.append(walk(sequence[-1]))
    running = RunningMagmax(base)
    for k, task in enumerate(sequence):
        running.add(task)
        if k == tasks // 2:  # stopped, saved and taken up again
            running = RunningMagmax(base, running.vector, running.last_length)
    if not any(bool(v.any()) for v in running.vector.values()):
        return
    expected = merge_state_dicts(base, sequence, method="magmax", scale=scale).state_dict
    found = running.merged(scale)
    assert {name: v.tolist() for name, v in found.items()} == {name: v.tolist() for name, v in expected.items()}
    assert all(found[name].dtype == expected[name].dtype for name in expected)


def test_tied_names_stay_tied():
    shared = torch.zeros(4)
    running = RunningMagmax({"embed": shared, "head": shared})
    running.add({"embed": torch.ones(4)})
    assert running.merged(1)["head"].tolist() == [1, 1, 1, 1]
    with pytest.raises(InputError, match="ties 'head' to 'embed', but the new task holds both"):
        running.add({"embed": torch.ones(4), "head": torch.zeros(4)})


def test_refusals():
    running = RunningMagmax({"w": torch.tensor([60000.0], dtype=torch.float16)})
    running.add({"w": torch.tensor([65000.0], dtype=torch.float16)})
    with pytest.raises(InputError, match="'w': a merged value does not fit in float16"):
        running.merged(scale=3)
    running = RunningMagmax({"w": torch.zeros(2)})
    with pytest.raises(InputError, match="no task was added yet"):
        running.merged()
    with pytest.raises(InputError, match="'w': the new task or the base holds NaN"):
        running.add({"w": torch.tensor([0.0, float("nan")])})
    with pytest.raises(InputError, match="lacks 'w'"):
        running.add({"v": torch.zeros(2)})
