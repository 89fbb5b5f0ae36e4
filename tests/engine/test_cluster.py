"""Cluster: programs that meet, bytes on links, copies, and the ring of a group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from dpsim import files
from dpsim.collectives import Call
from dpsim.costs import DeviceCosts, HostCosts
from dpsim.engine import Cluster, Communicator, Mark, Program
from dpsim.errors import DeadlockError
from dpsim.hardware import HardwareProfile, Network
from dpsim.machine import machine_of
from dpsim.scenario import DataParallelOptions, Scenario, ServerOptions
from dpsim.simulate import Simulation, simulate
from dpsim.timeline import Phase
from dpsim.units import to_ns
from tests.schedules.small import chain, machine, network

WORKLOAD = chain(3, width=512)


def cluster(
    name: str = "a100-sxm", gpus: int = 4, nodes: int = 1, *, servers: int = 0, record: bool = True
) -> Cluster:
    profile = files.find(HardwareProfile, name)
    wire = files.find(Network, "100gbe") if nodes + servers > 1 else None
    scenario = Scenario(mode="ring", gpus=gpus, nodes=nodes, batch=gpus)
    return Cluster(
        machine_of(profile, wire, gpus, nodes, servers=servers),
        WORKLOAD,
        scenario,
        (DeviceCosts(profile, "fp32"), HostCosts(profile)),
        iterations=1,
        record=record,
    )


# Programs


def meet(made: Cluster, key: str, parties: int, mark: Mark, label: str, got: list[Mark]) -> Program:
    got.append((yield made.meet(key, parties, mark, label)))


def test_programs_that_meet_go_on_with_the_latest_mark() -> None:
    made = cluster()
    got: list[Mark] = []
    for rank, at in enumerate((30, 50, 50)):
        label = f"rank {rank}"
        made.start(meet(made, "all-reduce 1", 3, Mark(at, rank), label, got), label)
    made.run()
    assert [Mark(50, 1)] * 3 == got


def test_a_key_can_be_met_again() -> None:
    made = cluster()
    got: list[Mark] = []

    def twice(rank: int) -> Program:
        for turn in range(2):
            met = yield made.meet("barrier", 2, Mark(10 * turn + rank), f"rank {rank}")
            got.append(met)

    for rank in range(2):
        made.start(twice(rank), f"rank {rank}")
    made.run()
    assert [Mark(1), Mark(1), Mark(11), Mark(11)] == got


def test_who_waits_for_nobody_is_named() -> None:
    made = cluster()
    got: list[Mark] = []

    def other() -> Program:
        yield made.env.timeout(1_204_000)
        yield made.meet("all_reduce 2 (64 bytes)", 3, Mark(0), "rank 2")

    made.start(meet(made, "all_reduce 1 (64 bytes)", 3, Mark(0), "rank 0", got), "rank 0")
    made.start(meet(made, "all_reduce 1 (64 bytes)", 3, Mark(0), "rank 1", got), "rank 1")
    made.start(other(), "rank 2")
    with pytest.raises(DeadlockError) as caught:
        made.run()
    assert (
        "at 1.204 ms nothing can happen, but 3 programs are not done: "
        "rank 0 waits for all_reduce 1 (64 bytes); rank 1 waits for all_reduce 1 (64 bytes); "
        "rank 2 waits for all_reduce 2 (64 bytes)"
    ) == str(caught.value)


def test_a_program_that_ends_waits_for_nothing() -> None:
    made = cluster()

    def ends() -> Program:
        yield made.env.timeout(5)

    def hangs() -> Program:
        yield made.env.event()

    made.start(ends(), "rank 0")
    made.start(hangs(), "rank 1")
    with pytest.raises(DeadlockError) as caught:
        made.run()
    assert (
        "at 5 ns nothing can happen, but 1 program is not done: rank 1 waits for its start"
    ) == str(caught.value)


# Copies and bytes


def test_a_copy_in_place_takes_the_memory_twice() -> None:
    made = cluster()
    assert made.device.memory_ns(2 << 20) == made.copy_ns("gpu1", "gpu1", 1 << 20)


def test_a_copy_takes_its_start_its_latency_and_its_bytes() -> None:
    made = cluster()
    route = made.machine.route("gpu0", "gpu1")
    fixed = made.machine.profile.device.copy_latency_s.value + route.latency_s
    free = to_ns(fixed + 1e9 / route.bandwidth_bytes_per_s)
    assert free == made.copy_ns("gpu0", "gpu1", 10**9)
    assert to_ns(fixed + 1.0) == made.copy_ns("gpu0", "gpu1", 10**9, cap=1e9)


def test_copies_that_share_a_link_share_its_rate() -> None:
    made = cluster("v100-pcie", gpus=4)
    alone = made.machine.route("host0", "gpu0").bandwidth_bytes_per_s
    assert [alone] == made.shared_rates([("host0", "gpu0")])
    first = made.machine.route("host0", "gpu0").hops
    sharers = [g for g in range(4) if made.machine.route("host0", f"gpu{g}").hops[-2] == first[-2]]
    rates = made.shared_rates([("host0", f"gpu{gpu}") for gpu in sharers])
    assert len(sharers) > 1
    assert [alone / len(sharers)] * len(sharers) == pytest.approx(rates)


def test_bytes_are_counted_on_every_link_of_the_measured_iteration() -> None:
    made = cluster()
    made.account(made.measured - 1, "gpu0", "gpu1", 5)
    made.account(made.measured, "gpu1", "gpu1", 5)
    assert {} == made.links
    made.account(made.measured, "gpu0", "gpu1", 7)
    made.account(made.measured, "host0", "gpu1", 11)
    hops = made.machine.route("gpu0", "gpu1").hops
    assert [7] * len(hops) == [made.links[hop] for hop in hops]
    assert (7, 0) == (made.traffic[0].sent, made.traffic[0].received)
    assert (0, 18) == (made.traffic[1].sent, made.traffic[1].received)


def test_a_way_over_the_network_is_counted_in_two_halves() -> None:
    made, whole = cluster(gpus=4, nodes=2), cluster(gpus=4, nodes=2)
    hops = made.machine.route("gpu0", "host1").hops
    made.load(hops, 9, until="net")
    assert hops[0] in made.links
    assert hops[-1] not in made.links
    made.load(hops, 9, since="net")
    whole.account(whole.measured, "gpu0", "host1", 9)
    assert whole.links == {hop: 9 * hops.count(hop) for hop in hops}
    assert whole.links == made.links


# Groups


@pytest.mark.parametrize(("name", "gpus"), [("v100-dgx1", 8), ("p100-dgx1", 8), ("v100-dgx1", 4)])
def test_the_ring_of_a_dgx1_is_closed_over_nvlink(name: str, gpus: int) -> None:
    made = cluster(name, gpus=gpus)
    ring = Communicator(made, range(gpus), 1, "auto").ring()
    assert list(range(gpus)) == sorted(ring)
    assert 0 == ring[0]
    for a, b in pairwise((*ring, ring[0])):
        kinds = {made.machine.link_kind(h) for h in made.machine.route(f"gpu{a}", f"gpu{b}").hops}
        assert {"nvlink"} == kinds


def test_a_ring_without_nvlink_is_in_the_order_of_ranks() -> None:
    assert (0, 1, 2, 3) == Communicator(cluster("v100-pcie"), range(4), 1, "auto").ring()


def test_a_ring_over_nodes_passes_each_once() -> None:
    made = cluster("v100-dgx1", gpus=16, nodes=2)
    ring = Communicator(made, range(16), 2, "auto").ring()
    nodes = [made.machine.node_of(gpu) for gpu in ring]
    assert [0] * 8 + [1] * 8 == nodes
    assert list(range(16)) == sorted(ring)


def test_a_collective_starts_with_the_last_and_ends_for_all_together() -> None:
    made = cluster()
    group = Communicator(made, range(4), 1, "auto")
    streams = [made.stream(rank, "comm") for rank in range(4)]
    launched = [Mark(10 * rank) for rank in range(4)]
    call = Call(collective="all_reduce", nbytes=1 << 20)
    last = made.thread(3, "main thread").work(Phase.LOOP, "loop", 30)
    end = group.run(1, call, streams, [*launched[:3], last], Phase.ALL_REDUCE)
    assert 30 + group.cost_ns(call) == end.at
    assert [end.at] * 4 == [stream.tail.at for stream in streams]
    timeline = made.recorder.timeline(0, end.at)
    assert [0, 0, 10, 20, 30] == timeline.start.tolist()
    assert [-1, 0, 0, 0, 0] == timeline.cause.tolist()


def ring_links(made: Cluster, ring: Sequence[int]) -> dict[str, int]:
    """Return the links of a ring, and how many steps of it cross each."""
    crossed: dict[str, int] = {}
    for a, b in pairwise((*ring, ring[0])):
        for hop in made.machine.route(f"gpu{a}", f"gpu{b}").hops:
            crossed[hop] = crossed.get(hop, 0) + 1
    return crossed


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce", "all_gather"])
def test_what_a_group_sends_it_receives_over_the_links_of_its_ring(collective: Any) -> None:
    made = cluster("v100-dgx1", gpus=8)
    group = Communicator(made, range(8), 1, "auto")
    group.account(1, Call(collective=collective, nbytes=8000))
    sent = [made.traffic[gpu].sent for gpu in range(8)]
    assert sum(sent) == sum(made.traffic[gpu].received for gpu in range(8)) > 0
    assert set(made.links) <= set(ring_links(made, group.ring()))
    assert max(made.links.values()) <= max(sent)


# Whole runs


RUNS: list[dict[str, Any]] = [
    {"mode": "ring"},
    {"mode": "ring", "nodes": 2},
    {"mode": "dp"},
    {"mode": "dp", "data_parallel": DataParallelOptions(nccl=False, input_on="cpu")},
    {"mode": "ps", "server": ServerOptions(placement="gpu0")},
    {"mode": "ps", "server": ServerOptions(placement="cpu", servers=2)},
    {"mode": "ps", "server": ServerOptions(placement="cpu", gpus_per_worker=2)},
    {"mode": "ps", "nodes": 2, "server": ServerOptions(placement="colocated")},
    {"mode": "ps", "nodes": 4, "server": ServerOptions(placement="colocated")},
    {"mode": "ps", "nodes": 2, "server": ServerOptions(placement="dedicated", servers=3)},
]


@pytest.mark.parametrize("options", RUNS)
@pytest.mark.parametrize("name", ["a100-sxm", "v100-dgx1", "rtx2080ti"])
def test_gpus_receive_what_gpus_and_hosts_send(options: dict[str, Any], name: str) -> None:
    """From the host comes the batch; servers in host memory send back as much as they get."""
    scenario = Scenario(gpus=4, batch=40, **options)
    done = simulate(WORKLOAD, machine(name), scenario, network(), record=False)
    traffic = [done.cluster.traffic[rank] for rank in range(4)]
    batch = int(WORKLOAD.input_bytes.at(40)) + int(WORKLOAD.target_bytes.at(40))
    assert batch + sum(use.sent for use in traffic) == sum(use.received for use in traffic)
    assert sum(use.sent for use in traffic) > 0


@pytest.mark.parametrize("options", [run for run in RUNS if run["mode"] == "ps"])
def test_a_server_link_carries_what_its_workers_push(options: dict[str, Any]) -> None:
    """Into the network goes what comes out of it, and it is what is not near to its server."""
    scenario = Scenario(gpus=4, batch=40, **options)
    done: Simulation = simulate(WORKLOAD, machine(), scenario, network(), record=False)
    links = done.cluster.links
    into = sum(n for hop, n in links.items() if hop.endswith(">net"))
    assert into == sum(n for hop, n in links.items() if hop.startswith("net>"))
    size, nodes = WORKLOAD.gradient_bytes, scenario.nodes or 1
    if options["server"].placement == "dedicated":
        assert 2 * 4 * size == into
    elif nodes > 1:
        assert 2 * 4 * size * (nodes - 1) == pytest.approx(nodes * into, abs=nodes * size)
