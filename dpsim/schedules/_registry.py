"""The registry of schedules, apart from the package so that plug-ins can import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dpsim.plugins import Registry

if TYPE_CHECKING:
    from dpsim.engine import Cluster

Schedule = Callable[["Cluster"], None]
"""Starts the programs of one scenario on a cluster: one generator a process."""

SCHEDULES: Registry[Schedule] = Registry("dpsim.schedules", "mode")
