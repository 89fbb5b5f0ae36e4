"""Packing: how a batch is cut, and how tensors are put into chunks and buckets. Exact rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dpsim.units import MIB
from dpsim.workload import Tensor

COALESCE_BYTES = 10 * MIB
"""Buffer of DataParallel's coalesced broadcast and reduce. Source: torch/nn/parallel/comm.py."""
DDP_FIRST_BYTES = MIB
"""First bucket of DDP. Source: torch/csrc/distributed/c10d/reducer.hpp."""
DDP_BUCKET_BYTES = 25 * MIB
"""Further buckets of DDP (bucket_cap_mb). Source: torch/nn/parallel/distributed.py."""
DDP_BROADCAST_BYTES = 250 * MIB
"""Buckets of DDP's buffer broadcast. Source: torch/nn/parallel/distributed.py."""

Sizes = Callable[[Tensor], int]


def chunk_batch(batch: int, replicas: int) -> tuple[int, ...]:
    """Return the samples of each replica: torch.chunk's rule, ceil(B/N) each until none is left.

    There may be fewer chunks than replicas: 5 samples on 4 GPUs are 2, 2, 1.

    >>> chunk_batch(10, 4)
    (3, 3, 3, 1)
    """
    size = -(-batch // replicas)
    full, rest = divmod(batch, size)
    return (size,) * full + ((rest,) if rest else ())


def spread_batch(batch: int, ranks: int) -> tuple[int, ...]:
    """Return the samples of each rank of a distributed sampler: as even as can be.

    >>> spread_batch(10, 4)
    (3, 3, 2, 2)
    """
    each, rest = divmod(batch, ranks)
    return (each + 1,) * rest + (each,) * (ranks - rest)


def broadcast_chunks(tensors: Sequence[Tensor], size: Sizes) -> list[list[Tensor]]:
    """Return the chunks of broadcast_coalesced: a chunk closes when it reaches the limit.

    Tensors keep their order within their dtype. Source: torch/csrc/utils/tensor_flatten.cpp.
    """
    return _by_dtype(tensors, lambda group: close_when_full(group, size, [COALESCE_BYTES]))


def reduce_chunks(tensors: Sequence[Tensor], size: Sizes) -> list[list[Tensor]]:
    """Return the chunks of reduce_add_coalesced: a chunk closes before it would pass the limit.

    A tensor larger than the limit has a chunk of its own. Source: torch/_utils.py _take_tensors.
    """
    return _by_dtype(tensors, lambda group: _close_before_full(group, size, COALESCE_BYTES))


def close_when_full(
    tensors: Iterable[Tensor], size: Sizes, limits: Sequence[float]
) -> list[list[Tensor]]:
    """Return groups that close when their bytes reach a limit; the last limit repeats.

    Source: torch/csrc/distributed/c10d/reducer.cpp compute_bucket_assignment_by_size.
    """
    groups: list[list[Tensor]] = []
    open_group: list[Tensor] = []
    total, step = 0, 0
    for tensor in tensors:
        open_group.append(tensor)
        total += size(tensor)
        if total >= limits[min(step, len(limits) - 1)]:
            groups.append(open_group)
            open_group, total, step = [], 0, step + 1
    return [*groups, open_group] if open_group else groups


def _close_before_full(tensors: Iterable[Tensor], size: Sizes, limit: float) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = []
    open_group: list[Tensor] = []
    total = 0
    for tensor in tensors:
        if open_group and total + size(tensor) > limit:
            groups.append(open_group)
            open_group, total = [], 0
        open_group.append(tensor)
        total += size(tensor)
    return [*groups, open_group] if open_group else groups


def _by_dtype(
    tensors: Sequence[Tensor], pack: Callable[[list[Tensor]], list[list[Tensor]]]
) -> list[list[Tensor]]:
    chunks: list[list[Tensor]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        chunks += pack([tensor for tensor in tensors if tensor.dtype == dtype])
    return chunks
