"""Bytes on the links of a ring, and the two bandwidths of benchmarks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.collectives import Call, Collective, bus_factor, traffic
from dpsim.errors import InputError

COLLECTIVES: tuple[Collective, ...] = (
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter",
)  # fmt: skip


def walk(collective: Collective, nbytes: int, ranks: int) -> list[int]:
    """Return the bytes that each rank sends, shard by shard, as the kernels do it."""
    shards = [nbytes // ranks + (i < nbytes % ranks) for i in range(ranks)]
    sent = [0] * ranks
    for r in range(ranks):
        if collective in ("all_reduce", "reduce_scatter"):
            sent[r] += sum(shards[(r - 1 - step) % ranks] for step in range(ranks - 1))
        if collective in ("all_reduce", "all_gather"):
            sent[r] += sum(shards[(r - step) % ranks] for step in range(ranks - 1))
    return sent


@given(
    collective=st.sampled_from(("all_reduce", "all_gather", "reduce_scatter")),
    nbytes=st.integers(0, 1 << 40),
    ranks=st.integers(1, 64),
)
def test_shards_sent_are_those_of_the_kernels(
    collective: Collective, nbytes: int, ranks: int
) -> None:
    sent, _ = traffic(Call(collective=collective, nbytes=nbytes), ranks)
    assert walk(collective, nbytes, ranks) == sent.tolist()


@given(
    collective=st.sampled_from(COLLECTIVES),
    nbytes=st.integers(0, 1 << 40),
    ranks=st.integers(1, 64),
)
def test_bytes_sent_are_bytes_received(collective: Collective, nbytes: int, ranks: int) -> None:
    sent, received = traffic(Call(collective=collective, nbytes=nbytes), ranks)
    passes = 2 if collective == "all_reduce" else 1
    assert passes * (ranks - 1) * nbytes == sent.sum() == received.sum()
    assert [int(sent[r - 1]) for r in range(ranks)] == received.tolist()


def test_an_all_reduce_sends_almost_twice_the_vector() -> None:
    sent, _ = traffic(Call(collective="all_reduce", nbytes=102_228_128), 4)
    assert sent.tolist() == [153_342_192] * 4  # 2(N-1)/N of ResNet-50


def test_a_broadcast_starts_and_a_reduce_ends_at_rank_0() -> None:
    sent, received = traffic(Call(collective="broadcast", nbytes=7), 4)
    assert (sent.tolist(), received.tolist()) == ([7, 7, 7, 0], [0, 7, 7, 7])
    sent, received = traffic(Call(collective="reduce", nbytes=7), 4)
    assert (sent.tolist(), received.tolist()) == ([0, 7, 7, 7], [7, 0, 7, 7])


def test_no_ranks_are_refused() -> None:
    with pytest.raises(InputError, match=r"^a collective needs 1 rank or more, got 0$"):
        traffic(Call(collective="reduce", nbytes=7), 0)


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(InputError, match=r"^reduce: nbytes must be >= 0, got -1$"):
        Call(collective="reduce", nbytes=-1)


@pytest.mark.parametrize(
    ("ranks", "milliseconds", "bus"),
    [(8, 8.14, 230.8), (16, 35.2, 57.2), (24, 64.8, 31.8), (32, 70.3, 29.6)],
)
def test_bus_bandwidth_of_1_gib_on_p4d_nodes(ranks: int, milliseconds: float, bus: float) -> None:
    """github.com/NVIDIA/nccl/issues/527: GB/s from GiB, the mistake most often made."""
    got = (1 << 30) / (milliseconds / 1e3) * bus_factor("all_reduce", ranks) / 1e9
    assert bus == pytest.approx(got, rel=0.003)


def test_bus_factors_of_the_other_collectives() -> None:
    factors = [bus_factor(collective, 4) for collective in COLLECTIVES]
    assert factors == [1.5, 1.0, 1.0, 0.75, 0.75]
    assert [bus_factor(collective, 1) for collective in COLLECTIVES] == [0, 1, 1, 0, 0]
