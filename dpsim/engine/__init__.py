"""The engine: clock, interpreter lock, host threads, streams, links and collectives.

The only code that imports simpy. Schedules act on a `Cluster`; spans and their causes are
recorded by threads and streams, so no schedule can forget one.
"""

from dpsim.engine.cluster import Cluster, Communicator, Program
from dpsim.engine.recurrence import Slowdown
from dpsim.engine.stream import Mark, Stream, latest
from dpsim.engine.thread import Run, Thread, launch_together

__all__ = [
    "Cluster",
    "Communicator",
    "Mark",
    "Program",
    "Run",
    "Slowdown",
    "Stream",
    "Thread",
    "latest",
    "launch_together",
]
