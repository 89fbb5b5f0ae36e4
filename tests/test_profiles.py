"""The shipped profiles and networks: complete, sourced, wired sanely, and true to their logs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dpsim import files
from dpsim._bundle import bundled
from dpsim.collectives import ALGORITHMS, Call, bus_factor, fabric_of
from dpsim.hardware import (
    Basis,
    CollectiveTable,
    EfficiencyTable,
    HardwareProfile,
    Network,
    Quantity,
    Table,
)
from dpsim.machine import machine_of
from dpsim.units import GB
from dpsim.workload import OpClass

PROFILES = files.names(HardwareProfile)
NETWORKS = files.names(Network)
SHIPPED = [(HardwareProfile, name) for name in PROFILES] + [(Network, name) for name in NETWORKS]
EXPECTED_PROFILES = {
    *("k80", "p100-dgx1", "v100-dgx1", "v100-pcie", "gtx1080ti", "rtx2080ti", "titan-rtx"),
    *("titan-rtx-nvlink", "rtx3090", "rtx3090-nvlink", "rtx4090", "a100-sxm", "h100-sxm", "h200"),
}
EXPECTED_NETWORKS = {
    *("1gbe", "10gbe", "20gbe", "25gbe", "40gbe", "100gbe", "roce-400g"),
    *("infiniband-edr", "infiniband-hdr", "infiniband-ndr"),
}
ENTRIES = (Quantity, Table, EfficiencyTable, CollectiveTable)


def entries(record: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every entry that has a source, with its place in the record."""
    if isinstance(record, ENTRIES):
        yield path, record
    elif isinstance(record, dict):
        for key, value in record.items():
            yield from entries(value, f"{path}.{key}")
    elif isinstance(record, tuple):
        for i, value in enumerate(record):
            yield from entries(value, f"{path}.{i}")
    elif dataclasses.is_dataclass(record):
        for field in dataclasses.fields(record):
            yield from entries(getattr(record, field.name), f"{path}.{field.name}")


def profile(name: str) -> HardwareProfile:
    """Return a shipped profile."""
    return files.find(HardwareProfile, name)


def find_table(name: str, collective: str, ranks: int, nodes: int = 1) -> CollectiveTable:
    """Return the one table of a profile for these ranks."""
    (table,) = (
        table
        for table in profile(name).collectives
        if (table.collective, table.ranks, table.nodes) == (collective, ranks, nodes)
    )
    return table


def bus_bandwidth(table: CollectiveTable, i: int) -> float:
    """Return the bus bandwidth of one entry of a table, GB/s."""
    factor = bus_factor(table.collective, table.ranks)
    return factor * table.nbytes[i] / table.seconds[i] / GB


def test_all_are_shipped() -> None:
    assert EXPECTED_PROFILES == set(PROFILES)
    assert EXPECTED_NETWORKS == set(NETWORKS)


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_a_file_is_what_dpsim_writes(kind: type[Any], name: str) -> None:
    record = files.find(kind, name)
    text = (bundled(files.FOLDERS[kind]) / f"{name}.json").read_text(encoding="utf-8")
    assert files.dumps(record) == text
    assert record.name == name


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_every_entry_says_where_it_comes_from(kind: type[Any], name: str) -> None:
    for path, entry in entries(files.find(kind, name)):
        assert len(entry.source) >= 10, path  # more than "?" or a bare unit
        if entry.basis in (Basis.ASSUMED, Basis.MODELLED):
            assert entry.spread > 0, path


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_assumed_entries_are_wide(kind: type[Any], name: str) -> None:
    for path, entry in entries(files.find(kind, name)):
        if entry.basis is Basis.ASSUMED:
            assert entry.spread >= 0.15, path


@pytest.mark.parametrize("name", PROFILES)
def test_networks_that_are_named_exist(name: str) -> None:
    named = {profile(name).network, *(table.network for table in profile(name).collectives)}
    assert named - {""} <= set(NETWORKS)


@pytest.mark.parametrize("name", PROFILES)
def test_tables_of_several_nodes_name_their_network(name: str) -> None:
    for table in profile(name).collectives:
        assert (table.nodes > 1) == (table.network != "")


@pytest.mark.parametrize("name", PROFILES)
def test_ends_have_the_names_that_routes_look_for(name: str) -> None:
    topology = profile(name).topology
    ends = {end for link in topology.links for end in link.ends}
    assert all(re.fullmatch(r"(gpu|switch|nvswitch|cpu|nic)\d+", end) for end in ends)
    assert {f"gpu{i}" for i in range(topology.gpus)} == {e for e in ends if e.startswith("gpu")}


@pytest.mark.parametrize("name", PROFILES)
def test_a_network_has_its_nics(name: str) -> None:
    it = profile(name)
    nics = {end for link in it.topology.links for end in link.ends if end.startswith("nic")}
    drawn = it.nics_per_node if it.network else 0
    assert {f"nic{i}" for i in range(drawn)} == nics


@pytest.mark.parametrize("name", PROFILES)
def test_every_pair_has_a_way_that_the_topology_allows(name: str) -> None:
    it = profile(name)
    machine = machine_of(it, None, it.topology.gpus, 1)
    for i, j in itertools.combinations(range(it.topology.gpus), 2):
        route = machine.route(f"gpu{i}", f"gpu{j}")
        assert route.peer != route.staged
        assert route.peer or it.topology.peer_access != "all"
        assert route.staged or it.topology.peer_access != "none"
    for i in range(it.topology.gpus):
        assert not machine.route("host0", f"gpu{i}").staged


@pytest.mark.parametrize("name", [name for name in PROFILES if profile(name).network])
def test_two_nodes_reach_each_other(name: str) -> None:
    it = profile(name)
    network = files.find(Network, it.network)
    machine = machine_of(it, network, 2 * it.topology.gpus, 2)
    route = machine.route("gpu0", f"gpu{it.topology.gpus}")
    assert 0 < route.bandwidth_bytes_per_s <= network.bandwidth_bytes_per_s.value
    assert route.staged != network.rdma


@pytest.mark.parametrize(
    ("name", "pair", "is_peer", "gb_per_s"),
    [
        ("a100-sxm", (0, 7), True, 274),
        ("v100-dgx1", (0, 3), True, 48.4),  # two links
        ("v100-dgx1", (0, 1), True, 24.2),  # one
        ("v100-dgx1", (0, 4), True, 48.4),  # to the other quad
        ("v100-dgx1", (0, 5), False, 9),  # none: past host memory, across the sockets
        ("p100-dgx1", (0, 4), True, 18.3),
        ("k80", (0, 1), True, 11.3),  # one board
        ("k80", (0, 15), False, 9),
        ("rtx2080ti", (0, 1), False, 12),
        ("rtx4090", (0, 1), False, 22),
        ("titan-rtx", (0, 1), False, 11.4),
        ("titan-rtx-nvlink", (0, 1), True, 47.9),
        ("rtx3090-nvlink", (0, 1), True, 52),
    ],
)
def test_copies_between_gpus(
    name: str, pair: tuple[int, int], is_peer: bool, gb_per_s: float
) -> None:
    it = profile(name)
    route = machine_of(it, None, it.topology.gpus, 1).route(f"gpu{pair[0]}", f"gpu{pair[1]}")
    assert is_peer == route.peer
    assert pytest.approx(gb_per_s * GB) == route.bandwidth_bytes_per_s


@pytest.mark.parametrize(("name", "one"), [("v100-dgx1", 24.2), ("p100-dgx1", 18.3)])
def test_the_hybrid_cube_mesh_uses_all_links_of_every_gpu(name: str, one: float) -> None:
    """6 NVLinks on V100 and 4 on P100, NVIDIA's data sheets."""
    links: Counter[str] = Counter()
    for link in profile(name).topology.links:
        if link.kind == "nvlink":
            width = round(link.bandwidth_bytes_per_s.value / (one * GB))
            links.update(dict.fromkeys(link.ends, width))
    count = {"v100-dgx1": 6, "p100-dgx1": 4}[name]
    assert dict.fromkeys((f"gpu{i}" for i in range(8)), count) == dict(links)


@pytest.mark.parametrize("name", PROFILES)
def test_every_op_class_has_an_efficiency_in_every_precision(name: str) -> None:
    device = profile(name).device
    known = {(table.op_class, table.dtype) for table in device.efficiency}
    for op_class in set(OpClass) - {OpClass.VIEW}:
        for dtype in device.peak_flop_per_s:
            assert {(op_class, dtype), (op_class, "")} & known, (op_class, dtype)
    assert len(known) == len(device.efficiency)  # no table is hidden by another


@pytest.mark.parametrize("name", PROFILES)
def test_larger_kernels_are_not_less_efficient(name: str) -> None:
    for table in profile(name).device.efficiency:
        assert sorted(table.share) == list(table.share)


@pytest.mark.parametrize("name", PROFILES)
def test_more_gpus_do_not_have_a_faster_graph_over_host_or_pcie(name: str) -> None:
    """Only NVLink has links that more GPUs can use."""
    graphs = [graph for graph in profile(name).nccl if graph.path != "nvlink"]
    rates = [graph.channels * graph.channel_bytes_per_s.value for graph in graphs]
    assert sorted(rates, reverse=True) == rates


@pytest.mark.parametrize(
    ("name", "collective", "ranks", "nbytes", "printed"),
    [
        # https://github.com/microsoft/superbenchmark/tree/700d6501f110/tests/data
        ("a100-sxm", "all_reduce", 8, 2**30, 230.29),
        ("a100-sxm", "all_reduce", 8, 2**33, 235.26),
        ("a100-sxm", "broadcast", 8, 2**33, 232.81),
        # index id 5426557276, OCI BM.GPU3.8
        ("v100-dgx1", "all_reduce", 8, 2**30, 135.50),
        # https://github.com/xxrjun/nccl-tests-cluster/tree/455de4f8dee2/benchmarks/example-cluster01
        ("h100-sxm", "all_reduce", 8, 2**34, 482.27),
        # https://github.com/stas00/ml-engineering/blob/744d01e18b79/network/README.md
        ("h200", "all_reduce", 8, 2**34, 482.26),
        # index id 34568999262
        ("rtx2080ti", "all_reduce", 8, 2**27, 2.46),
        # index id 54386745728
        ("rtx4090", "all_reduce", 4, 2**31, 2.59),
    ],
)
def test_tables_give_the_bus_bandwidth_that_the_logs_print(
    name: str, collective: str, ranks: int, nbytes: int, printed: float
) -> None:
    table = find_table(name, collective, ranks)
    actual = bus_bandwidth(table, table.nbytes.index(nbytes))
    assert pytest.approx(printed, rel=0.003) == actual  # logs print three digits, or two decimals


@pytest.mark.parametrize("name", PROFILES)
def test_no_table_beats_its_wires(name: str) -> None:
    """In one node a ring cannot; NVLS halves the traffic of an all-reduce."""
    it = profile(name)
    for table in (table for table in it.collectives if table.nodes == 1):
        graph = next(graph for graph in it.nccl if graph.gpus >= table.ranks)
        rate = graph.channels * graph.channel_bytes_per_s.value / GB
        limit = rate * (2 if graph.nvls else 1.25)  # graphs say what the largest sizes reach
        assert max(bus_bandwidth(table, i) for i in range(len(table.nbytes))) <= limit


@pytest.mark.parametrize("name", [name for name in PROFILES if profile(name).collectives])
def test_nccl_graphs_agree_with_measured_large_all_reduces(name: str) -> None:
    """Within 25 %: the graph is a fact about links, and NCCL's model is coarse below 1 GiB."""
    it = profile(name)
    for table in it.collectives:
        if table.collective != "all_reduce":
            continue
        network = files.find(Network, table.network) if table.network else None
        fabric = fabric_of(it, network, table.ranks, table.nodes)
        call = Call(collective="all_reduce", nbytes=int(table.nbytes[-1]))
        modelled = ALGORITHMS.get("nccl")(call, fabric)
        wide = 0.35 if table.nodes > 1 else 0.25  # over nodes switches may reduce
        assert pytest.approx(table.seconds[-1], rel=wide) == modelled
