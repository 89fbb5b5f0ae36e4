"""Collectives: what they cost on a fabric, when each rank is done, and the bytes they move.

Each module without an underscore is one algorithm, and its name is what a user types for
`--all-reduce`. An algorithm is a pure function of a `Call` and a `Fabric`; it sees no clock.
"""

from dpsim.collectives._fabric import Call, Collective, Fabric, fabric_of
from dpsim.collectives._finish import AUTO, choose, finish_ns
from dpsim.collectives._max_plus import ring_finish_ns
from dpsim.collectives._registry import ALGORITHMS, Algorithm
from dpsim.collectives._traffic import bus_factor, traffic

__all__ = [
    "ALGORITHMS",
    "AUTO",
    "Algorithm",
    "Call",
    "Collective",
    "Fabric",
    "bus_factor",
    "choose",
    "fabric_of",
    "finish_ns",
    "ring_finish_ns",
    "traffic",
]
