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
MOST_WAYS = 6
"""Pairs of a node with a server (or all without) and a server that are simulated one by one: two
servers beside workers. With more, nodes are taken as alike, which is quick for any number: four
nodes with a server each would take a minute where steps never repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """The links of one direction of a lane."""

    names: tuple[str, ...]
    own: Mapping[str, int]  # how many of the lane's ways have one of a link together; absent: all


MOST_NICS = 16
"""Nodes whose NICs are told apart when each has a server; of more, one NIC stands for the mean."""


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
    served and end together. A node with a server is equal to no other, for some keys are near to
    it alone. Where that makes more than `MOST_WAYS`, nodes are taken as alike: see `_alike`.

    Args:
        cluster: Where everything is.
        servers: The end of each server, "gpu0" or "host3".
        leaders: The ranks that push and pull; others hand their gradients to one of these.
    """
    leader_of = _leader_of(cluster.machine.gpus, leaders)
    workers = _workers(cluster, leader_of)
    hosts = set(servers) & {f"host{node}" for node in range(cluster.machine.nodes)}
    if len(hosts) > 1 and (len(hosts) + 1) * len(servers) > MOST_WAYS:
        return _alike(cluster, servers, leader_of, workers)
    ways = _Ways(cluster.machine, servers, leaders, by_host=by_host(cluster))
    colour = ways.colours(workers)
    classes = rank_classes(cluster, place=lambda rank: colour[leader_of[rank]])
    lanes = {}
    for c, members in enumerate(classes):
        pushing = [rank for rank in members.members if leader_of[rank] == rank]
        for s in range(len(servers)):
            lanes[c, s] = ways.lanes(pushing, s)
    leads = _leads(classes, leader_of)
    return Layout(classes=classes, servers=servers, lanes=lanes, leads=leads)


def by_host(cluster: Cluster) -> bool:
    """Return whether gradients for a GPU take the way through host memory (--path host)."""
    return cluster.scenario.server.path == "host"


def route_by(machine: Machine, source: str, target: str, *, by_host: bool) -> Route:
    """Return a route; between two GPUs through the memory of the source's node if `by_host`."""
    direct = machine.route(source, target)
    if not by_host or direct.staged or not (source[:3] == target[:3] == "gpu") or source == target:
        return direct
    home = f"host{machine.node_of(int(source.removeprefix('gpu')))}"
    up, down = machine.route(source, home), machine.route(home, target)
    return Route(
        source=source,
        target=target,
        hops=up.hops + down.hops,
        bandwidth_bytes_per_s=min(up.bandwidth_bytes_per_s, down.bandwidth_bytes_per_s),
        latency_s=up.latency_s + down.latency_s,
        flow_bytes_per_s=min(up.flow_bytes_per_s, down.flow_bytes_per_s),
        staged=True,
    )


def _leads(classes: list[RankClass], leader_of: list[int]) -> tuple[int, ...]:
    class_of = {rank: c for c, members in enumerate(classes) for rank in members.members}
    return tuple(class_of[leader_of[members.members[0]]] for members in classes)


def _leader_of(ranks: int, leaders: tuple[int, ...]) -> list[int]:
    found, leader = [], leaders[0]
    for rank in range(ranks):
        leader = rank if rank in set(leaders) else leader
        found.append(leader)
    return found


def _workers(cluster: Cluster, leader_of: list[int]) -> dict[int, Hashable]:
    """Return, by leader, the kinds of the ranks of its worker, and how fast these reach it."""
    kinds = rank_classes(cluster)
    kind = {rank: k for k, members in enumerate(kinds) for rank in members.members}
    workers: dict[int, list[int]] = {}
    for rank, leader in enumerate(leader_of):
        workers.setdefault(leader, []).append(rank)
    return {
        leader: (
            tuple(kind[rank] for rank in ranks),
            tuple(cluster.shared_rates([(f"gpu{rank}", f"gpu{leader}") for rank in ranks[1:]])),
        )
        for leader, ranks in workers.items()
    }


class _Ways:
    """The routes of all leaders to and from all servers, and which of them are equal."""

    def __init__(
        self,
        machine: Machine,
        servers: tuple[str, ...],
        leaders: tuple[int, ...],
        *,
        by_host: bool = False,
    ) -> None:
        """Find all routes: push to server s is way 2s, pull from it way 2s + 1."""
        self.machine = machine
        self.routes: dict[int, list[Route]] = {}
        for rank in leaders:
            gpu = f"gpu{rank}"
            ends = [pair for end in servers for pair in ((gpu, end), (end, gpu))]
            self.routes[rank] = [route_by(machine, *pair, by_host=by_host) for pair in ends]
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
    servers: tuple[str, ...],
    leader_of: list[int],
    workers: dict[int, Hashable],
) -> Layout:
    """Return the ways when workers that compute the same are one class, wherever they are.

    A class has two ways to each server that do not wait for each other: of the nodes where it is
    not, over the network, and of its own node. The flows of all these nodes have one rate: that of
    the node whose NIC has the least left for them beside its server's flows. Links inside nodes
    are one for all: each carries the ways to k servers where k - 1 are to others, and is made
    k / (k - 1) as fast if every node has a server.

    Beyond `MOST_NICS` nodes all NICs are one, which carries the mean of what servers send and take.

    Leaves out: that other flows gain what the slowest leaves; that a worker waits for its own ways
    alone and runs ahead of others. On 2 and 4 nodes of the shipped machines steps are 7 % shorter
    to 17 % longer so, mostly within 4 %; the most where servers add slower than the network sends.
    """
    machine = cluster.machine
    classes = rank_classes(cluster, place=lambda rank: workers[leader_of[rank]])
    spread = _Spread(machine, servers)
    lanes: dict[tuple[int, int], tuple[Lane, ...]] = {}
    for c, members in enumerate(classes):
        ranks: dict[int, list[int]] = {}
        for rank in members.members:
            if leader_of[rank] == rank:
                ranks.setdefault(machine.node_of(rank), []).append(rank)
        for s in range(len(servers)):
            lanes[c, s] = spread.lanes(ranks, s)
    return Layout(
        classes=classes,
        servers=servers,
        lanes=lanes,
        leads=_leads(classes, leader_of),
        extra_links=spread.links,
    )


@dataclass(frozen=True, slots=True)
class _Local:
    """Equal ways of one node, links by the names that they have in every node."""

    push: tuple[tuple[bool, str], ...]  # is it the server's?
    pull: tuple[tuple[bool, str], ...]
    cap_bytes_per_s: float
    latency_ns: int


class _Spread:
    """Makes lanes of many nodes that are alike."""

    def __init__(self, machine: Machine, servers: tuple[str, ...]) -> None:
        """Take where servers are. `links` are those that stand for the same one of every node."""
        self.machine = machine
        self.servers = servers
        self.homes = [int(server.removeprefix("host")) for server in servers]
        everywhere = len(set(self.homes)) == machine.nodes
        self.speed = len(servers) / (len(servers) - 1) if everywhere else 1.0
        self.many = machine.nodes > MOST_NICS
        self.links: dict[str, float] = {}
        self._known: dict[tuple[int, ...], list[tuple[_Local, Lane]]] = {}

    def lanes(self, ranks: Mapping[int, list[int]], server: int) -> tuple[Lane, ...]:
        """Return the ways of leaders, by node, to and from a server: far ones, then near ones."""
        home = self.homes[server]
        far: dict[_Local, list[tuple[int, Lane]]] = {}
        for node, members in ranks.items():
            if node != home:
                for local, lane in self._far(node, members):
                    far.setdefault(local, []).append((node, lane))
        near = self._groups(ranks.get(home, []), self.servers[server])
        return (*(self._merged(local, home, lanes) for local, lanes in far.items()), *near)

    def _groups(self, ranks: list[int], server: str) -> list[Lane]:
        """Return the ways of leaders of one node, equal ones merged."""
        ways = _Ways(self.machine, (server,), tuple(ranks))
        groups: dict[int, list[int]] = {}
        for rank, colour in ways.colours(dict.fromkeys(ranks, 0)).items():
            groups.setdefault(colour, []).append(rank)
        return [lane for members in groups.values() for lane in ways.lanes(members, 0)]

    def _far(self, node: int, ranks: list[int]) -> list[tuple[_Local, Lane]]:
        """Return the ways of a node to a server in another, found once for all nodes alike."""
        places = tuple(rank - self.machine.ranks_on(node).start for rank in ranks)
        if places not in self._known:
            home = next(home for home in self.homes if home != node)
            server = f"node{home}."

            def local(hops: Hops) -> tuple[tuple[bool, str], ...]:
                return tuple((server in h, re.sub(r"node\d+\.", "node.", h)) for h in hops.names)

            self._known[places] = [
                (_Local(local(x.push), local(x.pull), x.cap_bytes_per_s, x.latency_ns), x)
                for x in self._groups(ranks, f"host{home}")
            ]
        return self._known[places]

    def _merged(self, local: _Local, home: int, lanes: list[tuple[int, Lane]]) -> Lane:
        users = [(node, lane.count, lane.push, lane.pull) for node, lane in lanes]
        return Lane(
            push=self._hops(local.push, home, [(n, count, push) for n, count, push, _ in users]),
            pull=self._hops(local.pull, home, [(n, count, pull) for n, count, _, pull in users]),
            count=sum(lane.count for _, lane in lanes),
            cap_bytes_per_s=local.cap_bytes_per_s,
            latency_ns=local.latency_ns,
        )

    def _hops(
        self, path: tuple[tuple[bool, str], ...], home: int, users: list[tuple[int, int, Hops]]
    ) -> Hops:
        names: list[str] = []
        own: dict[str, int] = {}
        for at, (servers, hop) in enumerate(path):
            if servers:
                names.append(hop.replace("node.", f"node{home}."))
                if self.many and "net" in hop.split(">"):
                    # The NIC beside a server also carries its node's own way: the mean node's does.
                    every = self._name(hop, home, users[0][2].names[at])
                    names.append(every)
                    total = sum(count for _, count, _ in users)
                    own[every] = max(1, round(total / self.machine.nodes))
                continue
            copies: dict[str, int] = {}
            for node, count, hops in users:
                name = self._name(hop, node, hops.names[at])
                copies[name] = max(copies.get(name, 0), hops.own.get(hops.names[at], count))
            names += copies
            own |= copies
        return Hops(names=tuple(names), own=own)

    def _name(self, hop: str, node: int, known: str) -> str:
        """Return the link that stands for that of a node: itself for the NIC beside a server."""
        if "net" in hop.split(">") and node in self.homes and not self.many:
            return hop.replace("node.", f"node{node}.")
        every = "every node: " + hop.replace("node.", "")
        if every not in self.links:
            self.links[every] = self.machine.rates[known] * self.speed
        return every
