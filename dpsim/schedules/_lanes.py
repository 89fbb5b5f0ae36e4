"""Lanes: the ways between classes of workers and servers, with equal ways merged into one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from dpsim.engine import Cluster
from dpsim.machine import Machine, Route
from dpsim.schedules._classes import RankClass, rank_classes
from dpsim.units import to_ns

MOST_WAYS = 64
"""(class, server) pairs that are simulated one by one: 8 nodes with a server each. Beyond it nodes
with a server are taken as alike, which costs no more for more nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """`count` equal ways, each for the payload of one worker."""

    hops: tuple[str, ...]
    own: Mapping[str, int]  # how many of the `count` have one of a hop together; absent: all
    count: int
    cap_bytes_per_s: float
    latency_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Ways of one class to and from one server; no lane where server and worker are one."""

    push: tuple[Lane, ...] = ()
    pull: tuple[Lane, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Classes of workers, the ends at which servers are, and the ways between them."""

    classes: list[RankClass]
    servers: tuple[str, ...]
    lanes: dict[tuple[int, int], Lanes]  # (class, server)
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
    colour = ways.colours(_workers(cluster, kinds, leader_of))
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


def _workers(
    cluster: Cluster, kinds: list[RankClass], leader_of: list[int]
) -> dict[int, tuple[int, ...]]:
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

    def lanes(self, ranks: list[int], server: int) -> Lanes:
        """Return the ways of equal leaders to and from a server."""
        if not ranks or self.routes[ranks[0]][2 * server].source == (
            self.routes[ranks[0]][2 * server].target
        ):
            return Lanes()
        push, pull = (
            self._lane([self.routes[rank][2 * server + i] for rank in ranks]) for i in (0, 1)
        )
        return Lanes(push=(push,), pull=(pull,))

    def _lane(self, routes: list[Route]) -> Lane:
        """Return equal routes as one: of equal links, the first stands for all."""
        route = routes[0]
        users = Counter(hop for other in routes for hop in set(other.hops))
        hops = tuple(self.first[self.colour[hop]] for hop in route.hops)
        sharers = {self.first[self.colour[hop]]: users[hop] for hop in route.hops}
        return Lane(
            hops=hops,
            own={hop: n for hop, n in sharers.items() if n < len(routes)},
            count=len(routes),
            cap_bytes_per_s=route.flow_bytes_per_s,
            latency_ns=to_ns(route.latency_s),
        )


def _numbered(keys: Mapping[Hashable, Hashable]) -> dict:
    """Return a whole number for each key, the same for equal values."""
    numbers: dict[Hashable, int] = {}
    return {key: numbers.setdefault(value, len(numbers)) for key, value in keys.items()}


def _alike(
    cluster: Cluster,
    classes: list[RankClass],
    servers: tuple[str, ...],
    leaders: tuple[int, ...],
) -> Layout:
    """Return the ways when all ranks and all nodes are equal, servers included.

    Each server is reached by n - 1 nodes over the network and by one through its own memory. The
    link that stands for every node's own carries k flows of k servers, though each node sends to
    the k - 1 others only: it is made k / (k - 1) as fast.

    Leaves out: a worker beside a server is done with that server's keys before the others are, and
    runs ahead of them; here it waits.
    """
    machine = cluster.machine
    everywhere = len(set(servers)) == machine.nodes
    speed = len(servers) / (len(servers) - 1) if everywhere else 1.0
    links: dict[str, float] = {}
    lanes: dict[tuple[int, int], Lanes] = {}
    for s, server in enumerate(servers):
        node = int(server.removeprefix("host"))
        near = _groups(machine, server, leaders, node)
        far = _groups(machine, server, leaders, (node + 1) % machine.nodes)
        lanes[0, s] = Lanes(
            push=tuple(_spread(machine, group.push[0], node, speed, links) for group in far)
            + tuple(group.push[0] for group in near),
            pull=tuple(_spread(machine, group.pull[0], node, speed, links) for group in far)
            + tuple(group.pull[0] for group in near),
        )
    return Layout(classes=classes, servers=servers, lanes=lanes, leads=(0,), extra_links=links)


def _groups(machine: Machine, server: str, leaders: tuple[int, ...], node: int) -> list[Lanes]:
    """Return the ways of a node's leaders to one server, equal ones merged."""
    ranks = tuple(rank for rank in leaders if rank in machine.ranks_on(node))
    ways = _Ways(machine, (server,), ranks)
    groups: dict[int, list[int]] = {}
    for rank, colour in ways.colours(dict.fromkeys(ranks, 0)).items():
        groups.setdefault(colour, []).append(rank)
    return [ways.lanes(members, 0) for members in groups.values()]


def _spread(machine: Machine, lane: Lane, node: int, speed: float, links: dict[str, float]) -> Lane:
    """Return the lane of one node as that of all but `node`, where the server is."""
    names = {}
    for hop in lane.hops:
        if f"node{node}." in hop:
            continue
        names[hop] = "every node: " + re.sub(r"node\d+\.", "", hop)
        links[names[hop]] = machine.rates[hop] * speed
    return Lane(
        hops=tuple(names.get(hop, hop) for hop in lane.hops),
        own={name: lane.own.get(hop, lane.count) for hop, name in names.items()},
        count=lane.count * (machine.nodes - 1),
        cap_bytes_per_s=lane.cap_bytes_per_s,
        latency_ns=lane.latency_ns,
    )
