"""Synchronous parameter server: workers push gradients, servers add them, workers pull."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsim.engine import Cluster, Mark, Program, Stream, latest
from dpsim.errors import InfeasibleError
from dpsim.schedules._lanes import Lane, Layout, layout
from dpsim.schedules._registry import SCHEDULES
from dpsim.schedules._runs import ADD_BYTES, Hook, Runs, merge
from dpsim.schedules._sharding import Shard, shard
from dpsim.schedules._worker import Worker
from dpsim.timeline import Phase
from dpsim.units import to_ns

if TYPE_CHECKING:
    from simpy import Event, Process


@SCHEDULES.add
def ps(cluster: Cluster) -> None:
    """Start a program for each class of workers, and the servers.

    A key's life: gradient ready -> pushed (to each server one at a time, to all of them side by
    side) -> added by its server in arrival order -> updated when all workers' gradients are there
    -> pulled by all, as it was pushed. The next forward starts when a worker has pulled everything.

    Source: ps-lite (one request at a time), MXNet kvstore_dist_server (a barrier a key), and the
    closed forms of BytePS.

    Raises:
        InfeasibleError: The layout of servers does not fit the machine.
    """
    ends = server_ends(cluster)
    leaders = _leaders(cluster)
    ways = layout(cluster, ends, leaders)
    if ways.extra_links:
        cluster.lay(ways.extra_links)
    service = Service(cluster, ways, leaders)
    for c in range(len(ways.classes)):
        worker = PushingWorker(cluster, ways, c, leaders, service)
        cluster.start(worker.program(), f"rank {worker.rank}")


def server_ends(cluster: Cluster) -> tuple[str, ...]:
    """Return where each server is.

    auto: GPU 0 on one node, one server beside the workers of each node on several. cpu: processes
    in the memory of node 0. dedicated: nodes of their own, one server each.

    Raises:
        InfeasibleError: So many servers cannot be placed so.
    """
    options, machine = cluster.scenario.server, cluster.machine
    placement = options.placement
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
        return ("host0",) * max(1, options.servers)
    count = options.servers or machine.nodes
    if count > machine.nodes:
        raise InfeasibleError(
            f"--servers must be at most {machine.nodes} with --placement colocated on "
            f"{machine.nodes} nodes, got {count}. Lower it, or choose --placement dedicated."
        )
    return tuple(f"host{i}" for i in range(count))


def _leaders(cluster: Cluster) -> tuple[int, ...]:
    """Return the ranks that push: the first GPU of each worker.

    Raises:
        InfeasibleError: The GPUs of a node are not a multiple of a worker's.
    """
    each, machine = cluster.scenario.server.gpus_per_worker, cluster.machine
    leaders: list[int] = []
    for node in range(machine.nodes):
        ranks = machine.ranks_on(node)
        if len(ranks) % each:
            raise InfeasibleError(
                f"--gpus-per-worker must divide the {len(ranks)} GPUs of a node, got {each}. "
                "Correct it."
            )
        leaders += ranks[::each]
    return tuple(leaders)


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
        self.workers: list[PushingWorker] = []
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
        stream.op(Phase.AGGREGATE, name, now, duration, part.nbytes * senders)
        if before + senders == len(self.leaders):
            del self._arrived[key]
            self._update(iteration, part, name)

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

    def _update(self, iteration: int, part: Shard, name: str) -> None:
        stream = self.streams[part.server]
        if self.options.update_on == "server":
            stream.op(Phase.OPTIMIZER, name, stream.tail, self._update_ns(part))
        for worker in self.workers:
            worker.offer(iteration, part, stream.tail)

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


class PushingWorker(Worker):
    """A class of workers: computes, pushes in the order of gradients, pulls what is updated."""

    def __init__(
        self, cluster: Cluster, ways: Layout, index: int, leaders: tuple[int, ...], service: Service
    ) -> None:
        """Take one class of the layout."""
        members = ways.classes[index]
        super().__init__(cluster, members.members, members.batch)
        self.ways = ways
        self.index = index
        self.service = service
        self.senders = sum(rank in set(leaders) for rank in members.members)
        self.locals = cluster.scenario.server.gpus_per_worker
        servers = range(len(ways.servers))
        self.pushes = [cluster.stream(self.rank, self._push_name(s), self.count) for s in servers]
        self.pulls = [
            cluster.stream(self.rank, f"pull from server {s}", self.count) for s in servers
        ]
        self.reduces = cluster.stream(self.rank, "local reduce", self.count)
        self.spreads = cluster.stream(self.rank, "local broadcast", self.count)
        self.leader = max(rank for rank in leaders if rank <= self.rank)
        self.team = [c for c, lead in enumerate(ways.leads) if lead == ways.leads[index]]
        self._turn: dict[int, Process] = {}
        self._missing = 0
        self._all_pulled = cluster.env.event()
        service.workers.append(self)

    def _push_name(self, server: int) -> str:
        return f"push to server {server}" if len(self.ways.servers) > 1 else "push"

    def program(self) -> Program:
        """Run the training loop."""
        for iteration in range(1, self.cluster.iterations + 1):
            for micro_step in range(self.scenario.accumulation):
                self.begin(iteration, micro_step)
                self.forward()
                if self.scenario.evaluation:
                    continue
                keeps = self.keeps_gradients(micro_step)
                if micro_step + 1 < self.scenario.accumulation:
                    self.whole_backward(accumulate=keeps)
                else:
                    yield from self._exchange(iteration, accumulate=keeps)
            if self.scenario.server.update_on == "worker" and not self.scenario.evaluation:
                self.optimizer()
            self.finish()

    def _exchange(self, iteration: int, *, accumulate: bool) -> Program:
        """Run backward, push each gradient when it is ready, and pull all parameters."""
        ready = self._backward_with_pushes(accumulate=accumulate)
        if len(self.team) > 1:
            ready = yield from self._agree(iteration, ready)
        shards = self.service.shards
        self._missing = sum(len(parts) for parts in shards.values())
        self._all_pulled = self.cluster.env.event()
        if not self._missing:  # everything is frozen
            return
        if self.senders:
            self._push_all(iteration, ready)
        self.cluster.waits[f"rank {self.rank}"] = f"pulls of iteration {iteration}"
        yield self._all_pulled
        self.compute.wait(latest(*(stream.tail for stream in self.pulls), self.spreads.tail))
        self.account_exchange(iteration)

    def _backward_with_pushes(self, *, accumulate: bool) -> list[tuple[int, Mark]]:
        """Launch backward; return each parameter and when its gradient may be sent, in order."""
        host = self.host.host
        cost = self.host.ns(host.hook_s) + self.host.ns(host.copy_launch_s)
        hooks = self.runs.gradient_hooks(accumulate=accumulate)
        hooks += [
            Hook(after=ready.after_op, name="push", host=cost) for ready in self.workload.gradients
        ]
        self.begin_backward()
        before = self.compute.tail
        run, _ = merge(self.runs.backward(self.batch), self.runs.places(), hooks)
        places = self.runs.places()
        times = self.autograd.launch(self.compute, Phase.BACKWARD, run)
        self.end_backward()
        kernels_before = self._kernel_hooks_before(hooks, places)
        marks = []
        for ready in self.workload.gradients:
            at = int(np.searchsorted(places, ready.after_op, side="right"))
            last = at + int(kernels_before[at]) - 1  # -1: made by the loss, before the first
            mark = Mark(int(times.end[last]), self.compute.tail.span) if last >= 0 else before
            marks.append((ready.parameter, mark))
        return marks

    @staticmethod
    def _kernel_hooks_before(hooks: list[Hook], places: np.ndarray) -> np.ndarray:
        """Return how many kernels hooks have put in up to each place."""
        after = [hook.after for hook in hooks if hook.duration is not None]
        slots = np.searchsorted(places, np.array(after, dtype=np.int64), side="right")
        return np.searchsorted(np.sort(slots), np.arange(len(places) + 1), side="right")

    def _push_all(self, iteration: int, ready: list[tuple[int, Mark]]) -> None:
        """Queue all gradients for their servers; several GPUs of a worker add them up first."""
        queues: list[list[tuple[Shard, Mark]]] = [[] for _ in self.pushes]
        for parameter, mark in ready:
            tensor = self.workload.parameters[parameter]
            summed = self._reduce_locally(mark, self.runs.wire_bytes(tensor), tensor.name)
            for part in self.service.shards[parameter]:
                queues[part.server].append((part, summed))
        for server, queue in enumerate(queues):
            self.cluster.env.process(self._push(iteration, self.pushes[server], queue))

    def _push(self, iteration: int, stream: Stream, queue: list[tuple[Shard, Mark]]) -> Program:
        """Push to one server, in order, each when it is ready and the one before has arrived."""
        env = self.cluster.env
        for part, ready in queue:
            yield env.timeout(max(0, ready.at - int(env.now)))
            begin = latest(ready, stream.tail)
            sent = self._send(iteration, part)
            if sent:
                yield env.all_of(sent)
            name = self.workload.parameters[part.parameter].name
            stream.until(Phase.PUSH, name, begin, int(env.now), part.nbytes)

    def _send(self, iteration: int, part: Shard) -> list[Event]:
        """Start the flows of one shard to its server; each arrival is counted when it is there."""
        lanes = self.ways.lanes[self.index, part.server].push
        if not lanes:
            self.service.arrive(iteration, part, self.senders)
            return []
        events = []
        for lane in lanes:
            event = self._transfer(lane, part, "push")
            event.callbacks.append(self._arrival(iteration, part, lane.count))
            events.append(event)
        return events

    def _arrival(self, iteration: int, part: Shard, senders: int) -> Callable[[Event], None]:
        return lambda _: self.service.arrive(iteration, part, senders)

    def _transfer(self, lane: Lane, part: Shard, what: str) -> Event:
        return self.cluster.flows.transfer(
            lane.hops,
            part.nbytes,
            latency_ns=lane.latency_ns,
            count=lane.count,
            own=lane.own,
            cap_bytes_per_s=lane.cap_bytes_per_s,
            label=f"{what} of {self.workload.parameters[part.parameter].name}, rank {self.rank}",
        )

    # Pulls

    def offer(self, iteration: int, part: Shard, updated: Mark) -> None:
        """Take note that a shard is updated: it is pulled after those of its server before it."""
        previous = self._turn.get(part.server)
        lead = self.ways.leads[self.index]
        if lead != self.index:  # its leader pulls, and has been told before it
            previous = self.service.workers[lead]._turn[part.server]
        self._turn[part.server] = self.cluster.env.process(
            self._pull(iteration, part, updated, previous)
        )

    def _pull(
        self, iteration: int, part: Shard, updated: Mark, previous: Process | None
    ) -> Program:
        del iteration
        env = self.cluster.env
        if previous is not None and previous.is_alive:
            yield previous
        yield env.timeout(max(0, updated.at - int(env.now)))
        stream = self.pulls[part.server]
        begin = latest(updated, stream.tail)
        lanes = self.ways.lanes[self.index, part.server].pull
        if lanes:
            yield env.all_of([self._transfer(lane, part, "pull") for lane in lanes])
        name = self.workload.parameters[part.parameter].name
        stream.until(Phase.PULL, name, begin, int(env.now), part.nbytes)
        self._spread_locally(stream.tail, part.nbytes, name)
        self._missing -= 1
        if self._missing == 0:
            self._all_pulled.succeed()

    # Several GPUs a worker

    def _agree(
        self, iteration: int, ready: list[tuple[int, Mark]]
    ) -> Generator[Event, Any, list[tuple[int, Mark]]]:
        """Return when gradients are ready on all GPUs of a worker, where these differ."""
        agreed = []
        for parameter, mark in ready:
            key = f"gradient {parameter} of iteration {iteration}, worker of rank {self.leader}"
            meeting = self.cluster.meet(key, len(self.team), mark, f"rank {self.rank}")
            agreed.append((parameter, (yield meeting)))
        return agreed

    def _local_rate(self) -> float:
        pairs = [(f"gpu{self.leader + i}", f"gpu{self.leader}") for i in range(1, self.locals)]
        return min(self.cluster.shared_rates(pairs))

    def _reduce_locally(self, ready: Mark, nbytes: int, name: str) -> Mark:
        """Add the gradients of a worker's GPUs on its first one."""
        if self.locals == 1:
            return ready
        copy = to_ns(
            self.cluster.machine.profile.device.copy_latency_s.value + nbytes / self._local_rate()
        )
        add = (self.locals - 1) * self.device.memory_ns(ADD_BYTES * nbytes, self.straggle)
        return self.reduces.op(Phase.LOCAL_REDUCE, name, ready, copy + add, nbytes)

    def _spread_locally(self, pulled: Mark, nbytes: int, name: str) -> None:
        """Copy a pulled shard to the worker's other GPUs."""
        if self.locals > 1:
            latency = self.cluster.machine.profile.device.copy_latency_s.value
            duration = to_ns(latency + nbytes / self._local_rate())
            self.spreads.op(Phase.PULL, name, pulled, duration, nbytes)

    def account_exchange(self, iteration: int) -> None:
        """Count the bytes of a whole exchange on the links, in the last iteration only."""
        if iteration != self.cluster.iterations:
            return
        load: dict[str, int] = defaultdict(int)
        for parts in self.service.shards.values():
            for part in parts:
                load[self.ways.servers[part.server]] += part.nbytes
        leaders = set(self.service.leaders)
        account(self.cluster, [rank for rank in self.ranks if rank in leaders], load)


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
            cluster.account(cluster.iterations, gpu, end, load[end])
            cluster.account(cluster.iterations, end, gpu, load[end])
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
