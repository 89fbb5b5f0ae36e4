"""Measured times of this very fabric, interpolated between their entries.

Tables are kept as they were measured: a protocol switch that makes a larger call faster stays.
"""

from __future__ import annotations

import bisect
import math

from dpsim.collectives._fabric import Call, Fabric
from dpsim.collectives._registry import ALGORITHMS
from dpsim.errors import InputError
from dpsim.hardware import CollectiveTable


@ALGORITHMS.add
def measured(call: Call, fabric: Fabric) -> float:
    """Return the measured time of one collective, in seconds.

    On an entry: its time. Between two: linear in log(bytes), log(seconds). Below the smallest its
    time, the latency. Above the largest t = t_last bytes / bytes_last, its bandwidth kept.

    Source: the table's own.
    Leaves out: what happens above the largest entry when latency still counts there (errs slow).

    Raises:
        InputError: The profile has no such table for these ranks, nodes and network.
    """
    if fabric.ranks == 1 or call.nbytes == 0:
        return 0.0
    table = fabric.table(call.collective)
    if table is None:
        raise InputError(_no_table(call, fabric))
    return interpolate(table, call.nbytes)


def interpolate(table: CollectiveTable, nbytes: float) -> float:
    """Return the table's time for `nbytes` > 0, in seconds; see `measured`."""
    sizes, seconds = table.nbytes, table.seconds
    if nbytes <= sizes[0]:
        return seconds[0]
    if nbytes >= sizes[-1]:
        return seconds[-1] * (nbytes / sizes[-1])
    i = bisect.bisect_right(sizes, nbytes) - 1
    # Relative to the entry, not exp(log(t)), which is not always t: on the entry, share is 0.
    share = math.log(nbytes / sizes[i]) / math.log(sizes[i + 1] / sizes[i])
    return seconds[i] * math.pow(seconds[i + 1] / seconds[i], share)


def _no_table(call: Call, fabric: Fabric) -> str:
    where = "1 node" if fabric.nodes == 1 else f"{fabric.nodes} nodes of this network"
    known = ", ".join(fabric.profile_tables) or "none"
    return (
        f"no measured {call.collective} of {fabric.ranks} GPUs on {where}; measured: {known}. "
        "Use --all-reduce nccl, or add the table to the profile."
    )
