"""Choose an algorithm, and turn its time into each rank's finish on the clock."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpsim.collectives._fabric import Call, Fabric
from dpsim.collectives._registry import ALGORITHMS, Algorithm
from dpsim.errors import UnknownNameError
from dpsim.units import to_ns

AUTO = "auto"
"""The name that stands for "measured where the profile has a table, else nccl"."""


def choose(name: str, call: Call, fabric: Fabric) -> Algorithm:
    """Return the algorithm of that name for one call.

    Args:
        name: A plug-in of this package, or "auto": `measured` if the fabric has a table for the
            collective, else `nccl`.
        call: What is done.
        fabric: Where.

    Raises:
        UnknownNameError: No such plug-in; the message lists those that exist.
    """
    if name == AUTO:
        return ALGORITHMS.get("measured" if fabric.table(call.collective) else "nccl")
    known = ALGORITHMS.names()
    if name not in known:
        raise UnknownNameError("all-reduce algorithm", name, [*known, AUTO])
    return ALGORITHMS.get(name)


def finish_ns(
    call: Call, fabric: Fabric, ready: npt.NDArray[np.int64], algorithm: Algorithm
) -> npt.NDArray[np.int64]:
    """Return when each participant is done, in ns: max(ready) + t for all of them.

    NCCL's kernels spin until their neighbours arrive, so every finish depends on the last start.
    For a ring of equal links this is exact; where links differ it errs late, by less than N-1
    steps (`ring_finish_ns` is exact there too).

    Leaves out: ranks that end early because their last chunk came early (broadcast, trees).

    Args:
        call: What is done.
        fabric: Where.
        ready: When each rank, or each class of equal ranks, reached the call, ns, not empty.
        algorithm: From `choose`.
    """
    return np.full(ready.shape, int(ready.max()) + to_ns(algorithm(call, fabric)), dtype=np.int64)
