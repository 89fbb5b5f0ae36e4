"""Lanes: the ways between classes of workers and servers, with equal ways merged into one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from dpsim.engine import Cluster
from dpsim.machine import Machine, Route
from dpsim.schedules._classes import RankClass, rank_classes
from dpsim.units import to_ns

K = TypeVar("K")
MOST_WAYS = 64
"""(class, server) pairs that are simulated one by one: 8 nodes with a server each. Beyond it nodes
with a server are taken as alike, which costs no more for more nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """The links of one direction of a lane."""

    names: tuple[str, ...]
    own: Mapping[str, int]  # how many of the lane's ways have one of a link together; absent: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """`count` equal ways to one server and back, each for the payload of one worker."""

    push: Hops
    pull: Hops
    count: int
    cap_bytes_per_s: float
    latency_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Classes of workers, the ends at which servers are, and the ways between them."""

    classes: list[RankClass]
    servers: tuple[str, ...]
    lanes: dict[tuple[int, int], tuple[Lane, ...]]  # (class, server); () where these are one
    leads: tuple[int, ...]  # of each class, that of the ranks that push for it
    extra_links: dict[str, float] = field(default_factory=dict)


def layout(cluster: Cluster, servers: tuple[str, ...], leaders: tuple[int, ...]) -> Layout:
    """Return the ways between workers and servers.

    Workers are one class if nothing tells them apart: they compute the same, and their flows are
    equal in number and in neighbours on links of equal rate. This is exact: such flows start, are
    served and end together. With a server on every node, no two nodes are equal, for each key is
    near to one of them. Where that makes more than `MOST_WAYS`, they are taken as equal:
    `_alike` says how, and what it costs.

    Args:
        cluster: Where everything is.
        servers: The end of each server, "gpu0" or "host3".
        leaders: The ranks that push and pull; others hand their gradients to one of these.
    """
    kinds = rank_classes(cluster)
    hosts = set(servers) & {f"host{node}" for node in range(cluster.machine.nodes)}
    if len(kinds) == 1 and (len(hosts) + 1) * len(servers) > MOST_WAYS and len(hosts) > 1:
        return _alike(cluster, kinds, servers, leaders)
    leader_of = _leader_of(cluster.machine.gpus, leaders)
    ways = _Ways(cluster.machine, servers, leaders)
    colour = ways.colours(_workers(kinds, leader_of))
    classes = rank_classes(cluster, place=lambda rank: colour[leader_of[rank]])
    lanes = {}
    for c, members in enumerate(classes):
        pushing = [rank for rank in members.members if leader_of[rank] == rank]
        for s in range(len(servers)):
            lanes[c, s] = ways.lanes(pushing, s)
    class_of = {rank: c for c, members in enumerate(classes) for rank in members.members}
    leads = tuple(class_of[leader_of[members.members[0]]] for members in classes)
    return Layout(classes=classes, servers=servers, lanes=lanes, leads=leads)


def _leader_of(ranks: int, leaders: tuple[int, ...]) -> list[int]:
    found, leader = [], leaders[0]
    for rank in range(ranks):
        leader = rank if rank in set(leaders) else leader
        found.append(leader)
    return found


def _workers(kinds: list[RankClass], leader_of: list[int]) -> dict[int, tuple[int, ...]]:
    """Return, by leader, the kinds of the ranks of its worker."""
    kind = {rank: k for k, members in enumerate(kinds) for rank in members.members}
    workers: dict[int, tuple[int, ...]] = {}
    for rank, leader in enumerate(leader_of):
        workers[leader] = (*workers.get(leader, ()), kind[rank])
    return workers


class _Ways:
    """The routes of all leaders to and from all servers, and which of them are equal."""

    def __init__(self, machine: Machine, servers: tuple[str, ...], leaders: tuple[int, ...]):
        """Find all routes: push to server s is way 2s, pull from it way 2s + 1."""
        self.machine = machine
        self.routes: dict[int, list[Route]] = {}
        for rank in leaders:
            gpu = f"gpu{rank}"
            ends = [pair for end in servers for pair in ((gpu, end), (end, gpu))]
            self.routes[rank] = [machine.route(*pair) for pair in ends]
        hops = dict.fromkeys(h for ways in self.routes.values() for r in ways for h in r.hops)
        self.colour: dict[str, int] = _numbered({hop: machine.rates[hop] for hop in hops})
        self.first: dict[int, str] = {}

    def colours(self, workers: Mapping[int, Hashable]) -> dict[int, int]:
        """Return a number for each leader, equal for those that nothing tells apart.

        Links and leaders are told apart by each other until nothing changes (colour refinement).
        Max-min fair rates depend on nothing else: the partition is equitable.
        """
        mine: dict[int, int] = _numbered(
            {
                rank: (workers[rank], tuple((r.latency_s, r.flow_bytes_per_s) for r in ways))
                for rank, ways in self.routes.items()
            }
        )
        known = 0
        while known < (now := len(set(mine.values())) + len(set(self.colour.values()))):
            known = now
            uses: dict[str, list[tuple[int, int, int]]] = {hop: [] for hop in self.colour}
            for rank, ways in self.routes.items():
                for way, route in enumerate(ways):
                    for at, hop in enumerate(route.hops):
                        uses[hop].append((mine[rank], way, at))
            self.colour = _numbered(
                {hop: (self.colour[hop], tuple(sorted(uses[hop]))) for hop in uses}
            )
            mine = _numbered(
                {
                    rank: (mine[rank], tuple(tuple(self.colour[h] for h in r.hops) for r in ways))
                    for rank, ways in self.routes.items()
                }
            )
        for hop, colour in self.colour.items():
            self.first.setdefault(colour, hop)
        return mine

    def lanes(self, ranks: list[int], server: int) -> tuple[Lane, ...]:
        """Return the ways of equal leaders to and from a server, as one; () if there is none.

        Of equal links, the first stands for all.
        """
        if not ranks:
            return ()
        route = self.routes[ranks[0]][2 * server]
        if route.source == route.target:
            return ()
        lane = Lane(
            push=self._hops([self.routes[rank][2 * server].hops for rank in ranks]),
            pull=self._hops([self.routes[rank][2 * server + 1].hops for rank in ranks]),
            count=len(ranks),
            cap_bytes_per_s=route.flow_bytes_per_s,
            latency_ns=to_ns(route.latency_s),
        )
        return (lane,)

    def _hops(self, paths: list[tuple[str, ...]]) -> Hops:
        users = Counter(hop for path in paths for hop in set(path))
        first = {hop: self.first[self.colour[hop]] for hop in paths[0]}
        return Hops(
            names=tuple(first[hop] for hop in paths[0]),
            own={first[hop]: users[hop] for hop in paths[0] if users[hop] < len(paths)},
        )


def _numbered(keys: Mapping[K, Hashable]) -> dict[K, int]:
    """Return a whole number for each key, the same for equal values."""
    numbers: dict[Hashable, int] = {}
    return {key: numbers.setdefault(value, len(numbers)) for key, value in keys.items()}


def _alike(
    cluster: Cluster,
    classes: list[RankClass],
    servers: tuple[str, ...],
    leaders: tuple[int, ...],
) -> Layout:
    """Return the ways when ranks are equal, and nodes are taken as equal, servers included.

    All ranks are one class, with two ways to each server that do not wait for each other: of the
    nodes where it is not, over the network, and of its own node. The flows of all these nodes have
    one rate: that of the node whose NIC has the least left for them, next to its server's flows.
    Links inside these nodes are one for all: each carries the ways to k servers where k - 1 are to
    others, and is made k / (k - 1) as fast.

    Leaves out: that the flows of other nodes gain what the slowest leaves; that a worker waits only
    for its own ways.
    """
    machine = cluster.machine
    homes = [int(server.removeprefix("host")) for server in servers]
    links: dict[str, float] = {}
    lanes: dict[tuple[int, int], tuple[Lane, ...]] = {}
    for s, server in enumerate(servers):
        near = _groups(machine, server, leaders, homes[s])
        far = _groups(machine, server, leaders, (homes[s] + 1) % machine.nodes)
        spread = _Spread(machine, homes, homes[s], links)
        lanes[0, s] = (*map(spread.lane, far), *near)
    return Layout(classes=classes, servers=servers, lanes=lanes, leads=(0,), extra_links=links)


def _groups(machine: Machine, server: str, leaders: tuple[int, ...], node: int) -> list[Lane]:
    """Return the ways of a node's leaders to one server, equal ones merged."""
    ranks = tuple(rank for rank in leaders if rank in machine.ranks_on(node))
    ways = _Ways(machine, (server,), ranks)
    groups: dict[int, list[int]] = {}
    for rank, colour in ways.colours(dict.fromkeys(ranks, 0)).items():
        groups.setdefault(colour, []).append(rank)
    return [lane for members in groups.values() for lane in ways.lanes(members, 0)]


class _Spread:
    """Makes a lane of one node that of all nodes but the server's."""

    def __init__(
        self, machine: Machine, homes: list[int], server_node: int, links: dict[str, float]
    ):
        """Take where servers are; links that stand for those of every node are added to `links`."""
        self.machine = machine
        self.others = [node for node in homes if node != server_node]
        self.everywhere = len(homes) == machine.nodes
        self.at_server = f"node{server_node}."
        self.speed = len(homes) / (len(homes) - 1) if self.everywhere else 1.0
        self.links = links

    def lane(self, one: Lane) -> Lane:
        """Return the lane of all of them."""
        return Lane(
            push=self._hops(one.push, one.count),
            pull=self._hops(one.pull, one.count),
            count=one.count * (self.machine.nodes - 1),
            cap_bytes_per_s=one.cap_bytes_per_s,
            latency_ns=one.latency_ns,
        )

    def _hops(self, one: Hops, count: int) -> Hops:
        names: list[str] = []
        own: dict[str, int] = {}
        for hop in one.names:
            if self.at_server in hop:
                names.append(hop)
                continue
            copies = self._copies(hop)
            names += copies
            own |= dict.fromkeys(copies, one.own.get(hop, count))
        return Hops(names=tuple(names), own=own)

    def _copies(self, hop: str) -> list[str]:
        """Return the links that stand for this one in other nodes: by name if it is a NIC's."""
        copies = []
        is_nic = "net" in hop.split(">")
        if is_nic:
            copies = [re.sub(r"node\d+\.", f"node{node}.", hop) for node in self.others]
        if not (is_nic and self.everywhere):
            every = "every node: " + re.sub(r"node\d+\.", "", hop)
            self.links[every] = self.machine.rates[hop] * self.speed
            copies.append(every)
        return copies
