"""Recorder: spans are appended in blocks of columns and cut to a `Timeline` at the end."""

from __future__ import annotations

import numpy as np

from dpsim.timeline import PHASE_CODE, Int64, Phase, Timeline, Track

NO_SPAN = -1
"""The cause of what nothing recorded has caused."""


class Recorder:
    """Collects spans. While it is off, recording costs nothing and returns `NO_SPAN`."""

    def __init__(self, *, on: bool = True) -> None:
        """Start empty."""
        self.on = on
        self._codes: dict[int, tuple[tuple[str, ...], Int64]] = {}
        self._tracks: list[Track] = []
        self._names: dict[str, int] = {}
        self._blocks: list[tuple[int, int, Int64, Int64, Int64, Int64, int]] = []
        self._count = 0

    def track(self, track: Track) -> int:
        """Return the index of a new track."""
        self._tracks.append(track)
        return len(self._tracks) - 1

    def name(self, text: str) -> int:
        """Return the code of an op's name."""
        return self._names.setdefault(text, len(self._names))

    def codes(self, texts: tuple[str, ...]) -> Int64:
        """Return the codes of several names, as int64; the same tuple is looked up once."""
        kept = self._codes.get(id(texts))
        if kept is None or kept[0] is not texts:
            kept = (texts, np.array([self.name(text) for text in texts], dtype=np.int64))
            self._codes[id(texts)] = kept
        return kept[1]

    def span(  # noqa: PLR0913 - a span has seven columns
        self, track: int, phase: Phase, name: str, start: int, end: int, cause: int, nbytes: int = 0
    ) -> int:
        """Record one span and return its index; empty spans are not kept."""
        if not self.on or end <= start:
            return NO_SPAN
        return self.spans(
            track,
            phase,
            np.array([self.name(name)]),
            np.array([start]),
            np.array([end]),
            np.array([cause]),
            nbytes,
        )

    def spans(  # noqa: PLR0913 - the same
        self,
        track: int,
        phase: Phase,
        names: Int64,
        starts: Int64,
        ends: Int64,
        causes: Int64,
        nbytes: int = 0,
    ) -> int:
        """Record spans of one track and phase; return the index of the first."""
        if not self.on:
            return NO_SPAN
        first = self._count
        self._blocks.append((track, PHASE_CODE[phase], names, starts, ends, causes, nbytes))
        self._count += len(starts)
        return first

    @property
    def next_index(self) -> int:
        """Return the index that the next span will get, or `NO_SPAN` while off."""
        return self._count if self.on else NO_SPAN

    def timeline(self, start_ns: int, end_ns: int) -> Timeline:
        """Return the spans that touch [start_ns, end_ns), with 0 at start_ns."""
        columns = self._columns()
        start, end = columns[2], columns[3]
        kept = (end > start_ns) & (start < end_ns)
        index = np.cumsum(kept) - 1
        cause = columns[5][kept]
        known = (cause >= 0) & kept[np.maximum(cause, 0)] if len(kept) else cause >= 0
        return Timeline(
            step_ns=end_ns - start_ns,
            tracks=tuple(self._tracks),
            names=tuple(self._names),
            start=start[kept] - start_ns,
            end=end[kept] - start_ns,
            track=columns[0][kept].astype(np.int32),
            phase=columns[1][kept].astype(np.int32),
            op=columns[4][kept].astype(np.int32),
            nbytes=columns[6][kept],
            cause=np.where(known, index[np.maximum(cause, 0)], -1) if len(kept) else cause,
        )

    def _columns(self) -> list[Int64]:
        if not self._blocks:
            return [np.zeros(0, dtype=np.int64) for _ in range(7)]
        sizes = [len(block[3]) for block in self._blocks]
        tracks, phases, nbytes = (
            np.repeat(np.array([block[i] for block in self._blocks], dtype=np.int64), sizes)
            for i in (0, 1, 6)
        )
        names, starts, ends, causes = (
            np.concatenate([np.asarray(block[i], dtype=np.int64) for block in self._blocks])
            for i in (2, 3, 4, 5)
        )
        return [tracks, phases, starts, ends, names, causes, nbytes]
