"""Units: the clock is an `int` in nanoseconds, sizes are `int` bytes, rates are per second.

Factors of a thousand and of 1024 stand here alone; formulas elsewhere work in seconds and bytes.
This module imports nothing of dpsim.
"""

from __future__ import annotations

import math

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000
MS_PER_S = 1_000.0
US_PER_S = 1_000_000.0
MIB = 1 << 20
"""Bytes in a mebibyte: bucket caps and memory only. Bandwidth is in decimal GB/s."""
GB = 1_000_000_000
MB = 1_000_000


def to_ns(seconds: float) -> int:
    """Return a duration in whole nanoseconds, rounded half up once.

    Args:
        seconds: Duration in seconds, finite and >= 0.

    Raises:
        ValueError: The duration is negative, infinite or NaN.
    """
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"a duration must be finite and >= 0 s, got {seconds}")
    return int(seconds * NS_PER_S + 0.5)


def to_seconds(ns: int) -> float:
    """Return nanoseconds as seconds."""
    return ns / NS_PER_S


def format_duration(ns: float) -> str:
    """Return a duration with three or four digits and the unit that suits it.

    >>> format_duration(1_234_567)
    '1.235 ms'
    """
    size = abs(ns)
    if size < NS_PER_US:
        return f"{ns:.0f} ns"
    if size < NS_PER_MS:
        return f"{ns / NS_PER_US:.1f} us"
    if size < NS_PER_S:
        return f"{ns / NS_PER_MS:.3f} ms"
    return f"{ns / NS_PER_S:.3f} s"


def format_bytes(nbytes: float) -> str:
    """Return a size in decimal units.

    >>> format_bytes(102_228_128)
    '102.2 MB'
    """
    size = abs(nbytes)
    if size < 1e3:
        return f"{nbytes:.0f} B"
    if size < 1e6:
        return f"{nbytes / 1e3:.1f} kB"
    if size < 1e9:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e9:.2f} GB"


def format_rate(bytes_per_s: float) -> str:
    """Return a bandwidth in decimal GB/s.

    >>> format_rate(12e9)
    '12 GB/s'
    """
    if math.isinf(bytes_per_s):
        return "unlimited"
    rate = bytes_per_s / GB
    return f"{rate:.0f} GB/s" if rate >= 1e3 else f"{rate:.3g} GB/s"
