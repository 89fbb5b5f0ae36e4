"""Overrides: numbers of a profile or a network that someone has measured, put in by hand."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from pydantic import ValidationError

from dpsim.errors import InputError, UnknownNameError
from dpsim.files import explain
from dpsim.hardware import Basis, HardwareProfile, Link, Network, Quantity
from dpsim.units import format_rate

T = TypeVar("T")

SOURCE = "command line"
"""Source of a number that was put in by hand."""
CUSTOM_LATENCY_S = 25e-6
"""One way, one message: kernel TCP through one switch, as in the shipped Ethernet networks."""


def with_quantity(profile: HardwareProfile, path: str, value: float) -> HardwareProfile:
    """Return the profile with one quantity replaced.

    Args:
        profile: The machine.
        path: Keys joined by dots: `host.launch_gil_s`, `device.peak_flop_per_s.fp32`,
            `topology.links.0.latency_s`. A kind instead of a number takes all links of that kind:
            `topology.links.nvlink.bandwidth_bytes_per_s`.
        value: In the unit that the last key names.

    Raises:
        UnknownNameError: A key does not exist; the message lists those of its level.
        InputError: The path does not end at a quantity, or the value breaks its rule.
    """
    try:
        return _replaced(profile, path.split("."), (), float(value))
    except ValidationError as problem:
        raise InputError(f"--set {path}={value:g}: {explain(problem)}") from None


def _replaced(node: T, keys: list[str], done: tuple[str, ...], value: float) -> T:
    """Return a node with the quantity that `keys` lead to replaced."""
    here = ".".join(done) or "the profile"
    if isinstance(node, Quantity):
        if keys:
            raise InputError(
                f"--set {here}: must end here, at a quantity, got '{'.'.join(keys)}' behind it. "
                f"Use --set {here}=VALUE."
            )
        return dataclasses.replace(
            node, value=value, basis=Basis.ASSUMED, source=SOURCE, spread=0.0
        )
    children = _children(node)
    choices = _choices(node, children)
    if not keys:
        raise InputError(
            f"--set {here}: must lead to a quantity, got a group. "
            f"Add one of: {', '.join(sorted(choices))}."
        )
    key, rest = keys[0], keys[1:]
    if key not in choices and key not in children:
        raise UnknownNameError(f"key of {here}", key, choices)
    picked = choices.get(key, (key,))
    return _with(node, {k: _replaced(children[k], rest, (*done, key), value) for k in picked})


def _children(node: Any) -> dict[str, Any]:
    """Return what lies below a node and is or holds a quantity."""
    if dataclasses.is_dataclass(node):
        pairs = [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    elif isinstance(node, dict):
        pairs = list(node.items())
    elif isinstance(node, tuple):
        pairs = [(str(index), child) for index, child in enumerate(node)]
    else:
        pairs = []
    return {key: child for key, child in pairs if isinstance(child, Quantity) or _children(child)}


def _choices(node: Any, children: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the keys to show for a node, each with the children that it picks."""
    if not isinstance(node, tuple) or not all(isinstance(child, Link) for child in node):
        return {key: (key,) for key in children}
    kinds: dict[str, tuple[str, ...]] = {}
    for key, link in children.items():
        kinds[link.kind] = (*kinds.get(link.kind, ()), key)
    last = len(node) - 1
    return {**kinds, "0" if last == 0 else f"0 to {last}": tuple(children)}


def _with(node: T, fresh: dict[str, Any]) -> T:
    """Return a node with some of its children replaced."""
    if isinstance(node, dict):
        return {**node, **fresh}  # type: ignore[return-value]  # mypy does not narrow T
    if isinstance(node, tuple):
        items = (fresh.get(str(index), child) for index, child in enumerate(node))
        return tuple(items)  # type: ignore[return-value]  # the same
    return dataclasses.replace(node, **fresh)  # type: ignore[type-var]  # a record


def network_at(network: Network | None, bytes_per_s: float) -> Network:
    """Return a network with another bandwidth, which one connection can reach alone.

    Args:
        network: What to change; None for one of unknown kind, without RDMA.
        bytes_per_s: Payload of one NIC, each direction, > 0.
    """
    rate = Quantity(value=bytes_per_s, basis=Basis.ASSUMED, source=SOURCE)
    if network is not None:
        return dataclasses.replace(
            network,
            name=f"{network.name} at {format_rate(bytes_per_s)}",
            bandwidth_bytes_per_s=rate,
            flow_bytes_per_s=rate,
        )
    latency = Quantity(
        value=CUSTOM_LATENCY_S,
        basis=Basis.ASSUMED,
        source="kernel TCP, one way through one switch",
        spread=0.5,
    )
    return Network(
        name="custom",
        bandwidth_bytes_per_s=rate,
        latency_s=latency,
        flow_bytes_per_s=rate,
        rdma=False,
        description="A network of which the bandwidth alone is known",
    )
