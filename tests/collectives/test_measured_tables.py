"""Measured collectives: exact on their entries, never smoothed, honest outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.collectives import Call, Fabric
from dpsim.collectives.measured import interpolate, measured
from dpsim.errors import InputError
from dpsim.hardware import Basis, CollectiveTable

Tables = Callable[..., CollectiveTable]
BARE = Fabric(ranks=4, generation=1, path="pcie", channels=1, intra_bytes_per_s=1e9, ll128=False)


def test_between_two_entries_the_logarithms_are_linear(table: Tables) -> None:
    fabric = replace(BARE, tables=(table(nbytes=(1e4, 1e6), seconds=(1e-5, 1e-3)),))
    assert measured(Call(collective="all_reduce", nbytes=100_000), fabric) == pytest.approx(1e-4)


def test_below_the_table_is_latency_and_above_it_bandwidth(table: Tables) -> None:
    fabric = replace(BARE, tables=(table(),))
    times = [measured(Call(collective="all_reduce", nbytes=n), fabric) for n in (1, 1000, 10**9)]
    assert times == pytest.approx([20e-6, 20e-6, 100e-3])


POINTS = st.lists(
    st.tuples(st.integers(1, 1 << 40), st.floats(1e-6, 100)), min_size=1, unique_by=lambda p: p[0]
).map(sorted)


@given(points=POINTS)
def test_entries_are_hit_exactly(points: list[tuple[int, float]]) -> None:
    table = CollectiveTable(
        collective="all_reduce",
        ranks=4,
        nbytes=tuple(float(nbytes) for nbytes, _ in points),
        seconds=tuple(seconds for _, seconds in points),
        basis=Basis.MEASURED,
        source="test",
    )
    for nbytes, seconds in points:
        assert seconds == interpolate(table, nbytes)


@given(nbytes=st.integers(1, 1 << 40))
def test_between_entries_stays_between_their_times(nbytes: int) -> None:
    """A larger call that is faster (a change of protocol) stays in the answer."""
    table = CollectiveTable(
        collective="all_reduce",
        ranks=4,
        nbytes=(1e3, 1e4, 1e5, 1e6),
        seconds=(20e-6, 50e-6, 40e-6, 90e-6),
        basis=Basis.MEASURED,
        source="test",
    )
    got = interpolate(table, nbytes)
    if 1e4 <= nbytes <= 1e5:
        assert 40e-6 <= got <= 50e-6 * (1 + 1e-12)
    assert got >= 20e-6


def test_one_rank_or_no_bytes_need_no_table() -> None:
    call = Call(collective="all_reduce", nbytes=10)
    assert measured(call, replace(BARE, ranks=1)) == 0
    assert measured(replace(call, nbytes=0), BARE) == 0


def test_a_missing_table_lists_those_that_exist() -> None:
    labels = ("all_reduce of 8 GPUs on 1 node", "broadcast of 4 GPUs on 1 node")
    with pytest.raises(InputError) as error:
        measured(Call(collective="all_reduce", nbytes=1), replace(BARE, profile_tables=labels))
    assert str(error.value) == (
        "no measured all_reduce of 4 GPUs on 1 node; measured: all_reduce of 8 GPUs on 1 node, "
        "broadcast of 4 GPUs on 1 node. "
        "Use --all-reduce nccl, or add the table to the profile."
    )


def test_a_profile_without_tables_says_none() -> None:
    with pytest.raises(InputError, match="on 2 nodes of this network; measured: none"):
        measured(Call(collective="all_reduce", nbytes=1), replace(BARE, nodes=2))
