"""Forward passes in threads: in order, each on one thread, with the caller's number of threads kept."""

from __future__ import annotations

import threading

import pytest
import torch

from tunable_magmax.models.prepared import SMALLEST_PART as SMALLEST
from tunable_magmax.models.prepared import in_parallel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_parts_are_in_order_and_each_has_one_thread():
    seen = list(in_parallel(lambda rows: (rows, torch.get_num_threads()), 5 * SMALLEST + 1, 2 * SMALLEST, CPU))
    assert [row for rows, _ in seen for row in rows] == list(range(5 * SMALLEST + 1))
    assert {threads for _, threads in seen} == {1}
    assert max(len(rows) for rows, _ in seen) == SMALLEST
    told: list[int] = []
    later = threading.Thread(target=lambda: told.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert (torch.get_num_threads(), told) == (2, [2])


def test_an_error_ends_it_and_a_caller_may_stop():
    def work(rows: range) -> int:
        if rows.start:
            raise ValueError("broken")
        return 0

    with pytest.raises(ValueError, match="broken"):
        list(in_parallel(work, 4 * SMALLEST, 2 * SMALLEST, CPU))
    stopped = in_parallel(lambda rows: rows.start, 100 * SMALLEST, 2 * SMALLEST, CPU)
    assert next(stopped) == 0
    stopped.close()
    assert torch.get_num_threads() == 2
