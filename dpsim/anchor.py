"""Anchor: scale kernels or host work so that one GPU takes the step that somebody measured."""

from __future__ import annotations

import math
from collections.abc import Callable

from dpsim.costs import Scaling
from dpsim.errors import InfeasibleError
from dpsim.units import NS_PER_S, format_duration, to_ns

SMALLEST, LARGEST = 1e-3, 1e3
"""Factors tried: a host or a device a thousand times faster or slower than its profile."""
TOLERANCE = 1e-9
"""Relative width of the last bracket: well below a nanosecond in a second."""


def solve(step_ns: Callable[[Scaling], int], bound: str, anchor_s: float) -> Scaling:
    """Return the factors with which one GPU takes `anchor_s`.

    What bounds the unscaled step is scaled: kernels when the device does, host work when the host
    does. Where that alone does not reach the anchor, both are.

    Args:
        step_ns: The step of one GPU under given factors; never falls when a factor rises.
        bound: "device" or "host".
        anchor_s: The measured step, seconds.

    Raises:
        InfeasibleError: No factor reaches the anchor: something that is not scaled takes longer,
            or the anchor is as long as no machine of the kind would take.
    """
    most = step_ns(Scaling(kernels=LARGEST, host=LARGEST))
    if anchor_s * NS_PER_S > most:
        raise InfeasibleError(
            f"--anchor-step-ms must be reachable, got {format_duration(anchor_s * NS_PER_S)}: "
            f"work {LARGEST:.0f} times slower than the profile's takes {format_duration(most)}. "
            "Check the unit, the batch of the measurement (--anchor-batch) and the profile."
        )
    target = to_ns(anchor_s)
    ways: tuple[Callable[[float], Scaling], ...] = (
        (lambda x: Scaling(kernels=x)) if bound == "device" else (lambda x: Scaling(host=x)),
        lambda x: Scaling(kernels=x, host=x),
    )
    for way in ways:
        factor = _root(lambda x, way=way: step_ns(way(x)) - target)  # type: ignore[misc]
        if factor is not None:
            return way(factor)
    least = step_ns(Scaling(kernels=SMALLEST, host=SMALLEST))
    raise InfeasibleError(
        f"--anchor-step-ms must be reachable, got {format_duration(target)}: the copies of the "
        f"batch and the waits alone take {format_duration(least)}. Check the batch of the "
        "measurement (--anchor-batch) and the profile."
    )


def _root(excess: Callable[[float], int]) -> float | None:
    """Return the factor with no excess, by bisection on its logarithm; None if there is none."""
    low, high = SMALLEST, LARGEST
    if excess(low) > 0 or excess(high) < 0:
        return None
    while high / low > 1 + TOLERANCE:
        middle = math.sqrt(low * high)
        over = excess(middle)
        if over == 0:
            return middle
        low, high = (low, middle) if over > 0 else (middle, high)
    return math.sqrt(low * high)
