"""NCCL's own model: the fastest of ring, tree, NVLS and PAT in LL, LL128 or Simple.

For every algorithm and protocol  t = latency + bytes / bandwidth,  and the smallest wins. The
terms and their constants are those of NCCL 2.30.7 (src/graph/tuning.cc), so this is what NCCL
believes and chooses by; measured tables beat it where a profile has them.

What is left out: dropping channels and threads for small sizes (enqueue.cc:2075 does it, but
after the choice, and the model's time does not depend on it); grouped calls (`numPipeOps`);
CollNet (needs switches that reduce), NVLSTree (Hopper and newer on several nodes); graphs whose
channels differ (`sameChannels` = 0), which make broadcast and reduce slower; mixed GPU models.
A path through host memory counts as PCIe, as in NCCL: the slower staging is in its bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dpsim.collectives import _nccl_tables as tables
from dpsim.collectives._fabric import Call, Fabric
from dpsim.collectives._nccl_tables import Protocol
from dpsim.collectives._registry import ALGORITHMS
from dpsim.units import GB, US_PER_S

AlgorithmName = Literal["tree", "ring", "nvls", "pat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What NCCL chooses for one call, and the time its model gives.

    `algorithm` and `protocol` are "none" where nothing is launched: one rank or no bytes.
    """

    algorithm: AlgorithmName | Literal["none"]
    protocol: Protocol | Literal["none"]
    seconds: float


@ALGORITHMS.add
def nccl(call: Call, fabric: Fabric) -> float:
    """Return the time of the plan that NCCL chooses, in seconds; see `plan`."""
    return plan(call, fabric).seconds


def plan(call: Call, fabric: Fabric) -> Plan:
    """Return the fastest algorithm and protocol with its time.

    t = latency + nbytes / bandwidth for each pair on offer; ties go to the first in NCCL's order.

    Source: NCCL 2.30.7, src/graph/tuning.cc:630-655 (`ncclTopoGetAlgoTime`).
    Leaves out: see the module.
    """
    if fabric.ranks == 1 or call.nbytes == 0:
        return Plan(algorithm="none", protocol="none", seconds=0.0)
    plans = (
        Plan(
            algorithm=algorithm,
            protocol=protocol,
            seconds=_seconds(call, fabric, algorithm, protocol),
        )
        for algorithm, protocol in _offers(call, fabric)
    )
    return min(plans, key=lambda offer: offer.seconds)


def _offers(call: Call, fabric: Fabric) -> Iterator[tuple[AlgorithmName, Protocol]]:
    """Yield what NCCL compares for this call, in its order: tree and ring, then NVLS, then PAT."""
    protocols: tuple[Protocol, ...] = (
        ("LL", "LL128", "Simple") if fabric.ll128 else ("LL", "Simple")
    )
    if call.collective == "all_reduce":
        yield from (("tree", protocol) for protocol in protocols)
    yield from (("ring", protocol) for protocol in protocols)
    rooted = call.collective in ("broadcast", "reduce")
    # NVLS needs two channels, and its graph has one for each GPU (search.cc).
    reduces = fabric.nvls and tables.NVLS_EFFICIENCY[fabric.generation] > 0
    if reduces and fabric.nodes == 1 and not rooted:
        yield "nvls", "Simple"
    one_gpu_a_node = fabric.ranks == fabric.nodes
    if one_gpu_a_node and call.collective in ("all_gather", "reduce_scatter"):
        yield "pat", "Simple"


def _seconds(call: Call, fabric: Fabric, algorithm: AlgorithmName, protocol: Protocol) -> float:
    """Return latency + nbytes / bandwidth of one algorithm and protocol."""
    match algorithm:
        case "ring":
            latency_us = _ring_us(call, fabric, protocol)
            rate = _ring_bus(fabric, protocol) * fabric.ranks / _steps(call, fabric)
        case "tree":
            latency_us = _tree_us(fabric, protocol)
            rate = _tree_bus(fabric, protocol) / 2 * _tree_correction(call.nbytes, protocol)
        case "nvls":
            latency_us = tables.NVLS_US
            rate = _nvls_rate(call, fabric)
        case _:  # pat
            latency_us = _pat_us(fabric)
            rate = fabric.channels * fabric.ring_bytes_per_s * tables.PAT_SHARE
    return latency_us / US_PER_S + call.nbytes / rate


def _steps(call: Call, fabric: Fabric) -> int:
    """Return the hops of the data around the ring."""
    match call.collective:
        case "all_reduce":
            return 2 * (fabric.ranks - 1)
        case "all_gather" | "reduce_scatter":
            return fabric.ranks - 1
        case _:
            return fabric.ranks


def _by_nodes(row: tables.ByNodes, fabric: Fabric) -> float:
    return row[min(fabric.nodes, 3) - 1]


def _ll_max(fabric: Fabric) -> float:
    """Return LL's cap on the bus, bytes/s. On several nodes its row is the CPU's."""
    row = fabric.generation if fabric.nodes == 1 else int(fabric.cpu_vendor == "amd")
    return _by_nodes(tables.LL_MAX[row], fabric) * GB


def _ring_bus(fabric: Fabric, protocol: Protocol) -> float:
    """Return the bus bandwidth of the rings, bytes/s (tuning.cc:326-329)."""
    bus = fabric.channels * fabric.ring_bytes_per_s
    match protocol:
        case "LL":
            return min(_ll_max(fabric), bus * tables.RING_LL_SHARE)
        case "LL128":
            each = _by_nodes(tables.RING_LL128_MAX[fabric.generation], fabric)
            return min(bus * tables.RING_LL128_SHARE, fabric.channels * each * GB)
        case _:  # Simple
            return bus


def _tree_bus(fabric: Fabric, protocol: Protocol) -> float:
    """Return the bus bandwidth of the trees in an all-reduce, bytes/s (tuning.cc:330-336).

    With one GPU a node the pattern is the plain tree. On Hopper and newer NCCL may also fall back
    to it elsewhere; that needs its search and is left out.
    """
    each = _by_nodes(tables.TREE_MAX[fabric.generation], fabric)
    bus = fabric.channels * fabric.tree_bytes_per_s
    bus = min(bus * tables.TREE_SHARE, fabric.channels * each * GB)
    if protocol == "LL":
        bus = min(bus * tables.TREE_LL_SHARE, _ll_max(fabric))
    elif protocol == "LL128":
        each = _by_nodes(tables.TREE_LL128_MAX[fabric.generation], fabric)
        one = fabric.nodes == 1
        share = tables.TREE_LL128_SHARE_ONE_NODE if one else tables.TREE_LL128_SHARE
        bus = min(bus * share, fabric.channels * each * GB)
    return bus * tables.PLAIN_TREE_SHARE if fabric.ranks == fabric.nodes else bus


def _tree_correction(nbytes: int, protocol: Protocol) -> float:
    """Return the share of a tree's bandwidth that sizes from 64 B to 256 MB reach."""
    log_size = (nbytes >> 6).bit_length() - 1
    row = tables.TREE_CORRECTION[protocol]
    return row[log_size] if 0 <= log_size < len(row) else 1.0


def _nvls_rate(call: Call, fabric: Fabric) -> float:
    """Return the algorithm bandwidth of NVLS on one node, bytes/s (tuning.cc:305-321).

    Its graph has a channel for each GPU, at the highest speed tried whose sum the links carry;
    the rings' sum stands for that. The NVSwitch halves an all-reduce's traffic: two passes.
    """
    channels = fabric.ranks
    speeds = tables.NVLS_SPEEDS[fabric.generation]
    carried = fabric.channels * fabric.intra_bytes_per_s / channels / GB
    speed = next((speed for speed in speeds if speed <= carried), speeds[-1])
    share = tables.NVLS_EFFICIENCY[fabric.generation] * (channels - 1) / channels
    if call.collective == "all_reduce":
        each = min(speed * share * 2, speeds[0])  # bwInter stops at the highest speed tried.
        return channels * each * GB * fabric.ranks / _steps(call, fabric)
    return channels * speed * share * (fabric.ranks - 1) / fabric.ranks * GB


def _intra_us(fabric: Fabric, algorithm: Literal["tree", "ring"], protocol: Protocol) -> float:
    """Return the latency of a hop inside a node, us."""
    if fabric.path == "nvlink":
        return tables.HOP_US["nvlink"][algorithm][protocol]
    # NCCL gives trees in POWER machines the ring's latency (tuning.cc, "de-penalize").
    power = fabric.cpu_vendor == "power" and protocol == "Simple"
    return tables.HOP_US["pci"]["ring" if power else algorithm][protocol]


def _inter_us(fabric: Fabric, algorithm: tables.TreeOrRing, protocol: Protocol) -> float:
    """Return the latency of a hop between nodes, us: Simple pays the NIC's part twice."""
    exposed = fabric.ranks == fabric.nodes  # With one GPU a node nothing hides the network.
    times = 2 if protocol == "Simple" else 1
    hop = tables.HOP_US["net"]["tree" if exposed else algorithm][protocol]
    return hop + times * fabric.added_latency_s * US_PER_S


def _ring_us(call: Call, fabric: Fabric, protocol: Protocol) -> float:
    """Return the latency of a ring, us (tuning.cc:394-414 and the plateau of :647-650)."""
    base = tables.BASE_US["ring"][protocol]
    if call.collective in ("broadcast", "reduce"):
        if fabric.nodes == 1:
            return base + _intra_us(fabric, "ring", protocol)
        return base + tables.HOP_US["net"]["ring"][protocol]  # without the NIC's, as in NCCL
    steps = _steps(call, fabric)
    if fabric.nodes == 1:
        return base + steps * _intra_us(fabric, "ring", protocol)
    post = tables.NET_OVERHEAD_US.get(fabric.cpu_vendor, tables.NET_OVERHEAD_DEFAULT_US)
    intra = max(_intra_us(fabric, "ring", protocol), post * (3 if protocol == "Simple" else 1))
    inter_steps = (2 if call.collective == "all_reduce" else 1) * (fabric.nodes - 1)
    hops = (steps - inter_steps) * intra + inter_steps * _inter_us(fabric, "ring", protocol)
    return (base + hops) * _plateau(call, fabric, protocol)


def _plateau(call: Call, fabric: Fabric, protocol: Protocol) -> float:
    """Return the factor on the latency of a ring over several nodes."""
    each = call.nbytes // (fabric.channels * fabric.ranks)
    simple = protocol == "Simple" and call.collective == "all_reduce"
    if simple and each >= tables.RING_PLATEAU_BYTES:
        return tables.RING_PLATEAU[fabric.generation]
    return 1.0


def _tree_us(fabric: Fabric, protocol: Protocol) -> float:
    """Return the latency of a tree all-reduce, us: a chain in the node, a tree of nodes, twice."""
    chain = (fabric.ranks // fabric.nodes - 1) * _intra_us(fabric, "tree", protocol)
    depth = fabric.nodes.bit_length() - 1
    tree = depth * _inter_us(fabric, "tree", protocol) if depth else 0.0
    return tables.BASE_US["tree"][protocol] + 2 * (chain + tree)


def _pat_us(fabric: Fabric) -> float:
    """Return the latency of PAT, us: it has a logarithmic and a linear part (tuning.cc:430-436)."""
    depth = fabric.nodes.bit_length() - 1
    rounds = depth * _inter_us(fabric, "pat", "Simple") / 3.5
    return tables.BASE_US["pat"]["Simple"] + rounds + fabric.ranks * 2.8
