"""Sharding: which parameter server keeps which part of which tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dpsim.schedules._packing import Sizes
from dpsim.workload import Tensor

BIG_ARRAY_ELEMENTS = 1_000_000
"""Tensors with fewer elements stay whole. Source: MXNET_KVSTORE_BIGARRAY_BOUND, kvstore_dist.h."""
KEY_PRIME = 9973
"""A whole tensor with key i is on server (i * 9973) mod k. Source: mxnet kvstore_dist.h."""

Sharding = Literal["round-robin", "greedy", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of one tensor on one server."""

    parameter: int  # index into Workload.parameters
    server: int
    nbytes: int
    numel: int


def shard(
    parameters: tuple[Tensor, ...], servers: int, rule: Sharding, size: Sizes
) -> dict[int, tuple[Shard, ...]]:
    """Return the shards of each trainable parameter.

    split: tensors of a million elements and more are cut evenly over all servers, others stay
    whole at a hash of their key (MXNet). round-robin: whole, in definition order (TensorFlow's
    replica_device_setter). greedy: whole, each to the server with the least bytes so far
    (TensorFlow's GreedyLoadBalancingStrategy).

    Args:
        parameters: In definition order; frozen ones are not kept on servers.
        servers: Number of servers, >= 1.
        rule: How to place them.
        size: Bytes of a tensor on the wire.
    """
    load = [0] * servers
    placed: dict[int, tuple[Shard, ...]] = {}
    key = 0
    for index, tensor in enumerate(parameters):
        if not tensor.trainable:
            continue
        if rule == "split" and servers > 1 and tensor.numel >= BIG_ARRAY_ELEMENTS:
            chosen = list(range(servers))
        elif rule == "split":
            chosen = [key * KEY_PRIME % servers]
        elif rule == "greedy":
            chosen = [load.index(min(load))]
        else:
            chosen = [key % servers]
        placed[index] = _cut(index, tensor, chosen, size(tensor))
        for part in placed[index]:
            load[part.server] += part.nbytes
        key += 1
    return placed


def _cut(index: int, tensor: Tensor, servers: list[int], nbytes: int) -> tuple[Shard, ...]:
    count = len(servers)
    byte_edges = [nbytes * i // count for i in range(count + 1)]
    edges = [tensor.numel * i // count for i in range(count + 1)]
    return tuple(
        Shard(
            parameter=index,
            server=server,
            nbytes=byte_edges[i + 1] - byte_edges[i],
            numel=edges[i + 1] - edges[i],
        )
        for i, server in enumerate(servers)
    )
