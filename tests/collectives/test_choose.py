"""Names to algorithms, and times to the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dpsim.collectives import ALGORITHMS, Call, Fabric, choose, finish_ns
from dpsim.errors import InputError, UnknownNameError
from dpsim.hardware import CollectiveTable

BARE = Fabric(ranks=4, generation=1, path="pcie", channels=1, intra_bytes_per_s=12e9, ll128=False)
CALL = Call(collective="all_reduce", nbytes=1_000_000)


def test_every_file_is_one_algorithm_with_a_help_text() -> None:
    assert ALGORITHMS.names() == ["measured", "nccl", "ring"]
    for name in ALGORITHMS.names():
        assert ALGORITHMS.get(name).__module__ == f"dpsim.collectives.{name}"
        assert ALGORITHMS.summary(name)


def test_auto_takes_a_table_where_there_is_one(table: Callable[..., CollectiveTable]) -> None:
    known = replace(BARE, tables=(table(),))
    assert choose("auto", CALL, BARE) is ALGORITHMS.get("nccl")
    assert choose("auto", CALL, known) is ALGORITHMS.get("measured")
    assert choose("auto", replace(CALL, collective="reduce"), known) is ALGORITHMS.get("nccl")


@pytest.mark.parametrize("name", ["measured", "nccl", "ring"])
def test_a_name_is_its_file(name: str) -> None:
    assert choose(name, CALL, BARE) is ALGORITHMS.get(name)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError) as error:
        choose("rings", CALL, BARE)
    assert str(error.value) == (
        "no all-reduce algorithm 'rings'; known: auto, measured, nccl, ring. Did you mean 'ring'?"
    )


def test_measured_without_a_table_is_refused_when_it_is_asked() -> None:
    with pytest.raises(InputError, match="no measured all_reduce of 4 GPUs on 1 node"):
        choose("measured", CALL, BARE)(CALL, BARE)


def test_everyone_ends_after_the_last_start() -> None:
    ready = np.array([10, 3_000_000_000_000_000_001, 7], dtype=np.int64)
    finish = finish_ns(CALL, BARE, ready, lambda _call, _fabric: 1.5e-6)
    assert finish.tolist() == [3_000_000_000_000_001_501] * 3
    assert finish.dtype == np.int64
