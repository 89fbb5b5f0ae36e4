"""A hardware profile in which only what a fabric reads can be chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from dpsim.hardware import (
    Basis,
    CollectiveTable,
    Device,
    HardwareProfile,
    Host,
    Link,
    NcclGraph,
    Network,
    Quantity,
    Table,
    Topology,
)


def known(value: float) -> Quantity:
    """Return a quantity whose origin does not matter here."""
    return Quantity(value=value, basis=Basis.ASSUMED, source="test")


def host() -> Host:
    """Return a host; collectives do not look at it."""
    handover = Table(at=(0,), value=(0,), basis=Basis.ASSUMED, source="test")
    names = [field.name for field in fields(Host) if field.type in ("Duration", "PositiveQuantity")]
    quantities: dict[str, Any] = dict.fromkeys(names, known(1.0))
    return Host(gil_handover_s=handover, cores=1, **quantities)


@pytest.fixture
def graph() -> Callable[..., NcclGraph]:
    """Make an NCCL graph: GPUs, channels, GB/s of a channel, path."""

    def make(gpus: int, channels: int, rate: float, path: Any, *, nvls: bool = False) -> NcclGraph:
        each = known(rate * 1e9)
        return NcclGraph(
            gpus=gpus, channels=channels, channel_bytes_per_s=each, path=path, nvls=nvls
        )

    return make


@pytest.fixture
def network() -> Callable[..., Network]:
    """Make a network: name, GB/s of a NIC, GB/s of a connection, RDMA or not."""

    def make(name: str, rate: float, *, flow: float = 1e3, rdma: bool = False) -> Network:
        return Network(
            name=name,
            bandwidth_bytes_per_s=known(rate * 1e9),
            latency_s=known(30e-6),
            flow_bytes_per_s=known(flow * 1e9),
            rdma=rdma,
        )

    return make


@pytest.fixture
def table() -> Callable[..., CollectiveTable]:
    """Make a measured table; keywords replace the defaults."""

    def make(**values: Any) -> CollectiveTable:
        defaults: dict[str, Any] = {
            "collective": "all_reduce",
            "ranks": 4,
            "nbytes": (1e3, 1e6, 1e8),
            "seconds": (20e-6, 200e-6, 10e-3),
            "basis": Basis.MEASURED,
            "source": "test",
        }
        return CollectiveTable(**(defaults | values))

    return make


@pytest.fixture
def profile() -> Callable[..., HardwareProfile]:
    """Make a profile of 8 GPUs on PCIe links of 12 GB/s; keywords replace the defaults."""

    def make(
        *graphs: NcclGraph, architecture: str = "ampere", peer_access: Any = "all", **values: Any
    ) -> HardwareProfile:
        device: dict[str, Any] = {"name": "test", "architecture": architecture}
        links = tuple(
            Link(
                ends=(f"gpu{i}", "cpu0"),
                kind="pcie",
                bandwidth_bytes_per_s=known(12e9),
                latency_s=known(1e-6),
            )
            for i in range(8)
        )
        return HardwareProfile(
            name="test",
            description="",
            device=Device(
                peak_flop_per_s={},
                memory_bandwidth_bytes_per_s=known(1e12),
                memory_bytes=known(1e10),
                multiprocessors=1,
                kernel_floor_s=known(0),
                efficiency=(),
                copy_latency_s=known(0),
                **device,
            ),
            host=host(),
            topology=Topology(gpus=8, links=links, peer_access=peer_access),
            nccl=graphs,
            **values,
        )

    return make
