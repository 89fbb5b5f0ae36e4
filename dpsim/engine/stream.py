"""Stream: a FIFO of operations on one device, and the marks that other streams wait for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpsim.engine.recorder import NO_SPAN, Recorder
from dpsim.timeline import Int64, Phase, Track

NOTHING: Int64 = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, and the span that ended then: a CUDA event that has been recorded."""

    at: int  # ns
    span: int = NO_SPAN


def latest(*marks: Mark) -> Mark:
    """Return the mark that comes last; the first of equals."""
    return max(marks, key=lambda mark: mark.at)


class Stream:
    """One stream. `tail` is when all that was put on it is done."""

    def __init__(self, recorder: Recorder, track: Track, depth: int) -> None:
        """Start empty, at 0 ns; `depth` launches fit before a host thread blocks."""
        self.recorder = recorder
        self.track = recorder.track(track)
        self.depth = depth
        self.tail = Mark(0)
        self.retired = NOTHING

    def wait(self, mark: Mark) -> None:
        """Hold what follows until `mark` (cudaStreamWaitEvent)."""
        self.tail = latest(self.tail, mark)

    def run(self, phase: Phase, names: Int64, start: Int64, end: Int64, causes: Int64) -> None:
        """Put a run of ops with known times on the stream; `causes` are their launch spans."""
        if not len(end):
            return
        first = self.recorder.next_index
        if first != NO_SPAN:
            before = np.concatenate((np.array([self.tail.at]), end[:-1]))
            previous = np.arange(first - 1, first - 1 + len(end), dtype=np.int64)
            previous[0] = self.tail.span
            by_stream = start <= before
            self.recorder.spans(
                self.track, phase, names, start, end, np.where(by_stream, previous, causes)
            )
        self.tail = Mark(int(end[-1]), first + len(end) - 1 if first != NO_SPAN else NO_SPAN)
        self.remember(end)

    def op(self, phase: Phase, name: str, launched: Mark, duration: int, nbytes: int = 0) -> Mark:
        """Put one op on the stream and return its end."""
        begin = latest(self.tail, launched)
        return self.until(phase, name, begin, begin.at + duration, nbytes)

    def until(self, phase: Phase, name: str, begin: Mark, end: int, nbytes: int = 0) -> Mark:
        """Put one op on the stream whose begin (not before `tail`) and end are known."""
        span = self.recorder.span(self.track, phase, name, begin.at, end, begin.span, nbytes)
        self.tail = Mark(end, span if span != NO_SPAN else begin.span)
        self.remember(np.array([end], dtype=np.int64))
        return self.tail

    def remember(self, ends: Int64) -> None:
        """Keep the ends of the last `depth` launches: they limit how far a host runs ahead."""
        self.retired = np.concatenate((self.retired, ends))[-self.depth :]
