"""The constants of NCCL's tuning model, version 2.30.7.

Source: NVIDIA/nccl, commit 5067397c, src/graph/tuning.cc (`ncclTunerConstantsDefaults`,
`treeCorrectionFactor`, `nvlsEfficiency`) and src/graph/search.cc (candidate speeds). NVIDIA
fitted them on its own machines. Times are in microseconds and rates in GB/s, as there; nccl.py
converts them.
"""

from __future__ import annotations

from typing import Literal

TreeOrRing = Literal["tree", "ring", "pat"]
Protocol = Literal["LL", "LL128", "Simple"]
ByNodes = tuple[float, float, float]
"""A value on one node, on two nodes, and on three or more."""
ByProtocol = dict[Protocol, float]


def _by_protocol(ll: float, ll128: float, simple: float) -> ByProtocol:
    return {"LL": ll, "LL128": ll128, "Simple": simple}


BASE_US: dict[TreeOrRing, ByProtocol] = {
    "tree": _by_protocol(6.8, 14.0, 8.4),
    "ring": _by_protocol(6.6, 14.0, 8.4),
    "pat": _by_protocol(8.0, 8.0, 8.0),
}
"""Latency of one collective without its hops, us."""

HOP_US: dict[Literal["nvlink", "pci", "net"], dict[TreeOrRing, ByProtocol]] = {
    "nvlink": {
        "tree": _by_protocol(0.6, 1.25, 4.0),
        "ring": _by_protocol(0.6, 1.9, 3.4),
        "pat": _by_protocol(0.0, 0.0, 4.0),
    },
    "pci": {
        "tree": _by_protocol(1.0, 1.9, 4.0),
        "ring": _by_protocol(1.0, 2.5, 5.7),
        "pat": _by_protocol(0.0, 0.0, 4.0),
    },
    "net": {
        "tree": _by_protocol(5.0, 8.5, 14.0),
        "ring": _by_protocol(2.7, 4.0, 14.0),
        "pat": _by_protocol(0.0, 0.0, 14.0),
    },
}
"""Latency of one hop over each kind of link, us."""

NVLS_US = 25.0
"""Latency of a collective in the NVSwitch (Simple); it replaces the base latency."""

# Rows of the following tables: NCCL generation 0 Volta and older, 1 Ampere, 2 Hopper, 3 Blackwell.
LL_MAX: tuple[ByNodes, ...] = (
    (39.0, 39.0, 20.4),
    (87.7, 22.5, 19.0),
    (141.0, 45.0, 35.0),
    (282.0, 90.0, 70.0),
)
"""Highest bus bandwidth of LL, GB/s. On several nodes the row is the CPU's: 1 for AMD, else 0."""
RING_LL128_MAX: tuple[ByNodes, ...] = (
    (20.0, 20.0, 20.0),
    (20.0, 20.0, 20.0),
    (36.7, 36.7, 36.7),
    (40.0, 40.0, 40.0),
)
"""Highest bandwidth of one channel, ring and LL128, GB/s."""
TREE_LL128_MAX: tuple[ByNodes, ...] = (
    (20.0, 20.0, 20.0),
    (20.0, 20.0, 20.0),
    (36.7, 36.7, 29.0),
    (55.6, 31.67, 20.0),
)
"""Highest bandwidth of one channel, tree and LL128, GB/s."""
TREE_MAX: tuple[ByNodes, ...] = (
    (26.5, 18.5, 10.0),
    (24.0, 23.6, 17.8),
    (38.7, 41.4, 36.0),
    (70.0, 42.8, 24.0),
)
"""Highest bandwidth of one channel in a tree all-reduce, GB/s."""
NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)
"""Share of the channel's bandwidth that NVLS reaches; 0 where there is none."""

NVLS_SPEEDS: dict[int, tuple[float, ...]] = {
    2: (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    3: (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
}
"""Speeds of one channel that the search tries inside a node, by generation, GB/s, falling."""
INTER_SPEED_MAX = 48.0
"""Highest speed of one channel that the search tries between nodes (before Blackwell), GB/s."""

RING_LL128_SHARE = 0.92
TREE_SHARE = 0.92
TREE_LL128_SHARE_ONE_NODE = 7.0 / 9.0
TREE_LL128_SHARE = 120.0 / 128.0
TREE_LL_SHARE = 1.0 / 3.8
RING_LL_SHARE = 0.5
PLAIN_TREE_SHARE = 0.85
"""All NIC traffic of a node passes one GPU (pattern TREE), as with one GPU a node."""
PAT_SHARE = 0.75

NET_OVERHEAD_US = {"amd": 2.0}
"""Cost of posting one network operation, us; 1 for every other vendor."""
NET_OVERHEAD_DEFAULT_US = 1.0
RING_PLATEAU = (1.9, 1.4, 1.4, 1.4)
"""Factor on the latency of ring + Simple on several nodes, by generation."""
RING_PLATEAU_BYTES = 64
"""The factor applies from this many bytes a channel and rank."""

TREE_CORRECTION: dict[Protocol, tuple[float, ...]] = {
    "LL": (
        *(1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5),
        *(0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0),
    ),
    "LL128": (
        *(1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6),
        *(0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0),
    ),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
    ),
}
"""Factor on a tree's bandwidth by log2(bytes / 64). NCCL's tables have a 24th entry that its
test `logSize < 23` never reaches, so it is not here."""
