"""The short cuts of a ring equal one SimPy process a rank, to the nanosecond."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.collectives import ring_finish_ns
from dpsim.errors import InputError


def twin(ready: list[int], cost: list[list[int]]) -> list[int]:
    """Return the finish times of one process a rank; cost[s][r] is the link into r at step s."""
    env = simpy.Environment()
    ranks = len(ready)
    links = [simpy.Store(env) for _ in range(ranks)]  # links[r] leads from r-1 to r
    done = [0] * ranks

    def rank(r: int) -> Generator[simpy.Event, Any, None]:
        yield env.timeout(ready[r])
        for step in cost:
            yield links[(r + 1) % ranks].put("ready to send")
            yield links[r].get()
            yield env.timeout(step[r])
        done[r] = int(env.now)

    for r in range(ranks):
        env.process(rank(r))
    env.run()
    return done


TIMES = st.one_of(st.integers(0, 20), st.integers(0, 10**12))
"""Small numbers make ties, large ones nanoseconds of a day."""


@st.composite
def rings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw starts and link costs for 1 to 12 ranks."""
    ranks = draw(st.integers(1, 12))
    each = st.lists(TIMES, min_size=ranks, max_size=ranks)
    return draw(each), draw(each)


def ints(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@settings(max_examples=400, deadline=None)
@given(ring=rings(), halves=st.sampled_from((1, 2)))
def test_links_that_differ_equal_the_twin(ring: tuple[list[int], list[int]], halves: int) -> None:
    ready, cost = ring
    steps = halves * (len(ready) - 1)
    expected = twin(ready, [cost] * steps)
    assert expected == ring_finish_ns(ints(ready), ints(cost), steps).tolist()


@settings(max_examples=200, deadline=None)
@given(ring=rings(), steps=st.integers(0, 40))
def test_any_number_of_steps_equals_the_twin(ring: tuple[list[int], list[int]], steps: int) -> None:
    ready, cost = ring
    expected = twin(ready, [cost] * steps)
    assert expected == ring_finish_ns(ints(ready), ints(cost), steps).tolist()


@settings(max_examples=200, deadline=None)
@given(ring=rings(), cost=TIMES, halves=st.sampled_from((1, 2)))
def test_equal_links_end_together(
    ring: tuple[list[int], list[int]], cost: int, halves: int
) -> None:
    ready, _ = ring
    ranks, steps = len(ready), halves * (len(ready) - 1)
    finish = ring_finish_ns(ints(ready), ints([cost] * ranks), steps).tolist()
    assert twin(ready, [[cost] * ranks] * steps) == finish
    assert [max(ready) + steps * cost] * ranks == finish


@settings(max_examples=200, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 8), steps=st.integers(1, 14))
def test_costs_of_every_step_equal_the_twin(data: st.DataObject, ranks: int, steps: int) -> None:
    each = st.lists(TIMES, min_size=ranks, max_size=ranks)
    ready, cost = data.draw(each), [data.draw(each) for _ in range(steps)]
    assert twin(ready, cost) == ring_finish_ns(ints(ready), ints(cost)).tolist()


@settings(max_examples=100, deadline=None)
@given(ring=rings(), turn=st.integers(0, 11))
def test_renaming_ranks_around_the_ring_changes_nothing(
    ring: tuple[list[int], list[int]], turn: int
) -> None:
    ready, cost = map(ints, ring)
    turned = ring_finish_ns(np.roll(ready, turn), np.roll(cost, turn))
    assert np.roll(ring_finish_ns(ready, cost), turn).tolist() == turned.tolist()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shape", ["random", "rising", "falling", "one slow", "late start"])
def test_large_rings_equal_the_recursion(seed: int, shape: str) -> None:
    """Rings too long for SimPy; rising and falling links are the worst case of the splitting."""
    random = np.random.default_rng(seed)
    ranks = int(random.integers(50, 400))
    cost = random.integers(1, 10**6, ranks)
    ready = random.integers(0, 10 ** int(random.integers(1, 9)), ranks)
    if shape in ("rising", "falling"):
        cost = np.sort(cost)[:: 1 if shape == "rising" else -1].copy()
    elif shape == "one slow":
        cost = np.where(np.arange(ranks) == ranks // 3, 10**6, 1000)
    elif shape == "late start":
        ready[ranks // 2] = 10**9
    steps = 2 * (ranks - 1)
    expected = ring_finish_ns(ready, np.tile(cost, (steps, 1)))
    assert expected.tolist() == ring_finish_ns(ready, cost).tolist()


def test_a_lap_over_slow_links_can_be_the_longest_walk() -> None:
    """Rank 1 starts late behind a fast link: what it waits for is its own lap around the ring."""
    ready, cost = [0, 1000, 0], [100, 1, 100]
    assert twin(ready, [cost] * 4) == ring_finish_ns(ints(ready), ints(cost)).tolist()
    assert twin(ready, [cost] * 2) == ring_finish_ns(ints(ready), ints(cost), 2).tolist()


def test_the_inputs_are_left_alone() -> None:
    ready, cost = ints([3, 1, 2]), ints([5, 7, 6])
    ring_finish_ns(ready, cost)
    ring_finish_ns(ready, np.tile(cost, (4, 1)))
    assert (ready.tolist(), cost.tolist()) == ([3, 1, 2], [5, 7, 6])


def test_one_rank_has_no_steps() -> None:
    assert ring_finish_ns(ints([7]), ints([5])).tolist() == [7]


@pytest.mark.parametrize(
    ("ready", "cost", "steps", "message"),
    [
        ([], [], None, r"ready must have the shape [N], N >= 1, got (0,)"),
        ([1, 2], [1], None, r"cost_ns must have the shape [2] or [steps, 2], got (1,)"),
        ([1], [1], -1, r"steps must be >= 0 and match cost_ns of (1,), got -1"),
        ([1], [[1], [1]], 3, r"steps must be >= 0 and match cost_ns of (2, 1), got 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    ready: list[int], cost: Any, steps: int | None, message: str
) -> None:
    with pytest.raises(InputError) as error:
        ring_finish_ns(ints(ready), ints(cost), steps)
    assert message == str(error.value)
