"""The demonstration at full size tells the story it claims. The small ones, in another file, change its constants."""

import pytest

from tunable_magmax.experiments.demo import SITES, SOURCES, run_demo


@pytest.mark.stress
def test_tailored_merges_win_on_their_sites_and_training_forgets(tmp_path):
    found = run_demo(tmp_path / "out")
    assert found.forgetting > 0.3
    for k, site in enumerate(SITES):
        rivals = [row for row in found.rows if not row.tailored and row.own in (None, site)]
        for source in ("labels", "inputs"):
            row = next(row for row in found.rows if row.own == site and row.model == f"from {SOURCES[source]}")
            assert row.sites[k] > max(rival.sites[k] for rival in rivals)
            assert row.half[k] > max(rival.half[k] for rival in rivals)
            assert row.prior[k] > row.sites[k]
