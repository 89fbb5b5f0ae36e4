"""Synchronous parameter server: workers push gradients, servers add them, workers pull."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsim.engine import Cluster, Mark, Program, Stream, latest
from dpsim.errors import InfeasibleError
from dpsim.schedules._lanes import Hops, Lane, Layout, layout
from dpsim.schedules._registry import SCHEDULES
from dpsim.schedules._runs import ADD_BYTES, Hook, merge
from dpsim.schedules._server import WORKING_GPU, Service, account, server_ends
from dpsim.schedules._sharding import Shard
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
    workers = [PushingWorker(cluster, ways, c, leaders, service) for c in range(len(ways.classes))]
    for worker, lead in zip(workers, ways.leads, strict=True):
        worker.lead = workers[lead]
        cluster.start(worker.program(), f"rank {worker.rank}")


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


@dataclass(slots=True, kw_only=True)
class Connection:
    """One way of a class of workers to one server, and what is under way on it."""

    lane: Lane | None  # None: worker and server are one
    pushes: Stream
    pulls: Stream
    spreads: bool  # what it pulls goes on to the worker's other GPUs
    turn: Process | None = None  # the last pull


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
        self.connections = [
            [self._connect(s, i, lane) for i, lane in enumerate(ways.lanes[index, s] or (None,))]
            for s in range(len(ways.servers))
        ]
        self.reduces = cluster.stream(self.rank, "local reduce", self.count)
        self.spreads = cluster.stream(self.rank, "local broadcast", self.count)
        self.lead = self  # the class that pushes for this one
        self.leader = max(rank for rank in leaders if rank <= self.rank)
        self.team = ways.leads.count(ways.leads[index])  # classes that make up a worker
        self._missing = 0
        self._all_pulled = cluster.env.event()
        service.workers.append(self)

    def _connect(self, server: int, position: int, lane: Lane | None) -> Connection:
        near = " beside it" if position else ""
        name = f" to server {server}{near}" if len(self.ways.servers) > 1 else ""
        return Connection(
            lane=lane,
            pushes=self.cluster.stream(self.rank, f"push{name}", self.count),
            pulls=self.cluster.stream(self.rank, f"pull from server {server}{near}", self.count),
            spreads=position == 0,
        )

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
        if self.team > 1:
            ready = yield from self._agree(iteration, ready)
        shards = self.service.shards
        self._missing = sum(
            len(self.connections[part.server]) for parts in shards.values() for part in parts
        )
        self._all_pulled = self.cluster.env.event()
        if not self._missing:  # everything is frozen
            return
        if self.senders:
            self._push_all(iteration, ready)
        self.cluster.waits[f"rank {self.rank}"] = f"pulls of iteration {iteration}"
        yield self._all_pulled
        if self.gpu == WORKING_GPU:
            taken = self.service.taken_ns(self.compute.tail.at)
            self.compute.op(Phase.AGGREGATE, "server on this GPU", self.compute.tail, taken)
        self.compute.wait(latest(*self._pulled(), self.spreads.tail))
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
        queues: list[list[tuple[Shard, Mark]]] = [[] for _ in self.connections]
        for parameter, mark in ready:
            tensor = self.workload.parameters[parameter]
            summed = self._reduce_locally(mark, self.runs.wire_bytes(tensor), tensor.name)
            for part in self.service.shards[parameter]:
                queues[part.server].append((part, summed))
        for connections, queue in zip(self.connections, queues, strict=True):
            for connection in connections:
                self.cluster.env.process(self._push(iteration, connection, queue))

    def _push(
        self, iteration: int, connection: Connection, queue: list[tuple[Shard, Mark]]
    ) -> Program:
        """Push to one server, in order, each when it is ready and the one before has arrived."""
        env, stream = self.cluster.env, connection.pushes
        for part, ready in queue:
            yield env.timeout(max(0, ready.at - int(env.now)))
            begin = latest(ready, stream.tail)
            senders = self.senders
            if connection.lane:
                senders = connection.lane.count
                yield self._transfer(connection.lane.push, connection.lane, part, "push")
            self.service.arrive(iteration, part, senders)
            name = self.workload.parameters[part.parameter].name
            stream.until(Phase.PUSH, name, begin, int(env.now), part.nbytes)

    def _transfer(self, hops: Hops, lane: Lane, part: Shard, what: str) -> Event:
        return self.cluster.flows.transfer(
            hops.names,
            part.nbytes,
            latency_ns=lane.latency_ns,
            count=lane.count,
            own=hops.own,
            cap_bytes_per_s=lane.cap_bytes_per_s,
            label=f"{what} of {self.workload.parameters[part.parameter].name}, rank {self.rank}",
        )

    # Pulls

    def offer(self, part: Shard, updated: Mark) -> None:
        """Take note that a shard is updated: it is pulled after those of its server before it."""
        for i, connection in enumerate(self.connections[part.server]):
            previous = connection.turn
            if self.lead is not self:  # it pulls, and has been told before this one
                previous = self.lead.connections[part.server][i].turn
            connection.turn = self.cluster.env.process(
                self._pull(connection, part, updated, previous)
            )

    def _pull(
        self, connection: Connection, part: Shard, updated: Mark, previous: Process | None
    ) -> Program:
        env, stream = self.cluster.env, connection.pulls
        if previous is not None and previous.is_alive:
            yield previous
        yield env.timeout(max(0, updated.at - int(env.now)))
        begin = latest(updated, stream.tail)
        if connection.lane:
            yield self._transfer(connection.lane.pull, connection.lane, part, "pull")
        name = self.workload.parameters[part.parameter].name
        stream.until(Phase.PULL, name, begin, int(env.now), part.nbytes)
        if connection.spreads:
            self._spread_locally(stream.tail, part.nbytes, name)
        self._missing -= 1
        if self._missing == 0:
            self._all_pulled.succeed()

    def _pulled(self) -> list[Mark]:
        """Return when each connection is done with its pulls."""
        return [connection.pulls.tail for many in self.connections for connection in many]

    # Several GPUs a worker

    def _agree(
        self, iteration: int, ready: list[tuple[int, Mark]]
    ) -> Generator[Event, Any, list[tuple[int, Mark]]]:
        """Return when gradients are ready on all GPUs of a worker, where these differ."""
        agreed = []
        for parameter, mark in ready:
            key = f"gradient {parameter} of iteration {iteration}, worker of rank {self.leader}"
            meeting = self.cluster.meet(key, self.team, mark, f"rank {self.rank}")
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
        """Count the bytes of a whole exchange on the links, in the measured iteration only."""
        if iteration != self.cluster.measured:
            return
        load: dict[str, int] = defaultdict(int)
        for parts in self.service.shards.values():
            for part in parts:
                load[self.ways.servers[part.server]] += part.nbytes
        leaders = set(self.service.leaders)
        account(self.cluster, [rank for rank in self.ranks if rank in leaders], load)
