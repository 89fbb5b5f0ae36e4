"""Cluster: the machine at work - clock, programs, threads, streams, copies and collectives."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import simpy

from dpsim.collectives import Call, Collective, Fabric, choose, fabric_of, traffic
from dpsim.costs import DeviceCosts, HostCosts
from dpsim.engine.fairness import fair_rates
from dpsim.engine.network import Network as FlowNetwork
from dpsim.engine.recorder import Recorder
from dpsim.engine.stream import Mark, Stream, latest
from dpsim.engine.thread import Thread
from dpsim.errors import DeadlockError
from dpsim.machine import Machine, Route
from dpsim.scenario import Scenario
from dpsim.timeline import Phase, Track
from dpsim.units import format_duration, to_ns
from dpsim.workload import Workload

Program = Generator[simpy.Event, Any, None]
"""A host program: it yields only where it must wait for what another program does."""


@dataclass(slots=True)
class RankTraffic:
    """Bytes of one rank in the measured iteration."""

    sent: int = 0
    received: int = 0


class Cluster:
    """Everything that schedules act on. One cluster runs one scenario for some iterations."""

    def __init__(
        self,
        machine: Machine,
        workload: Workload,
        scenario: Scenario,
        costs: tuple[DeviceCosts, HostCosts],
        *,
        iterations: int,
        record: bool = True,
    ) -> None:
        """Start at 0 ns with idle devices."""
        self.machine = machine
        self.workload = workload
        self.scenario = scenario
        self.device, self.host = costs
        self.measured = iterations
        self.iterations = iterations + 1  # what the next one does early falls into the step
        self.env = simpy.Environment()
        self.recorder = Recorder(on=record)
        self.links: dict[str, int] = defaultdict(int)
        self.traffic: dict[int, RankTraffic] = defaultdict(RankTraffic)
        self.messages: dict[str, tuple[int, ...]] = {}
        self.batches: dict[int, int] = {}
        self.ends: dict[int, list[int]] = defaultdict(list)
        self.stands_for: dict[int, int] = {}  # which simulated rank a rank is equal to
        self.waits: dict[str, str] = {}
        self.groups: list[Communicator] = []
        self._flows: FlowNetwork | None = None
        self._meetings: dict[str, _Meeting] = {}

    def thread(self, rank: int, name: str, count: int = 1) -> Thread:
        """Return a new host thread that belongs to `rank` (and to `count - 1` like it)."""
        return Thread(self.recorder, Track(rank=rank, name=name, kind="thread", count=count))

    def stream(self, rank: int, name: str, count: int = 1) -> Stream:
        """Return a new stream on the device of `rank`."""
        track = Track(rank=rank, name=name, kind="stream", count=count)
        return Stream(self.recorder, track, self.machine.profile.host.launch_queue)

    def server_stream(self, server: int, name: str, count: int = 1) -> Stream:
        """Return a new FIFO of work on a parameter server; its rank is -1 - server."""
        track = Track(rank=-1 - server, name=name, kind="server", count=count)
        return Stream(self.recorder, track, self.machine.profile.host.launch_queue)

    @property
    def flows(self) -> FlowNetwork:
        """Return the links as a network of flows that share them fairly."""
        if self._flows is None:
            self._flows = FlowNetwork(self.env, self.machine.rates)
        return self._flows

    def lay(self, links: dict[str, float]) -> None:
        """Add links that stand for several equal ones to the network of flows, bytes/s each."""
        rates: ChainMap[str, float] = ChainMap(links, cast(Any, self.machine.rates))
        self._flows = FlowNetwork(self.env, rates)

    def straggle(self, rank: int) -> float:
        """Return the factor on the compute time of a rank."""
        return dict(self.scenario.stragglers).get(rank, 1.0)

    def copy_ns(self, source: str, target: str, nbytes: int, cap: float = float("inf")) -> int:
        """Return the time of one copy alone on its route, ns."""
        if source == target:
            return self.device.memory_ns(2 * nbytes)
        route = self.machine.route(source, target)
        rate = min(route.bandwidth_bytes_per_s, cap)
        start = self.machine.profile.device.copy_latency_s.value + route.latency_s
        return to_ns(start + nbytes / rate)

    def shared_rates(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the rate of each of several copies that run at the same time, bytes/s."""
        routes = [self.machine.route(*pair) for pair in pairs]
        links = {hop: i for i, hop in enumerate(dict.fromkeys(h for r in routes for h in r.hops))}
        capacities = [self.machine.rates[hop] for hop in links]
        return [
            float(r) for r in fair_rates([[links[h] for h in r.hops] for r in routes], capacities)
        ]

    def account(self, iteration: int, source: str, target: str, nbytes: int) -> None:
        """Count bytes on every link of a route, in the measured iteration only."""
        if iteration == self.measured and source != target:
            self.account_route(iteration, self.machine.route(source, target), nbytes)

    def account_route(self, iteration: int, route: Route, nbytes: int) -> None:
        """Count bytes on every link of a given route, in the measured iteration only."""
        if iteration != self.measured or route.source == route.target:
            return
        for hop in route.hops:
            self.links[hop] += nbytes
        for end, way in ((route.source, "sent"), (route.target, "received")):
            if end.startswith("gpu"):
                use = self.traffic[int(end[3:])]
                setattr(use, way, getattr(use, way) + nbytes)

    def load(self, hops: Sequence[str], nbytes: int, *, since: str = "", until: str = "") -> None:
        """Count bytes on the hops that lead up to the end `until`, or on those after `since`."""
        split = next(
            (i for i, hop in enumerate(hops) if hop.split(">")[0] == (since or until)), len(hops)
        )
        for hop in hops[split:] if since else hops[:split]:
            self.links[hop] += nbytes

    def start(self, program: Program, label: str) -> None:
        """Add a program. `label` names it in a deadlock report."""
        self.env.process(self._guard(program, label))

    def _guard(self, program: Program, label: str) -> Program:
        self.waits[label] = "its start"
        yield from program
        del self.waits[label]

    def run(self) -> None:
        """Run all programs to their end.

        Raises:
            DeadlockError: Nothing can happen any more, but a program has not ended.
        """
        self.env.run()
        if self.waits:
            listed = "; ".join(f"{who} waits for {what}" for who, what in self.waits.items())
            count = len(self.waits)
            raise DeadlockError(
                f"at {format_duration(self.env.now)} nothing can happen, but "
                f"{count} program{'s are' if count > 1 else ' is'} not done: {listed}"
            )

    def finish_step(self, rank: int, mark: Mark) -> None:
        """Note when a rank's iteration was done."""
        self.ends[rank].append(mark.at)

    def meet(self, key: str, parties: int, mark: Mark, label: str) -> simpy.Event:
        """Return an event with the latest mark of `parties` programs that meet under `key`."""
        meeting = self._meetings.setdefault(key, _Meeting(self.env.event()))
        meeting.marks.append(mark)
        self.waits[label] = key
        if len(meeting.marks) == parties:
            del self._meetings[key]
            meeting.event.succeed(latest(*meeting.marks))
        return meeting.event


@dataclass(slots=True)
class _Meeting:
    event: simpy.Event
    marks: list[Mark]

    def __init__(self, event: simpy.Event) -> None:
        self.event = event
        self.marks = []


class Communicator:
    """A group of GPUs, what a collective costs among them, and which links it loads."""

    def __init__(self, cluster: Cluster, gpus: Sequence[int], nodes: int, algorithm: str) -> None:
        """Take GPUs in ring order."""
        self._cluster = cluster
        self.gpus = tuple(gpus)
        self.fabric: Fabric = fabric_of(
            cluster.machine.profile, cluster.machine.network, len(self.gpus), nodes
        )
        cluster.groups.append(self)
        self.algorithm = algorithm
        self.used: dict[Collective, set[int]] = defaultdict(set)  # sizes that were asked for
        self._costs: dict[Call, int] = {}
        self._ring: tuple[int, ...] | None = None

    def cost_ns(self, call: Call) -> int:
        """Return the time from "all are ready" to "done", ns."""
        if call not in self._costs:
            chosen = choose(self.algorithm, call, self.fabric)
            self.used[call.collective].add(call.nbytes)
            self._costs[call] = to_ns(chosen(call, self.fabric))
        return self._costs[call]

    def account(self, iteration: int, call: Call) -> None:
        """Count the bytes of a call on the ring of its GPUs, in the measured iteration only."""
        if iteration != self._cluster.measured or len(self.gpus) < 2:
            return
        sent, received = traffic(call, len(self.gpus))
        ring = self.ring()
        for i, (gpu, other) in enumerate(zip(ring, (*ring[1:], ring[0]), strict=True)):
            self._cluster.traffic[gpu].sent += int(sent[i])
            self._cluster.traffic[gpu].received += int(received[i])
            if sent[i]:
                for hop in self._cluster.machine.route(f"gpu{gpu}", f"gpu{other}").hops:
                    self._cluster.links[hop] += int(sent[i])

    def ring(self) -> tuple[int, ...]:
        """Return the GPUs in the order of a ring: over NVLink alone where there is such a ring.

        NCCL searches rings so too; it uses several at a time, of which this is the first by name.
        """
        if self._ring is None:
            machine = self._cluster.machine
            nodes: dict[int, list[int]] = defaultdict(list)
            for gpu in self.gpus:
                nodes[machine.node_of(gpu)].append(gpu)
            self._ring = tuple(
                gpu
                for members in nodes.values()
                for gpu in nvlink_path(machine, members, len(nodes) == 1)
            )
        return self._ring

    def run(
        self,
        iteration: int,
        call: Call,
        streams: Sequence[Stream],
        launched: Sequence[Mark],
        phase: Phase,
    ) -> Mark:
        """Put one kernel of a collective on each stream; all end together.

        Each stream is held from when it reaches its kernel: NCCL's kernels poll for their peers.
        """
        begins = [latest(s.tail, m) for s, m in zip(streams, launched, strict=True)]
        ready = latest(*begins)
        end = ready.at + self.cost_ns(call)
        self.account(iteration, call)
        for stream, begin in zip(streams, begins, strict=True):
            stream.until(phase, call.collective, Mark(begin.at, ready.span), end, call.nbytes)
        return Mark(end, streams[0].tail.span)


def nvlink_path(machine: Machine, gpus: list[int], closed: bool) -> list[int]:
    """Return GPUs of one node in an order whose neighbours share an NVLink; as given if none does.

    Args:
        machine: Where the links are.
        gpus: In order of preference; the first stays first, it is the root.
        closed: Must the last reach the first as well?
    """

    def linked(i: int, j: int) -> bool:
        hops = machine.route(f"gpu{i}", f"gpu{j}").hops
        return all(machine.link_kind(hop) == "nvlink" for hop in hops)

    def extend(path: list[int], left: list[int]) -> list[int] | None:
        if not left:
            return path if not closed or linked(path[-1], path[0]) else None
        for gpu in left:
            if linked(path[-1], gpu):
                found = extend([*path, gpu], [other for other in left if other != gpu])
                if found:
                    return found
        return None

    return extend(gpus[:1], gpus[1:]) or gpus
