"""The textbook ring: 2(N-1) steps of latency + bytes / N / bandwidth.

It has none of NCCL's protocols and algorithms: what the wires alone would take.
"""

from __future__ import annotations

from dpsim.collectives._fabric import Call, Fabric
from dpsim.collectives._registry import ALGORITHMS
from dpsim.errors import InputError


@ALGORITHMS.add
def ring(call: Call, fabric: Fabric) -> float:
    """Return the time of one collective on a ring of equal steps, in seconds.

    With N ranks, S bytes, k channels and B bytes a second over all of them:

    * all_reduce: 2(N-1) steps of hop + S/N/B, that is 2(N-1) hop + 2(N-1)/N S/B.
    * all_gather, reduce_scatter: N-1 of these steps.
    * broadcast, reduce: pipelined, (N-1) hop + S/B + (N-2) min(k chunk, S)/B; the last term is the
      first chunk's way to the end of the ring, and a call of less than a chunk is sent whole.

    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009; the pipeline follows
    NCCL 2.30.7, src/device/broadcast.h and reduce.h.
    Leaves out: the reduction kernel's own pass over memory, (N-1)/N S/B_reduce, which NCCL hides
    in the transfer; the hop's share in later chunks (8 slots are in flight).
    """
    ranks, nbytes = fabric.ranks, call.nbytes
    if ranks == 1 or nbytes == 0:
        return 0.0
    if call.collective in ("broadcast", "reduce"):
        rate = fabric.channels * fabric.ring_bytes_per_s
        fill = (ranks - 2) * min(fabric.channels * fabric.chunk_bytes, nbytes)
        return (ranks - 1) * fabric.hop_s + (nbytes + fill) / rate
    return steps(call, fabric) * step_s(call, fabric)


def steps(call: Call, fabric: Fabric) -> int:
    """Return the number of steps: 2(N-1) for all_reduce, N-1 for all_gather and reduce_scatter.

    Raises:
        InputError: A broadcast or reduce, which go round in chunks and have no steps.
    """
    if call.collective in ("broadcast", "reduce"):
        raise InputError(f"{call.collective} is a pipeline and has no ring steps")
    return (2 if call.collective == "all_reduce" else 1) * (fabric.ranks - 1)


def step_s(call: Call, fabric: Fabric) -> float:
    """Return the time of one step over the slowest link, in seconds: hop + S/N/B."""
    rate = fabric.channels * fabric.ring_bytes_per_s
    return fabric.hop_s + call.nbytes / fabric.ranks / rate
