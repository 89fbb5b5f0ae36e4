"""Exact collapses: a run of launches on one stream, and N threads under one interpreter lock.

Each function here replaces one event per kernel by array arithmetic in integer nanoseconds; its
event-by-event twin is in the tests and gives the same numbers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import chain

import numpy as np

from dpsim.timeline import Int64

SPEED_UNITS = 1024
"""A stream's full speed, in work units a nanosecond: slow-downs are whole 1024ths of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Intervals in which a stream works at `speed` of `SPEED_UNITS`, ascending and disjoint."""

    intervals: tuple[tuple[int, int], ...]  # ns
    speed: int  # work units a nanosecond, 1..SPEED_UNITS

    def work_by(self, at: Int64) -> Int64:
        """Return W(t): the work units that the stream can do by each time."""
        times, works, speeds = self._knots()
        i = np.searchsorted(times, at, side="right") - 1
        return np.asarray(works[i] + (at - times[i]) * speeds[i])

    def time_of(self, work: Int64) -> Int64:
        """Return the first whole ns by which so many work units can be done."""
        times, works, speeds = self._knots()
        i = np.maximum(np.searchsorted(works, work, side="left") - 1, 0)
        return np.asarray(times[i] - (works[i] - work) // speeds[i])

    def _knots(self) -> tuple[Int64, Int64, Int64]:
        """Return when the speed changes, the work done by then, and the speed from then on."""
        times = np.array([0, *chain.from_iterable(self.intervals)], dtype=np.int64)
        slow = np.arange(len(times)) % 2 == 1
        speeds = np.where(slow, self.speed, SPEED_UNITS)
        works = np.concatenate(([0], np.cumsum(np.diff(times) * speeds[:-1])))
        return times, works, speeds


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queue:
    """A stream before a run is launched on it."""

    tail: int  # when it is free, ns
    retired: Int64  # ends of its last launches, oldest first, at most `depth`, ns
    depth: int  # launches that fit on it, >= 1
    slowdown: Slowdown | None = None


def launch(clock: int, host: Int64, durations: Int64, queue: Queue) -> Launched:
    """Return the times of a run that one thread launches on one stream.

    launched[k] = max(launched[k-1] + host[k], end[k - depth]): the thread sleeps while `depth`
    launches of the stream have not ended.

    Args:
        clock: When the thread is free, ns.
        host: Host time of each launch, ns, shape [K].
        durations: Device time of each op at full speed, ns, shape [K].
        queue: The stream.
    """
    count = len(host)
    launched = clock + np.cumsum(host)
    server = _Server(queue)
    start, end = server.serve(launched, durations)
    history = np.concatenate((queue.retired, end))
    full_from = queue.depth - len(queue.retired)  # first op that may find the queue full
    if full_from < count and (history[: count - full_from] > launched[full_from:]).any():
        launched, start, end = _launch_in_blocks(clock, host, durations, queue)
    begun = np.concatenate((np.array([clock], dtype=np.int64), launched[:-1]))[:count]
    last = int(launched[-1]) if count else clock
    return Launched(
        asked=begun,
        begun=begun,
        worked=begun + host,
        launched=launched,
        start=start,
        end=end,
        clock=last,
    )


def _launch_in_blocks(
    clock: int, host: Int64, durations: Int64, queue: Queue
) -> tuple[Int64, Int64, Int64]:
    """Return launch times, starts and ends where the queue fills: in blocks with known limits."""
    count, taken, depth = len(host), len(queue.retired), queue.depth
    history = np.concatenate((queue.retired, np.zeros(count, dtype=np.int64)))
    launched, start = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    server = _Server(queue)
    for first in range(0, count, depth):
        last = min(first + depth, count)
        spent = np.cumsum(host[first:last])
        limit = np.full(last - first, clock, dtype=np.int64)
        slot = np.arange(first, last) + taken - depth
        full = slot >= 0
        limit[full] = history[slot[full]]
        gate = np.maximum(limit - spent, clock)
        launched[first:last] = np.maximum.accumulate(gate) + spent
        start[first:last], history[taken + first : taken + last] = server.serve(
            launched[first:last], durations[first:last]
        )
        clock = int(launched[last - 1])
    return launched, start, history[taken:]


class _Server:
    """A FIFO stream that serves ops, at full speed or slower in some intervals."""

    def __init__(self, queue: Queue) -> None:
        self.slowdown = queue.slowdown
        tail = np.array([queue.tail], dtype=np.int64)
        self.tail = int(self.slowdown.work_by(tail)[0]) if self.slowdown else queue.tail

    def serve(self, launched: Int64, durations: Int64) -> tuple[Int64, Int64]:
        """Return starts and ends of the next ops, ns.

        In work units a stream that slows down is Lindley's recursion again: w[k] =
        max(W(launched[k]), w[k-1]) + SPEED_UNITS * durations[k]. Times are rounded up to whole
        ns; the recursion is exact.
        """
        if not self.slowdown:
            ends = queue_ends(launched, durations, self.tail)
            self.tail = int(ends[-1]) if len(ends) else self.tail
            return ends - durations, ends
        work = durations * SPEED_UNITS
        done = queue_ends(self.slowdown.work_by(launched), work, self.tail)
        self.tail = int(done[-1]) if len(done) else self.tail
        return self.slowdown.time_of(done - work), self.slowdown.time_of(done)


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
