"""The textbook ring: its closed forms, and the recursion it stands for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.collectives import ALGORITHMS, Call, Collective, Fabric, finish_ns, ring_finish_ns
from dpsim.collectives.ring import ring, step_s, steps
from dpsim.errors import InputError
from dpsim.units import to_ns

FABRIC = Fabric(
    ranks=4,
    generation=1,
    path="pcie",
    channels=2,
    intra_bytes_per_s=6e9,
    ll128=False,
    hop_s=5e-6,
)


@given(size=st.integers(1, 1 << 36), ranks=st.integers(2, 512), hop_s=st.floats(0, 1e-3))
def test_all_reduce_is_the_closed_form(size: int, ranks: int, hop_s: float) -> None:
    fabric = replace(FABRIC, ranks=ranks, hop_s=hop_s)
    expected = 2 * (ranks - 1) * hop_s + 2 * (ranks - 1) / ranks * size / 12e9
    assert expected == pytest.approx(ring(Call(collective="all_reduce", nbytes=size), fabric))


@pytest.mark.parametrize("half", ["all_gather", "reduce_scatter"])
def test_an_all_reduce_is_its_two_halves(half: Collective) -> None:
    whole = ring(Call(collective="all_reduce", nbytes=1 << 24), FABRIC)
    assert whole == pytest.approx(2 * ring(Call(collective=half, nbytes=1 << 24), FABRIC))


def test_a_broadcast_fills_the_pipeline_once() -> None:
    """10 MiB over 4 GPUs on PCIe 3: the bytes, and two chunks of 512 KiB to reach the end."""
    fabric = replace(FABRIC, channels=1, intra_bytes_per_s=12e9, hop_s=0)
    call = Call(collective="broadcast", nbytes=10 << 20)
    expected = (10 << 20) / 12e9 + 2 * (512 << 10) / 12e9
    assert expected == pytest.approx(ring(call, fabric))
    assert ring(call, fabric) == ring(replace(call, collective="reduce"), fabric)


def test_a_small_broadcast_is_sent_whole_from_rank_to_rank() -> None:
    call = Call(collective="broadcast", nbytes=1000)
    assert ring(call, FABRIC) == pytest.approx(3 * (5e-6 + 1000 / 12e9))


def test_two_ranks_broadcast_without_filling() -> None:
    call = Call(collective="broadcast", nbytes=1 << 20)
    assert ring(call, replace(FABRIC, ranks=2)) == pytest.approx(5e-6 + (1 << 20) / 12e9)


def test_the_slowest_link_sets_the_step_on_several_nodes() -> None:
    fabric = replace(FABRIC, nodes=2, inter_bytes_per_s=0.5e9)
    call = Call(collective="all_reduce", nbytes=4 << 20)
    assert step_s(call, fabric) == pytest.approx(5e-6 + (1 << 20) / 1e9)


def test_equal_starts_end_where_the_recursion_ends() -> None:
    call = Call(collective="all_reduce", nbytes=48_000_000)  # one step is exactly 1.005 ms
    ready = np.array([5, 900, 17, 0], dtype=np.int64)
    cost = np.full(4, to_ns(step_s(call, FABRIC)), dtype=np.int64)
    expected = ring_finish_ns(ready, cost, steps(call, FABRIC))
    assert expected.tolist() == finish_ns(call, FABRIC, ready, ALGORITHMS.get("ring")).tolist()


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather"])
def test_one_rank_or_no_bytes_take_no_time(collective: Collective) -> None:
    assert ring(Call(collective=collective, nbytes=1 << 20), replace(FABRIC, ranks=1)) == 0
    assert ring(Call(collective=collective, nbytes=0), FABRIC) == 0


def test_a_pipeline_has_no_steps() -> None:
    with pytest.raises(InputError, match=r"^broadcast is a pipeline and has no ring steps$"):
        steps(Call(collective="broadcast", nbytes=1), FABRIC)
