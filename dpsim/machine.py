"""Machine: nodes of one kind, wired to each other, as a graph of directed links; and routes in it.

All nodes are alike: paths are found in one node, when they are first asked for, and composed, so
that a machine of any size costs nothing to make. This module knows no time: see `engine.network`.

Names. A GPU is "gpu7" by its rank over all nodes, the memory of a node is "host0". A link is named
by its ends in its node, "gpu0>switch0"; a shared (half-duplex) one "gpu0-switch0"; a second one
between the same ends ends in "#2"; the memory of a node is the link "memory". With several nodes
these become "node3.gpu0>switch0"; and "node3.nic0>net" and "net>node3.nic0" lead to the network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from dpsim.errors import InfeasibleError, InputError
from dpsim.hardware import HardwareProfile, LinkKind, Network
from dpsim.node import HOST, MEMORY, NET, DirectedLink, NodeGraph, Path, species

END_LABELS = {"gpu": "GPU", "cpu": "CPU", "nic": "NIC", "nvswitch": "NVSwitch", NET: "network"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of a copy. A link that is named twice is crossed twice."""

    source: str
    target: str
    hops: Path
    bandwidth_bytes_per_s: float  # of one flow alone; infinite when there is nothing to cross
    latency_s: float  # sum over the hops
    flow_bytes_per_s: float = math.inf  # the most that one connection between nodes reaches
    staged: bool = False  # passes through host memory that is neither of its ends
    peer: bool = False  # between GPUs of one node, and not staged


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """The nodes of one run. Made by `machine_of`."""

    profile: HardwareProfile
    network: Network | None
    gpus: int
    nodes: int  # with GPUs at work
    servers: int  # further nodes whose GPUs, if any, are idle
    _node: NodeGraph = field(repr=False)
    _routes: dict[tuple[str, str], Route] = field(default_factory=dict, repr=False)

    def ranks_on(self, node: int) -> range:
        """Return the ranks on a node: GPUs in order, the first nodes one more if need be."""
        each, more = divmod(self.gpus, self.nodes)
        start = node * each + min(node, more)
        return range(start, min(start + each + (node < more), self.gpus))

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        each, more = divmod(self.gpus, self.nodes)
        full = more * (each + 1)
        return rank // (each + 1) if rank < full else more + (rank - full) // each

    def is_peer(self, i: int, j: int) -> bool:
        """Return whether rank i can copy to rank j inside one node, past host memory."""
        return self.route(f"gpu{i}", f"gpu{j}").peer

    def link(self, name: str) -> DirectedLink:
        """Return a directed link by the name it has in a route.

        Raises:
            InputError: There is no such link.
        """
        total = self.nodes + self.servers
        match = re.fullmatch(rf"({NET}>)?node(\d+)\.(.+)", name) if total > 1 else None
        node = int(match[2]) if match else 0
        local = (match[1] or "") + match[3] if match else name
        link = self._node.links.get(local)
        if link is None or node >= total or self._hops(node, (local,)) != (name,):
            raise InputError(f"machine: no link has the name '{name}'. Take names from a route.")
        return replace(link, name=name, back=self._hops(node, (link.back,))[0])

    def link_names(self) -> Iterator[str]:
        """Yield the names of all links, node by node."""
        for node in range(self.nodes + self.servers):
            yield from self._hops(node, tuple(self._node.links))

    def link_kind(self, name: str) -> LinkKind:
        """Return the kind of a link."""
        return self.link(name).kind

    def link_label(self, name: str) -> str:
        """Return a name for people: "node 3: GPU 0 to switch 0"."""
        link = self.link(name)
        match = re.search(r"node(\d+)\.", name)
        node = f"node {match[1]}: " if match else ""
        if link.ends == (MEMORY, MEMORY):
            return f"{node}host memory"
        joint = " and " if link.back == link.name else " to "
        return node + joint.join(map(_end_label, link.ends))

    @property
    def rates(self) -> Mapping[str, float]:
        """Return the bytes/s of every link by its name, looked up when asked for."""
        return _Rates(self)

    def route(self, source: str, target: str) -> Route:
        """Return the way from one memory to another.

        Between GPUs of a node: direct where `Topology.peer_access` allows it. Else staged, as two
        copies, to and from host memory, that the driver pipelines: the flow crosses all links of
        both and the memory twice (written and read), so that its rate is that of the slower copy.
        Between nodes a GPU uses its nearest NIC, a host its first; without RDMA, or where GPUs have
        no peer access at all (then they have no GPUDirect either), data pass host memory at each
        GPU. The fabric does not block: only NICs limit. The latency of staging is that of its hops.

        Leaves out: the fill of the pipeline; bonded paths (a profile draws them as one link);
        remote sockets' memory (a node has one memory of the bandwidth of all).

        Args:
            source: "gpu{rank}" or "host{node}".
            target: The same.

        Raises:
            InputError: An end does not exist, or the profile draws no way to it.
        """
        key = (source, target)
        if key not in self._routes:
            self._routes[key] = self._find_route(source, target)
        return self._routes[key]

    def _find_route(self, source: str, target: str) -> Route:
        (a, start), (b, end) = self._locate(source), self._locate(target)
        node = self._node
        if a == b:
            path, staged = node.inside(start, end)
            return Route(
                source=source,
                target=target,
                hops=self._hops(a, path),
                bandwidth_bytes_per_s=node.bandwidth(path),
                latency_s=node.latency_s(path),
                staged=staged,
                peer=HOST not in (start, end) and not staged,
            )
        (out, staged_out), (into, staged_in) = node.out(start), node.into(end)
        return Route(
            source=source,
            target=target,
            hops=self._hops(a, out) + self._hops(b, into),
            bandwidth_bytes_per_s=min(
                node.bandwidth(out), node.bandwidth(into), node.flow_bytes_per_s
            ),
            latency_s=node.latency_s(out) + node.latency_s(into),
            flow_bytes_per_s=node.flow_bytes_per_s,
            staged=staged_out or staged_in,
        )

    def _locate(self, name: str) -> tuple[int, str]:
        """Return the node of an end and its name there: "gpu3" or "host"."""
        match = re.fullmatch(r"(gpu|host)(0|[1-9]\d*)", name)
        number = int(match[2]) if match else -1
        total = self.nodes + self.servers
        if match and match[1] == "gpu" and number < self.gpus:
            node = self.node_of(number)
            return node, f"gpu{number - self.ranks_on(node).start}"
        if match and match[1] == "host" and number < total:
            return number, HOST
        raise InputError(
            f"machine: the end of a route must be gpu0 to gpu{self.gpus - 1} or host0 to "
            f"host{total - 1}, got '{name}'. Correct the schedule that asks for it."
        )

    def _hops(self, node: int, path: Path) -> Path:
        """Return the names that links of a node have in the machine."""
        if self.nodes + self.servers == 1:
            return path
        return tuple(_in_node(node, name) for name in path)


def machine_of(
    profile: HardwareProfile,
    network: Network | None,
    gpus: int,
    nodes: int | None = None,
    *,
    servers: int = 0,
) -> Machine:
    """Return the machine of a run.

    Ranks fill the nodes in order, as evenly as can be: 10 GPUs on 4 nodes are 3, 3, 2, 2. Where the
    nodes divide the GPUs this is what torchrun does with that many processes a node.

    Args:
        profile: The kind of every node.
        network: What joins the nodes; None when there is one node.
        gpus: GPUs at work, >= 1.
        nodes: Nodes they are spread over; None: as few as hold them.
        servers: Further nodes, without work for their GPUs: dedicated parameter servers, >= 0.
            They are hosts `nodes` to `nodes + servers - 1`.

    Raises:
        InfeasibleError: So many GPUs or nodes do not exist, or no network joins them.
        InputError: A count is below 1, or the profile draws no way from a GPU to a CPU.
    """
    nodes = -(-gpus // profile.topology.gpus) if nodes is None else nodes
    _check_counts(profile, gpus, nodes, servers)
    if nodes + servers > 1 and network is None:
        raise InfeasibleError(
            f"--network must name what joins {nodes + servers} nodes, got none for {gpus} GPUs of "
            f"'{profile.name}'. Name one, or stay on one node of at most {profile.topology.gpus}."
        )
    return Machine(profile, network, gpus, nodes, servers, NodeGraph(profile, network))


def _check_counts(profile: HardwareProfile, gpus: int, nodes: int, servers: int) -> None:
    """Refuse counts that contradict each other or the profile."""
    each, total = profile.topology.gpus, nodes + servers
    for name, value, least in (("--gpus", gpus, 1), ("--nodes", nodes, 1), ("servers", servers, 0)):
        if value < least:
            raise InputError(f"{name} must be >= {least}, got {value}. Raise it to {least}.")
    if nodes > gpus:
        raise InfeasibleError(
            f"--nodes must be at most --gpus, got {nodes} nodes for {gpus} GPUs. "
            f"Lower --nodes to {gpus}."
        )
    if gpus > nodes * each:
        raise InfeasibleError(
            f"--gpus must be at most {nodes * each} on {nodes} nodes of '{profile.name}', got "
            f"{gpus}. Raise --nodes to {-(-gpus // each)}."
        )
    if 0 < profile.max_nodes < total:
        raise InfeasibleError(
            f"--nodes must be at most {profile.max_nodes} for '{profile.name}', dedicated servers "
            f"included, got {total}. Lower --gpus, or take another profile."
        )


class _Rates(Mapping[str, float]):
    """The rates of all links, by name, none of them written out."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getitem__(self, name: str) -> float:
        try:
            return self._machine.link(name).bandwidth_bytes_per_s
        except InputError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return self._machine.link_names()

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _in_node(node: int, name: str) -> str:
    """Return the name that a link of a node has in a machine of several nodes."""
    if name.startswith(f"{NET}>"):
        return f"{NET}>node{node}.{name.removeprefix(f'{NET}>')}"
    return f"node{node}.{name}"


def _end_label(name: str) -> str:
    kind = species(name)
    return f"{END_LABELS.get(kind, kind)} {name[len(kind) :]}".strip()
