"""Thread: its clock, what it launches, and the spans in which it works and waits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.engine import Mark, Run, Slowdown, Stream, Thread, launch_together
from dpsim.engine.recorder import NO_SPAN, Recorder
from dpsim.timeline import PHASES, Phase, Timeline, Track

FOREVER = 10**9
MAIN = Track(rank=0, name="main thread", kind="thread")
COMPUTE = Track(rank=0, name="compute", kind="stream")


class Process:
    """Threads with a stream each, and what is recorded of them."""

    def __init__(self, threads: int = 1, depth: int = 1024, *, on: bool = True) -> None:
        self.recorder = Recorder(on=on)
        self.threads = [Thread(self.recorder, MAIN) for _ in range(threads)]
        self.streams = [Stream(self.recorder, COMPUTE, depth) for _ in range(threads)]

    @property
    def timeline(self) -> Timeline:
        return self.recorder.timeline(0, FOREVER)

    def rows(self, track: int) -> list[tuple[Phase, int, int]]:
        """Return the spans of a track by start."""
        timeline = self.timeline
        mine = np.flatnonzero(timeline.track == track)
        found = [
            (PHASES[timeline.phase[i]], int(timeline.start[i]), int(timeline.end[i])) for i in mine
        ]
        return sorted(found, key=lambda row: row[1:])


def run_of(ops: list[tuple[int, int, int]], rest: int = 0) -> Run:
    """Return a run of (locked, unlocked, duration)."""
    locked, unlocked, durations = (
        np.array([op[i] for op in ops], dtype=np.int64) for i in range(3)
    )
    names = tuple(f"op {i}" for i in range(len(ops)))
    return Run(names=names, locked=locked, unlocked=unlocked, durations=durations, rest=rest)


def test_work_moves_the_clock_and_is_recorded() -> None:
    process = Process()
    [thread] = process.threads
    assert Mark(30, 0) == thread.work(Phase.LOOP, "loop", 30)
    assert Mark(30, 0) == thread.work(Phase.LOOP, "nothing", 0)
    assert Mark(40, 1) == thread.work(Phase.INPUT, "copy", 10)
    assert 40 == thread.clock
    assert [(Phase.LOOP, 0, 30), (Phase.INPUT, 30, 40)] == process.rows(0)
    assert [-1, 0] == process.timeline.cause.tolist()


def test_a_thread_waits_for_what_is_to_come_alone() -> None:
    process = Process()
    [thread], [stream] = process.threads, process.streams
    thread.work(Phase.LOOP, "loop", 30)
    thread.wait(Mark(20), "past")
    thread.wait(Mark(30), "now")
    done = stream.op(Phase.FORWARD, "kernel", thread.now, 50)
    thread.wait(done, "loss.item()")
    assert 80 == thread.clock
    assert [(Phase.LOOP, 0, 30), (Phase.SYNC, 30, 80)] == process.rows(0)
    assert done.span == process.timeline.cause[2]


def test_another_thread_makes_it_runnable_but_not_earlier() -> None:
    process = Process()
    [thread] = process.threads
    thread.work(Phase.LOOP, "loop", 30)
    thread.resume(Mark(20, 7))
    assert Mark(30, 0) == thread.now
    thread.resume(Mark(45, 7))
    assert Mark(45, 7) == thread.now
    assert [(Phase.LOOP, 0, 30)] == process.rows(0)


def test_a_launch_takes_host_time_then_the_kernel_follows() -> None:
    process = Process()
    [thread], [stream] = process.threads, process.streams
    thread.launch(stream, Phase.FORWARD, run_of([(5, 5, 100), (5, 5, 3)], rest=7))
    assert [(Phase.FORWARD, 0, 10), (Phase.FORWARD, 10, 20), (Phase.FORWARD, 20, 27)] == (
        process.rows(0)
    )
    assert [(Phase.FORWARD, 10, 110), (Phase.FORWARD, 110, 113)] == process.rows(1)
    # launch 0, launch 1 after it; kernel 0 by its launch, kernel 1 by kernel 0; the rest by launch 1
    assert [-1, 0, 0, 2, 1] == process.timeline.cause.tolist()
    assert 27 == thread.clock


def test_a_part_of_a_run_is_launched_like_the_whole() -> None:
    run = run_of([(3, 4, 20), (1, 1, 50), (9, 0, 2)], rest=6)
    whole, parts = Process(), Process()
    whole.threads[0].launch(whole.streams[0], Phase.BACKWARD, run)
    for first, last in ((0, 1), (1, 1), (1, 3)):
        parts.threads[0].launch(parts.streams[0], Phase.BACKWARD, run.part(first, last))
    assert whole.threads[0].clock == parts.threads[0].clock
    for track in range(2):
        assert whole.rows(track) == parts.rows(track)
    assert (1, 0, 6) == (len(run.part(0, 1)), run.part(0, 1).rest, run.part(1, 3).rest)


def test_a_full_queue_is_a_wait_of_the_host() -> None:
    process = Process(depth=1)
    process.threads[0].launch(process.streams[0], Phase.FORWARD, run_of([(10, 0, 100)] * 3))
    assert [
        (Phase.FORWARD, 0, 10),
        (Phase.FORWARD, 10, 20),
        (Phase.QUEUE_WAIT, 20, 110),
        (Phase.FORWARD, 110, 120),
        (Phase.QUEUE_WAIT, 120, 210),
    ] == process.rows(0)


def test_a_slow_stream_fills_its_queue_too() -> None:
    """At a quarter of the speed each op takes 400 ns, and the host waits for all but the last."""
    process = Process(depth=1)
    slow = Slowdown(intervals=((0, 10_000),), speed=256)
    times = process.threads[0].launch(
        process.streams[0], Phase.BACKWARD, run_of([(10, 0, 100)] * 3), slow
    )
    assert [10, 410, 810] == times.launched.tolist()
    assert [410, 810, 1210] == times.end.tolist()


def test_threads_under_one_lock_wait_for_it_in_turn() -> None:
    """Two threads: 10 ns with the lock and a hand-over of 2 while the other has launches left."""
    process = Process(threads=2)
    runs = [run_of([(10, 0, 1)]), run_of([(10, 0, 1)])]
    launch_together(
        process.threads, process.streams, Phase.FORWARD, runs, np.array([0, 2], dtype=np.int64)
    )
    assert [(Phase.FORWARD, 0, 12)] == process.rows(0)
    assert [(Phase.GIL_WAIT, 0, 12), (Phase.FORWARD, 12, 22)] == process.rows(1)


OPS = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 60))
RUNS = st.lists(st.lists(OPS, max_size=12), min_size=1, max_size=4)
CASES = settings(max_examples=200)


@CASES
@given(RUNS, st.integers(1, 6), st.lists(st.integers(0, 30), min_size=4, max_size=4), st.data())
def test_what_threads_record_is_whole_and_never_overlaps(
    ops: list[list[tuple[int, int, int]]], depth: int, clocks: list[int], data: Any
) -> None:
    """Spans of a thread fill the time from its start to its clock; kernels take their time."""
    process = Process(threads=len(ops), depth=depth)
    for thread, clock in zip(process.threads, clocks, strict=False):
        thread.work(Phase.LOOP, "loop", clock)
    runs = [run_of(each, rest=data.draw(st.integers(0, 5))) for each in ops]
    handover = np.array(data.draw(st.lists(st.integers(0, 9), min_size=4, max_size=4)))
    for phase in (Phase.FORWARD, Phase.LOSS):  # the second finds queues as the first left them
        launch_together(process.threads, process.streams, phase, runs, handover[: len(ops)])
    for thread, stream, each in zip(process.threads, process.streams, ops, strict=True):
        at = 0
        for _, start, end in process.rows(thread.track):
            assert at == start
            at = end
        assert at == thread.clock
        spans = process.rows(stream.track)
        lengths = [op[2] for op in each if op[2]]
        assert 2 * lengths == [end - start for _, start, end in spans if end > start]
        assert all(a[2] <= b[1] for a, b in pairwise(spans))


@CASES
@given(RUNS, st.integers(1, 6), st.integers(0, 20))
def test_a_launch_is_done_after_the_host_has_worked_and_before_its_kernel_starts(
    ops: list[list[tuple[int, int, int]]], depth: int, clock: int
) -> None:
    process = Process(depth=depth)
    [thread], [stream] = process.threads, process.streams
    thread.work(Phase.LOOP, "loop", clock)
    for each in ops:
        before, run = thread.clock, run_of(each)
        times = thread.launch(stream, Phase.FORWARD, run)
        host = np.cumsum(run.locked + run.unlocked)
        assert (times.launched >= before + host).all()
        assert (times.launched <= times.start).all()
        assert (run.durations == times.end - times.start).all()
        assert thread.clock == (times.launched[-1] if len(run) else before)
    timeline = process.timeline
    on_device = np.flatnonzero((timeline.track == 1) & (timeline.cause >= 0))
    for i in on_device.tolist():
        # What let a kernel start ended at or before its start: its launch, or the op before it.
        assert timeline.end[timeline.cause[i]] <= timeline.start[i]


@CASES
@given(st.lists(OPS, max_size=12), st.integers(1, 6), st.integers(0, 9))
def test_one_thread_with_a_lock_is_one_without_but_for_the_handover(
    ops: list[tuple[int, int, int]], depth: int, retake: int
) -> None:
    alone, together = Process(depth=depth), Process(depth=depth)
    run = run_of([(locked + retake, unlocked, device) for locked, unlocked, device in ops], rest=3)
    alone.threads[0].launch(alone.streams[0], Phase.FORWARD, run)
    launch_together(
        together.threads, together.streams, Phase.FORWARD, [run_of(ops, rest=3)], np.array([retake])
    )
    assert alone.threads[0].now == together.threads[0].now
    assert alone.streams[0].tail == together.streams[0].tail
    for track in range(2):
        assert alone.rows(track) == together.rows(track)


@pytest.mark.parametrize("threads", [1, 3])
def test_times_are_the_same_while_nothing_is_recorded(threads: int) -> None:
    clocks = []
    for on in (True, False):
        process = Process(threads=threads, depth=2, on=on)
        runs = [run_of([(5, 1, 30)] * 4, rest=2)] * threads
        handover = np.arange(threads, dtype=np.int64)
        launch_together(process.threads, process.streams, Phase.FORWARD, runs, handover)
        clocks.append(([t.clock for t in process.threads], [s.tail.at for s in process.streams]))
    assert clocks[0] == clocks[1]
    assert NO_SPAN == process.threads[0].now.span
