"""Host thread: a clock that moves as the thread works, launches and waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpsim.engine.recorder import NO_SPAN, Recorder
from dpsim.engine.recurrence import Launched, Queue, Slowdown, ThreadRun, contend, launch
from dpsim.engine.stream import Mark, Stream, latest
from dpsim.timeline import Int64, Phase, Track


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A run of K launches as costs: what `dpsim.costs` makes of ops, at one batch."""

    names: tuple[str, ...]
    locked: Int64  # host time that holds the interpreter lock, ns
    unlocked: Int64  # host time that does not, ns
    durations: Int64  # device time, ns
    rest: int = 0  # host time after the last launch, ns

    def __len__(self) -> int:
        """Return K."""
        return len(self.durations)

    def part(self, first: int, last: int) -> Run:
        """Return launches first..last-1; the rest goes with the last part."""
        return Run(
            names=self.names[first:last],
            locked=self.locked[first:last],
            unlocked=self.unlocked[first:last],
            durations=self.durations[first:last],
            rest=self.rest if last >= len(self) else 0,
        )


class Thread:
    """One host thread. Its program calls these verbs; `clock` is its own time."""

    def __init__(self, recorder: Recorder, track: Track) -> None:
        """Start at 0 ns."""
        self.recorder = recorder
        self.track = recorder.track(track)
        self.now = Mark(0)

    @property
    def clock(self) -> int:
        """Return the thread's time, ns."""
        return self.now.at

    def work(self, phase: Phase, name: str, duration: int) -> Mark:
        """Spend host time that launches nothing; return its end."""
        end = self.now.at + duration
        span = self.recorder.span(self.track, phase, name, self.now.at, end, self.now.span)
        self.now = Mark(end, span if span != NO_SPAN else self.now.span)
        return self.now

    def wait(self, mark: Mark, name: str, phase: Phase = Phase.SYNC) -> None:
        """Block until `mark`."""
        if mark.at > self.now.at:
            span = self.recorder.span(self.track, phase, name, self.now.at, mark.at, mark.span)
            self.now = Mark(mark.at, span if span != NO_SPAN else mark.span)

    def resume(self, mark: Mark) -> None:
        """Begin at `mark` at the earliest: another thread made this one runnable."""
        self.now = latest(self.now, mark)

    def launch(
        self, stream: Stream, phase: Phase, run: Run, slowdown: Slowdown | None = None
    ) -> Launched:
        """Launch a run on a stream, alone: nobody else wants the interpreter lock."""
        queue = Queue(
            tail=stream.tail.at,
            retired=stream.retired,
            depth=stream.depth,
            slowdown=slowdown if slowdown and slowdown.intervals else None,
        )
        times = launch(self.now.at, run.locked + run.unlocked, run.durations, queue)
        self._place(stream, phase, run, times)
        return times

    def _place(self, stream: Stream, phase: Phase, run: Run, times: Launched) -> None:
        count = len(run)
        if count:
            codes = self.recorder.codes(run.names) if self.recorder.on else times.end
            causes = self._record_launches(phase, codes, run, times)
            stream.run(phase, codes, times.start, times.end, causes)
            self.now = Mark(times.clock, int(causes[-1]))
        if run.rest:
            self.work(phase, "views", run.rest)

    def _record_launches(self, phase: Phase, codes: Int64, run: Run, times: Launched) -> Int64:
        """Record what the thread did; return the span of each launch."""
        count = len(run)
        if not self.recorder.on:
            return np.full(count, NO_SPAN, dtype=np.int64)
        first = self.recorder.next_index
        spans = np.arange(first, first + count, dtype=np.int64)
        causes = spans - 1
        causes[0] = self.now.span
        self.recorder.spans(self.track, phase, codes, times.begun, times.worked, causes)
        self._record_waits(Phase.GIL_WAIT, "GIL", times.asked, times.begun)
        self._record_waits(Phase.QUEUE_WAIT, "launch queue", times.worked, times.launched)
        return spans

    def _record_waits(self, phase: Phase, name: str, begin: Int64, end: Int64) -> None:
        waited = end > begin
        count = int(waited.sum())
        if count:
            codes = np.full(count, self.recorder.name(name), dtype=np.int64)
            unknown = np.full(count, NO_SPAN, dtype=np.int64)
            self.recorder.spans(self.track, phase, codes, begin[waited], end[waited], unknown)


def launch_together(
    threads: list[Thread],
    streams: list[Stream],
    phase: Phase,
    runs: list[Run],
    handover: Int64,
) -> None:
    """Launch one run a thread, each on its own stream, all under one interpreter lock."""
    depth = streams[0].depth
    times = contend(
        tuple(
            ThreadRun(
                clock=thread.clock,
                locked=run.locked,
                unlocked=run.unlocked,
                durations=run.durations,
                tail=stream.tail.at,
                retired=stream.retired,
            )
            for thread, stream, run in zip(threads, streams, runs, strict=True)
        ),
        handover,
        depth,
    )
    for thread, stream, run, one in zip(threads, streams, runs, times, strict=True):
        thread._place(stream, phase, run, one)
