"""Chunks and buckets, byte for byte."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.scenario import RingOptions
from dpsim.schedules._buckets import buckets
from dpsim.schedules._packing import (
    COALESCE_BYTES,
    broadcast_chunks,
    chunk_batch,
    close_when_full,
    reduce_chunks,
    spread_batch,
)
from dpsim.schedules._sharding import shard
from dpsim.units import MIB
from dpsim.workload import GradientReady, Tensor
from tests.schedules.small import chain, model

BROADCAST = (
    11_821_312,
    12_355_584,
    12_093_440,
    13_639_680,
    12_615_680,
    13_639_680,
    13_651_968,
    12_406_784,
    4_000,
)
REDUCE = (
    9_724_160,
    9_986_048,
    9_994_240,
    6_569_984,
    9_441_280,
    4_210_688,
    8_404_992,
    4_198_400,
    9_441_280,
    8_409_088,
    9_441_280,
    4_210_688,
    8_196_000,
)


def size(tensor: Tensor) -> int:
    return tensor.nbytes


def sizes(chunks: list[list[Tensor]]) -> tuple[int, ...]:
    return tuple(sum(map(size, chunk)) for chunk in chunks)


def test_resnet50_is_broadcast_in_9_chunks_and_reduced_in_13() -> None:
    parameters = model("resnet50").parameters
    assert (161, 102_228_128) == (len(parameters), sum(map(size, parameters)))
    assert BROADCAST == sizes(broadcast_chunks(parameters, size))
    assert REDUCE == sizes(reduce_chunks(parameters, size))


def test_resnet50_has_a_chunk_of_buffers_for_each_dtype() -> None:
    buffers = model("resnet50").buffers
    assert 159 == len(buffers)
    assert (212_480, 424) == sizes(broadcast_chunks(buffers, size))


def test_resnet50_has_the_buckets_of_ddp() -> None:
    workload = model("resnet50")
    packed = buckets(workload, RingOptions(), 3, size)
    found = [sum(workload.parameters[i].nbytes for i in bucket) / MIB for bucket in packed]
    assert [7.82, 30.04, 25.04, 25.32, 9.27] == [round(mib, 2) for mib in found]
    first, last = packed[0], packed[-1]
    assert ["fc.bias", "fc.weight"] == [workload.parameters[i].name for i in first[:2]]
    assert "conv1.weight" == workload.parameters[last[-1]].name


def test_ddp_caps_the_first_bucket_like_the_others_when_a_cap_is_given() -> None:
    workload = chain(12, width=512)  # 1 MiB each
    packed = buckets(workload, RingOptions(bucket_bytes=4 * MIB), 2, size)
    assert [4, 4, 4] == [len(bucket) for bucket in packed]
    packed = buckets(workload, RingOptions(), 2, size)
    assert [1, 11] == [len(bucket) for bucket in packed]


def test_a_sparse_gradient_has_a_bucket_of_its_own() -> None:
    parameters = [
        Tensor(name=name, shape=(10,), sparse_gradient=name == "embedding")
        for name in ("embedding", "a", "b")
    ]
    ready = tuple(GradientReady(parameter=i, after_op=0) for i in (2, 0, 1))
    workload = replace(chain(3), parameters=tuple(parameters), gradients=ready)
    assert ((2, 1), (0,)) == buckets(workload, RingOptions(), 2, size)


CUTS = [
    # batch, GPUs, samples of each, share of the GPUs' time that is used in percent
    (10, 4, (3, 3, 3, 1), 83.3),
    (9, 4, (3, 3, 3), 75),
    (5, 4, (2, 2, 1), 62.5),
    (36, 7, (6,) * 6, 85.7),
    (9, 8, (2, 2, 2, 2, 1), 56.2),
    (17, 8, (3, 3, 3, 3, 3, 2), 70.8),
    (25, 8, (4,) * 6 + (1,), 78.1),
    (33, 8, (5,) * 6 + (3,), 82.5),
    (41, 8, (6,) * 6 + (5,), 85.4),
    (3, 8, (1, 1, 1), 37.5),
    (100, 8, (13,) * 7 + (9,), 96.2),
    (3, 4, (1, 1, 1), 75),
]


@pytest.mark.parametrize(("batch", "gpus", "expected", "balance"), CUTS)
def test_a_batch_is_cut_as_torch_chunk_cuts_it(
    batch: int, gpus: int, expected: tuple[int, ...], balance: float
) -> None:
    chunks = chunk_batch(batch, gpus)
    assert expected == chunks
    assert balance == pytest.approx(100 * batch / (gpus * max(chunks)), abs=0.051)


@given(batch=st.integers(1, 4096), gpus=st.integers(1, 64))
def test_cuts_keep_every_sample(batch: int, gpus: int) -> None:
    torch = pytest.importorskip("torch")
    chunks = chunk_batch(batch, gpus)
    assert batch == sum(chunks) == sum(spread_batch(batch, gpus))
    assert tuple(map(len, torch.arange(batch).chunk(gpus))) == chunks
    spread = spread_batch(batch, gpus)
    assert gpus == len(spread)
    assert max(spread) - min(spread) <= 1


TENSORS = st.lists(
    st.tuples(st.integers(1, 3 * COALESCE_BYTES // 8), st.sampled_from(["float32", "int64"])),
    min_size=1,
    max_size=30,
).map(
    lambda rows: tuple(
        Tensor(name=f"t{i}", shape=(numel,), dtype=dtype) for i, (numel, dtype) in enumerate(rows)
    )
)


@given(TENSORS)
def test_packers_keep_every_tensor_once_in_the_order_of_its_dtype(
    tensors: tuple[Tensor, ...],
) -> None:
    by_dtype = [
        tensor
        for dtype in dict.fromkeys(t.dtype for t in tensors)
        for tensor in tensors
        if tensor.dtype == dtype
    ]
    for pack in (broadcast_chunks, reduce_chunks):
        assert by_dtype == [tensor for chunk in pack(tensors, size) for tensor in chunk]


@given(TENSORS)
def test_broadcast_overshoots_by_less_than_a_tensor_and_reduce_never_does(
    tensors: tuple[Tensor, ...],
) -> None:
    for chunk in broadcast_chunks(tensors, size):
        assert sum(map(size, chunk[:-1])) < COALESCE_BYTES
    for chunk in reduce_chunks(tensors, size):
        assert len(chunk) == 1 or sum(map(size, chunk)) <= COALESCE_BYTES


@given(TENSORS)
def test_reduce_packs_as_torch_does(tensors: tuple[Tensor, ...]) -> None:
    take = pytest.importorskip("torch._utils")._take_tensors
    made = on_meta(tensors)
    expected = [[t.number for t in chunk] for chunk in take(made, COALESCE_BYTES)]
    found = [[int(t.name[1:]) for t in chunk] for chunk in reduce_chunks(tensors, size)]
    # torch gives out full chunks as they fill and what is left last, dtype by dtype.
    assert sorted(expected) == sorted(found)


@given(TENSORS, st.lists(st.integers(1, 30), min_size=1, max_size=3))
def test_buckets_are_packed_as_torch_does(tensors: tuple[Tensor, ...], caps: list[int]) -> None:
    torch = pytest.importorskip("torch")
    assign = torch.distributed._compute_bucket_assignment_by_size
    limits = [cap * MIB for cap in caps]
    workload = replace(
        chain(1),
        parameters=tensors,
        gradients=tuple(GradientReady(parameter=i, after_op=0) for i in range(len(tensors))),
    )
    expected, _ = assign(
        [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in tensors],
        limits,
    )
    options = RingOptions(bucket_list_bytes=tuple(map(float, limits)))
    found = buckets(workload, options, 2, size)
    assert [tuple(bucket) for bucket in expected] == list(found)


def on_meta(tensors: tuple[Tensor, ...]) -> list[Any]:
    torch = pytest.importorskip("torch")
    made = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in tensors]
    for number, tensor in enumerate(made):
        tensor.number = number
    return made


def test_a_chunk_may_be_exactly_full() -> None:
    half = [Tensor(name=f"t{i}", shape=(COALESCE_BYTES // 8,)) for i in range(5)]
    assert [2, 2, 1] == [len(chunk) for chunk in reduce_chunks(half, size)]
    assert [2, 2, 1] == [len(chunk) for chunk in broadcast_chunks(half, size)]


def test_limits_of_buckets_are_used_in_turn_and_the_last_repeats() -> None:
    tensors = [Tensor(name=f"t{i}", shape=(1,)) for i in range(9)]  # 4 bytes each
    assert [1, 3, 3, 2] == [len(g) for g in close_when_full(tensors, size, [4, 12])]
    assert [[]] == [close_when_full([], size, [4])]


def test_servers_keep_every_byte_of_what_is_trained_and_nothing_else() -> None:
    parameters = (
        Tensor(name="big", shape=(1_000_003,)),
        Tensor(name="frozen", shape=(10,), trainable=False),
        Tensor(name="small", shape=(999_999,)),
    )
    for rule in ("split", "round-robin", "greedy"):
        parts = shard(parameters, 3, rule, size)
        assert [0, 2] == list(parts)
        for index, pieces in parts.items():
            assert parameters[index].nbytes == sum(piece.nbytes for piece in pieces)
            assert parameters[index].numel == sum(piece.numel for piece in pieces)


def test_only_tensors_of_a_million_elements_are_split() -> None:
    parameters = (Tensor(name="big", shape=(1_000_000,)), Tensor(name="small", shape=(999_999,)))
    parts = shard(parameters, 4, "split", size)
    assert ([0, 1, 2, 3], [1 * 9973 % 4]) == (
        [piece.server for piece in parts[0]],
        [piece.server for piece in parts[1]],
    )
