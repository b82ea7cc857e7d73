"""Patterns of an adapter's configuration match as PEFT's do, and none can take for ever."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.checkpoints.lora.patterns import NamePattern

PIECES = [
    r"a",
    r"b",
    r"\.",
    r".",
    r"[ab]",
    r"[^a.]",
    r"\d",
    r"\w",
    r"^",
    r"$",
    r"(a|b)",
    r"(a|)",
    r"a*",
    r"b+?",
    r"(ab)?",
    r"a{1,3}",
    r".*",
]
NAMES = st.text("ab.0\n", max_size=8)


@given(st.lists(st.sampled_from(PIECES), max_size=5).map("".join), NAMES)
def test_the_same_names_as_the_usual_matcher(pattern: str, name: str) -> None:
    assert NamePattern(pattern).matches(name) == bool(re.match(rf"(.*\.)?({pattern})$", name))


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*.*.*.*.*)*b", "(a?){40}a{40}b", "((a*)*)*b"])
def test_no_pattern_takes_for_ever(pattern: str) -> None:
    start = time.monotonic()
    assert not NamePattern(pattern).matches("a" * 2000)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "pattern", [r"(a)\1", "a(?=b)", "(?i)a", "(?>a)", "(", "a{9999}", "((()){999999}){999999}", r"\bq"]
)
def test_what_no_name_needs_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="the pattern"):
        NamePattern(pattern)
