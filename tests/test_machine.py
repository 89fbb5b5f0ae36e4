"""Routes and peers on small machines of known wiring, and what is refused."""

import dataclasses
import math
import time
from collections import Counter
from itertools import pairwise, permutations

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.engine.network import Network as Flows
from dpsim.errors import InfeasibleError, InputError
from dpsim.hardware import (
    Basis,
    Device,
    HardwareProfile,
    Host,
    Link,
    Network,
    Quantity,
    Table,
    Topology,
)
from dpsim.machine import Machine, machine_of
from dpsim.units import to_ns

GB = 1e9


def known(value: float) -> Quantity:
    return Quantity(value=value, basis=Basis.ASSUMED, source="test")


def wire(a: str, b: str, kind: str, gb_per_s: float, latency_s: float = 1e-6, duplex: bool = True):
    return Link(
        ends=(a, b),
        kind=kind,
        bandwidth_bytes_per_s=known(gb_per_s * GB),
        latency_s=known(latency_s),
        duplex=duplex,
    )


def profile(gpus: int, links: list[Link], peer_access: str, **changes) -> HardwareProfile:
    handover = Table(at=(0.0,), value=(0.0,), basis=Basis.ASSUMED, source="test")
    given_host = {"memory_bandwidth_bytes_per_s": known(100 * GB), "cores": 16}
    given_host["gil_handover_s"] = handover
    needed = [f.name for f in dataclasses.fields(Host) if f.default is dataclasses.MISSING]
    device = Device(
        name="GPU",
        architecture="volta",
        peak_flop_per_s={"fp32": known(15e12)},
        memory_bandwidth_bytes_per_s=known(900 * GB),
        memory_bytes=known(16 * GB),
        multiprocessors=80,
        kernel_floor_s=known(2e-6),
        efficiency=(),
        copy_latency_s=known(1e-6),
    )
    return HardwareProfile(
        name="box",
        description="",
        device=device,
        host=Host(**{name: given_host.get(name, known(1e-6)) for name in needed}),
        topology=Topology(gpus=gpus, links=tuple(links), peer_access=peer_access),
        nccl=(),
        **changes,
    )


def pcie_tree(*, socket_of: list[int], per_switch: int = 2) -> list[Link]:
    """GPUs in order below switches of 12 GB/s, switches below the CPU of their first GPU."""
    links = [wire("cpu0", "cpu1", "socket", 20, 2e-6)] if max(socket_of) else []
    for gpu, socket in enumerate(socket_of):
        switch = gpu // per_switch
        links.append(wire(f"gpu{gpu}", f"switch{switch}", "pcie", 12))
        if gpu % per_switch == 0:
            links.append(wire(f"switch{switch}", f"cpu{socket}", "pcie", 12))
    return links


TWO_SOCKETS = pcie_tree(socket_of=[0, 0, 0, 0, 1, 1, 1, 1])
CUBE_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
"""NVLinks of 25 GB/s between the GPUs of a DGX-1 with V100 (NVIDIA, DGX-1 system architecture)."""
DGX1 = TWO_SOCKETS + [
    wire(f"gpu{a}", f"gpu{b}", "nvlink", 25 * bonds) for (a, b), bonds in CUBE_MESH.items()
]
NVSWITCH = [
    *TWO_SOCKETS,
    *(wire(f"gpu{gpu}", "nvswitch0", "nvlink", 300, 0.5e-6) for gpu in range(8)),
    *(wire(f"nic{nic}", f"switch{nic // 2}", "pcie", 24) for nic in range(8)),
]
INFINIBAND = Network(
    name="ib",
    bandwidth_bytes_per_s=known(12.5 * GB),
    latency_s=known(2e-6),
    flow_bytes_per_s=known(12.5 * GB),
    rdma=True,
)
ETHERNET = Network(
    name="eth",
    bandwidth_bytes_per_s=known(1.25 * GB),
    latency_s=known(30e-6),
    flow_bytes_per_s=known(1 * GB),
    rdma=False,
)


def box(links: list[Link], peer_access: str, gpus: int = 8) -> Machine:
    return machine_of(profile(gpus, links, peer_access), None, gpus)


# --- one node -------------------------------------------------------------------------------------


def test_neighbours_in_a_cube_mesh_copy_over_their_nvlink():
    machine = box(DGX1, "nvlink")
    route = machine.route("gpu0", "gpu3")
    assert ("gpu0>gpu3",) == route.hops
    assert (50 * GB, 1e-6, True, False) == (
        route.bandwidth_bytes_per_s,
        route.latency_s,
        route.peer,
        route.staged,
    )
    peers = {(i, j) for i, j in permutations(range(8), 2) if machine.is_peer(i, j)}
    assert {pair for a, b in CUBE_MESH for pair in ((a, b), (b, a))} == peers


def test_others_in_a_cube_mesh_go_through_host_memory():
    route = box(DGX1, "nvlink").route("gpu0", "gpu5")
    up = ("gpu0>switch0", "switch0>cpu0")
    down = ("cpu0>cpu1", "cpu1>switch2", "switch2>gpu5")
    assert (*up, "memory", "memory", *down) == route.hops
    assert (True, False) == (route.staged, route.peer)
    assert 12 * GB == route.bandwidth_bytes_per_s
    assert route.latency_s == pytest.approx(6e-6)  # four PCIe hops and the socket link


def test_all_peers_take_pcie_where_no_nvlink_leads():
    route = box(DGX1, "all").route("gpu1", "gpu4")
    assert route.hops == (
        "gpu1>switch0",
        "switch0>cpu0",
        "cpu0>cpu1",
        "cpu1>switch2",
        "switch2>gpu4",
    )
    assert (True, False) == (route.peer, route.staged)


@pytest.mark.parametrize("access", ["nvlink", "all", "pcie-tree"])
def test_every_pair_below_an_nvswitch_is_a_peer(access):
    machine = box(NVSWITCH, access)
    for i, j in permutations(range(8), 2):
        route = machine.route(f"gpu{i}", f"gpu{j}")
        assert (f"gpu{i}>nvswitch0", f"nvswitch0>gpu{j}") == route.hops
        assert (300 * GB, 1e-6, True) == (route.bandwidth_bytes_per_s, route.latency_s, route.peer)


def test_nvlink_to_a_cpu_does_not_make_peers():
    """On POWER9 the CPU has NVLinks too; GPUs of the same CPU are peers only by their own."""
    links = [wire(f"gpu{i}", "cpu0", "nvlink", 75) for i in range(3)]
    machine = box([*links, wire("gpu0", "gpu1", "nvlink", 75)], "nvlink", gpus=3)
    assert (True, False) == (machine.is_peer(0, 1), machine.is_peer(0, 2))
    assert ("gpu0>cpu0", "memory", "memory", "cpu0>gpu2") == machine.route("gpu0", "gpu2").hops


def test_peers_in_a_pcie_tree_are_below_one_cpu():
    machine = box(TWO_SOCKETS, "pcie-tree")
    assert ("gpu0>switch0", "switch0>gpu1") == machine.route("gpu0", "gpu1").hops
    below = machine.route("gpu0", "gpu2")
    assert ("gpu0>switch0", "switch0>cpu0", "cpu0>switch1", "switch1>gpu2") == below.hops
    same_socket = [[i // 4 == j // 4 for j in range(8)] for i in range(8)]
    assert same_socket == [[machine.is_peer(i, j) for j in range(8)] for i in range(8)]
    assert "cpu0>cpu1" in machine.route("gpu3", "gpu4").hops


def test_without_peer_access_even_nvlink_is_not_used():
    machine = box(DGX1, "none")
    route = machine.route("gpu0", "gpu1")
    up, down = ("gpu0>switch0", "switch0>cpu0"), ("cpu0>switch0", "switch0>gpu1")
    assert (*up, "memory", "memory", *down) == route.hops
    assert not any(machine.is_peer(i, j) for i, j in permutations(range(8), 2))


def test_slow_memory_limits_a_staged_copy_to_half():
    """Each byte is written to host memory and read from it."""
    slow = profile(8, TWO_SOCKETS, "none")
    host = dataclasses.replace(slow.host, memory_bandwidth_bytes_per_s=known(10 * GB))
    machine = machine_of(dataclasses.replace(slow, host=host), None, 8)
    assert 5 * GB == machine.route("gpu0", "gpu1").bandwidth_bytes_per_s
    assert 10 * GB == machine.route("gpu0", "host0").bandwidth_bytes_per_s
    assert 5 * GB == machine.route("host0", "host0").bandwidth_bytes_per_s


def test_a_shared_wire_is_one_link_for_both_directions():
    links = [wire(f"gpu{i}", "cpu0", "pcie", 16, duplex=False) for i in range(2)]
    machine = box(links, "none", gpus=2)
    assert ("gpu0-cpu0", "memory", "memory", "gpu1-cpu0") == machine.route("gpu0", "gpu1").hops
    assert ("memory", "gpu0-cpu0") == machine.route("host0", "gpu0").hops
    assert "GPU 0 and CPU 0" == machine.link_label("gpu0-cpu0")


def test_of_equally_short_paths_the_widest_is_taken_then_the_first_by_name():
    links = [wire("gpu0", "cpu0", "pcie", 16), wire("gpu1", "cpu0", "pcie", 16)]
    for switch, width in (("a", 10), ("b", 20), ("c", 20)):
        links += [wire(f"gpu{i}", switch, "nvlink", width) for i in range(2)]
    machine = box(links, "all", gpus=2)
    assert ("gpu0>b", "b>gpu1") == machine.route("gpu0", "gpu1").hops
    assert ("gpu1>b", "b>gpu0") == machine.route("gpu1", "gpu0").hops


def test_of_two_equal_paths_both_directions_take_the_same():
    """By name gpu0 would start with "a" and gpu1 with "c", which are not on one path."""
    pairs = [("gpu0", "a"), ("a", "d"), ("d", "gpu1"), ("gpu0", "b"), ("b", "c"), ("c", "gpu1")]
    links = [wire(a, b, "nvlink", 25) for a, b in pairs]
    links += [wire(f"gpu{i}", "cpu0", "pcie", 12) for i in range(2)]
    machine = box(links, "all", gpus=2)
    assert ("gpu0>a", "a>d", "d>gpu1") == machine.route("gpu0", "gpu1").hops
    assert ("gpu1>d", "d>a", "a>gpu0") == machine.route("gpu1", "gpu0").hops


def test_a_second_wire_between_the_same_ends_is_another_link():
    links = [wire("gpu0", "cpu0", "pcie", 16), wire("gpu0", "cpu0", "nvlink", 75)]
    machine = box(links, "all", gpus=1)
    assert ("gpu0>cpu0#2", "memory") == machine.route("gpu0", "host0").hops
    assert "pcie" == machine.link_kind("cpu0>gpu0")


def test_a_gpu_reaches_itself_for_nothing():
    route = box(DGX1, "none").route("gpu2", "gpu2")
    assert () == route.hops
    assert (math.inf, 0, True, False) == (
        route.bandwidth_bytes_per_s,
        route.latency_s,
        route.peer,
        route.staged,
    )


def test_host_memory_is_reached_at_the_nearest_cpu():
    machine = box(DGX1, "nvlink")
    assert ("gpu6>switch3", "switch3>cpu1", "memory") == machine.route("gpu6", "host0").hops
    assert ("memory", "cpu1>switch3", "switch3>gpu6") == machine.route("host0", "gpu6").hops


# --- several nodes --------------------------------------------------------------------------------


def test_with_rdma_a_gpu_sends_from_its_own_nic():
    machine = machine_of(profile(8, NVSWITCH, "all"), INFINIBAND, 16)
    route = machine.route("gpu1", "gpu14")
    assert route.hops == (
        "node0.gpu1>switch0",
        "node0.switch0>nic1",
        "node0.nic1>net",
        "net>node1.nic6",
        "node1.nic6>switch3",
        "node1.switch3>gpu6",
    )
    assert (12 * GB, False, False) == (route.bandwidth_bytes_per_s, route.staged, route.peer)
    assert route.latency_s == pytest.approx(4e-6 + 2e-6)
    nics = [machine.route(f"gpu{i}", "gpu8").hops[2] for i in range(8)]
    assert [f"node0.nic{i}>net" for i in range(8)] == nics


@pytest.mark.parametrize(("access", "network"), [("all", ETHERNET), ("none", INFINIBAND)])
def test_without_rdma_or_peer_access_data_pass_host_memory_on_both_sides(access, network):
    machine = machine_of(profile(8, NVSWITCH, access), network, 16)
    route = machine.route("gpu0", "gpu8")
    assert route.staged
    assert {"node0.memory": 2, "node1.memory": 2} == {
        name: times for name, times in Counter(route.hops).items() if "memory" in name
    }
    assert ("node0.switch0>cpu0", "node0.memory") == route.hops[1:3]


def test_one_connection_is_capped():
    route = machine_of(profile(8, TWO_SOCKETS, "all"), ETHERNET, 16).route("gpu0", "gpu8")
    assert (1 * GB, 1 * GB) == (route.bandwidth_bytes_per_s, route.flow_bytes_per_s)


def test_nics_that_the_topology_does_not_draw_are_taken_in_turn():
    machine = machine_of(profile(8, TWO_SOCKETS, "all", nics_per_node=2), INFINIBAND, 16)
    assert ("node0.gpu5>switch2", "node0.switch2>cpu1", "node0.nic1>net") == machine.route(
        "gpu5", "host1"
    ).hops[:3]
    assert ("node0.memory", "node0.nic0>net", "net>node1.nic0", "node1.memory") == machine.route(
        "host0", "host1"
    ).hops


def test_dedicated_servers_are_further_hosts():
    machine = machine_of(profile(8, NVSWITCH, "all"), ETHERNET, 16, servers=2)
    assert (2, 2) == (machine.nodes, machine.servers)
    assert "net>node3.nic0" in machine.route("gpu0", "host3").hops
    assert range(16, 16) == machine.ranks_on(3)


FORTY = profile(40, [wire(f"gpu{i}", "cpu0", "pcie", 12) for i in range(40)], "all")


@given(st.integers(1, 40), st.data())
def test_every_rank_has_one_place_and_nodes_differ_by_one_at_most(nodes, data):
    machine = machine_of(FORTY, ETHERNET, data.draw(st.integers(nodes, 40 * nodes)), nodes)
    places = [machine.ranks_on(node) for node in range(nodes)]
    assert list(range(machine.gpus)) == [rank for ranks in places for rank in ranks]
    assert max(map(len, places)) - min(map(len, places)) <= 1
    assert all(machine.node_of(rank) == node for node in range(nodes) for rank in places[node])


def test_sixteen_thousand_gpus_are_made_in_milliseconds():
    box_of_8 = profile(8, NVSWITCH, "all")
    start = time.perf_counter()
    machine = machine_of(box_of_8, INFINIBAND, 16_384)
    route = machine.route("gpu0", "gpu16383")
    assert time.perf_counter() - start < 0.2  # about 2 ms where it was written
    assert "net>node2047.nic7" in route.hops
    assert 2048 * 75 == len(machine.rates)


# --- relations ------------------------------------------------------------------------------------

MACHINES = {
    "cube mesh": machine_of(profile(8, DGX1, "nvlink"), ETHERNET, 16),
    "nvswitch": machine_of(profile(8, NVSWITCH, "all"), INFINIBAND, 16, servers=1),
    "tree": machine_of(profile(8, TWO_SOCKETS, "pcie-tree"), None, 8),
    "no peers": machine_of(profile(8, TWO_SOCKETS, "none"), INFINIBAND, 12, 3),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_routes_are_chains_of_links_and_the_way_back_is_the_same(machine):
    ends = [f"gpu{i}" for i in range(machine.gpus)]
    ends += [f"host{i}" for i in range(machine.nodes + machine.servers)]
    for source, target in permutations(ends, 2):
        there, back = machine.route(source, target), machine.route(target, source)
        links = [machine.link(name) for name in there.hops]
        assert tuple(link.back for link in reversed(links)) == back.hops
        assert dataclasses.replace(there, source=target, target=source, hops=back.hops) == back
        wires = [link for link in links if link.ends != ("memory", "memory")]
        assert all(
            a.ends[1] == b.ends[0] or {species(a.ends[1]), species(b.ends[0])} <= {"cpu", "nic"}
            for a, b in pairwise(wires)
        )
        shares = [link.bandwidth_bytes_per_s / there.hops.count(link.name) for link in links]
        assert min(*shares, there.flow_bytes_per_s) == there.bandwidth_bytes_per_s
        assert sum(link.latency_s for link in links) == pytest.approx(there.latency_s)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_the_rate_of_a_route_is_what_one_flow_gets_in_the_network(machine):
    ends = ["gpu0", "gpu1", f"gpu{machine.gpus - 1}", "host0", f"host{machine.nodes - 1}"]
    for source, target in permutations(dict.fromkeys(ends), 2):
        route = machine.route(source, target)
        env = simpy.Environment()
        flow = Flows(env, machine.rates).transfer(
            route.hops,
            12_000_000,
            latency_ns=to_ns(route.latency_s),
            cap_bytes_per_s=route.flow_bytes_per_s,
        )
        env.run(flow)
        alone_s = 12_000_000 / route.bandwidth_bytes_per_s
        assert to_ns(alone_s) + to_ns(route.latency_s) == env.now


def species(end: str) -> str:
    return end.rstrip("0123456789")


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(8)), st.sampled_from(["all", "nvlink", "pcie-tree", "none"]))
def test_the_numbering_of_gpus_changes_nothing(order, access):
    for links in (DGX1, TWO_SOCKETS, NVSWITCH):
        number = {f"gpu{i}": f"gpu{order[i]}" for i in range(8)}
        renamed = [
            dataclasses.replace(link, ends=tuple(number.get(end, end) for end in link.ends))
            for link in links
        ]
        before, after = box(links, access), box(renamed, access)
        for i, j in permutations(range(8), 2):
            a = before.route(f"gpu{i}", f"gpu{j}")
            b = after.route(f"gpu{order[i]}", f"gpu{order[j]}")
            assert (a.bandwidth_bytes_per_s, a.peer, a.staged, len(a.hops)) == (
                b.bandwidth_bytes_per_s,
                b.peer,
                b.staged,
                len(b.hops),
            )
            assert a.latency_s == pytest.approx(b.latency_s)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_link_has_a_rate_a_kind_and_a_label(machine):
    assert len(machine.rates) == len(set(machine.rates))
    labels = set()
    for name, rate in machine.rates.items():
        link = machine.link(name)
        assert (name, rate) == (link.name, link.bandwidth_bytes_per_s)
        assert name == machine.link(link.back).back
        assert machine.link_kind(name) == link.kind
        labels.add(machine.link_label(name))
    assert len(labels) == len(machine.rates)


def test_labels_are_for_people():
    machine = MACHINES["nvswitch"]
    assert "node 1: GPU 0 to NVSwitch 0" == machine.link_label("node1.gpu0>nvswitch0")
    assert "node 1: network to NIC 3" == machine.link_label("net>node1.nic3")
    assert "node 0: host memory" == machine.link_label("node0.memory")
    assert "switch 0 to CPU 0" == MACHINES["tree"].link_label("switch0>cpu0")


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ((0,), InputError, "--gpus must be >= 1, got 0. Raise it to 1."),
        ((8, 0), InputError, "--nodes must be >= 1, got 0. Raise it to 1."),
        (
            (2, 3),
            InfeasibleError,
            "--nodes must be at most --gpus, got 3 nodes for 2 GPUs. Lower --nodes to 2.",
        ),
        (
            (17, 2),
            InfeasibleError,
            "--gpus must be at most 16 on 2 nodes of 'box', got 17. Raise --nodes to 3.",
        ),
        (
            (40,),
            InfeasibleError,
            "--nodes must be at most 4 for 'box', dedicated servers included, got 5. "
            "Lower --gpus, or take another profile.",
        ),
        (
            (9,),
            InfeasibleError,
            "--network must name what joins 2 nodes, got none for 9 GPUs of 'box'. "
            "Name one, or stay on one node of at most 8.",
        ),
    ],
)
def test_counts_that_cannot_be(counts, error, message):
    with pytest.raises(error) as raised:
        machine_of(profile(8, DGX1, "nvlink", max_nodes=4), None, *counts)
    assert message == str(raised.value)


@pytest.mark.parametrize("end", ["gpu8", "host1", "gpu01", "nic0", ""])
def test_an_end_that_is_not_there(end):
    with pytest.raises(InputError) as raised:
        box(DGX1, "nvlink").route("gpu0", end)
    assert str(raised.value) == (
        f"machine: the end of a route must be gpu0 to gpu7 or host0 to host0, got '{end}'. "
        "Correct the schedule that asks for it."
    )


@pytest.mark.parametrize("name", ["gpu0>gpu9", "node2.nic0>net", "node00.memory", "memory"])
def test_a_link_that_is_not_there(name):
    machine = MACHINES["cube mesh"]
    assert name not in machine.rates
    with pytest.raises(InputError) as raised:
        machine.link(name)
    assert f"machine: no link has the name '{name}'. Take names from a route." == str(raised.value)


def test_a_profile_without_a_cpu():
    with pytest.raises(InputError) as raised:
        box([wire("gpu0", "gpu1", "nvlink", 25)], "all", gpus=2)
    assert str(raised.value) == (
        "profile 'box': topology.links must have an end 'cpu0' that 'gpu0' reaches, got none. "
        "Add the link to the host."
    )


def test_a_profile_with_a_gpu_that_is_cut_off():
    links = [wire("gpu0", "cpu0", "pcie", 12), wire("gpu0", "gpu1", "nvlink", 25)]
    with pytest.raises(InputError) as raised:
        box(links, "all", gpus=2)
    assert str(raised.value) == (
        "profile 'box': topology.links must join 'gpu1' and 'cpu0' without passing a GPU or a "
        "NIC, found no way. Add the missing link."
    )
