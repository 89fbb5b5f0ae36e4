"""Durations, sizes and rates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.units import format_bytes, format_duration, format_rate, to_ns, to_seconds

CENTURY_NS = 100 * 365 * 86_400 * 10**9


@given(st.integers(0, 2**50))
def test_whole_nanoseconds_survive_seconds(ns: int) -> None:
    """Up to 2^50 ns, 13 days, the two roundings move a duration by less than half a nanosecond."""
    assert ns == to_ns(to_seconds(ns))


@given(st.floats(0, CENTURY_NS / 1e9), st.floats(0, CENTURY_NS / 1e9))
def test_a_longer_duration_is_never_fewer_nanoseconds(a: float, b: float) -> None:
    short, long = sorted((a, b))
    assert to_ns(short) <= to_ns(long)


def test_half_a_nanosecond_is_rounded_up() -> None:
    assert [0, 1, 1, 2] == [to_ns(s) for s in (0.4e-9, 0.5e-9, 1.4e-9, 1.5e-9)]


@pytest.mark.parametrize("seconds", [-1e-9, math.inf, -math.inf, math.nan])
def test_what_is_no_duration_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"^a duration must be finite and >= 0 s, got {seconds}$"):
        to_ns(seconds)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.0 us"),
        (12_340, "12.3 us"),
        (1_234_567, "1.235 ms"),
        (-1_234_567, "-1.235 ms"),
        (61_000_000_000, "61.000 s"),
    ],
)
def test_durations_carry_the_unit_that_suits_them(ns: int, text: str) -> None:
    assert text == format_duration(ns)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (4_000, "4.0 kB"),
        (102_228_128, "102.2 MB"),
        (141e9, "141.00 GB"),
    ],
)
def test_sizes_are_decimal(nbytes: float, text: str) -> None:
    assert text == format_bytes(nbytes)


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (0.118e9, "0.118 GB/s"),
        (12e9, "12 GB/s"),
        (3.35e12, "3350 GB/s"),
        (math.inf, "unlimited"),
    ],
)
def test_bandwidths_are_decimal_and_infinity_is_unlimited(bytes_per_s: float, text: str) -> None:
    assert text == format_rate(bytes_per_s)
