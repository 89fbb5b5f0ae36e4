"""Exact collapses: a run of launches on one stream, and N threads under one interpreter lock.

Each function here replaces one event per kernel by array arithmetic in integer nanoseconds; its
event-by-event twin is in the tests and gives the same numbers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dpsim.timeline import Int64

SPEED_UNITS = 1024
"""A stream's full speed, in work units a nanosecond: slow-downs are whole 1024ths of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launched:
    """Times of a run of K launches, ns."""

    asked: Int64  # the thread is ready to begin the op
    begun: Int64  # it begins: later than asked when it waited for the interpreter lock
    worked: Int64  # its own work on the op is done
    launched: Int64  # the op is in the stream's queue: later than worked when that was full
    start: Int64  # the device starts it
    end: Int64
    clock: int  # when the thread is free again


def queue_ends(launched: Int64, durations: Int64, tail: int) -> Int64:
    """Return when each op of a FIFO stream ends, ns (Lindley's recursion).

    end[k] = max(launched[k], end[k-1]) + durations[k], end[-1] = tail.

    Source: Lindley, Proc. Camb. Phil. Soc. 48, 1952.
    """
    done = np.cumsum(durations)
    gate = launched - done + durations
    if len(gate):
        gate[0] = max(gate[0], tail)
    return np.asarray(np.maximum.accumulate(gate) + done, dtype=np.int64)


def launch(
    clock: int, host: Int64, durations: Int64, tail: int, retired: Int64, depth: int
) -> Launched:
    """Return the times of a run that one thread launches on one stream.

    launched[k] = max(launched[k-1] + host[k], end[k - depth]): the thread sleeps while `depth`
    launches of the stream have not ended. `retired` are the ends of earlier launches, oldest
    first, at most `depth` of them; `tail` is when the stream is free.

    Args:
        clock: When the thread is free, ns.
        host: Host time of each launch, ns, shape [K].
        durations: Device time of each op, ns, shape [K].
        tail: When the stream is free, ns.
        retired: Ends of the last launches on the stream, shape [<= depth].
        depth: Launches that fit on the stream, >= 1.
    """
    count = len(host)
    launched = clock + np.cumsum(host)
    ends = queue_ends(launched, durations, tail)
    history = np.concatenate((retired, ends))
    free = len(history) - count  # of the depth slots, this many were taken
    full_from = depth - free  # first op that may find the queue full
    if full_from < count and (history[: count - full_from] > launched[full_from:]).any():
        launched, ends = _launch_in_blocks(clock, host, durations, tail, retired, depth)
    begun = np.concatenate((np.array([clock], dtype=np.int64), launched[:-1]))[:count]
    last = int(launched[-1]) if count else clock
    return Launched(
        asked=begun,
        begun=begun,
        worked=begun + host,
        launched=launched,
        start=ends - durations,
        end=ends,
        clock=last,
    )


def _launch_in_blocks(
    clock: int, host: Int64, durations: Int64, tail: int, retired: Int64, depth: int
) -> tuple[Int64, Int64]:
    """Return launch and end times where the queue fills: in blocks whose limits are known."""
    count, taken = len(host), len(retired)
    history = np.concatenate((retired, np.zeros(count, dtype=np.int64)))
    launched = np.zeros(count, dtype=np.int64)
    first = 0
    while first < count:
        last = min(first + depth, count)
        spent = np.cumsum(host[first:last])
        limit = np.full(last - first, clock, dtype=np.int64)
        slot = np.arange(first, last) + taken - depth
        full = slot >= 0
        limit[full] = history[slot[full]]
        gate = np.maximum(limit - spent, clock)
        launched[first:last] = np.maximum.accumulate(gate) + spent
        ends = queue_ends(launched[first:last], durations[first:last], tail)
        history[taken + first : taken + last] = ends
        clock, tail, first = int(launched[last - 1]), int(ends[-1]), last
    return launched, history[taken:]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThreadRun:
    """What one of N threads launches while all contend for the interpreter lock."""

    clock: int  # ns, when the thread asks for the first time
    locked: Int64  # host time with the lock, ns, shape [K]
    unlocked: Int64  # host time without it, ns, shape [K]
    durations: Int64  # device time, ns, shape [K]
    tail: int  # when its stream is free, ns
    retired: Int64  # ends of earlier launches on its stream


def contend(runs: tuple[ThreadRun, ...], handover: Int64, depth: int) -> list[Launched]:
    """Return the times of N runs whose threads share one interpreter lock, first come first served.

    Op k of a thread asks for the lock when op k-1 has been launched; holds it for
    locked[k] + handover[w], w being the number of *other* threads that still have ops to launch;
    then works unlocked[k] and launches. Ties go to the thread with the lower index.

    Args:
        runs: One for each thread.
        handover: Extra ns of one retake with 0, 1, .. len(runs)-1 other threads.
        depth: Launches that fit on a stream.
    """
    locked = [run.locked.tolist() for run in runs]
    unlocked = [run.unlocked.tolist() for run in runs]
    durations = [run.durations.tolist() for run in runs]
    history = [run.retired.tolist() for run in runs]
    taken = [len(run.retired) for run in runs]
    tails = [run.tail for run in runs]
    asked: list[list[int]] = [[] for _ in runs]
    begun: list[list[int]] = [[] for _ in runs]
    worked: list[list[int]] = [[] for _ in runs]
    launched: list[list[int]] = [[] for _ in runs]
    extra = handover.tolist()
    waiting = [(run.clock, i) for i, run in enumerate(runs) if len(run.locked)]
    heapq.heapify(waiting)
    others, free = len(waiting) - 1, 0
    while waiting:
        ask, i = waiting[0]
        k = len(asked[i])
        begin = max(free, ask)
        free = begin + locked[i][k] + extra[others]
        done = free + unlocked[i][k]
        worked[i].append(done)
        slot = taken[i] + k - depth
        if slot >= 0 and history[i][slot] > done:
            done = history[i][slot]
        tail = (max(tails[i], done)) + durations[i][k]
        tails[i] = tail
        history[i].append(tail)
        asked[i].append(ask)
        begun[i].append(begin)
        launched[i].append(done)
        if k + 1 < len(locked[i]):
            heapq.heapreplace(waiting, (done, i))
        else:
            heapq.heappop(waiting)
            others -= 1
    return [
        _launched(run, (asked[i], begun[i], worked[i], launched[i]), history[i][taken[i] :])
        for i, run in enumerate(runs)
    ]


def _launched(run: ThreadRun, host: tuple[list[int], ...], ends: list[int]) -> Launched:
    asked, begun, worked, launched = (np.array(column, dtype=np.int64) for column in host)
    end = np.array(ends, dtype=np.int64)
    return Launched(
        asked=asked,
        begun=begun,
        worked=worked,
        launched=launched,
        start=end - run.durations,
        end=end,
        clock=int(launched[-1]) if len(launched) else run.clock,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Intervals in which a stream works at `speed` of `SPEED_UNITS`, ascending and disjoint."""

    intervals: tuple[tuple[int, int], ...]  # ns
    speed: int  # work units a nanosecond, 1..SPEED_UNITS


def slowed_ends(
    launched: Int64, durations: Int64, tail: int, slowdown: Slowdown
) -> tuple[Int64, Int64]:
    """Return starts and ends of a FIFO stream that is slower in some intervals, ns.

    W(t) is the work done by time t, `SPEED_UNITS` a ns outside and `speed` inside the intervals.
    In work units the stream is Lindley's recursion again: w[k] = max(W(launched[k]), w[k-1]) +
    SPEED_UNITS * durations[k]. Ends are rounded up to whole ns; the recursion is exact.
    """
    knots = [0]
    for begin, end in slowdown.intervals:
        knots += [begin, end]
    work = [0]
    for index, (a, b) in enumerate(pairwise(knots)):
        work.append(work[-1] + (b - a) * (slowdown.speed if index % 2 else SPEED_UNITS))
    times, works = np.array(knots, dtype=np.int64), np.array(work, dtype=np.int64)
    speeds = np.array(
        [slowdown.speed if i % 2 else SPEED_UNITS for i in range(len(knots))], dtype=np.int64
    )

    def done_by(at: Int64) -> Int64:
        i = np.searchsorted(times, at, side="right") - 1
        return np.asarray(works[i] + (at - times[i]) * speeds[i])

    def reached(amount: Int64) -> Int64:
        i = np.searchsorted(works, amount, side="left") - 1
        i = np.maximum(i, 0)
        return np.asarray(times[i] - (works[i] - amount) // speeds[i])

    amount = queue_ends(
        done_by(launched), durations * SPEED_UNITS, int(done_by(np.array([tail]))[0])
    )
    start = amount - durations * SPEED_UNITS
    return reached(start), reached(amount)
