"""Modules stand for their tensors, and a preference for its weights and its scale."""

from __future__ import annotations

import torch

from tunable_magmax import Preference, merge_checkpoints, merge_state_dicts
from tunable_magmax.merging.state_dicts import MergeSession


def module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def test_modules_are_merged_as_their_state_dicts_are() -> None:
    base, *tasks = map(module, range(3))
    merged = merge_state_dicts(base, tasks, weights=[3, 1])
    expected = merge_state_dicts(base.state_dict(), [task.state_dict() for task in tasks], weights=[3, 1])
    assert merged.report == expected.report
    assert all(torch.equal(tensor, expected.state_dict[name]) for name, tensor in merged.state_dict.items())
    base.load_state_dict(merged.state_dict)
    with MergeSession(module(0), tasks) as session:
        assert session.merge(weights=[3, 1]).report == expected.report


def test_a_preference_stands_for_its_weights_and_its_scale(tmp_path) -> None:  # type: ignore[no-untyped-def]
    base, *tasks = (module(seed).state_dict() for seed in range(3))
    by_hand = merge_state_dicts(base, tasks, weights=[0.75, 0.25])
    assert merge_state_dicts(base, tasks, weights=Preference((3, 1))).report.counts == by_hand.report.counts
    found = merge_state_dicts(base, tasks, weights=Preference((3, 1), scale=0.5))
    assert found.report.scale == 0.5
    assert merge_state_dicts(base, tasks, weights=Preference((3, 1), scale=0.5), scale=2).report.scale == 2

    from safetensors.torch import save_file

    files = [tmp_path / f"{k}.safetensors" for k in range(3)]
    for file, tensors in zip(files, (base, *tasks), strict=True):
        save_file(tensors, file)
    report = merge_checkpoints(files[0], files[1:], tmp_path / "out.safetensors", weights=Preference((3, 1), scale=0.5))
    assert (report.scale, report.counts) == (0.5, found.report.counts)
