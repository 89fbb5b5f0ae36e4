"""NCCL's model: its published arithmetic, the reported cases, and its limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.collectives import Call, Collective, Fabric, bus_factor
from dpsim.collectives.nccl import _intra_us, _plateau, nccl, plan

PCIE = Fabric(ranks=4, generation=0, path="pcie", channels=1, intra_bytes_per_s=12e9, ll128=True)
"""Four GPUs on PCIe 3. LL128 is on although the path rule forbids it: so are the vectors."""
A100 = Fabric(ranks=8, generation=1, path="nvlink", channels=12, intra_bytes_per_s=20e9, ll128=True)
FOUR_NODES = Fabric(
    ranks=32,
    nodes=4,
    generation=1,
    path="nvlink",
    channels=8,
    intra_bytes_per_s=24e9,
    inter_bytes_per_s=24e9,
    ll128=True,
)
H100 = Fabric(
    ranks=8, generation=2, path="nvlink", channels=12, intra_bytes_per_s=30e9, ll128=True, nvls=True
)
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 256 * KIB, MIB, 10 * MIB, 25 * MIB, 100 * MIB)

# Microseconds and choices computed by hand-checked arithmetic of NCCL 2.30.7, tuning.cc.
VECTORS: list[tuple[Fabric, Collective, tuple[str, ...]]] = [
    (PCIE, "all_reduce", (
        "13.6 ring LL", "64.6 ring LL128", "171.5 ring LL128",
        "1353.3 ring Simple", "3319.4 ring Simple", "13149.8 ring Simple",
    )),
    (PCIE, "broadcast", (
        "8.3 ring LL", "35.9 ring Simple", "101.5 ring Simple",
        "887.9 ring Simple", "2198.6 ring Simple", "8752.2 ring Simple",
    )),
    (A100, "all_reduce", (
        "15.1 ring LL", "20.2 ring LL", "35.9 ring LL",
        "123.7 ring LL128", "247.1 ring Simple", "820.6 ring Simple",
    )),
    (A100, "broadcast", (
        "7.2 ring LL", "10.2 ring LL", "16.2 ring Simple",
        "55.5 ring Simple", "121.0 ring Simple", "448.7 ring Simple",
    )),
    (FOUR_NODES, "all_reduce", (
        "35.8 tree LL", "72.0 tree LL128", "91.7 tree LL128",
        "240.0 tree LL128", "461.8 ring LL128", "1414.2 ring LL128",
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fabric", "collective", "nbytes", "expected"),
    [
        (fabric, collective, nbytes, expected)
        for fabric, collective, row in VECTORS
        for nbytes, expected in zip(SIZES, row, strict=True)
    ],
)
def test_times_and_choices_are_those_of_nccl(
    fabric: Fabric, collective: Collective, nbytes: int, expected: str
) -> None:
    time, algorithm, protocol = expected.split()
    got = plan(Call(collective=collective, nbytes=nbytes), fabric)
    assert (algorithm, protocol) == (got.algorithm, got.protocol)
    # The vectors are printed to 0.1 us.
    assert float(time) == pytest.approx(got.seconds * 1e6, abs=0.051)


@given(nbytes=st.integers(0, 1 << 33), fabric=st.sampled_from((PCIE, A100, FOUR_NODES)))
def test_reduce_costs_what_a_broadcast_costs(nbytes: int, fabric: Fabric) -> None:
    broadcast = plan(Call(collective="broadcast", nbytes=nbytes), fabric)
    assert broadcast == plan(Call(collective="reduce", nbytes=nbytes), fabric)


BROADCAST_CHUNKS = (
    11_821_312, 12_355_584, 12_093_440, 13_639_680, 12_615_680, 13_639_680, 13_651_968, 12_406_784,
    4_000,
)  # fmt: skip
REDUCE_CHUNKS = (
    9_724_160, 9_986_048, 9_994_240, 6_569_984, 9_441_280, 4_210_688, 8_404_992, 4_198_400,
    9_441_280, 8_409_088, 9_441_280, 4_210_688, 8_196_000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("fabric", "broadcast_ms", "reduce_ms", "sum_ms"),
    [
        (replace(PCIE, ll128=False), 8.65, 8.70, 17.3),
        (A100, 0.53, 0.58, 1.1),
    ],
)
def test_data_parallel_moves_resnet50_in_the_known_time(
    fabric: Fabric, broadcast_ms: float, reduce_ms: float, sum_ms: float
) -> None:
    """PyTorch's 9 broadcast and 13 reduce chunks of ResNet-50 (102 MB each way)."""
    down = sum(nccl(Call(collective="broadcast", nbytes=c), fabric) for c in BROADCAST_CHUNKS)
    up = sum(nccl(Call(collective="reduce", nbytes=c), fabric) for c in REDUCE_CHUNKS)
    assert sum(BROADCAST_CHUNKS) == sum(REDUCE_CHUNKS) == 102_228_128
    # 8.65 takes Simple for the last chunk of 4 kB too, where LL saves 6 us; the rest is rounding.
    assert broadcast_ms == pytest.approx(down * 1e3, abs=0.011)
    assert reduce_ms == pytest.approx(up * 1e3, abs=0.005)
    assert sum_ms == pytest.approx((down + up) * 1e3, abs=0.05)


def test_nvls_reaches_what_eight_h100_measure() -> None:
    """nccl-tests 2.17.8 with NCCL 2.29: 1 GiB in 4000.8 us, 470 GB/s on the bus."""
    got = plan(Call(collective="all_reduce", nbytes=1 << 30), H100)
    assert (got.algorithm, got.protocol) == ("nvls", "Simple")
    assert got.seconds == pytest.approx(4000.8e-6, rel=0.02)  # the model is 0.7 % below


def test_nvls_needs_the_switch_one_node_and_hopper() -> None:
    call = Call(collective="all_reduce", nbytes=1 << 30)
    for fabric in (
        replace(H100, nvls=False),
        replace(H100, generation=1),
        replace(H100, nodes=2, inter_bytes_per_s=30e9),
    ):
        assert plan(call, fabric).algorithm != "nvls"
    assert plan(Call(collective="broadcast", nbytes=1 << 30), H100).algorithm == "ring"


def test_pat_is_offered_with_one_gpu_a_node_only() -> None:
    call = Call(collective="all_gather", nbytes=1 << 20)
    spread = replace(FOUR_NODES, ranks=64, nodes=64)
    assert plan(call, spread).algorithm == "pat"
    assert plan(call, replace(spread, ranks=128)).algorithm == "ring"
    assert plan(replace(call, collective="all_reduce"), spread).algorithm == "tree"


def test_without_ll128_middle_sizes_take_ll_or_simple() -> None:
    plain = replace(PCIE, ll128=False)
    protocols = [plan(Call(collective="all_reduce", nbytes=n), plain).protocol for n in SIZES]
    assert protocols == ["LL", "Simple", "Simple", "Simple", "Simple", "Simple"]


GBE = Fabric(
    ranks=4,
    nodes=2,
    generation=0,
    path="pcie",
    channels=1,
    intra_bytes_per_s=12e9,
    inter_bytes_per_s=0.1175e9,
    network_latency_s=50e-6,
    rdma=False,
    ll128=False,
)
"""Two nodes of two GPUs over gigabit Ethernet."""


@given(
    nbytes=st.integers(1, 1 << 32),
    ranks=st.integers(2, 64),
    nic=st.sampled_from((0.1175e9, 1.17e9, 12e9, 24e9)),
    channels=st.integers(1, 16),
)
def test_two_nodes_never_beat_their_nic(nbytes: int, ranks: int, nic: float, channels: int) -> None:
    """Each node must at least send its half of the sum and its half of the result: S bytes."""
    fabric = replace(
        GBE,
        ranks=ranks,
        channels=channels,
        intra_bytes_per_s=1e12,
        inter_bytes_per_s=nic / channels,
        network_latency_s=0.0,
        ll128=True,
    )
    assert nccl(Call(collective="all_reduce", nbytes=nbytes), fabric) >= nbytes / nic


def test_gigabit_ethernet_binds_two_nodes_although_the_formula_says_intra() -> None:
    """ResNet-50 on 2 x 2 GPUs: the ring sends 1.5 S over each NIC, the trees S at 0.92 x 0.8."""
    got = plan(Call(collective="all_reduce", nbytes=102_228_128), GBE)
    assert got.algorithm == "tree"
    assert got.seconds == pytest.approx(102_228_128 / (0.92 * 0.8 * 0.1175e9), rel=0.001)


def test_tcp_pays_its_latency_and_rdma_does_not() -> None:
    call = Call(collective="all_reduce", nbytes=8)
    tcp, rdma = nccl(call, GBE), nccl(call, replace(GBE, rdma=True))
    # A tree of two nodes crosses the network twice; LL pays the latency once a crossing.
    assert tcp - rdma == pytest.approx(2 * 50e-6)


HAND_COMPUTED: dict[str, tuple[Fabric, Call, str, float]] = {
    # 14 + 2 * 6 * 8.5 us; 142.4 * 120/128 * 0.85 / 2 * 0.6 GB/s
    "plain tree of 64 nodes with one GPU each": (
        replace(FOUR_NODES, ranks=64, nodes=64),
        Call(collective="all_reduce", nbytes=MIB),
        "tree LL128",
        116e-6 + MIB / 34.0425e9,
    ),
    # 8 + 6 * 14 / 3.5 + 64 * 2.8 us; 192 * 0.75 GB/s
    "PAT over InfiniBand": (
        replace(FOUR_NODES, ranks=64, nodes=64),
        Call(collective="all_gather", nbytes=MIB),
        "pat Simple",
        211.2e-6 + MIB / 144e9,
    ),
    # each hop 14 + 2 * 20 us
    "PAT over TCP": (
        replace(FOUR_NODES, ranks=64, nodes=64, rdma=False, network_latency_s=20e-6, ll128=False),
        Call(collective="all_gather", nbytes=MIB),
        "pat Simple",
        (8 + 6 * 54 / 3.5 + 179.2) * 1e-6 + MIB / 144e9,
    ),
    # 6.6 + one hop of 5.0 us, the tree's, because nothing hides it
    "ring of two nodes with one GPU each": (
        replace(FOUR_NODES, ranks=2, nodes=2),
        Call(collective="all_gather", nbytes=64),
        "ring LL",
        11.6e-6 + 64 / (39e9 * 2),
    ),
    # (8.4 + 24 * 5.7 + 6 * 14) * 1.9 us
    "long ring of Volta on Intel": (
        replace(PCIE, ranks=16, nodes=4, inter_bytes_per_s=12e9, ll128=False),
        Call(collective="all_reduce", nbytes=1 << 30),
        "ring Simple",
        435.48e-6 + (1 << 30) * 30 / 16 / 12e9,
    ),
    # posting costs 3 * 2 us, more than the hop of 5.7
    "long ring of Ampere on AMD": (
        replace(
            PCIE,
            ranks=16,
            nodes=4,
            generation=1,
            cpu_vendor="amd",
            inter_bytes_per_s=12e9,
            ll128=False,
        ),
        Call(collective="all_reduce", nbytes=1 << 30),
        "ring Simple",
        (8.4 + 24 * 6 + 6 * 14) * 1.4e-6 + (1 << 30) * 30 / 16 / 12e9,
    ),
    # 6.6 + 28 * 1 + 3 * 2.7 us; 20.4 GB/s
    "LL between Intel hosts": (
        replace(FOUR_NODES, ll128=False),
        Call(collective="reduce_scatter", nbytes=64 * KIB),
        "ring LL",
        42.7e-6 + 64 * KIB / (20.4e9 * 32 / 31),
    ),
    # 6.6 + 28 * 2 + 3 * 2.7 us; 19 GB/s
    "LL between AMD hosts": (
        replace(FOUR_NODES, ll128=False, cpu_vendor="amd"),
        Call(collective="reduce_scatter", nbytes=64 * KIB),
        "ring LL",
        70.7e-6 + 64 * KIB / (19e9 * 32 / 31),
    ),
    # 90 GB/s is the highest speed that the search tries for a channel
    "NVLS on Blackwell": (
        replace(H100, generation=3, channels=24),
        Call(collective="all_reduce", nbytes=1 << 30),
        "nvls Simple",
        25e-6 + (1 << 30) / (8 * 90e9 * 8 / 14),
    ),
}
"""Each with the arithmetic of tuning.cc done by hand: microseconds and GB/s in the comment."""


@pytest.mark.parametrize("case", HAND_COMPUTED)
def test_hand_computed_corners(case: str) -> None:
    fabric, call, choice, seconds = HAND_COMPUTED[case]
    got = plan(call, fabric)
    assert choice == f"{got.algorithm} {got.protocol}"
    assert seconds == pytest.approx(got.seconds, rel=1e-6)


def test_long_rings_pay_the_plateau_from_64_bytes_a_channel_and_rank() -> None:
    """The choice hides it: LL wins at such sizes."""
    small, large = (
        _plateau(Call(collective="all_reduce", nbytes=64 * 8 * 32 - less), FOUR_NODES, "Simple")
        for less in (1, 0)
    )
    assert (1.0, 1.4) == (small, large)


def test_power_trees_have_the_latency_of_rings() -> None:
    """The choice hides it: rings win inside a node, so the private function is asked."""
    power = replace(PCIE, cpu_vendor="power")
    assert _intra_us(power, "tree", "Simple") == 5.7
    assert _intra_us(PCIE, "tree", "Simple") == 4.0


def test_trees_below_64_bytes_are_not_corrected() -> None:
    small = plan(Call(collective="all_reduce", nbytes=63), FOUR_NODES)
    assert small.algorithm == "tree"
    assert small.seconds > 0


@pytest.mark.parametrize(
    "collective", ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"]
)
@pytest.mark.parametrize("fabric", [PCIE, A100, FOUR_NODES, H100, GBE])
def test_limits(collective: Collective, fabric: Fabric) -> None:
    big = Call(collective=collective, nbytes=1 << 36)
    assert nccl(big, replace(fabric, ranks=1, nodes=1)) == 0
    assert nccl(Call(collective=collective, nbytes=0), fabric) == 0
    rates = [nbytes / nccl(Call(collective=collective, nbytes=nbytes), fabric) for nbytes in SIZES]
    assert sorted(rates) == pytest.approx(rates, rel=0.35)  # protocol changes make small dents
    # In the limit, the bus carries what the channels do; a tree on two nodes up to 1.84 times.
    bus = big.nbytes / nccl(big, fabric) * bus_factor(collective, fabric.ranks)
    ideal = fabric.channels * fabric.ring_bytes_per_s
    assert 0.9 * ideal <= bus <= 1.85 * ideal


def test_free_links_leave_the_latency() -> None:
    free = replace(A100, channels=1, intra_bytes_per_s=math.inf)
    small, large = (plan(Call(collective="broadcast", nbytes=n), free) for n in (1, 1 << 30))
    assert small.seconds == pytest.approx(7.2e-6, rel=1e-4)
    assert large.seconds == pytest.approx(11.8e-6, rel=1e-4)
