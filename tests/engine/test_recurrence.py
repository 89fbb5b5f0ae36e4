"""Each collapse of dpsim.engine.recurrence against its event-by-event twin, to the nanosecond."""

from __future__ import annotations

from collections.abc import Generator
from fractions import Fraction
from itertools import pairwise

import numpy as np
import simpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpsim.engine.recurrence import (
    SPEED_UNITS,
    Queue,
    Slowdown,
    ThreadRun,
    contend,
    launch,
    queue_ends,
)
from dpsim.timeline import Int64

TIMES = st.integers(0, 50)
NONE = np.zeros(0, dtype=np.int64)
CASES = settings(max_examples=300, deadline=None)
Steps = Generator[simpy.Event, None, None]


class StreamTwin:
    """A stream as a process: takes launches in order, and frees their places when they end."""

    def __init__(self, env: simpy.Environment, tail: int, retired: list[int], depth: int) -> None:
        self.env = env
        self.launches = simpy.Store(env)
        self.places = simpy.Resource(env, depth)
        self.ends: list[int] = []
        for end in retired:
            env.process(self._taken(end))
        env.process(self._serve(tail))

    def _taken(self, end: int) -> Steps:
        with self.places.request() as place:
            yield place
            yield self.env.timeout(end)

    def _serve(self, tail: int) -> Steps:
        yield self.env.timeout(tail)
        while True:
            place, duration = yield self.launches.get()
            yield self.env.timeout(duration)
            self.ends.append(int(self.env.now))
            self.places.release(place)

    def put(self, duration: int, launched: list[int]) -> Steps:
        """Wait for a place, then launch."""
        place = self.places.request()
        yield place
        launched.append(int(self.env.now))
        self.launches.put((place, duration))


@st.composite
def stream_states(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """Return depth, ends of earlier launches, and when the stream is free: their last end."""
    depth = draw(st.integers(1, 6))
    retired = sorted(draw(st.lists(TIMES, max_size=depth)))
    return depth, retired, retired[-1] if retired else 0


@CASES
@given(stream_states(), st.integers(0, 30), st.lists(st.tuples(TIMES, TIMES), max_size=25))
def test_a_run_of_launches_equals_a_thread_and_a_stream(
    state: tuple[int, list[int], int], clock: int, ops: list[tuple[int, int]]
) -> None:
    depth, retired, tail = state
    env = simpy.Environment()
    stream = StreamTwin(env, tail, retired, depth)
    launched: list[int] = []

    def thread() -> Steps:
        yield env.timeout(clock)
        for host, duration in ops:
            yield env.timeout(host)
            yield from stream.put(duration, launched)

    env.process(thread())
    env.run()
    host, durations = (np.array([op[i] for op in ops], dtype=np.int64) for i in (0, 1))
    queue = Queue(tail=tail, retired=np.array(retired, dtype=np.int64), depth=depth)
    times = launch(clock, host, durations, queue)
    assert launched == times.launched.tolist()
    assert stream.ends == times.end.tolist()
    assert (launched[-1] if launched else clock) == times.clock
    assert (times.begun + host <= times.launched).all()
    assert (times.start == times.end - durations).all()


@st.composite
def thread_runs(draw: st.DrawFn) -> tuple[int, tuple[ThreadRun, ...]]:
    """Return a depth, and runs of several threads each with a stream of its own."""
    depth = draw(st.integers(1, 5))
    runs = []
    for _ in range(draw(st.integers(1, 5))):
        retired = sorted(draw(st.lists(TIMES, max_size=depth)))
        ops = draw(st.lists(st.tuples(st.integers(1, 9), TIMES, TIMES), max_size=12))
        columns = [np.array([op[i] for op in ops], dtype=np.int64) for i in range(3)]
        runs.append(
            ThreadRun(
                clock=draw(st.integers(0, 40)),
                locked=columns[0],
                unlocked=columns[1],
                durations=columns[2],
                tail=retired[-1] if retired else 0,
                retired=np.array(retired, dtype=np.int64),
            )
        )
    return depth, tuple(runs)


def contend_by_rounds(
    runs: tuple[ThreadRun, ...], handover: list[int], depth: int
) -> list[tuple[list[int], list[int]]]:
    """Return launches and ends by a second algorithm: scan all threads for who asked first."""
    count = len(runs)
    ask = [run.clock for run in runs]
    done = [0] * count
    launched: list[list[int]] = [[] for _ in runs]
    history = [run.retired.tolist() for run in runs]
    tail = [run.tail for run in runs]
    free = 0
    while True:
        wanting = [i for i in range(count) if done[i] < len(runs[i].locked)]
        if not wanting:
            return [(launched[i], history[i][len(runs[i].retired) :]) for i in range(count)]
        i = min(wanting, key=lambda j: (ask[j], j))
        k = done[i]
        free = max(free, ask[i]) + int(runs[i].locked[k]) + handover[len(wanting) - 1]
        at = free + int(runs[i].unlocked[k])
        if len(history[i]) >= depth:
            at = max(at, history[i][-depth])
        tail[i] = max(tail[i], at) + int(runs[i].durations[k])
        history[i].append(tail[i])
        launched[i].append(at)
        ask[i] = at
        done[i] += 1


@CASES
@given(thread_runs(), st.lists(st.integers(0, 9), min_size=5, max_size=5))
def test_threads_under_one_lock_equal_a_scan_of_who_asked_first(
    case: tuple[int, tuple[ThreadRun, ...]], handover: list[int]
) -> None:
    depth, runs = case
    expected = contend_by_rounds(runs, handover, depth)
    times = contend(runs, np.array(handover, dtype=np.int64), depth)
    assert expected == [(t.launched.tolist(), t.end.tolist()) for t in times]
    held = sorted(
        (int(b), int(b + g))
        for t, run in zip(times, runs, strict=True)
        for b, g in zip(t.begun, run.locked, strict=True)
    )
    assert all(a[1] <= b[0] for a, b in pairwise(held))


OPS = st.tuples(st.integers(1, 900), st.integers(0, 900), st.integers(0, 3_000))


@CASES
@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.lists(OPS, max_size=10)), min_size=1, max_size=4),
    st.lists(st.integers(0, 90), min_size=4, max_size=4),
    st.integers(1, 4),
)
def test_threads_under_one_lock_equal_processes_that_share_a_resource(
    threads: list[tuple[int, list[tuple[int, int, int]]]], handover: list[int], depth: int
) -> None:
    """One process a thread and one a stream; who asks at the same time is left to the test above."""
    scale = 1_000  # and a few ns that tell threads and ops apart, so that few ask together
    env = simpy.Environment()
    lock = simpy.Resource(env)
    wanting = [sum(bool(ops) for _, ops in threads)]
    launched: list[list[int]] = [[] for _ in threads]
    streams = [StreamTwin(env, 0, [], depth) for _ in threads]

    def thread(run: ThreadRun, index: int) -> Steps:
        yield env.timeout(run.clock)
        for k in range(len(run.locked)):
            with lock.request() as turn:
                yield turn
                extra = handover[wanting[0] - 1] * scale
                wanting[0] -= k + 1 == len(run.locked)
                yield env.timeout(int(run.locked[k]) + extra)
            yield env.timeout(int(run.unlocked[k]))
            yield from streams[index].put(int(run.durations[k]), launched[index])

    runs = []
    for index, (clock, ops) in enumerate(threads):
        places = np.arange(len(ops), dtype=np.int64)
        cost = [np.array([op[i] for op in ops], dtype=np.int64) * scale for i in range(3)]
        run = ThreadRun(
            clock=clock * scale + index,
            locked=cost[0],
            unlocked=cost[1] + 17 * index + places,
            durations=cost[2] + 53 * index + 5 * places,
            tail=0,
            retired=NONE,
        )
        runs.append(run)
        env.process(thread(run, index))
    env.run()
    times = contend(tuple(runs), np.array(handover, dtype=np.int64) * scale, depth)
    asked = [int(at) for t in times for at in t.asked]
    assume(len(set(asked)) == len(asked))
    assert launched == [t.launched.tolist() for t in times]
    assert [stream.ends for stream in streams] == [t.end.tolist() for t in times]


@CASES
@given(thread_runs())
def test_one_thread_alone_has_no_lock_to_wait_for(case: tuple[int, tuple[ThreadRun, ...]]) -> None:
    depth, runs = case
    run = runs[0]
    alone = contend((run,), np.zeros(1, dtype=np.int64), depth)[0]
    queue = Queue(tail=run.tail, retired=run.retired, depth=depth)
    times = launch(run.clock, run.locked + run.unlocked, run.durations, queue)
    assert times.clock == alone.clock
    for column in ("asked", "begun", "worked", "launched", "start", "end"):
        assert getattr(times, column).tolist() == getattr(alone, column).tolist()


@st.composite
def slowdowns(draw: st.DrawFn) -> Slowdown:
    edges = sorted(draw(st.sets(st.integers(0, 200), max_size=8)))
    edges = edges[: len(edges) // 2 * 2]
    pairs = tuple(zip(edges[::2], edges[1::2], strict=True))
    return Slowdown(intervals=pairs, speed=draw(st.integers(1, SPEED_UNITS)))


def finish_by_ns(start: Fraction, work: Fraction, slowdown: Slowdown) -> Fraction:
    """Return when `work` ns at full speed are done, interval by interval, in exact fractions."""
    now, left = start, work
    slow = Fraction(slowdown.speed, SPEED_UNITS)
    for begin, end in (*slowdown.intervals, (10**9, 10**9)):
        if now < begin:
            if left <= begin - now:
                return now + left
            left, now = left - (begin - now), Fraction(begin)
        if now < end:
            if left <= (end - now) * slow:
                return now + left / slow
            left, now = left - (end - now) * slow, Fraction(end)
    return now + left


def columns(ops: list[tuple[int, int]]) -> tuple[Int64, Int64]:
    host, durations = (np.array([op[i] for op in ops], dtype=np.int64) for i in (0, 1))
    return host, durations


@CASES
@given(
    slowdowns(),
    stream_states(),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(0, 20), TIMES), max_size=20),
)
def test_a_slowed_stream_equals_one_that_is_followed_op_by_op(
    slowdown: Slowdown,
    state: tuple[int, list[int], int],
    clock: int,
    ops: list[tuple[int, int]],
) -> None:
    """In exact fractions; the host sees an end, and a place in the queue, at the next whole ns."""
    depth, retired, tail = state
    launched, starts, ends = [], [], list(retired)
    now, free = clock, Fraction(tail)
    for host, duration in ops:
        now += host
        if len(ends) >= depth:
            now = max(now, ends[-depth])
        launched.append(now)
        begin = max(Fraction(now), free)
        free = finish_by_ns(begin, Fraction(duration), slowdown)
        starts.append(-(-begin.numerator // begin.denominator))
        ends.append(-(-free.numerator // free.denominator))
    queue = Queue(
        tail=tail, retired=np.array(retired, dtype=np.int64), depth=depth, slowdown=slowdown
    )
    times = launch(clock, *columns(ops), queue)
    assert launched == times.launched.tolist()
    assert starts == times.start.tolist()
    assert ends[len(retired) :] == times.end.tolist()
    assert (times.end - times.start >= columns(ops)[1]).all()


@CASES
@given(stream_states(), st.lists(st.tuples(TIMES, TIMES), max_size=15))
def test_a_stream_that_is_slowed_to_full_speed_is_a_plain_one(
    state: tuple[int, list[int], int], ops: list[tuple[int, int]]
) -> None:
    depth, retired, tail = state
    ended = np.array(retired, dtype=np.int64)
    full = Slowdown(intervals=((3, 90), (100, 101)), speed=SPEED_UNITS)
    plain = launch(7, *columns(ops), Queue(tail=tail, retired=ended, depth=depth))
    slowed = launch(7, *columns(ops), Queue(tail=tail, retired=ended, depth=depth, slowdown=full))
    assert plain.launched.tolist() == slowed.launched.tolist()
    assert plain.end.tolist() == slowed.end.tolist()


@CASES
@given(slowdowns(), st.integers(0, 300))
def test_the_time_of_the_work_by_a_time_is_that_time(slowdown: Slowdown, at: int) -> None:
    when = np.array([at], dtype=np.int64)
    assert [at] == slowdown.time_of(slowdown.work_by(when)).tolist()


@CASES
@given(st.lists(st.tuples(TIMES, TIMES), max_size=15), st.integers(0, 60))
def test_a_queue_equals_one_that_is_served_op_by_op(ops: list[tuple[int, int]], tail: int) -> None:
    gaps, durations = columns(ops)
    launched, expected, free = np.cumsum(gaps), [], tail
    for at, duration in zip(launched.tolist(), durations.tolist(), strict=True):
        free = max(at, free) + duration
        expected.append(free)
    assert expected == queue_ends(launched, durations, tail).tolist()


def test_a_queue_of_one_place_runs_host_and_device_in_lockstep() -> None:
    """Host 10 and device 30: the second launch waits for the first end, and so on."""
    ops = [(10, 30)] * 4
    times = launch(0, *columns(ops), Queue(tail=0, retired=NONE, depth=1))
    assert [10, 40, 70, 100] == times.launched.tolist()
    assert [40, 70, 100, 130] == times.end.tolist()


def test_no_launches_take_no_time() -> None:
    run = ThreadRun(clock=5, locked=NONE, unlocked=NONE, durations=NONE, tail=9, retired=NONE)
    alone = launch(5, NONE, NONE, Queue(tail=9, retired=NONE, depth=1))
    [shared] = contend((run,), np.zeros(1, dtype=np.int64), 1)
    assert (5, 5) == (alone.clock, shared.clock)
    assert (0, 0) == (len(alone.end), len(shared.end))


def test_threads_share_the_lock_but_not_the_time_without_it() -> None:
    """Two threads, 10 ns with the lock and 10 without: both are always busy; three wait in turn."""
    for count, rounds in ((1, 20), (2, 20), (3, 30)):
        ops = np.full(50, 10, dtype=np.int64)
        run = ThreadRun(clock=0, locked=ops, unlocked=ops, durations=ops, tail=0, retired=NONE)
        times = contend((run,) * count, np.zeros(count, dtype=np.int64), 1024)
        gaps = np.diff(times[0].launched)
        assert [rounds] * 49 == gaps.tolist()
