"""Timeline: what ran where and when, as columns, so that a million spans cost nothing to sum."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


class Phase(StrEnum):
    """What a span belongs to. Host threads, streams, links and servers share the vocabulary."""

    LOOP = "loop"  # the training loop's own Python
    INPUT = "input"  # host to device copy of the batch
    DEVICE_CHECK = "device check"  # DataParallel compares the device of every tensor
    SCATTER = "scatter"  # batch cut and sent to the replicas
    BROADCAST = "broadcast parameters"  # replicate: parameters from GPU 0
    BUFFERS = "broadcast buffers"  # replicate, or DDP's forward_sync_buffers
    REPLICATE = "replicate modules"  # Python rebuilds the module tree
    THREADS = "threads"  # start and join of the replica threads
    FORWARD = "forward"
    GATHER = "gather"  # outputs to the output device
    LOSS = "loss"
    LOSS_BACKWARD = "loss backward"
    SCATTER_GRADIENTS = "scatter gradients"  # Gather.backward
    BACKWARD = "backward"
    REDUCE = "reduce gradients"  # DataParallel's one reduce node
    ACCUMULATE = "accumulate gradients"
    BUCKET = "bucket copies"  # DDP: gradient to bucket and back
    ALL_REDUCE = "all-reduce"
    LOCAL_REDUCE = "local reduce"  # several GPUs a worker
    PUSH = "push"
    AGGREGATE = "aggregate"  # on the server
    PULL = "pull"
    OPTIMIZER = "optimizer"
    SYNC = "wait for device"  # the host waits for a stream
    GIL_WAIT = "GIL wait"
    QUEUE_WAIT = "launch queue full"


PHASES = tuple(Phase)
"""Order of the codes in `Timeline.phase`."""
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One row: a stream of a GPU, a host thread, a server. Spans on it never overlap."""

    rank: int  # first of the `count` equal ranks it stands for; -1 for a server
    name: str  # "compute", "comm", "main thread", "replica thread 3"
    kind: Literal["stream", "thread", "server"]
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """One step, in columns of equal length n.

    The step is the window [0, step_ns). Host threads run ahead of the devices, so spans of this
    step may begin before 0, and spans of the step before may end after it.
    """

    step_ns: int
    tracks: tuple[Track, ...]
    names: tuple[str, ...]  # ops; `op` indexes it
    start: Int64  # ns
    end: Int64  # ns, >= start
    track: Int32  # index into tracks
    phase: Int32  # index into PHASES
    op: Int32  # index into names
    nbytes: Int64  # payload of copies and collectives, else 0
    cause: Int64  # index of the span that let it start, -1 if none is kept

    def __len__(self) -> int:
        """Return the number of spans."""
        return len(self.start)

    def clipped(self) -> tuple[Int64, Int64]:
        """Return starts and ends cut to the window; spans outside have length 0."""
        start = np.clip(self.start, 0, self.step_ns)
        return start, np.maximum(np.clip(self.end, 0, self.step_ns), start)

    def busy_ns(self, track: int) -> int:
        """Return the time within the window in which a track is busy."""
        start, end = self.clipped()
        mine = self.track == track
        return int((end[mine] - start[mine]).sum())

    def phase_ns(self, track: int) -> dict[Phase, int]:
        """Return the time within the window that a track spends in each phase, in phase order."""
        start, end = self.clipped()
        mine = self.track == track
        sums = np.zeros(len(PHASES), dtype=np.int64)
        np.add.at(sums, self.phase[mine], (end - start)[mine])
        return {phase: int(ns) for phase, ns in zip(PHASES, sums, strict=True) if ns > 0}
