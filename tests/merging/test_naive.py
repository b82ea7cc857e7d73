"""The oracle against examples worked out by hand, so that two programs cannot agree on one mistake unnoticed."""

import pytest
import torch
from naive import G, Unrepresentable, lottery, mix, naive_budget, naive_merge

# Six elements, three tasks; candidates under `compare: all` in brackets.
#   p        0     1     2     3     4     5
#   tau_1   [3]  [-1]   [2]   [1]   [0]   [5]
#   tau_2    2    [1]  [-2]   [4]   [0]    1
#   tau_3    1    [1]    1   [-4]   [0]    2
TAU = [[3, -1, 2, 1, 0, 5], [2, 1, -2, 4, 0, 1], [1, 1, 1, -4, 0, 2]]

# The lottery of seed 0, first 16 bits of each number, written out from docs/method.md:
#   p                   0     1     2     3     4     5      order of p
#   stream 0, task 1   62a4  f620  b10b  12a3  7bcb  d8f6    3 0 4 2 5 1
#   stream 0, task 2   179c  f29f  9ecc  af73  7e47  b406    0 4 2 3 5 1
#   stream 0, task 3   651a  48d2  ed9c  7c2c  b702  4b5a    1 5 0 3 4 2
#   stream 1, task 1   3839  735d  67ec  bbe5  d52a  7af1    0 2 1 5 3 4
#   stream 1, task 2   8c63  5f28  4a0c  b738  880a  235e    5 2 1 4 0 3
#   stream 1, task 3   b21a  ed45  3ab7  ef5f  2c5d  1770    5 4 2 0 1 3
#   stream 2, /2^64    .466  .573  .260  .654  .280  .540
#   stream 3, task 3                                         5 0 3 2 1 4


def example(tau=TAU, base=10.0, **options):
    zero = torch.full((len(tau[0]),), base)
    tasks = [{"w": zero + torch.tensor(row, dtype=torch.float32)} for row in tau]
    result = naive_merge({"w": zero}, tasks, **{"scale": 1, **options})
    return result, (result.state_dict["w"] - base).tolist()


def owners(result):
    return [result.owners[p] for p in sorted(result.owners)]


def test_lottery_is_splitmix64_after_absorbing():
    # Published outputs of SplitMix64 for the state 1234567.
    outputs = [mix((1234567 + G * (p + 1)) % 2**64) for p in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_lottery_reads_every_integer_modulo_2_64():
    assert lottery(-1, 3, 70, 5) == lottery(2**64 - 1, 3, 70, 5 + 2**64) == lottery(2**64 - 1, 3, 70 + 2**64, 5)


@pytest.mark.parametrize(
    ("stream", "task", "order"),
    [(0, 1, "304251"), (0, 2, "042351"), (0, 3, "150342"), (1, 2, "521403"), (1, 3, "542013"), (3, 3, "503214")],
)
def test_lottery_table_above(stream, task, order):
    assert "".join(map(str, sorted(range(6), key=lambda p: lottery(0, stream, task, p)))) == order


def test_too_many_candidates():
    # Task 3 may keep two of {1, 3, 4}: 1 and 3 by lottery. Task 2 finds {2, 4}, task 1 is left with {0, 5}.
    result, tau = example(budget=[2, 2, 2])
    assert owners(result) == [1, 3, 2, 3, 2, 1]
    assert tau == [3, 1, -2, -4, 0, 5]
    assert (result.counts, result.leftovers, result.elements) == ([2, 2, 2], 0, 6)


def test_leftovers_go_to_free_budget():
    # Task 3 takes {1, 3, 4}, task 2 {2}. Task 1 may keep one of {0, 5}: 0. Element 5 is left, and only task 3 has room.
    result, tau = example(budget=[1, 1, 4])
    assert owners(result) == [1, 3, 2, 3, 3, 3]
    assert tau == [3, 1, -2, -4, 0, 2]
    assert (result.counts, result.leftovers) == ([1, 1, 4], 1)


def test_a_task_without_budget_blocks_under_compare_all():
    # Task 3 {1, 3, 4}, task 2 {2}; 0 and 5 are nobody's. Task 2 draws first: 5 comes before 0 in its lottery.
    result, _ = example(budget=[0, 2, 4])
    assert owners(result) == [3, 3, 2, 3, 3, 2]
    assert result.leftovers == 2


def test_a_task_without_budget_is_no_rival_under_compare_active():
    # Against task 2 alone, task 3 has {1, 3, 4, 5}; task 2 has no rival left and takes {0, 2}.
    result, _ = example(budget=[0, 2, 4], compare="active")
    assert owners(result) == [2, 3, 2, 3, 3, 3]
    assert result.leftovers == 0


def test_frozen_tensors_take_part_in_the_index_but_not_in_d():
    base = {"a": torch.zeros(2), "b": torch.zeros(4), "c": torch.zeros(3, dtype=torch.int32)}
    tasks = [dict(base), dict(base, b=torch.ones(4))]
    result = naive_merge(base, tasks, budget=[3, 1])
    assert result.elements == 4
    # p = 2, 3, 4, 5: task 2's lottery has 4 first of these, the third element of `b`.
    assert result.owners == {2: 1, 3: 1, 4: 2, 5: 1}


def test_scope_tensor():
    # n = (0, 2, 1) in each half. First half: task 3 {1}, task 2 {2}, left 0 -> task 2. Second half: task 3 keeps 3 of
    # {3, 4}, task 2 {4}, left 5 -> task 2.
    zero = torch.zeros(3)
    tasks = [{"a": torch.tensor(row[:3]), "b": torch.tensor(row[3:])} for row in torch.tensor(TAU).float().tolist()]
    result = naive_merge({"b": zero, "a": zero.clone()}, tasks, weights=[0, 1, 1], scope="tensor")
    assert owners(result) == [2, 3, 2, 3, 2, 2]
    assert (result.budget, result.counts, result.leftovers) == ([0, 4, 2], [0, 4, 2], 2)


def test_magmax_and_matched_scale():
    result, _ = example(method="magmax", scale="matched")
    assert owners(result) == [1, 3, 2, 3, 3, 1]
    # ||tau_3||^2 = 1 + 1 + 1 + 16 + 0 + 4 = 23; merged [3, 1, -2, -4, 0, 5]: 9 + 1 + 4 + 16 + 0 + 25 = 55.
    assert result.scale == 0.646670  # sqrt(23 / 55) = 0.64666979...


def test_last_task():
    result, tau = example(method="last_task", scale="matched")
    assert (tau, result.scale, result.counts) == (TAU[2], 1.0, [0, 0, 6])


def test_random_mix():
    assert owners(example(method="random_mix")[0]) == [2, 2, 1, 2, 1, 2]
    assert owners(example(method="random_mix", weights=[1, 0, 1])[0]) == [1, 3, 1, 3, 1, 3]


def test_average():
    assert example(method="average", weights=[2, 1, 1])[1] == [2.25, 0, 0.75, 0.5, 0, 3.25]


def test_task_arithmetic():
    assert example(method="task_arithmetic", weights=[1, 0, 2])[1] == [5, 1, 4, -7, 0, 9]


def test_ties():
    # Three elements each. Task 1: 5, 0, 2. Task 2: 3, 0, 2. Task 3: 3, 5 and 0, by lottery among 0, 1, 2.
    assert example(method="ties", density=0.5)[1] == [2, 0, 0, 0, 0, 3.5]
    # 0: mean of 3, 2, 4. 2: 2 - 2 = 0. 3: 4 - 16 < 0, so -16 alone. 5: mean of 5 and 8.
    assert example(method="ties", density=0.5, weights=[1, 1, 4])[1] == [3, 0, 0, -16, 0, 6.5]


def test_each_operation_rounds_in_the_working_type():
    def out(base, task, scale, base_type=torch.float32, **options):
        state = naive_merge(
            {"w": torch.tensor([base], dtype=base_type)}, [{"w": torch.tensor([task])}], scale=scale, **options
        ).state_dict["w"]
        return state.item(), state.dtype

    assert out(2.0**24, 2.0**24 + 2, 0.5) == (2.0**24, torch.float32)  # 2^24 + 1 is a tie: to even
    assert out(2.0**24, 2.0**24 + 2, 0.5, torch.float64) == (2.0**24 + 1, torch.float64)
    # (1 + 2^-23)^2 rounds to 1 + 2^-22; a fused multiply-add would leave 2^-46.
    assert out(-1 - 2.0**-22, -(2.0**-23), 1 + 2.0**-23) == (0.0, torch.float32)
    assert out(1.0, 2.0, 1, torch.bfloat16, out_dtype=torch.float16) == (2.0, torch.float16)
    with pytest.raises(Unrepresentable):
        out(0.0, 40000.0, 2, out_dtype=torch.float16)


def test_budget():
    assert naive_budget([0.1, 0.9], 10) == [1, 9]
    assert naive_budget([0, 1, 1, 1], 11) == [0, 4, 4, 3]  # 3 each; the remainder skips the task of weight 0
    assert naive_budget([1, 1, 1], 2) == [1, 1, 0]
