"""Basis: how each group of numbers behind a prediction is known - the weakest entry speaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from dpsim.costs import COMPUTE, DEFAULT_SHARE, DeviceCosts
from dpsim.engine import Cluster
from dpsim.hardware import Basis, EfficiencyTable, Quantity, Table
from dpsim.prediction import BasisEntry
from dpsim.workload import OpClass

ORDER = (Basis.MEASURED, Basis.PUBLISHED, Basis.MODELLED, Basis.ASSUMED)
"""Best first."""
Entry = Quantity | Table | EfficiencyTable


def basis_of(cluster: Cluster, *, anchored: bool) -> tuple[BasisEntry, ...]:
    """Return the basis of compute, host, links, collectives and network, as far as they count.

    Args:
        cluster: After its run.
        anchored: Were kernels or host work scaled to a measured step?
    """
    profile, network = cluster.machine.profile, cluster.machine.network
    entries = [
        _weakest("compute", _compute(cluster)),
        _weakest("host", _quantities(profile.host)),
    ]
    if anchored:
        entries.insert(
            0, BasisEntry(what="one GPU", basis=Basis.MEASURED, spread=0.0, source="the anchor")
        )
    used = set(cluster.links)
    names = {hop.split(".")[-1].split("#")[0] for hop in used}
    links = [
        entry
        for link in profile.topology.links
        if {f"{link.ends[0]}>{link.ends[1]}", f"{link.ends[1]}>{link.ends[0]}", link.name} & names
        for entry in (link.bandwidth_bytes_per_s, link.latency_s)
    ]
    if links:
        entries.append(_weakest("links", links))
    entries += _collectives(cluster)
    if network is not None and any("net" in hop.split(">") for hop in used):
        entries.append(_weakest("network", [network.bandwidth_bytes_per_s, network.latency_s]))
    return tuple(entries)


def _compute(cluster: Cluster) -> list[Entry]:
    """Return what the kernels of the run were timed with: no peak or table of another precision."""
    costs, workload, scenario = cluster.device, cluster.workload, cluster.scenario
    ops = list(workload.forward)
    if not scenario.evaluation:
        entry = workload.optimizer(scenario.optimizer, scenario.optimizer_implementation)
        ops += [*workload.backward, *(entry.ops if entry else ())]
    classes = {op.op_class for op in ops if op.kernels}
    if scenario.gpus > 1:
        classes.add(OpClass.COPY)  # chunks and buckets
    found: list[Entry] = [costs.device.memory_bandwidth_bytes_per_s, costs.device.kernel_floor_s]
    for op_class in OpClass:
        if op_class in classes:
            found += _of_class(costs, op_class)
    return found


def _of_class(costs: DeviceCosts, op_class: OpClass) -> list[Entry]:
    """Return the peak and the tables that kernels of one class are timed with."""
    by_bytes = None if op_class in COMPUTE else costs.table(op_class)
    found: list[Entry] = [by_bytes or costs.table(OpClass.ELEMENTWISE) or NO_TABLE]
    if op_class in COMPUTE:
        precision = costs.compute_precision(op_class)
        found.append(costs.device.peak_flop_per_s[precision])
        found.append(costs.table(op_class, precision) or NO_TABLE)
    return found


def _quantities(record: object) -> list[Entry]:
    values = (getattr(record, f.name) for f in fields(record))  # type: ignore[arg-type]
    return [value for value in values if isinstance(value, Quantity | Table)]


def _weakest(what: str, entries: Iterable[Entry]) -> BasisEntry:
    listed = list(entries)
    worst = max(listed, key=lambda e: (ORDER.index(e.basis), e.spread))
    return BasisEntry(
        what=what,
        basis=worst.basis,
        spread=max(entry.spread for entry in listed),
        source=worst.source,
    )


def _collectives(cluster: Cluster) -> list[BasisEntry]:
    """Return one entry for each way in which collectives of the run were timed."""
    found: dict[str, BasisEntry] = {}
    for group in cluster.groups:
        for collective in group.used:
            table = group.fabric.table(collective)
            what = f"collectives ({collective.replace('_', '-')})"
            if table is not None and group.algorithm in ("auto", "measured"):
                found[what] = BasisEntry(
                    what=what, basis=table.basis, spread=table.spread, source=table.source
                )
            else:
                model = "the textbook ring" if group.algorithm == "ring" else "NCCL's time model"
                found[what] = BasisEntry(
                    what=what,
                    basis=Basis.MODELLED,
                    spread=MODEL_SPREAD,
                    source=f"{model} on the graph of profile {cluster.machine.profile.name}",
                )
    return list(found.values())


NO_TABLE = Quantity(
    value=DEFAULT_SHARE,
    basis=Basis.ASSUMED,
    source="share of a peak for a class of ops without an efficiency table",
    spread=0.3,
)
MODEL_SPREAD = 0.35
"""NCCL's model against the measured tables of the shipped profiles: within 25 % of every largest
single-node all-reduce, within 35 % over nodes (tests/test_profiles.py)."""
