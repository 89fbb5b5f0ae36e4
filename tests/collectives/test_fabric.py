"""From a hardware profile to the few numbers of NCCL's model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from dpsim.collectives import Call, fabric_of
from dpsim.collectives.nccl import plan
from dpsim.collectives.ring import ring
from dpsim.errors import InfeasibleError, InputError

Make = Callable[..., Any]


def test_the_smallest_graph_that_holds_the_node_is_taken(profile: Make, graph: Make) -> None:
    box = profile(graph(8, 12, 20, "nvlink"), graph(2, 4, 20, "nvlink"), graph(4, 6, 20, "nvlink"))
    assert [fabric_of(box, None, n, 1).channels for n in (2, 3, 4, 5, 8)] == [4, 6, 6, 12, 12]


def test_the_largest_graph_stands_for_more_gpus_than_it_has(profile: Make, graph: Make) -> None:
    assert fabric_of(profile(graph(4, 3, 20, "nvlink")), None, 8, 1).channels == 3


def test_one_node_has_the_graph_and_no_network(profile: Make, graph: Make, network: Make) -> None:
    box = profile(graph(8, 12, 20, "nvlink", nvls=True), architecture="hopper", cpu_vendor="amd")
    fabric = fabric_of(box, network("any", 1), 8, 1)
    assert (fabric.ranks, fabric.nodes, fabric.ranks_per_node) == (8, 1, 8)
    assert (fabric.generation, fabric.cpu_vendor, fabric.path) == (2, "amd", "nvlink")
    assert (fabric.intra_bytes_per_s, fabric.inter_bytes_per_s) == (20e9, math.inf)
    assert (fabric.ll128, fabric.nvls) == (True, True)
    assert fabric.hop_s == pytest.approx(3.4e-6)


@pytest.mark.parametrize(
    ("architecture", "generation"),
    [
        ("pascal", 0),
        ("volta", 0),
        ("turing", 0),
        ("ampere", 1),
        ("ada", 1),
        ("hopper", 2),
        ("blackwell", 3),
    ],
)
def test_generations_go_by_compute_capability(
    profile: Make, architecture: str, generation: int
) -> None:
    assert fabric_of(profile(architecture=architecture), None, 2, 1).generation == generation


@pytest.mark.parametrize(
    ("case", "enabled"),
    [
        (("volta", "nvlink", False, 1), True),
        (("pascal", "nvlink", False, 1), False),  # compute capability below 7.0
        (("volta", "pcie", False, 1), False),  # path worse than NVB
        (("ampere", "host", False, 1), False),
        (("ampere", "nvlink", True, 2), True),
        (("ampere", "nvlink", False, 2), False),  # a TCP NIC is behind the CPU: worse than PXB
        (("ampere", "pcie", True, 2), False),
        (("ampere", "pcie", True, 8), True),  # one GPU a node has no path inside it
    ],
)
def test_ll128_follows_the_path_rule(
    profile: Make, graph: Make, network: Make, case: tuple[str, str, bool, int], *, enabled: bool
) -> None:
    architecture, path, rdma, nodes = case
    box = profile(graph(8, 1, 12, path), architecture=architecture)
    assert fabric_of(box, network("n", 12, rdma=rdma), 8, nodes).ll128 is enabled


def test_eight_nics_make_eight_channels(profile: Make, graph: Make, network: Make) -> None:
    """DGX A100: 12 channels of 20 GB/s inside, 8 NICs of 24 GB/s outside."""
    box = profile(graph(8, 12, 20, "nvlink"), nics_per_node=8)
    fabric = fabric_of(box, network("hdr", 24, rdma=True), 32, 4)
    assert fabric.channels == 8
    assert (fabric.intra_bytes_per_s, fabric.inter_bytes_per_s) == pytest.approx((30e9, 24e9))
    assert fabric.hop_s == pytest.approx(14e-6)


def test_a_fast_nic_has_several_channels(profile: Make, graph: Make, network: Make) -> None:
    box = profile(graph(8, 12, 30, "nvlink"))
    fabric = fabric_of(box, network("xdr", 96, rdma=True), 16, 2)
    assert fabric.channels == 2
    assert fabric.inter_bytes_per_s == pytest.approx(48e9)


def test_between_nodes_is_never_faster_than_inside(
    profile: Make, graph: Make, network: Make
) -> None:
    fabric = fabric_of(profile(graph(8, 1, 6, "host")), network("ndr", 48, rdma=True), 16, 2)
    assert (fabric.channels, fabric.inter_bytes_per_s) == (1, 6e9)


def test_gigabit_ethernet_binds_both_rings_and_trees(
    profile: Make, graph: Make, network: Make
) -> None:
    """Two nodes of two and of four GPUs: reported 7 to 8 and 2 to 3 times slower than one GPU."""
    box = profile(graph(4, 1, 10, "pcie"), architecture="pascal")
    size = 102_228_128
    call = Call(collective="all_reduce", nbytes=size)
    for gpus, sent in ((4, 153.3e6), (8, 178.9e6)):
        fabric = fabric_of(box, network("1gbe", 0.1175), gpus, 2)
        assert (fabric.channels, fabric.inter_bytes_per_s) == (1, 0.1175e9)
        assert ring(call, fabric) == pytest.approx(sent / 0.1175e9, rel=0.01)
        assert plan(call, fabric).seconds >= size / 0.1175e9


def test_tcp_is_capped_by_its_connections(profile: Make, graph: Make, network: Make) -> None:
    """One channel has two connections, of 1.1 GB/s each here, on a NIC of 12 GB/s."""
    box = profile(graph(8, 1, 12, "pcie"))
    slow, fast = (
        fabric_of(box, network("100gbe", 12, flow=1.1, rdma=rdma), 16, 2) for rdma in (False, True)
    )
    assert (slow.inter_bytes_per_s, fast.inter_bytes_per_s) == pytest.approx((2.2e9, 12e9))
    assert (slow.added_latency_s, fast.added_latency_s) == (30e-6, 0.0)
    assert slow.hop_s == pytest.approx(44e-6)


def test_one_gpu_a_node_has_the_nic_alone(profile: Make, graph: Make, network: Make) -> None:
    box = profile(graph(8, 12, 20, "nvlink"), nics_per_node=8)
    fabric = fabric_of(box, network("hdr", 24, rdma=True), 4, 4)
    # 8 NICs, but the GPU's own PCIe link carries 12 GB/s.
    assert (fabric.channels, fabric.intra_bytes_per_s, fabric.inter_bytes_per_s) == (1, 12e9, 12e9)
    slow = fabric_of(box, network("10gbe", 1.2), 4, 4)
    assert slow.channels * slow.ring_bytes_per_s == pytest.approx(9.6e9)


def test_uneven_nodes_run_at_the_slower_graph(profile: Make, graph: Make, network: Make) -> None:
    box = profile(graph(4, 6, 20, "nvlink"), graph(2, 1, 12, "pcie"), nics_per_node=8)
    fabric = fabric_of(box, network("hdr", 24, rdma=True), 5, 2)
    assert (fabric.ranks_per_node, fabric.channels, fabric.path) == (3, 1, "pcie")
    assert fabric.ring_bytes_per_s == 12e9


def test_one_rank_costs_nothing(profile: Make, graph: Make) -> None:
    fabric = fabric_of(profile(graph(8, 1, 12, "pcie")), None, 1, 1)
    assert plan(Call(collective="all_reduce", nbytes=10), fabric).seconds == 0


@pytest.mark.parametrize(("peer_access", "path"), [("all", "pcie"), ("none", "host")])
def test_a_profile_without_graphs_has_a_ring_of_its_links(
    profile: Make, peer_access: str, path: str
) -> None:
    fabric = fabric_of(profile(peer_access=peer_access), None, 4, 1)
    assert (fabric.channels, fabric.intra_bytes_per_s, fabric.path) == (1, 12e9, path)


def test_a_free_network_leaves_the_node(profile: Make, graph: Make, network: Make) -> None:
    box = profile(graph(8, 12, 20, "nvlink"))
    fabric = fabric_of(box, network("free", math.inf, flow=math.inf), 16, 2)
    assert fabric.channels * fabric.ring_bytes_per_s == pytest.approx(240e9)
    free = profile(graph(8, 12, math.inf, "nvlink"))
    assert math.isinf(fabric_of(free, network("free", math.inf, rdma=True), 16, 2).ring_bytes_per_s)


def test_tables_match_ranks_nodes_and_network(profile: Make, table: Make, network: Make) -> None:
    tables = (
        table(ranks=8),
        table(ranks=8, nodes=2, network="hdr"),
        table(ranks=8, nodes=2, network="edr"),
    )
    box = profile(collectives=tables)
    assert fabric_of(box, None, 8, 1).tables == tables[:1]
    assert fabric_of(box, network("edr", 12, rdma=True), 8, 2).tables == tables[2:]
    assert fabric_of(box, network("edr", 12, rdma=True), 8, 4).tables == ()
    assert fabric_of(box, None, 4, 1).profile_tables == (
        "all_reduce of 8 GPUs on 1 node",
        "all_reduce of 8 GPUs on 2 nodes over hdr",
        "all_reduce of 8 GPUs on 2 nodes over edr",
    )


@pytest.mark.parametrize(("gpus", "nodes"), [(2, 3), (0, 1), (4, 0)])
def test_empty_nodes_are_refused(profile: Make, gpus: int, nodes: int) -> None:
    with pytest.raises(InfeasibleError) as error:
        fabric_of(profile(), None, gpus, nodes)
    message = f"{gpus} GPUs cannot be on {nodes} nodes: each needs one or more."
    assert str(error.value) == message


def test_several_nodes_need_a_network(profile: Make) -> None:
    with pytest.raises(InputError) as error:
        fabric_of(profile(), None, 8, 2)
    assert str(error.value) == "8 GPUs on 2 nodes need a network, got none. Name one."
