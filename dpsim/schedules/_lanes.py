"""Lanes: the ways between classes of workers and servers, with equal ways merged into one."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from dpsim.engine import Cluster
from dpsim.machine import Machine, Route
from dpsim.schedules._classes import RankClass, rank_classes
from dpsim.units import to_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """`count` equal ways, each for the payload of `workers` workers."""

    hops: tuple[str, ...]
    own: frozenset[str]  # hops of which each of the `count` has its own
    count: int
    workers: int  # whose payloads one way carries together
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
    extra_links: dict[str, float] = field(default_factory=dict)


def layout(cluster: Cluster, servers: tuple[str, ...], leaders: tuple[int, ...]) -> Layout:
    """Return the ways between workers and servers.

    On one node, workers whose ways differ only in links that nobody else uses are one class. Over
    nodes, equal ranks are one class if every node looks alike to the servers: the workers of a
    node share one way, and nodes are a multiplicity. Else every node's ranks are a class.

    Args:
        cluster: Where everything is.
        servers: The end of each server, "gpu0" or "host3".
        leaders: The ranks that push and pull; others hand their gradients to one of these.
    """
    if cluster.machine.nodes == 1:
        return _on_one_node(cluster, servers, leaders)
    classes = rank_classes(cluster)
    if len(classes) == 1:
        return _alike(cluster, classes, servers, leaders)
    machine = cluster.machine
    classes = rank_classes(cluster, place=machine.node_of)
    lanes = {}
    for c, members in enumerate(classes):
        pushing = [rank for rank in members.members if rank in set(leaders)]
        for s, server in enumerate(servers):
            ways = [(f"gpu{rank}", server) for rank in pushing[:1]]
            lanes[c, s] = Lanes(
                push=tuple(_lane(machine.route(a, b), 1, len(pushing)) for a, b in ways),
                pull=tuple(_lane(machine.route(b, a), 1, len(pushing)) for a, b in ways),
            )
    return Layout(classes=classes, servers=servers, lanes=lanes)


def _lane(route: Route, count: int, workers: int, own: frozenset[str] = frozenset()) -> Lane:
    """Return a lane; several workers behind one way have a connection each."""
    return Lane(
        hops=route.hops,
        own=own,
        count=count,
        workers=workers,
        cap_bytes_per_s=route.flow_bytes_per_s * workers,
        latency_ns=to_ns(route.latency_s),
    )


def _on_one_node(cluster: Cluster, servers: tuple[str, ...], leaders: tuple[int, ...]) -> Layout:
    machine = cluster.machine
    ends = tuple(dict.fromkeys(servers))
    shapes = _shapes(machine, ends, leaders)
    leader_of = {}
    for rank in range(machine.gpus):
        leader_of[rank] = max((leader for leader in leaders if leader <= rank), default=leaders[0])
    classes = rank_classes(cluster, place=lambda rank: shapes[leader_of[rank]])
    lanes = {}
    for c, members in enumerate(classes):
        pushing = [rank for rank in members.members if rank in set(leaders)]
        first, count = f"gpu{leader_of[members.members[0]]}", max(1, len(pushing))
        for s, server in enumerate(servers):
            if first == server:
                lanes[c, s] = Lanes()
                continue
            there, back = machine.route(first, server), machine.route(server, first)
            private = _private(machine, server, leaders)
            lanes[c, s] = Lanes(
                push=(_lane(there, count, 1, frozenset(there.hops) & private),),
                pull=(_lane(back, count, 1, frozenset(back.hops) & private),),
            )
    return Layout(classes=classes, servers=servers, lanes=lanes)


def _uses(machine: Machine, end: str, leaders: tuple[int, ...]) -> dict[str, int]:
    """Return how many leaders use each link on their ways to and from an end."""
    uses: dict[str, int] = {}
    for rank in leaders:
        for route in (machine.route(f"gpu{rank}", end), machine.route(end, f"gpu{rank}")):
            for hop in set(route.hops):
                uses[hop] = uses.get(hop, 0) + 1
    return uses


def _private(machine: Machine, end: str, leaders: tuple[int, ...]) -> frozenset[str]:
    return frozenset(hop for hop, users in _uses(machine, end, leaders).items() if users == 1)


def _shapes(
    machine: Machine, ends: tuple[str, ...], leaders: tuple[int, ...]
) -> dict[int, Hashable]:
    """Return what tells the ways of leaders apart: shared links by name, private ones by rate."""
    shapes: dict[int, list[Hashable]] = {rank: [] for rank in leaders}
    for end in ends:
        private = _private(machine, end, leaders)
        for rank in leaders:
            gpu = f"gpu{rank}"
            for route in (machine.route(gpu, end), machine.route(end, gpu)):
                hops = tuple(machine.rates[h] if h in private else h for h in route.hops)
                shapes[rank].append((hops, route.latency_s, route.flow_bytes_per_s))
    return {rank: tuple(shape) for rank, shape in shapes.items()}


def _alike(
    cluster: Cluster,
    classes: list[RankClass],
    servers: tuple[str, ...],
    leaders: tuple[int, ...],
) -> Layout:
    """Return the ways when all ranks are equal: nodes are a multiplicity.

    With a server on every node, n - 1 nodes reach each over the network and one through its own
    memory. The link that stands for every node's own carries k flows of k servers, though each
    node sends to the k - 1 others only: it is made k / (k - 1) as fast.
    """
    machine = cluster.machine
    nodes = machine.nodes
    per_node = max(1, len(leaders) // nodes)
    homes = {f"host{node}" for node in range(nodes)}
    colocated = set(servers) <= homes
    everywhere = colocated and len(servers) == nodes
    extra: dict[str, float] = {}
    lanes: dict[tuple[int, int], Lanes] = {}
    for s, server in enumerate(servers):
        node = int(server.removeprefix("host"))
        other = (node + 1) % nodes
        gpu = f"gpu{machine.ranks_on(other).start}"
        remote = nodes - 1 if colocated else nodes
        speed = len(servers) / (len(servers) - 1) if everywhere else 1.0
        push = _spread(machine, machine.route(gpu, server), remote, per_node, speed, extra)
        pull = _spread(machine, machine.route(server, gpu), remote, per_node, speed, extra)
        near: tuple[Lane, ...] = ()
        back: tuple[Lane, ...] = ()
        if colocated:
            mine = f"gpu{machine.ranks_on(node).start}"
            near = (_lane(machine.route(mine, server), 1, per_node),)
            back = (_lane(machine.route(server, mine), 1, per_node),)
        lanes[0, s] = Lanes(push=(push, *near), pull=(pull, *back))
    return Layout(classes=classes, servers=servers, lanes=lanes, extra_links=extra)


def _spread(
    machine: Machine,
    route: Route,
    count: int,
    workers: int,
    speed: float,
    extra: dict[str, float],
) -> Lane:
    """Return a lane of `count` nodes: their network links are own, what is inside them a cap."""
    if math.isinf(route.bandwidth_bytes_per_s):
        return _lane(route, count, workers)
    server_node = route.target if route.target.startswith("host") else route.source
    own_hops, shared = [], []
    inside = math.inf
    for hop in route.hops:
        if "net" not in hop.split(">"):
            inside = min(inside, machine.rates[hop])
        elif f"node{server_node.removeprefix('host')}." in hop:
            shared.append(hop)
        else:
            name = "every node: " + hop.replace(hop[hop.index("node") : hop.index(".") + 1], "")
            extra[name] = machine.rates[hop] * speed
            own_hops.append((name, machine.rates[hop]))
    cap = min([route.flow_bytes_per_s * workers, *(rate for _, rate in own_hops)])
    # Ways inside a node: each of its workers has its own to host memory.
    cap = min(cap, inside * workers)
    return Lane(
        hops=tuple(name for name, _ in own_hops) + tuple(shared),
        own=frozenset(name for name, _ in own_hops),
        count=count,
        workers=workers,
        cap_bytes_per_s=cap,
        latency_ns=to_ns(route.latency_s),
    )
