"""The registry of all-reduce algorithms, apart from the package so that plug-ins can import it."""

from __future__ import annotations

from collections.abc import Callable

from dpsim.collectives._fabric import Call, Fabric
from dpsim.plugins import Registry

Algorithm = Callable[[Call, Fabric], float]
"""Seconds from "all participants are ready" to "done", when all start together."""

ALGORITHMS: Registry[Algorithm] = Registry("dpsim.collectives", "all-reduce algorithm")
