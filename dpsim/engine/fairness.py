"""Max-min fair rates by progressive filling, in whole rate units so that no order matters.

This module is pure: no clock, no simpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import InputError

Ints = NDArray[np.int64]
Units = NewType("Units", int)
"""A rate in units of 1/RESOLUTION bytes/s."""

RESOLUTION = 1 << 16
"""Rate units in one byte/s: rounding a share of 10 MB/s moves the end of 1 s by 0.002 ns."""
UNLIMITED = Units(np.iinfo(np.int64).max)
MAX_BYTES_PER_S = float(2**62 // RESOLUTION)
"""70 TB/s, the most that a finite link may have, so that sums of rates fit 64 bits."""


def rate_units(bytes_per_s: float, where: str) -> Units:
    """Return a rate in rate units, rounded to the nearest and at least 1."""
    if math.isinf(bytes_per_s) and bytes_per_s > 0:
        return UNLIMITED
    if not 0 < bytes_per_s <= MAX_BYTES_PER_S:
        raise InputError(
            f"{where} must have a rate > 0 and at most {MAX_BYTES_PER_S:.3g} bytes/s, or "
            f"infinity, got {bytes_per_s}. Correct it in the hardware profile."
        )
    return Units(max(1, round(bytes_per_s * RESOLUTION)))


def fair_rates(
    routes: Sequence[Sequence[int]],
    capacities: Sequence[float],
    *,
    counts: Sequence[int] | None = None,
    caps: Sequence[float] | None = None,
) -> NDArray[np.float64]:
    """Return the max-min fair rate of each flow, in bytes/s; infinity where nothing limits it.

    All rates grow together until a link is full or a flow has reached its cap; these flows keep
    their rate, the others grow on. A rate is rounded down to 2**-16 bytes/s.

    Source: Bertsekas and Gallager, Data Networks, 2nd ed., 6.5.2.

    Args:
        routes: Link indexes of each flow; a link named twice is crossed twice.
        capacities: Bytes/s of each link, > 0, infinity allowed.
        counts: Number of equal flows that an entry stands for, >= 1; None: all 1.
        caps: Most that one flow of an entry can take, bytes/s; None: no caps.

    Raises:
        InputError: A capacity or a cap is not > 0, or finite and above 70 TB/s.
    """
    number = len(routes)
    lengths = np.fromiter((len(route) for route in routes), np.int64, number)
    flow = np.repeat(np.arange(number), lengths)
    link = np.fromiter((hop for route in routes for hop in route), np.int64, int(lengths.sum()))
    weights = np.ones(number, np.int64) if counts is None else np.asarray(counts, np.int64)
    free = np.array(
        [rate_units(value, f"link {i}") for i, value in enumerate(capacities)], np.int64
    )
    most = [UNLIMITED] * number
    if caps is not None:
        most = [rate_units(value, f"the cap of flow {i}") for i, value in enumerate(caps)]
    finite = free[link] < UNLIMITED
    flow, link = flow[finite], link[finite]
    rates = fill(flow, link, weights[flow], free, np.array(most, np.int64))
    return np.where(rates == UNLIMITED, math.inf, rates / RESOLUTION)


def fill(flow: Ints, link: Ints, weight: Ints, capacity: Ints, caps: Ints) -> Ints:
    """Return max-min fair rates in rate units, by progressive filling.

    Entry k says that flow[k] loads link[k] with weight[k] times its rate. A round freezes every
    flow at its cap, and every flow of a link where all flows have their least share: fair shares
    only grow while others freeze, so this equals filling in the order of the shares, in fewer
    rounds (Ros-Giralt et al., "On the bottleneck structure of congestion-controlled networks",
    POMACS 3(3), 2019).
    """
    rates = np.zeros(len(caps), np.int64)
    live = np.ones(len(caps), np.bool_)
    free = capacity.copy()
    while live.any():
        load = np.zeros(len(free), np.int64)
        np.add.at(load, link, weight)
        share = free // np.maximum(load, 1)
        offer = share[link]
        least = caps.copy()
        np.minimum.at(least, flow, offer)
        slack = np.zeros(len(free), np.bool_)
        slack[link[offer > least[flow]]] = True
        done = live & (least == caps)
        done[flow[~slack[link]]] = True
        rates[done] = np.maximum(least[done], 1)  # a share below one unit must still end
        gone = done[flow]
        np.subtract.at(free, link[gone], weight[gone] * rates[flow[gone]])
        np.maximum(free, 0, out=free)
        flow, link, weight = flow[~gone], link[~gone], weight[~gone]
        live &= ~done
    return rates
