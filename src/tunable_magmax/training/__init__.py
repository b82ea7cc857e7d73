"""From a pre-trained encoder to theta_1 .. theta_T: the loop of `tmx train`, and records of other loops."""

from __future__ import annotations

from tunable_magmax.training.recording import callback, record_base, record_task, recorded

__all__ = ["callback", "record_base", "record_task", "recorded"]
