"""Buckets of DistributedDataParallel: which gradients are reduced together, and in what order."""

from __future__ import annotations

from dpsim.scenario import RingOptions
from dpsim.schedules._packing import (
    DDP_BUCKET_BYTES,
    DDP_FIRST_BYTES,
    Sizes,
    close_when_full,
)
from dpsim.workload import Tensor, Workload

Bucket = tuple[int, ...]
"""Indexes into Workload.parameters."""


def rebuild_iteration(options: RingOptions) -> int | None:
    """Return the iteration before which DDP rebuilds its buckets; None: never.

    Source: torch/csrc/distributed/c10d/reducer.cpp should_rebuild_buckets and rebuild_buckets.
    """
    if options.find_unused_parameters and not options.static_graph:
        return None
    return 3 if options.static_graph else 2


def buckets(
    workload: Workload, options: RingOptions, iteration: int, size: Sizes
) -> tuple[Bucket, ...]:
    """Return the buckets of an iteration, in the order in which they are reduced.

    Before the rebuild: packed in definition order and reversed, with no limit unless unused
    parameters are searched for or a list of caps is given - one bucket, then. After it: packed in
    the order in which gradients became ready, unused parameters last.

    Source: torch/nn/parallel/distributed.py _ddp_init_helper, reducer.cpp rebuild_buckets.
    """
    rebuilt = rebuild_iteration(options)
    limits = bucket_limits(options)
    order = [ready.parameter for ready in workload.gradients] + unused_parameters(workload)
    if rebuilt is not None and iteration >= rebuilt:
        return _pack(workload, order, limits, size)
    order.sort()
    limited = options.find_unused_parameters and not options.static_graph
    if not limited and not options.bucket_list_bytes:
        limits = (float("inf"),)
    return tuple(reversed(_pack(workload, order, limits, size)))


def unused_parameters(workload: Workload) -> list[int]:
    """Return the trainable parameters that backward gives no gradient."""
    given = {ready.parameter for ready in workload.gradients}
    return [i for i, p in enumerate(workload.parameters) if p.trainable and i not in given]


def bucket_limits(options: RingOptions) -> tuple[float, ...]:
    """Return the byte limits, of which the last repeats."""
    if options.bucket_list_bytes:
        return options.bucket_list_bytes
    if options.bucket_bytes is not None:
        return (options.bucket_bytes,)
    return (DDP_FIRST_BYTES, DDP_BUCKET_BYTES)


def _pack(
    workload: Workload, order: list[int], limits: tuple[float, ...], size: Sizes
) -> tuple[Bucket, ...]:
    """Pack by (dtype, in order); sparse gradients have a bucket each."""
    tensors = [workload.parameters[i] for i in order]
    index = {id(tensor): i for tensor, i in zip(tensors, order, strict=True)}
    packed: list[list[Tensor]] = [[t] for t in tensors if t.sparse_gradient]
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        dense = [t for t in tensors if t.dtype == dtype and not t.sparse_gradient]
        packed += close_when_full(dense, size, limits)
    if len({t.dtype for t in tensors}) > 1 or any(t.sparse_gradient for t in tensors):
        position = {id(t): k for k, t in enumerate(tensors)}
        packed.sort(key=lambda group: min(position[id(t)] for t in group))
    return tuple(tuple(index[id(t)] for t in group) for group in packed)
