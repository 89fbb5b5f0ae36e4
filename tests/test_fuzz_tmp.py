"""Exact collapses of whole scenarios: equal ranks as one, equal ways as one, and known limits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.engine import Cluster
from dpsim.engine.network import Network as FlowNetwork
from dpsim.errors import InputError
from dpsim.hardware import HardwareProfile
from dpsim.machine import Route
from dpsim.overrides import with_quantity
from dpsim.scenario import DataParallelOptions, RingOptions, Scenario, ServerOptions
from dpsim.schedules import _lanes
from dpsim.schedules._classes import RankClass, rank_classes
from dpsim.schedules._lanes import Hops, Lane, Layout
from dpsim.simulate import Simulation, simulate
from dpsim.units import NS_PER_S, to_ns
from dpsim.workload import Workload
from tests.schedules.small import (
    INFINITE,
    chain,
    free_device,
    free_host,
    free_links,
    machine,
    model,
    network,
)

SMALL = chain(6, width=700, buffers=3, per_sample=2e6)  # 2 MB a layer
WHOLE = replace(  # layers that are split over servers between layers that stay whole
    chain(5, width=1100),
    parameters=tuple(
        replace(p, shape=(n, 1000))
        for p, n in zip(chain(5).parameters, (1, 1500, 30, 2000, 90), strict=True)
    ),
)


# Each rank by itself


def apart(cluster: Cluster, place: Callable[[int], Hashable] | None = None) -> list[RankClass]:
    """Return a class for each rank."""
    classes = [
        RankClass(members=(rank,), batch=c.batch)
        for c in rank_classes(cluster, place)
        for rank in c.members
    ]
    return sorted(classes, key=lambda c: c.members)


def layout_apart(cluster: Cluster, servers: tuple[str, ...], leaders: tuple[int, ...]) -> Layout:
    """Return every way between a worker and a server, none merged."""
    classes = apart(cluster)
    lanes: dict[tuple[int, int], tuple[Lane, ...]] = {}
    for rank in range(len(classes)):
        for s, server in enumerate(servers):
            gpu, lanes[rank, s] = f"gpu{rank}", ()
            if rank in leaders and gpu != server:
                there, back = cluster.machine.route(gpu, server), cluster.machine.route(server, gpu)
                lanes[rank, s] = (lane_of(there, back),)
    leads = tuple(max(leader for leader in leaders if leader <= c.members[0]) for c in classes)
    return Layout(classes=classes, servers=servers, lanes=lanes, leads=leads)


def lane_of(there: Route, back: Route) -> Lane:
    return Lane(
        push=Hops(names=there.hops, own={}),
        pull=Hops(names=back.hops, own={}),
        count=1,
        cap_bytes_per_s=there.flow_bytes_per_s,
        latency_ns=to_ns(there.latency_s),
    )


@contextmanager
def each_rank_apart() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsim.schedules.ring.rank_classes", apart)
        patch.setattr("dpsim.schedules.ps.layout", layout_apart)
        yield


def question(
    workload: Workload = SMALL, profile: str = "a100-sxm", net: str = "25gbe", **options: Any
) -> Simulation:
    scenario = Scenario(**options)
    return simulate(workload, machine(profile), scenario, network(net), record=False)


def both(*args: Any, **options: Any) -> tuple[int, int]:
    """Return the step with equal ranks as one, and with each apart."""
    together = question(*args, **options)
    with each_rank_apart():
        alone = question(*args, **options)
    assert len(together.cluster.ends) <= len(alone.cluster.ends)
    assert len(alone.cluster.ends) == together.cluster.scenario.gpus
    assert together.steady == alone.steady
    return together.step_ns, alone.step_ns


PROFILES = ("a100-sxm", "v100-dgx1", "v100-pcie", "k80", "rtx3090", "titan-rtx")
HALF = ("a100-sxm", "v100-dgx1", "v100-pcie", "rtx3090")  # with 16 bits, and 8 GPUs
PLACES = [(2, 1), (4, 1), (6, 1), (4, 2), (7, 2), (6, 3), (16, 2)]


def fits(profile: str, gpus: int, nodes: int) -> bool:
    return gpus <= nodes * machine(profile).topology.gpus


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("gpus", "nodes"), PLACES)
def test_ranks_of_ring_as_one_take_what_each_takes(profile: str, gpus: int, nodes: int) -> None:
    if not fits(profile, gpus, nodes):
        pytest.skip(f"{profile} has {machine(profile).topology.gpus} GPUs")
    for batch in (gpus, 8 * gpus + 1):
        together, alone = both(
            SMALL, profile, mode="ring", gpus=gpus, nodes=nodes, batch=batch, pinned_input=True
        )
        assert together == alone


SERVERS = {
    "gpu0": ServerOptions(placement="gpu0"),
    "cpu": ServerOptions(placement="cpu", servers=2),
    "one": ServerOptions(placement="dedicated", servers=1),
    "four": ServerOptions(placement="dedicated", servers=4, update_on="worker"),
    "few": ServerOptions(placement="colocated", servers=2, sharding="greedy"),
    "pairs": ServerOptions(placement="cpu", gpus_per_worker=2),
}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("servers", SERVERS)
def test_workers_as_one_take_what_each_takes(profile: str, servers: str) -> None:
    options = SERVERS[servers]
    for gpus, nodes in PLACES:
        if not fits(profile, gpus, nodes):
            continue
        if options.placement == "gpu0" and nodes > 1:
            continue
        if options.placement == "colocated" and not (options.servers <= nodes and gpus < 16):
            continue
        if gpus % (options.gpus_per_worker * nodes):
            continue
        batch = 4 * gpus + (nodes == 1)  # one rank has one sample more
        together, alone = both(
            WHOLE, profile, mode="ps", gpus=gpus, nodes=nodes, batch=batch, server=options
        )
        assert together == alone, (gpus, nodes)


@pytest.mark.parametrize("name", ["small-cnn", "deep-mlp"])
@pytest.mark.parametrize("mode", ["ring", "ps"])
def test_shipped_models_on_ranks_as_one_take_what_each_takes(name: str, mode: str) -> None:
    server = ServerOptions(placement="cpu", servers=1)
    for profile, gpus in (("v100-dgx1", 8), ("gtx1080ti", 3)):
        together, alone = both(
            model(name), profile, mode=mode, gpus=gpus, batch=64, server=server, iteration=2
        )
        assert together == alone


@settings(max_examples=500)
@given(
    st.sampled_from(PROFILES),
    st.sampled_from(["ring", "ps"]),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.5, 1.3, 4.0])), max_size=3),
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.sampled_from(["cpu", "one", "pairs", "four"]),
    st.sampled_from([1, 3]),
)
def test_ranks_that_differ_take_what_each_takes(
    profile: str,
    mode: str,
    stragglers: list[tuple[int, float]],
    split: list[int],
    servers: str,
    nodes: int,
) -> None:
    """Uneven batches and stragglers, also within a worker of two GPUs."""
    nodes = nodes if fits(profile, 6, nodes) else 3
    together, alone = both(
        WHOLE,
        profile,
        mode=mode,
        gpus=6,
        nodes=nodes,
        batch=sum(split),
        split=tuple(split),
        stragglers=tuple(dict(stragglers).items()),
        server=SERVERS[servers],
        iteration=2,
    )
    assert together == alone


@pytest.mark.parametrize("mode", ["ring", "ps", "dp"])
def test_it_does_not_matter_which_of_equal_ranks_straggles(mode: str) -> None:
    """GPU 0 of dp has work of its own; the others hang on one switch. Ranks of dp take turns."""
    server = ServerOptions(placement="dedicated", servers=2)
    first = 1 if mode == "dp" else 0
    steps = {
        question(mode=mode, gpus=4, batch=32, server=server, stragglers=((rank, 3.0),)).step_ns
        for rank in range(first, 4)
    }
    assert 1 == len(steps) or mode == "dp"
    assert max(steps) <= 1.01 * min(steps)


@pytest.mark.parametrize("nodes", [3, 4])
@pytest.mark.parametrize("profile", ["a100-sxm", "v100-pcie", "rtx3090"])
@pytest.mark.parametrize("workload", [SMALL, WHOLE], ids=["small", "whole"])
def test_nodes_with_a_server_each_are_nearly_alike(
    nodes: int, profile: str, workload: Workload
) -> None:
    """What is left out: a worker waits for its own ways alone, and runs ahead of others."""
    options: dict[str, Any] = {"mode": "ps", "gpus": 2 * nodes, "nodes": nodes, "batch": 64}
    alike, alone = both(workload, profile, **options)
    assert alike == pytest.approx(alone, rel=0.09)


def test_nodes_that_are_taken_as_alike_cost_no_more_programs() -> None:
    options: dict[str, Any] = {"mode": "ps", "server": ServerOptions(placement="colocated")}
    done = question(gpus=64, nodes=16, batch=256, **options)
    assert [0] == list(done.cluster.ends)
    uneven = question(gpus=63, nodes=16, batch=252, stragglers=((5, 1.5),), **options)
    assert [0, 5] == list(uneven.cluster.ends)


@pytest.mark.parametrize("nodes", [2, 5])
def test_a_slower_rank_makes_no_step_shorter(nodes: int) -> None:
    options: dict[str, Any] = {"mode": "ps", "gpus": 2 * nodes, "nodes": nodes, "batch": 40}
    steps = [question(stragglers=((1, factor),), **options).step_ns for factor in (1.0, 5.0, 20.0)]
    assert sorted(steps) == steps


# Flows that share a link among some


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    st.tuples(*[st.integers(1, 9)] * 3),
)
def test_flows_that_share_a_link_in_groups_equal_flows_written_out(
    nodes: int, each: int, sizes: list[int], rates: tuple[int, int, int]
) -> None:
    """`each` workers on each of some nodes: a link of their own, one a node, one for all."""
    names = ("gpu", "nic", "server")
    bytes_per_s = {name: 1e8 * rate for name, rate in zip(names, rates, strict=True)}
    written_out = {
        f"gpu {n} {i}": bytes_per_s["gpu"] for n in range(nodes) for i in range(each)
    } | {f"nic {n}": bytes_per_s["nic"] for n in range(nodes)}
    written_out["server"] = bytes_per_s["server"]
    routes = [(f"gpu {n} {i}", f"nic {n}", "server") for n in range(nodes) for i in range(each)]
    arrivals = []
    for links, flows, count in ((bytes_per_s, [names], nodes * each), (written_out, routes, 1)):
        env = simpy.Environment()
        wires = FlowNetwork(env, links)
        own = {"gpu": 1, "nic": each} if count > 1 or links is bytes_per_s else {}
        ends: list[int] = []
        for turn, size in enumerate(sizes):
            for hops in flows:
                env.process(send(wires, turn * 100, (hops, size, count, own), ends))
        env.run()
        arrivals.append(sorted(set(ends)))
        used = {name: use.nbytes for name, use in wires.use().items()}
        assert nodes * each * sum(sizes) == used["server"]
        assert each * sum(sizes) == used["nic" if links is bytes_per_s else "nic 0"]
    assert arrivals[0] == arrivals[1]


def send(
    wires: FlowNetwork, start: int, flow: tuple[Any, int, int, dict[str, int]], ends: list[int]
) -> Iterator[simpy.Event]:
    hops, size, count, own = flow
    yield wires._env.timeout(start)
    yield wires.transfer(hops, size, count=count, own=own)
    ends.append(int(wires._env.now))


def test_more_flows_than_there_are_cannot_share_a_link() -> None:
    wires = FlowNetwork(simpy.Environment(), {"nic": 1e9})
    with pytest.raises(InputError) as caught:
        wires.transfer(("nic",), 1, count=2, own={"nic": 3}, label="push")
    assert (
        "network: 1 to count 2 flows can have a hop of their own, got {'nic': 3} for 'push'. "
        "Correct the schedule."
    ) == str(caught.value)


# Closed forms of the parameter server, where nothing else takes time

KEYS = 8
WIDTH = 1024
SIZE = KEYS * 4 * WIDTH * WIDTH
EQUAL_KEYS = chain(KEYS, width=WIDTH, per_sample=0.0)


def bare(nic_bytes_per_s: float, workers: int, **server: Any) -> float:
    """Return the step in seconds; one GPU a node, and only NICs and sums take time."""
    profile = bare_machine()
    wire = replace(
        network(),
        bandwidth_bytes_per_s=replace(network().bandwidth_bytes_per_s, value=nic_bytes_per_s),
        flow_bytes_per_s=replace(network().flow_bytes_per_s, value=INFINITE),
        latency_s=replace(network().latency_s, value=0.0),
    )
    scenario = Scenario(
        mode="ps",
        gpus=workers,
        nodes=workers,
        batch=workers,
        sync="none",
        server=ServerOptions(**({"reduce_bytes_per_s": INFINITE, "reduce_threads": 1} | server)),
    )
    workload = replace(EQUAL_KEYS, input_bytes=replace(EQUAL_KEYS.input_bytes, per_sample=0.0))
    done = simulate(workload, profile, scenario, wire, record=False)
    return done.step_ns / NS_PER_S


def bare_machine() -> HardwareProfile:
    profile = free_host(free_device(free_links(machine())))
    return with_quantity(profile, "host.memory_bandwidth_bytes_per_s", INFINITE)


NIC = 1e9
ROUNDING_S = 2e-6  # some ns for each of a few hundred parts that are rounded


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_one_server_takes_n_s_over_its_nic_and_the_last_key_back(workers: int) -> None:
    """Ingress and egress are pipelined: all keys in, the last one out."""
    step = bare(NIC, workers, placement="dedicated", servers=1)
    expected = workers * SIZE / NIC * (1 + 1 / KEYS)
    assert expected == pytest.approx(step, abs=ROUNDING_S)


@pytest.mark.parametrize(("workers", "servers"), [(4, 2), (6, 3), (4, 4), (2, 4), (3, 12)])
def test_balanced_servers_take_the_longer_of_their_side_and_the_workers(
    workers: int, servers: int
) -> None:
    """max(S / B, N S / (k B)), and the last key back at the same rate."""
    step = bare(NIC, workers, placement="dedicated", servers=servers)
    expected = max(1.0, workers / servers) * SIZE / NIC * (1 + 1 / KEYS)
    assert expected == pytest.approx(step, abs=ROUNDING_S)


@pytest.mark.parametrize("servers", [2, 4, 8])
def test_whole_keys_are_pushed_to_all_servers_side_by_side(servers: int) -> None:
    """8 equal keys, a like number on each server: the same as if each were split."""
    options: dict[str, Any] = {"placement": "dedicated", "servers": servers}
    split = bare(NIC, 2 * servers, sharding="split", **options)
    whole = bare(NIC, 2 * servers, sharding="round-robin", **options)
    on_each = KEYS // servers
    assert split / (1 + 1 / KEYS) * (1 + 1 / on_each) == pytest.approx(whole, abs=ROUNDING_S)


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 32])
def test_servers_beside_all_workers_take_what_a_ring_takes(nodes: int) -> None:
    """2 (N-1) S / (N B): each NIC sends its pushes and its server's keys.

    The first push and the last pull have no other to share the NIC with: up to 1/K more.
    """
    step = bare(NIC, nodes, placement="colocated")
    expected = 2 * (nodes - 1) * SIZE / (nodes * NIC)
    assert expected - ROUNDING_S <= step <= expected * (1 + 1 / KEYS) + ROUNDING_S


@pytest.mark.parametrize("workers", [2, 5])
def test_a_slow_sum_bounds_the_server(workers: int) -> None:
    """(3N - 1) S / 3 over the rate, after the first key is in and before the last is out."""
    rate = 1e8
    step = bare(NIC, workers, placement="dedicated", servers=1, reduce_bytes_per_s=rate)
    adding = (3 * workers - 1) * SIZE / 3 / rate
    key = workers * SIZE / KEYS / NIC
    assert adding + 2 * key == pytest.approx(step, abs=ROUNDING_S)


def test_free_wires_leave_nothing() -> None:
    assert bare(NIC, 1, placement="colocated") < ROUNDING_S
    assert bare(7e13, 4, placement="dedicated", servers=4) < 100 * ROUNDING_S


# What is recorded


WORKLOADS = st.builds(
    chain,
    st.integers(1, 5),
    width=st.sampled_from([64, 700, 1100]),
    per_sample=st.sampled_from([1e5, 2e7]),
    buffers=st.integers(0, 3),
    outputs=st.integers(1, 2),
)
MODES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "single": st.just({}),
    "dp": st.fixed_dictionaries(
        {
            "data_parallel": st.builds(
                DataParallelOptions,
                nccl=st.booleans(),
                loss_in_forward=st.booleans(),
                output_device=st.integers(-1, 0),
                input_on=st.sampled_from(["gpu", "cpu"]),
            )
        }
    ),
    "ring": st.fixed_dictionaries(
        {
            "nodes": st.integers(1, 2),
            "ring": st.builds(
                RingOptions,
                bucket_bytes=st.sampled_from([None, 1e5, 1e8]),
                find_unused_parameters=st.booleans(),
                gradient_as_bucket_view=st.booleans(),
                gradient_hook=st.sampled_from(["none", "fp16"]),
            ),
        }
    ),
    "ps": st.fixed_dictionaries(
        {
            "nodes": st.integers(1, 2),
            "server": st.builds(
                ServerOptions,
                placement=st.sampled_from(["auto", "cpu", "dedicated", "colocated"]),
                gpus_per_worker=st.sampled_from([1, 2]),
                update_on=st.sampled_from(["server", "worker"]),
                sharding=st.sampled_from(["round-robin", "split"]),
            ),
        }
    ),
}
LOOPS = st.fixed_dictionaries(
    {
        "sync": st.sampled_from(["item-after-loss", "item-after-step", "none"]),
        "pinned_input": st.booleans(),
        "set_to_none": st.booleans(),
        "accumulation": st.integers(1, 2),
        "iteration": st.integers(1, 2),
        "precision": st.sampled_from(["fp32", "amp"]),
    }
)


@pytest.mark.parametrize("mode", MODES)
def test_spans_of_a_track_never_overlap(mode: str) -> None:
    @settings(max_examples=300)
    @given(
        WORKLOADS,
        MODES[mode],
        LOOPS,
        st.sampled_from(HALF),
        st.sampled_from([1, 2]),
        st.data(),
    )
    def holds(
        workload: Workload,
        options: dict[str, Any],
        loop: dict[str, Any],
        profile: str,
        pairs: int,
        data: Any,
    ) -> None:
        gpus = 1 if mode == "single" else 2 * pairs * options.get("nodes", 1)
        stragglers = (
            (data.draw(st.integers(0, gpus - 1)), data.draw(st.sampled_from([1.0, 2.5]))),
        )
        depth = data.draw(st.sampled_from([1, 3, 1024]))
        made = machine(profile)
        made = replace(made, host=replace(made.host, launch_queue=depth))
        scenario = Scenario(
            mode=mode,
            gpus=gpus,
            batch=data.draw(st.integers(gpus, 64)),
            stragglers=stragglers,
            **options,
            **loop,
        )
        done = simulate(workload, made, scenario, network())
        # The whole recording, not just the step.
        timeline = done.cluster.recorder.timeline(0, 10**12)
        assert (timeline.start <= timeline.end).all()
        for track in range(len(timeline.tracks)):
            mine = np.flatnonzero(timeline.track == track)
            spans = sorted(zip(timeline.start[mine], timeline.end[mine], strict=True))
            assert all(a[1] <= b[0] for a, b in pairwise(spans)), timeline.tracks[track]
        step = done.cluster.recorder.timeline(done.start_ns, done.end_ns)
        for track in range(len(step.tracks)):
            assert sum(step.phase_ns(track).values()) == step.busy_ns(track) <= step.step_ns

    holds()


def test_the_most_ways_that_are_simulated_one_by_one_leave_two_servers_exact() -> None:
    assert (2 + 1) * 2 <= _lanes.MOST_WAYS < (3 + 1) * 3
