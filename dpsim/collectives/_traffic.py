"""How many bytes a ring puts on each link, and the names that benchmarks give to bandwidth."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpsim.collectives._fabric import Call, Collective
from dpsim.errors import InputError


def traffic(call: Call, ranks: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the bytes that each rank sends and receives on a ring in rank order.

    Rank r sends to r+1, so received[r] = sent[r-1]. The vector is cut into N shards of whole bytes
    that differ by one at most. Sums over all ranks, exactly:

    * all_reduce 2(N-1) S: each rank leaves out one shard in each half, so about 2(N-1)/N S.
    * reduce_scatter, all_gather (N-1) S.
    * broadcast, reduce (N-1) S: S from every rank but the last before the root (broadcast), or
      but the root (reduce). The root is rank 0.

    Source: NCCL 2.30.7, src/device/{all_reduce,reduce_scatter,all_gather,broadcast,reduce}.h.
    Leaves out: flags (LL doubles the bytes, LL128 adds 1/15); trees, which load links otherwise.

    Args:
        call: What is done.
        ranks: N, >= 1; for 1 nothing is sent.

    Raises:
        InputError: `ranks` is below 1.
    """
    if ranks < 1:
        raise InputError(f"a collective needs 1 rank or more, got {ranks}")
    sent = _sent(call, ranks) if ranks > 1 else np.zeros(1, dtype=np.int64)
    return sent, np.roll(sent, 1)


def _sent(call: Call, ranks: int) -> npt.NDArray[np.int64]:
    size, rank = call.nbytes, np.arange(ranks, dtype=np.int64)
    shard = size // ranks + (rank < size % ranks)
    match call.collective:
        case "all_reduce":  # rank r ends the first half with shard r, and never sends shard r+1 on
            return 2 * size - shard - np.roll(shard, -1)
        case "reduce_scatter":
            return size - shard
        case "all_gather":
            return size - np.roll(shard, -1)
        case "broadcast":
            return np.where(rank == ranks - 1, 0, size)
        case _:  # reduce
            return np.where(rank == 0, 0, size)


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth, where the latter is S / t.

    2(N-1)/N for all_reduce, (N-1)/N for all_gather and reduce_scatter, 1 for broadcast and reduce.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    match collective:
        case "all_reduce":
            return 2 * (ranks - 1) / ranks
        case "all_gather" | "reduce_scatter":
            return (ranks - 1) / ranks
        case _:
            return 1.0
