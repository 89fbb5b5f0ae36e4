"""Server: what parameter servers keep, sum and update, and where they are."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from dpsim.engine import Cluster, Mark
from dpsim.errors import InfeasibleError
from dpsim.schedules._lanes import Layout, by_host, route_by
from dpsim.schedules._runs import ADD_BYTES, Runs
from dpsim.schedules._sharding import Shard, shard
from dpsim.timeline import Phase
from dpsim.units import to_ns


def server_ends(cluster: Cluster) -> tuple[str, ...]:
    """Return where each server is.

    auto: GPU 0 on one node, one server beside the workers of each node on several. cpu: processes
    in the memory of node 0. dedicated: nodes of their own, one server each.

    Raises:
        InfeasibleError: So many servers cannot be placed so.
    """
    options, machine = cluster.scenario.server, cluster.machine
    placement = options.placement
    if options.path == "gpu" and placement not in ("auto", "gpu0"):
        raise InfeasibleError(
            f"--path gpu needs a server on a GPU (--placement gpu0), got --placement {placement}. "
            "Change either."
        )
    if placement == "auto":
        placement = "gpu0" if machine.nodes == 1 and options.servers <= 1 else "colocated"
        if machine.nodes == 1 and options.servers > 1:
            placement = "cpu"
    if placement == "dedicated":
        return tuple(f"host{machine.nodes + i}" for i in range(machine.servers))
    if placement == "gpu0":
        if options.servers > 1:
            raise InfeasibleError(
                f"--servers must be 1 with --placement gpu0, got {options.servers}. "
                "Choose --placement cpu or dedicated."
            )
        return ("gpu0",)
    if placement == "cpu":
        cores = machine.profile.host.cores
        if options.servers > cores:
            raise InfeasibleError(
                f"--servers must be at most {cores} with --placement cpu on "
                f"'{machine.profile.name}', which has so many cores, got {options.servers}. "
                "Lower it, or choose --placement dedicated."
            )
        return ("host0",) * max(1, options.servers)
    count = options.servers or machine.nodes
    if count > machine.nodes:
        raise InfeasibleError(
            f"--servers must be at most {machine.nodes} with --placement colocated on "
            f"{machine.nodes} nodes, got {count}. Lower it, or choose --placement dedicated."
        )
    return tuple(f"host{i}" for i in range(count))


class Puller(Protocol):
    """Whom a service tells that a shard is updated."""

    def offer(self, part: Shard, updated: Mark) -> None:
        """Take note of it."""


WORKING_GPU = "gpu0"
"""The one GPU that may be a worker and a server."""


class Service:
    """All servers: their keys, their queues, and who waits for what."""

    def __init__(self, cluster: Cluster, ways: Layout, leaders: tuple[int, ...]) -> None:
        """Place the keys."""
        self.cluster = cluster
        self.ways = ways
        self.leaders = leaders
        self.options = cluster.scenario.server
        self.runs = Runs(cluster.workload, cluster.scenario, (cluster.device, cluster.host))
        self.shards = shard(
            cluster.workload.parameters,
            len(ways.servers),
            self.options.sharding,
            self.runs.wire_bytes,
        )
        given = {ready.parameter for ready in cluster.workload.gradients}
        self.shards = {i: parts for i, parts in self.shards.items() if i in given}
        load = [0] * len(ways.servers)
        for parts in self.shards.values():
            for part in parts:
                load[part.server] += part.nbytes
        cluster.messages["bytes on each server"] = tuple(load)
        self.streams = [
            cluster.server_stream(s, f"server {s} ({end})") for s, end in enumerate(ways.servers)
        ]
        self.workers: list[Puller] = []
        self._kernels: list[tuple[int, int]] = []
        self._arrived: dict[tuple[int, int, int], int] = defaultdict(int)
        self._state_bytes = self._update_bytes_per_element()

    def _update_bytes_per_element(self) -> float:
        """Return the bytes that one update of one element reads and writes on the server."""
        trainable = sum(p.numel for p in self.cluster.workload.parameters if p.trainable)
        total = sum(op.bytes_moved.fixed for op in self.runs.optimizer_ops().ops)
        return total * self.runs.element_scale / max(1, trainable)

    def arrive(self, iteration: int, part: Shard, senders: int) -> None:
        """Add the gradients of `senders` workers, which have just arrived, in arrival order."""
        key = (iteration, part.parameter, part.server)
        before = self._arrived[key]
        self._arrived[key] = before + senders
        now = Mark(int(self.cluster.env.now))
        stream = self.streams[part.server]
        # The first is copied (2 passes), each other is added (3 passes), by itself.
        duration = senders * self._sum_ns(part, ADD_BYTES)
        if before == 0:
            duration += self._sum_ns(part, ADD_BYTES - 1) - self._sum_ns(part, ADD_BYTES)
        name = self.cluster.workload.parameters[part.parameter].name
        end = stream.op(Phase.AGGREGATE, name, now, duration, part.nbytes * senders)
        self._note(part, end.at - duration, end.at)
        if before + senders == len(self.leaders):
            del self._arrived[key]
            self._update(part, name)

    def _note(self, part: Shard, begin: int, end: int) -> None:
        if self.ways.servers[part.server] == WORKING_GPU:
            self._kernels.append((begin, end))

    def taken_ns(self, until: int) -> int:
        """Return the time before `until` that servers took from GPU 0, and forget it.

        Kernels of the server and of the worker fill the same device, so what one does beside the
        other is time that the other loses.
        """
        taken = sum(max(0, min(end, until) - begin) for begin, end in self._kernels)
        self._kernels.clear()
        return taken

    def _sum_ns(self, part: Shard, passes: int) -> int:
        end = self.ways.servers[part.server]
        if end.startswith("gpu"):
            return self.cluster.device.memory_ns(passes * part.nbytes)
        host = self.cluster.machine.profile.host
        threads = min(self.options.reduce_threads, host.cores)
        rate = self.options.reduce_bytes_per_s or host.reduce_bytes_per_s.value * threads
        at_home = self.ways.servers.count(end)  # servers that share one host's memory
        memory = host.memory_bandwidth_bytes_per_s.value / (ADD_BYTES * at_home)
        return to_ns(passes / ADD_BYTES * part.nbytes / min(rate, memory))

    def _update(self, part: Shard, name: str) -> None:
        stream = self.streams[part.server]
        if self.options.update_on == "server":
            duration = self._update_ns(part)
            end = stream.op(Phase.OPTIMIZER, name, stream.tail, duration)
            self._note(part, end.at - duration, end.at)
        for worker in self.workers:
            worker.offer(part, stream.tail)

    def _update_ns(self, part: Shard) -> int:
        """Return the time of one key's update: one Python call, then its memory traffic."""
        host = self.cluster.machine.profile.host
        call = self.cluster.host.ns(host.optimizer_tensor_s) + self.cluster.host.ns(
            host.launch_free_s
        )
        nbytes = self._state_bytes * part.numel
        if self.ways.servers[part.server].startswith("gpu"):
            return call + self.cluster.device.memory_ns(nbytes)
        return call + to_ns(nbytes / host.memory_bandwidth_bytes_per_s.value)


def account(cluster: Cluster, ranks: list[int], load: dict[str, int]) -> None:
    """Count what ranks push to and pull from server ends that keep `load` bytes each.

    A way over the network is counted in two halves, from the rank to the network and from there to
    the server: as many steps as there are ranks and servers, not their product.
    """
    machine = cluster.machine
    for rank in ranks:
        gpu, home = f"gpu{rank}", f"host{machine.node_of(rank)}"
        far = [end for end in load if machine.nodes + machine.servers > 1 and end != home]
        for end in load.keys() - set(far):
            for pair in ((gpu, end), (end, gpu)):
                route = route_by(machine, *pair, by_host=by_host(cluster))
                cluster.account_route(cluster.measured, route, load[end])
        if far:
            nbytes = sum(load[end] for end in far)
            cluster.load(machine.route(gpu, far[0]).hops, nbytes, until="net")
            cluster.load(machine.route(far[0], gpu).hops, nbytes, since="net")
            cluster.traffic[rank].sent += nbytes
            cluster.traffic[rank].received += nbytes
    for end, nbytes in load.items():
        guests = [r for r in ranks if end.startswith("host") and f"host{machine.node_of(r)}" != end]
        if guests:
            gpu = f"gpu{guests[0]}"
            cluster.load(machine.route(gpu, end).hops, nbytes * len(guests), since="net")
            cluster.load(machine.route(end, gpu).hops, nbytes * len(guests), until="net")
