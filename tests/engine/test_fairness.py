"""Max-min fair rates against textbook cases, a twin in fractions, and their definition."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.engine.fairness import fair_rates
from dpsim.errors import InputError

UNIT = 2**-16
"""Rates are rounded down to this many bytes/s; the twin is exact."""

Case = tuple[list[list[int]], list[float], list[int], list[float]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Routes, capacities, counts, caps."""
    rate = st.integers(1, 30).map(lambda n: n * 1e8) | st.floats(1e6, 1e11)
    capacities = draw(st.lists(rate | st.just(math.inf), min_size=1, max_size=5))
    route = st.lists(st.integers(0, len(capacities) - 1), max_size=3)
    routes = draw(st.lists(route, min_size=1, max_size=7))
    number = len(routes)
    counts = draw(st.lists(st.integers(1, 4), min_size=number, max_size=number))
    caps = draw(st.lists(rate | st.just(math.inf), min_size=number, max_size=number))
    return routes, capacities, counts, caps


def water_filling(case: Case) -> list[Fraction | float]:
    """Raise all rates together; stop flows at their cap and on full links. Exact, one flow each."""
    routes, capacities, counts, caps = case
    free = {link: Fraction(rate) for link, rate in enumerate(capacities) if rate < math.inf}
    crossings = [Counter(hop for hop in route if hop in free) for route in routes]
    rates: list[Fraction | float] = [Fraction(0)] * len(routes)
    live = set(range(len(routes)))
    while live:
        load = {link: sum(crossings[f][link] * counts[f] for f in live) for link in free}
        steps = [free[link] / load[link] for link in free if load[link]]
        steps += [Fraction(caps[f]) - rates[f] for f in live if caps[f] < math.inf]
        if not steps:
            for f in live:
                rates[f] = math.inf
            break
        step = min(steps)
        for f in live:
            rates[f] += step
        for link in free:
            free[link] -= step * load[link]
        full = {link for link in free if load[link] and free[link] == 0}
        live = {f for f in live if rates[f] != caps[f] and not full & set(crossings[f])}
    return rates


def test_one_link_is_shared_equally():
    assert [2.5e8] * 4 == fair_rates([[0]] * 4, [1e9]).tolist()


def test_the_three_link_example_of_the_textbook():
    """A long flow over three links of 1, 2 and 3 GB/s, and one flow on each.

    The first link gives both of its flows 0.5; the others take what is left: 1.5 and 2.5.
    """
    rates = fair_rates([[0, 1, 2], [0], [1], [2]], [1e9, 2e9, 3e9])
    assert [0.5e9, 0.5e9, 1.5e9, 2.5e9] == rates.tolist()


def test_what_a_capped_flow_leaves_goes_to_the_others():
    rates = fair_rates([[0], [0], [0]], [1e9], caps=[1e8, math.inf, math.inf])
    assert [1e8, 4.5e8, 4.5e8] == rates.tolist()


def test_a_link_crossed_twice_is_loaded_twice():
    assert [5e8] == fair_rates([[0, 0]], [1e9]).tolist()


def test_no_limit_is_infinity():
    assert [math.inf, math.inf] == fair_rates([[], [0]], [math.inf]).tolist()
    assert [3e9] == fair_rates([[]], [], caps=[3e9]).tolist()


@given(cases())
def test_equals_water_filling_in_fractions(case):
    routes, capacities, counts, caps = case
    rates = fair_rates(routes, capacities, counts=counts, caps=caps)
    # Each share is rounded down once, and a link passes on the error of at most 28 frozen flows.
    for mine, exact in zip(rates.tolist(), water_filling(case), strict=True):
        assert mine == exact or abs(mine - exact) <= 1e3 * UNIT


@given(cases())
def test_no_link_carries_more_than_it_can(case):
    routes, capacities, counts, caps = case
    rates = fair_rates(routes, capacities, counts=counts, caps=caps)
    for link, capacity in enumerate(capacities):
        if capacity < math.inf:
            carried = sum(
                Fraction(rate) * count * route.count(link)
                for route, rate, count in zip(routes, rates.tolist(), counts, strict=True)
                if link in route
            )
            assert carried <= Fraction(capacity) + Fraction(UNIT)  # the capacity's own rounding


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_flows_changes_nothing(case, random):
    routes, capacities, counts, caps = case
    order = list(range(len(routes)))
    random.shuffle(order)
    rates = fair_rates(routes, capacities, counts=counts, caps=caps)
    shuffled = fair_rates(
        [routes[i] for i in order],
        capacities,
        counts=[counts[i] for i in order],
        caps=[caps[i] for i in order],
    )
    assert np.array_equal(rates[order], shuffled)


@given(cases())
def test_an_entry_with_a_count_equals_that_many_flows(case):
    routes, capacities, counts, caps = case
    flows = [i for i, count in enumerate(counts) for _ in range(count)]
    one_by_one = fair_rates([routes[i] for i in flows], capacities, caps=[caps[i] for i in flows])
    rates = fair_rates(routes, capacities, counts=counts, caps=caps)
    assert rates[flows].tolist() == one_by_one.tolist()


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, 1e15])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(InputError) as error:
        fair_rates([[0]], [rate])
    assert str(error.value) == (
        "link 0 must have a rate > 0 and at most 7.04e+13 bytes/s, or infinity, "
        f"got {rate}. Correct it in the hardware profile."
    )
