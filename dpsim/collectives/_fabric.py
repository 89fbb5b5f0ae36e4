"""What a collective is, and what an algorithm may know of the wires it runs on.

`fabric_of` is the only place where a hardware profile becomes the few numbers of NCCL's model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from dpsim.collectives._nccl_tables import HOP_US, INTER_SPEED_MAX
from dpsim.errors import InfeasibleError, InputError
from dpsim.hardware import Architecture, CollectiveTable, HardwareProfile, Network
from dpsim.units import GB, US_PER_S

Collective = Literal["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"]
Path = Literal["nvlink", "pcie", "host"]

GENERATION: dict[Architecture, int] = {
    "cpu": 0, "kepler": 0, "maxwell": 0, "pascal": 0, "volta": 0, "turing": 0,
    "ampere": 1, "ada": 1, "hopper": 2, "blackwell": 3,
}  # fmt: skip
"""Row of NCCL's tables: compute capability below 8.0, 8.x, 9.x, 10 and up. Turing is 7.5."""
WITHOUT_LL128 = frozenset({"cpu", "kepler", "maxwell", "pascal"})
"""LL128 needs compute capability 7.0 (nccl/src/graph/tuning.cc:538)."""
SIMPLE_STEP_BYTES = 512 * 1024
"""Chunk of broadcast and reduce: one slot of the 4 MiB Simple buffer (8 slots), which they fill
one at a time (nccl/src/include/collectives.h:19-34)."""
SOCKETS_PER_CHANNEL = 2
"""TCP connections of one channel of the graph: NCCL doubles the channels when it connects them
(src/graph/connect.cc) and opens one socket for each (src/transport/net_socket.cc). On NICs of
Amazon (16) and Google (4) it opens more, which is left out: the cap errs towards slow there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective. The root of a broadcast or reduce is rank 0.

    Attributes:
        collective: What is done.
        nbytes: Payload, bytes, >= 0: the whole vector. For all_gather that is the result, for
            reduce_scatter the input, as nccl-tests counts them.

    Raises:
        InputError: `nbytes` is negative.
    """

    collective: Collective
    nbytes: int

    def __post_init__(self) -> None:
        """Refuse a negative payload."""
        if self.nbytes < 0:
            raise InputError(f"{self.collective}: nbytes must be >= 0, got {self.nbytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The wires between the participants, as NCCL's model sees them.

    Bandwidths are payload bytes a second of one channel in one direction; times `channels` they
    are those of the whole graph.

    Attributes:
        ranks: Participants, >= 1.
        nodes: Nodes they are on, 1 to `ranks`.
        generation: Row of NCCL's tables, 0 Volta and older to 3 Blackwell.
        cpu_vendor: Decides LL's cap and the cost of posting to the network.
        path: Worst link inside a node; "host" is staged through host memory (no peer access).
        channels: Rings that run side by side.
        intra_bytes_per_s: Of one channel inside a node.
        inter_bytes_per_s: Of one channel between nodes; unused on one node.
        network_latency_s: One way; added to NCCL's own unless `rdma`.
        rdma: NICs read GPU memory. NCCL's constants for a hop between nodes are of such NICs.
        ll128: NCCL would enable the protocol LL128 here.
        nvls: The NVSwitches reduce; NCCL then also tries NVLS on one node.
        hop_s: Cost of one step of the textbook ring apart from its bytes.
        chunk_bytes: Chunk in which broadcast and reduce go round, each channel.
        tables: Measured collectives for these ranks, nodes and network.
        profile_tables: Names of all measured collectives of the profile, for messages.
    """

    ranks: int
    nodes: int = 1
    generation: int
    cpu_vendor: Literal["intel", "amd", "arm", "power"] = "intel"
    path: Path
    channels: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float = math.inf
    network_latency_s: float = 0.0
    rdma: bool = True
    ll128: bool
    nvls: bool = False
    hop_s: float = 0.0
    chunk_bytes: int = SIMPLE_STEP_BYTES
    tables: tuple[CollectiveTable, ...] = ()
    profile_tables: tuple[str, ...] = ()

    @property
    def ranks_per_node(self) -> int:
        """Return the ranks of the fullest node."""
        return -(-self.ranks // self.nodes)

    @property
    def ring_bytes_per_s(self) -> float:
        """Return the bandwidth of one channel's ring: the slowest link that it passes.

        NCCL's search only accepts rings with bwIntra = bwInter on several nodes, so its formula's
        "bwIntra for two nodes" is the NIC's too (nccl/src/graph/search.cc, first pass).
        """
        if self.nodes == 1:
            return self.intra_bytes_per_s
        return min(self.intra_bytes_per_s, self.inter_bytes_per_s)

    @property
    def tree_bytes_per_s(self) -> float:
        """Return the bandwidth of one channel's tree.

        On two nodes NCCL raises bwIntra to at most twice bwInter (search.cc, second pass). That is
        honest: the two trees of a pair of nodes send `nbytes` once over each NIC, half of what a
        long ring does. Halved by the algorithm's 1/2, the result stays within the NIC.
        """
        if self.nodes == 2:
            return min(self.intra_bytes_per_s, 2 * self.inter_bytes_per_s)
        return self.ring_bytes_per_s

    @property
    def added_latency_s(self) -> float:
        """Return what a hop between nodes costs on top of NCCL's constant.

        NCCL adds the NIC's latency, which its InfiniBand and socket code leave at 0; the constants
        were fitted over InfiniBand and contain that wire, but not a TCP stack.
        """
        return 0.0 if self.rdma else self.network_latency_s

    def table(self, collective: Collective) -> CollectiveTable | None:
        """Return the measured times of `collective` on this fabric, if there are any."""
        return next((table for table in self.tables if table.collective == collective), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """The graph inside one node: NCCL's, or the stand-in of a profile without."""

    channels: int
    channel_bytes_per_s: float
    path: Path
    nvls: bool = False


def fabric_of(profile: HardwareProfile, network: Network | None, gpus: int, nodes: int) -> Fabric:
    """Return the fabric of `gpus` ranks spread evenly over `nodes` nodes of `profile`.

    Nodes hold ceil(gpus / nodes) or one less. As NCCL does, the slowest node's graph counts.
    Between nodes the graph's bandwidth is min(inside a node, payload of a NIC x NICs a node), and
    for TCP at most the sum of its connections; it has one channel a NIC, more where a NIC outruns
    the fastest channel that NCCL tries, and no more than inside a node. A profile without NCCL
    graphs gets one ring at the speed of its slowest link.

    Source: NCCL 2.30.7, src/graph/search.cc, src/graph/tuning.cc:514-541 (LL128), src/init.cc.
    Leaves out: rounding to NCCL's list of channel speeds; a PCIe link shared by GPU and NIC
    traffic; that a GPU may be far from its NIC (a profile with RDMA and NVLink is taken to have
    them below one switch, as DGX-like boxes do).

    Args:
        profile: The kind of node.
        network: The wire between nodes; not looked at for one node.
        gpus: Ranks, >= nodes.
        nodes: Nodes, >= 1.

    Raises:
        InfeasibleError: `nodes` is below 1 or above `gpus`.
        InputError: Several nodes without a network.
    """
    if not 1 <= nodes <= gpus:
        raise InfeasibleError(f"{gpus} GPUs cannot be on {nodes} nodes: each needs one or more.")
    node = _node_of(profile, gpus, nodes)
    inside = Fabric(
        ranks=gpus,
        generation=GENERATION[profile.device.architecture],
        cpu_vendor=profile.cpu_vendor,
        path=node.path,
        channels=node.channels,
        intra_bytes_per_s=node.channel_bytes_per_s,
        ll128=node.path == "nvlink" and profile.device.architecture not in WITHOUT_LL128,
        nvls=node.nvls,
        hop_s=HOP_US["nvlink" if node.path == "nvlink" else "pci"]["ring"]["Simple"] / US_PER_S,
        tables=_matching_tables(profile, "", gpus, 1),
        profile_tables=tuple(_label(table) for table in profile.collectives),
    )
    if nodes == 1:
        return inside
    if network is None:
        raise InputError(f"{gpus} GPUs on {nodes} nodes need a network, got none. Name one.")
    return _over_nodes(inside, profile, network, nodes)


def _over_nodes(inside: Fabric, profile: HardwareProfile, network: Network, nodes: int) -> Fabric:
    """Return the fabric of several nodes, from the one of a node."""
    alone = inside.ranks == nodes  # One GPU a node: no ring inside, the NIC is the only link.
    node = _uplink(profile) if alone else inside.channels * inside.intra_bytes_per_s
    nic = network.bandwidth_bytes_per_s.value
    total = min(nic * profile.nics_per_node, node)
    channels = _channels(total, nic) if alone else min(inside.channels, _channels(total, nic))
    if not network.rdma:
        total = min(total, channels * SOCKETS_PER_CHANNEL * network.flow_bytes_per_s.value)
    latency_s = network.latency_s.value
    near = alone or inside.path == "nvlink"
    return replace(
        inside,
        nodes=nodes,
        channels=channels,
        intra_bytes_per_s=node / channels,
        inter_bytes_per_s=total / channels,
        network_latency_s=latency_s,
        rdma=network.rdma,
        ll128=near and network.rdma and profile.device.architecture not in WITHOUT_LL128,
        nvls=False,  # Over nodes NVLS needs SHARP in the switches; NVLSTree is left out.
        hop_s=HOP_US["net"]["ring"]["Simple"] / US_PER_S + (0.0 if network.rdma else latency_s),
        tables=_matching_tables(profile, network.name, inside.ranks, nodes),
    )


def _channels(total_bytes_per_s: float, nic_bytes_per_s: float) -> int:
    """Return the channels of a graph over several nodes: one a NIC in use, more on fast NICs."""
    fastest = min(nic_bytes_per_s, INTER_SPEED_MAX * GB)
    if math.isinf(total_bytes_per_s):
        return 1
    return math.ceil(total_bytes_per_s / fastest)


def _uplink(profile: HardwareProfile) -> float:
    """Return the bandwidth of a GPU's best link towards the NICs, bytes a second."""
    rates = [
        link.bandwidth_bytes_per_s.value
        for link in profile.topology.links
        if "gpu0" in link.ends and link.kind != "nvlink"
    ]
    return max(rates, default=math.inf)


def _node_of(profile: HardwareProfile, gpus: int, nodes: int) -> _Node:
    """Return the graph inside the slowest node: the fullest and the emptiest are looked up."""
    if gpus == nodes:
        return _Node(channels=1, channel_bytes_per_s=math.inf, path="pcie")
    found = [_graph(profile, size) for size in (-(-gpus // nodes), max(gpus // nodes, 2))]
    return _Node(
        channels=min(node.channels for node in found),
        channel_bytes_per_s=min(node.channel_bytes_per_s for node in found),
        path=max((node.path for node in found), key=("nvlink", "pcie", "host").index),
        nvls=all(node.nvls for node in found),
    )


def _graph(profile: HardwareProfile, gpus: int) -> _Node:
    """Return the smallest graph that holds `gpus`, else the largest, else one of the links."""
    graphs = sorted(profile.nccl, key=lambda graph: graph.gpus)
    if not graphs:
        return _slowest_link(profile, gpus)
    graph = next((graph for graph in graphs if graph.gpus >= gpus), graphs[-1])
    return _Node(
        channels=graph.channels,
        channel_bytes_per_s=graph.channel_bytes_per_s.value,
        path=graph.path,
        nvls=graph.nvls,
    )


def _slowest_link(profile: HardwareProfile, gpus: int) -> _Node:
    """Return a stand-in for a profile without graphs: one ring at the slowest GPU's best link."""
    best = [
        max(link.bandwidth_bytes_per_s.value for link in profile.topology.links if gpu in link.ends)
        for gpu in (f"gpu{i}" for i in range(min(gpus, profile.topology.gpus)))
    ]
    path: Path = "host" if profile.topology.peer_access == "none" else "pcie"
    return _Node(channels=1, channel_bytes_per_s=min(best), path=path)


def _matching_tables(
    profile: HardwareProfile, network: str, gpus: int, nodes: int
) -> tuple[CollectiveTable, ...]:
    return tuple(
        table
        for table in profile.collectives
        if (table.ranks, table.nodes) == (gpus, nodes) and (nodes == 1 or table.network == network)
    )


def _label(table: CollectiveTable) -> str:
    """Return "all_reduce of 16 GPUs on 2 nodes over infiniband-hdr"."""
    where = "1 node" if table.nodes == 1 else f"{table.nodes} nodes over {table.network or '?'}"
    return f"{table.collective} of {table.ranks} GPUs on {where}"
