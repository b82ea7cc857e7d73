"""A session gives what single merges give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import models

from tunable_magmax import METHODS, MergeSession, merge_state_dicts
from tunable_magmax.errors import InputError


@settings(deadline=None, derandomize=True, max_examples=40)
@given(models(tasks=st.integers(1, 9), only_merged=True), st.data())
@pytest.mark.filterwarnings("ignore:no task changed")
def test_every_merge_of_a_session_equals_a_merge_of_its_own(drawn, data):
    tasks = len(drawn.tasks)
    with MergeSession(drawn.base, drawn.tasks) as session:
        for _ in range(4):
            options = {
                "method": data.draw(st.sampled_from(["tunable_magmax"] * 4 + sorted(METHODS))),
                "scale": data.draw(st.sampled_from([0.5, "matched"])),
                "scope": data.draw(st.sampled_from(["model", "tensor"])),
                "compare": data.draw(st.sampled_from(["all", "active"])),
                "seed": data.draw(st.integers(0, 3)),
            }
            if METHODS[options["method"]].weights != "refused":
                weights = st.lists(st.sampled_from([0, 0.1, 1, 3]), min_size=tasks, max_size=tasks).filter(any)
                options["weights"] = data.draw(weights)
            found = session.merge(**options)
            expected = merge_state_dicts(drawn.base, drawn.tasks, **options)
            assert found.report == expected.report
            for name, tensor in expected.state_dict.items():
                assert torch.equal(found.state_dict[name], tensor), (name, options)


def test_patterns_are_fixed_and_a_closed_session_says_so():
    with MergeSession({"w": torch.zeros(2)}, [{"w": torch.ones(2)}]) as session:
        session.merge()
        with pytest.raises(InputError, match="fixed"):
            session.merge(exclude=["w"])
    with pytest.raises(InputError, match="MergeSession is closed"):
        session.merge()


@pytest.mark.parametrize("method", METHODS)
def test_options_that_a_method_does_not_read_change_nothing_and_are_told(method):
    """Set each option away from its default: the method may read it, or the bytes are the same and it says so."""
    noise = torch.Generator().manual_seed(3)
    base = {"w": torch.zeros(40)}
    tasks = [{"w": torch.randn(40, generator=noise)} for _ in range(3)]
    plain = merge_state_dicts(base, tasks, method=method)
    assert plain.report.warnings == ()
    others = {"scope": "tensor", "compare": "active", "density": 0.4, "seed": 9}
    with MergeSession(base, tasks) as session:
        for name, value in others.items():
            merged = merge_state_dicts(base, tasks, method=method, **{name: value})
            assert session.merge(method=method, **{name: value}).report == merged.report
            if name in merged.report.options:
                assert merged.report.warnings == ()
            else:
                assert torch.equal(merged.state_dict["w"], plain.state_dict["w"])
                (warning,) = merged.report.warnings
                assert warning.startswith(f"{name} has no effect with {method}; it is for ")
