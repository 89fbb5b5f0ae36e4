"""The network against closed forms, and against a twin with one object per flow, in fractions."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.engine.network import LinkUse, Network
from dpsim.errors import InputError
from dpsim.units import NS_PER_S, to_ns

JUST_UNDER_HALF_NS = Fraction(499_999, 1_000_000)
"""The rule of the network: an end that is less than this away is now."""


@dataclass(frozen=True)
class Send:
    """One transfer of a test."""

    start_ns: int
    hops: tuple[str, ...]
    nbytes: int
    latency_ns: int = 0
    count: int = 1
    own: frozenset[str] = frozenset()
    cap: float = math.inf


def run(rates: dict[str, float], sends: list[Send]) -> tuple[list[int], dict[str, LinkUse]]:
    """Return when each transfer arrives, and the use of the links."""
    env = simpy.Environment()
    network = Network(env, rates)
    arrivals = [-1] * len(sends)

    def sender(i: int, send: Send):
        yield env.timeout(send.start_ns)
        yield network.transfer(
            send.hops,
            send.nbytes,
            latency_ns=send.latency_ns,
            count=send.count,
            own=send.own,
            cap_bytes_per_s=send.cap,
        )
        arrivals[i] = env.now

    for i, send in enumerate(sends):
        env.process(sender(i, send))
    env.run()
    assert network.in_flight() == ()
    assert all(type(arrival) is int for arrival in arrivals)
    return arrivals, network.use()


# --- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 64])
def test_an_incast_ends_at_once_for_all(workers):
    """N flows of S bytes into one server of rate B end together at N S / B."""
    rates = {f"worker{i}": 10e9 for i in range(workers)} | {"server": 1.25e9}
    sends = [Send(0, (f"worker{i}", "server"), 10_000_001) for i in range(workers)]
    arrivals, _ = run(rates, sends)
    assert [to_ns(workers * 10_000_001 / 1.25e9)] * workers == arrivals


@given(st.integers(1, 10**10), st.integers(1, 10**12))
def test_one_flow_takes_its_bytes_over_the_rate(nbytes, rate):
    exact = Fraction(nbytes * NS_PER_S, rate)
    arrivals, _ = run({"link": float(rate)}, [Send(0, ("link",), nbytes)])
    assert [math.floor(exact + 1 - JUST_UNDER_HALF_NS)] == arrivals


def test_staggered_starts_share_the_processor():
    """Three flows of 6, 3 and 1 kB on a link of 1 B/ns that start at 0, 1000 and 2000 ns.

    Until 1000: the first has 5000 left. Until 2000 two share: 4500 and 2500 left. Then three:
    the third ends after 3 x 1000 ns, at 5000; 3500 and 1500 left. Then two: the second ends after
    2 x 1500, at 8000; the first has 2000 left and ends at 10000, when all 10 kB have passed.
    """
    sends = [Send(0, ("link",), 6000), Send(1000, ("link",), 3000), Send(2000, ("link",), 1000)]
    arrivals, use = run({"link": 1e9}, sends)
    assert [10_000, 8000, 5000] == arrivals
    assert {"link": LinkUse(nbytes=10_000, busy_ns=10_000)} == use


def test_three_links_in_a_row():
    """A long flow over links of 1, 2 and 3 B/ns beside one short flow on each, 1500 bytes each.

    Rates 0.5, 0.5, 1.5, 2.5 B/ns: the third link's ends at 600, the second's at 1000. The first
    link keeps both of its flows at 0.5 until 3000.
    """
    sends = [
        Send(0, ("a", "b", "c"), 1500),
        Send(0, ("a",), 1500),
        Send(0, ("b",), 1500),
        Send(0, ("c",), 1500),
    ]
    arrivals, use = run({"a": 1e9, "b": 2e9, "c": 3e9}, sends)
    assert [3000, 3000, 1000, 600] == arrivals
    assert {name: LinkUse(3000, 3000) for name in "abc"} == use


def test_a_capped_flow_takes_its_cap():
    sends = [Send(0, ("link",), 1000, cap=0.25e9), Send(0, ("link",), 3000)]
    assert [4000, 4000] == run({"link": 1e9}, sends)[0]


def test_busy_time_leaves_out_the_pauses():
    sends = [Send(100, ("a",), 50), Send(120, ("a",), 50), Send(1000, ("a",), 10)]
    assert LinkUse(nbytes=110, busy_ns=110) == run({"a": 1e9}, sends)[1]["a"]


# --- limits ---------------------------------------------------------------------------------------


def test_no_bytes_no_limit_and_no_hops_take_the_latency_alone():
    rates = {"a": 1e9, "free": math.inf}
    sends = [
        Send(5, ("a",), 0, latency_ns=7),
        Send(5, ("free",), 10**15, latency_ns=8),
        Send(5, (), 10**15, latency_ns=9),
        Send(5, (), 10**15),
    ]
    arrivals, use = run(rates, sends)
    assert [12, 13, 14, 5] == arrivals
    assert {"a": LinkUse(0, 0), "free": LinkUse(10**15, 0)} == use


def test_latency_does_not_hold_the_link():
    sends = [Send(0, ("a",), 100, latency_ns=500), Send(100, ("a",), 100, latency_ns=500)]
    arrivals, use = run({"a": 1e9}, sends)
    assert [600, 700] == arrivals
    assert LinkUse(nbytes=200, busy_ns=200) == use["a"]


def test_a_transfer_that_rounds_to_nothing_ends_now():
    assert [3] == run({"a": 900e9}, [Send(3, ("a",), 1)])[0]


def test_an_exact_half_is_rounded_up_though_the_rate_is_not_exact():
    """1 byte at 2/3 bytes/ns takes 1.5 ns; this rate is rounded up to 2**-16 bytes/s."""
    assert [2] == run({"a": 2e9 / 3}, [Send(0, ("a",), 1)])[0]


def test_use_and_in_flight_in_the_middle():
    env = simpy.Environment()
    network = Network(env, {"a": 1e9})
    network.transfer(("a",), 1000, label="first")
    network.transfer(("a",), 1000, label="second")
    assert ("first", "second") == network.in_flight()
    env.run(until=500)
    assert ("first", "second") == network.in_flight()
    assert {"a": LinkUse(nbytes=0, busy_ns=500)} == network.use()


def test_starts_at_one_time_are_shared_out_once(monkeypatch):
    """Also when a chain of events at that time leads to the start."""
    env = simpy.Environment()
    network = Network(env, {"a": 1e9})
    shares = []
    share = network._share
    monkeypatch.setattr(network, "_share", lambda now: (shares.append(now), share(now)))

    def sender(turns: int):
        yield env.timeout(10)
        for _ in range(turns):
            yield env.timeout(0)
        yield network.transfer(("a",), 100)

    for turns in range(5):
        env.process(sender(turns))
    env.run()
    assert [10] == shares
    assert 510 == env.now


def test_rates_are_looked_up_late():
    class Lazy(dict[str, float]):
        def __contains__(self, name):
            return True

        def __missing__(self, name):
            return 1e9

    env = simpy.Environment()
    Network(env, Lazy()).transfer(("any",), 10)
    env.run()
    assert 10 == env.now


# --- the twin -------------------------------------------------------------------------------------


@dataclass
class Flow:
    """One flow of the twin."""

    send: int
    hops: tuple[str, ...]
    left: Fraction
    cap: Fraction | None
    rate: Fraction = Fraction(0)


def twin_rates(flows: list[Flow], rates: dict[str, Fraction]) -> None:
    """Raise all rates together until a link is full or a cap is reached, and so on."""
    free = dict(rates)
    live = list(flows)
    for flow in flows:
        flow.rate = Fraction(0)
    while live:
        load = defaultdict(int)
        for flow in live:
            for hop in flow.hops:
                load[hop] += 1
        steps = [free[hop] / load[hop] for hop in load]
        steps += [flow.cap - flow.rate for flow in live if flow.cap is not None]
        step = min(steps)
        for flow in live:
            flow.rate += step
        for hop in load:
            free[hop] -= step * load[hop]
        full = {hop for hop in load if free[hop] == 0}
        live = [flow for flow in live if flow.rate != flow.cap and not full & set(flow.hops)]


def twin(rates: dict[str, float], sends: list[Send]) -> list[int]:
    """Return when each transfer arrives: event by event, counts written out, exact rates."""
    arrivals = [-1] * len(sends)
    exact: dict[str, Fraction] = {}
    waiting: list[tuple[int, Flow]] = []
    for i, send in enumerate(sends):
        finite = [hop for hop in send.hops if rates[hop] < math.inf]
        if send.nbytes == 0 or (not finite and send.cap == math.inf):
            arrivals[i] = send.start_ns + send.latency_ns
            continue
        for copy in range(send.count):
            hops = tuple(f"{hop}#{copy}" if hop in send.own else hop for hop in finite)
            exact |= {
                name: Fraction(rates[hop]) / NS_PER_S
                for name, hop in zip(hops, finite, strict=True)
            }
            cap = None if send.cap == math.inf else Fraction(send.cap) / NS_PER_S
            waiting.append((send.start_ns, Flow(i, hops, Fraction(send.nbytes), cap)))
    now = 0
    active: list[Flow] = []
    while active or waiting:
        ended = [flow for flow in active if flow.left < JUST_UNDER_HALF_NS * flow.rate]
        for flow in ended:
            arrivals[flow.send] = now + sends[flow.send].latency_ns
        active = [flow for flow in active if flow not in ended]
        active += [flow for start, flow in waiting if start == now]
        waiting = [(start, flow) for start, flow in waiting if start != now]
        twin_rates(active, exact)
        times = [start for start, _ in waiting]
        times += [
            now + max(0, math.floor(flow.left / flow.rate + 1 - JUST_UNDER_HALF_NS))
            for flow in active
        ]
        if times:
            for flow in active:
                flow.left -= flow.rate * (min(times) - now)
            now = min(times)
    return arrivals


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, float], list[Send]]:
    """Rates and transfers: round and odd numbers, equal and mixed, and equal workers with NICs."""
    rate = st.integers(1, 30).map(lambda n: n * 1e8) | st.floats(1e7, 1e12)
    rates = {name: draw(rate | st.just(math.inf)) for name in "abcd"} | {"nic": draw(rate)}
    workers = draw(st.integers(1, 3))
    plain = st.builds(
        Send,
        start_ns=st.integers(0, 5) | st.integers(0, 20_000),
        hops=st.lists(st.sampled_from("abcd"), max_size=3).map(tuple),
        nbytes=st.integers(0, 10) | st.sampled_from([1000, 30_000]) | st.integers(0, 50_000),
        latency_ns=st.integers(0, 100),
        count=st.integers(1, 3),
        cap=st.just(math.inf) | rate,
    )
    from_workers = plain.map(
        lambda send: replace(send, hops=("nic", *send.hops), own=frozenset({"nic"}), count=workers)
    )
    return rates, draw(st.lists(plain | from_workers, min_size=1, max_size=7))


@settings(max_examples=500, derandomize=True, deadline=None)
@given(cases())
def test_equals_the_twin_to_the_nanosecond(case):
    """The twin has exact rates, the network's are rounded to 2**-16 bytes/s.

    Over these times that moves an end by about 1e-8 ns, so a case in some millions may differ by a
    nanosecond: the cases are the same in each run.
    """
    rates, sends = case
    assert twin(rates, sends) == run(rates, sends)[0]


# --- relations ------------------------------------------------------------------------------------


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_transfers_changes_nothing(case, random):
    rates, sends = case
    order = list(range(len(sends)))
    random.shuffle(order)
    arrivals, use = run(rates, sends)
    shuffled, shuffled_use = run(rates, [sends[i] for i in order])
    assert [arrivals[i] for i in order] == shuffled
    assert use == shuffled_use


@given(cases())
def test_a_count_equals_that_many_transfers(case):
    rates, sends = case
    written_out, origin = [], []
    more = dict(rates)
    for i, send in enumerate(sends):
        for copy in range(send.count):
            names = {hop: f"{hop}#{copy}" for hop in send.own}
            more |= {name: rates[hop] for hop, name in names.items()}
            hops = tuple(names.get(hop, hop) for hop in send.hops)
            written_out.append(replace(send, hops=hops, count=1, own=frozenset()))
            origin.append(i)
    arrivals, use = run(rates, sends)
    one_by_one, more_use = run(more, written_out)
    assert [arrivals[i] for i in origin] == one_by_one
    assert use == {name: more_use.get(name) or more_use[f"{name}#0"] for name in use}


@given(cases())
def test_every_link_carries_the_bytes_that_were_sent_over_it(case):
    rates, sends = case
    sent = defaultdict(int)
    for send in sends:
        for hop in send.hops:
            sent[hop] += send.nbytes * (1 if hop in send.own else send.count)
    assert dict(sent) == {name: link.nbytes for name, link in run(rates, sends)[1].items()}


@given(cases(), st.integers(1, 10**9))
def test_a_later_start_of_all_shifts_all(case, shift):
    rates, sends = case
    arrivals, _ = run(rates, sends)
    later, _ = run(rates, [replace(send, start_ns=send.start_ns + shift) for send in sends])
    assert [arrival + shift for arrival in arrivals] == later


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), min_size=1, max_size=12))
def test_whole_nanoseconds_are_near_the_fluid_of_real_time(flows):
    """On one link each end of another flow moves a flow by at most half a nanosecond."""
    arrivals, _ = run({"a": 1.7e9}, [Send(start, ("a",), size) for start, size in flows])
    for arrival, exact in zip(arrivals, processor_sharing(flows, 1.7), strict=True):
        assert abs(arrival - exact) <= len(flows) / 2


def processor_sharing(flows: list[tuple[int, int]], rate: float) -> list[float]:
    """Return the ends on one link in real time, without rounding."""
    left = [float(size) for _, size in flows]
    ends = [math.inf] * len(flows)
    now = 0.0
    while math.inf in ends:
        active = [i for i, f in enumerate(flows) if f[0] <= now and ends[i] == math.inf]
        coming = min((f[0] for f in flows if f[0] > now), default=math.inf)
        share = rate / max(1, len(active))
        end = now + min((left[i] for i in active), default=math.inf) / share
        for i in active:
            left[i] -= share * (min(end, coming) - now)
        now = min(end, coming)
        for i in active:
            if left[i] <= 1e-9:  # rounding of 1e4 bytes in binary64
                ends[i] = now
    return ends


# --- messages -------------------------------------------------------------------------------------


def test_an_unknown_link_is_refused():
    with pytest.raises(InputError) as error:
        Network(simpy.Environment(), {}).transfer(("gpu0>gpu9",), 1)
    assert str(error.value) == (
        "network: every hop must be a link, got 'gpu0>gpu9'. Take hops from a route."
    )


def test_a_link_without_a_rate_is_refused():
    with pytest.raises(InputError) as error:
        Network(simpy.Environment(), {"a": 0.0}).transfer(("a",), 1)
    assert str(error.value) == (
        "network: link 'a' must have a rate > 0 and at most 7.04e+13 bytes/s, or infinity, "
        "got 0.0. Correct it in the hardware profile."
    )


def test_numbers_out_of_range_are_refused():
    with pytest.raises(InputError) as error:
        Network(simpy.Environment(), {"a": 1e9}).transfer(("a",), -1, count=0, label="push")
    assert str(error.value) == (
        "network: a transfer needs nbytes >= 0, latency_ns >= 0 and count >= 1, got -1, 0 and 0 "
        "for 'push'. Correct the schedule."
    )


# --- speed ----------------------------------------------------------------------------------------


@pytest.mark.benchmark
def test_sixteen_workers_push_a_resnet_in_under_a_second(benchmark):
    """161 tensors from each of 16 unequal workers: 2,576 flows that all start at other times."""
    rates = {f"worker{i}": 1.25e9 for i in range(16)} | {"server": 1.25e9}
    sends = [
        Send(50_000 * tensor + 1_237 * worker, (f"worker{worker}", "server"), 1000 + 997 * tensor)
        for tensor in range(161)
        for worker in range(16)
    ]
    benchmark.pedantic(run, (rates, sends), rounds=3)
    assert benchmark.stats.stats.min < 1.0
