"""Catalog: what `dpsim list` knows: models, machines, networks, modes and collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from dpsim import files
from dpsim.collectives import ALGORITHMS
from dpsim.hardware import Basis, HardwareProfile, Network
from dpsim.report import draw, shortened, table
from dpsim.schedules import SCHEDULES
from dpsim.units import GB, MB, US_PER_S, format_bytes, format_rate
from dpsim.workload import Workload

Row = dict[str, Any]


def catalog(sections: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Return what is shipped, by section; the unit is in every key that is not a count.

    Args:
        sections: Keys of `SECTIONS`; () for all.
    """
    return {name: SECTIONS[name]() for name in sections or SECTIONS}


def _models() -> list[Row]:
    rows = []
    for name in files.names(Workload):
        model = files.find(Workload, name)
        rows.append(
            {
                "name": name,
                "sample": model.sample,
                "parameters": sum(p.numel for p in model.parameters),
                "parameter_bytes": model.parameter_bytes,
                "forward_flop_per_sample": model.flops_per_sample_forward,
                "modules": model.modules,
                "tensors": len(model.parameters) + len(model.buffers),
                "ops": len(model.forward) + len(model.backward),
            }
        )
    return rows


def _profiles() -> list[Row]:
    rows = []
    for name in files.names(HardwareProfile):
        profile = files.find(HardwareProfile, name)
        rows.append(
            {
                "name": name,
                "device": profile.device.name,
                "gpus_per_node": profile.topology.gpus,
                "network": profile.network,
                "weakest_basis": str(weakest_basis(profile)),
                "description": profile.description,
            }
        )
    return rows


def _networks() -> list[Row]:
    rows = []
    for name in files.names(Network):
        network = files.find(Network, name)
        rows.append(
            {
                "name": name,
                "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s.value,
                "flow_bytes_per_s": network.flow_bytes_per_s.value,
                "latency_s": network.latency_s.value,
                "rdma": network.rdma,
                "description": network.description,
            }
        )
    return rows


def _modes() -> list[Row]:
    return [{"name": name, "summary": SCHEDULES.summary(name)} for name in SCHEDULES.names()]


def _collectives() -> list[Row]:
    return [{"name": name, "summary": ALGORITHMS.summary(name)} for name in ALGORITHMS.names()]


SECTIONS: dict[str, Callable[[], list[Row]]] = {
    "models": _models,
    "profiles": _profiles,
    "networks": _networks,
    "modes": _modes,
    "collectives": _collectives,
}
"""The sections in the order in which they are shown."""


def weakest_basis(record: Any) -> Basis:
    """Return the weakest basis of all entries of a record."""
    order = list(Basis)
    return max(_bases(record), key=order.index, default=Basis.MEASURED)


def _bases(value: Any) -> Iterator[Basis]:
    if isinstance(value, Basis):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _bases(getattr(value, field.name))
    elif isinstance(value, dict | tuple):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _bases(child)


def as_text(sections: dict[str, list[Row]], *, width: int, color: bool) -> str:
    """Return what `catalog` returns as tables."""
    return "\n".join(
        f"{name.upper()}\n{draw(TABLES[name](rows, width), width=width, color=color)}"
        for name, rows in sections.items()
    )


def _model_table(rows: list[Row], _: int) -> Table:
    shown = table("name", ">parameters", ">size", ">forward", "for each", ">modules", ">ops")
    for x in rows:
        shown.add_row(
            x["name"],
            f"{x['parameters'] / MB:.1f} M",
            format_bytes(x["parameter_bytes"]),
            f"{x['forward_flop_per_sample'] / GB:.3g} GFLOP",
            x["sample"],
            str(x["modules"]),
            str(x["ops"]),
        )
    return shown


def _profile_table(rows: list[Row], _: int) -> Table:
    shown = table("name", "device", ">GPUs a node", "network", "weakest basis")
    for x in rows:
        device = x["device"].removeprefix("NVIDIA ")
        gpus, network = str(x["gpus_per_node"]), x["network"] or "-"
        shown.add_row(x["name"], device, gpus, network, x["weakest_basis"])
    return shown


def _network_table(rows: list[Row], width: int) -> Table:
    shown = table("name", ">bandwidth", ">latency", "RDMA", "what it is")
    for x in rows:
        shown.add_row(
            x["name"],
            format_rate(x["bandwidth_bytes_per_s"]),
            f"{x['latency_s'] * US_PER_S:.3g} us",
            "yes" if x["rdma"] else "no",
            shortened(x["description"], width - 47),
        )
    return shown


def _plugin_table(rows: list[Row], _: int) -> Table:
    shown = table("name", "what it is")
    for x in rows:
        shown.add_row(x["name"], x["summary"])
    return shown


TABLES: dict[str, Callable[[list[Row], int], Table]] = {
    "models": _model_table,
    "profiles": _profile_table,
    "networks": _network_table,
    "modes": _plugin_table,
    "collectives": _plugin_table,
}
