import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibrate.optimizer import (
    CHUNK_ELEMENTS,
    IMPLEMENTATIONS,
    MAX_BLOCKS,
    MAX_TENSORS,
    OPTIMIZERS,
    launches,
    optimizer_ops,
)

SHAPES = [torch.empty(n, device="meta") for n in (10, 300, 1_000, 70_000)]
ELEMENTS = sum(p.numel() for p in SHAPES)


@pytest.mark.parametrize(
    ("name", "implementation", "bytes_per_element"),
    [
        ("sgd", "foreach", 12),
        ("sgd", "fused", 12),
        ("sgd", "for-loop", 12),
        ("momentum", "foreach", 32),
        ("momentum", "fused", 20),
        ("momentum", "for-loop", 32),
        ("adam", "foreach", 72),
        ("adam", "fused", 28),
        ("adam", "for-loop", 72),
        ("adamw", "foreach", 80),  # its default weight decay scales the parameters: 8 more
        ("adamw", "fused", 28),
        ("adamw", "for-loop", 80),
    ],
)
def test_bytes_are_those_of_the_second_step(name, implementation, bytes_per_element):
    found = optimizer_ops(name, implementation, SHAPES)
    assert (name, implementation) == (found.name, found.implementation)
    moved = sum(op.bytes_moved.fixed for op in found.ops)
    steps = 8 * len(SHAPES) if implementation == "fused" and "adam" in name else 0
    assert bytes_per_element * ELEMENTS + steps == moved


@pytest.mark.parametrize(
    ("name", "copies"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2)]
)
def test_state_is_a_multiple_of_the_parameters(name, copies):
    states = {optimizer_ops(name, way, SHAPES).state_bytes for way in IMPLEMENTATIONS}
    assert {copies * 4 * ELEMENTS} == states


def test_loop_launches_every_call_for_every_tensor():
    kernels = {
        name: sum(op.kernels for op in optimizer_ops(name, "for-loop", SHAPES).ops)
        for name in OPTIMIZERS
    }
    calls = {"sgd": 1, "momentum": 3, "adam": 7, "adamw": 8}
    assert {name: count * len(SHAPES) for name, count in calls.items()} == kernels


def test_step_counters_of_adam_stay_on_the_host():
    ops = optimizer_ops("adam", "foreach", SHAPES).ops
    host = [op.name for op in ops if not op.kernels]
    # two bias corrections ask each counter
    assert 2 * len(SHAPES) == host.count("aten._local_scalar_dense")
    assert 1 == host.count("aten._foreach_add_")


@pytest.mark.parametrize(
    ("sizes", "max_tensors", "expected"),
    [
        ([], 110, 0),
        ([0, 0], 110, 0),
        ([1], 110, 1),
        ([1] * 110, 110, 1),
        ([1] * 111, 110, 2),
        ([1] * 161, 64, 3),
        ([CHUNK_ELEMENTS * MAX_BLOCKS], 110, 1),
        ([CHUNK_ELEMENTS * MAX_BLOCKS + 1], 110, 2),
        # the tensor that is cut counts again: 319 blocks, then its second chunk and 109 more
        ([CHUNK_ELEMENTS * 319, CHUNK_ELEMENTS * 2, *[1] * 110], 110, 3),
    ],
)
def test_launches_follow_the_chunks_of_multi_tensor_apply(sizes, max_tensors, expected):
    assert expected == launches(sizes, max_tensors)


@given(st.lists(st.integers(0, 50 * CHUNK_ELEMENTS), max_size=300), st.sampled_from(MAX_TENSORS))
def test_launches_lie_between_their_bounds(sizes, max_tensors):
    chunks = [-(-size // CHUNK_ELEMENTS) for size in sizes]
    tensors = sum(count > 0 for count in chunks)
    lower = max(-(-sum(chunks) // MAX_BLOCKS), -(-tensors // max_tensors))
    upper = sum(chunks) // MAX_BLOCKS + tensors // (max_tensors - 1) + 1
    assert lower <= launches(sizes, max_tensors) <= upper
