"""Numbers put in by hand: they replace one quantity, and wrong paths are refused in words."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dpsim import files
from dpsim.errors import InputError, UnknownNameError
from dpsim.hardware import Basis, HardwareProfile, Network
from dpsim.overrides import network_at, with_quantity

PROFILE = files.find(HardwareProfile, "a100-sxm")


def test_one_quantity_changes_and_nothing_else() -> None:
    changed = with_quantity(PROFILE, "host.launch_gil_s", 2e-5)
    new = changed.host.launch_gil_s
    assert (2e-5, Basis.ASSUMED, "command line") == (new.value, new.basis, new.source)
    host = dataclasses.replace(changed.host, launch_gil_s=PROFILE.host.launch_gil_s)
    assert dataclasses.replace(changed, host=host) == PROFILE


def test_keys_of_dictionaries_and_places_in_lists_are_keys() -> None:
    changed = with_quantity(PROFILE, "device.peak_flop_per_s.fp32", 1e13)
    assert 1e13 == changed.device.peak_flop_per_s["fp32"].value
    assert PROFILE.device.peak_flop_per_s["bf16"] == changed.device.peak_flop_per_s["bf16"]
    changed = with_quantity(PROFILE, "nccl.0.channel_bytes_per_s", 1e9)
    assert 1e9 == changed.nccl[0].channel_bytes_per_s.value
    assert PROFILE.nccl[1:] == changed.nccl[1:]


def test_a_kind_takes_all_links_of_that_kind() -> None:
    changed = with_quantity(PROFILE, "topology.links.nvlink.bandwidth_bytes_per_s", 1e11)
    for before, after in zip(PROFILE.topology.links, changed.topology.links, strict=True):
        assert (1e11 == after.bandwidth_bytes_per_s.value) == (before.kind == "nvlink")
    changed = with_quantity(PROFILE, "topology.links.0.latency_s", 1.0)
    assert [1.0] == [x.latency_s.value for x in changed.topology.links if x.latency_s.value == 1]


def test_infinity_means_free() -> None:
    changed = with_quantity(PROFILE, "device.memory_bandwidth_bytes_per_s", math.inf)
    assert math.inf == changed.device.memory_bandwidth_bytes_per_s.value


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("hots.launch_gil_s", 1.0, "no key of the profile 'hots'; known: device, host, nccl, topology. Did you mean 'host'?"),
        ("device.peak_flop_per_s.fp8", 1.0, "no key of device.peak_flop_per_s 'fp8'; known: bf16, fp16, fp32, tf32."),
        ("topology.links.99.latency_s", 1.0, f"no key of topology.links '99'; known: 0 to {len(PROFILE.topology.links) - 1}, nvlink, pcie, socket."),
        ("host.launch_gil_s.value", 1.0, "--set host.launch_gil_s: must end here, at a quantity, got 'value' behind it. Use --set host.launch_gil_s=VALUE."),
        ("topology.links.0", 1.0, "--set topology.links.0: must lead to a quantity, got a group. Add one of: bandwidth_bytes_per_s, latency_s."),
        ("host.launch_gil_s", -1.0, "--set host.launch_gil_s=-1: value: Input should be greater than or equal to 0, got -1.0. Correct the value."),
        ("host.memory_bandwidth_bytes_per_s", 0.0, "--set host.memory_bandwidth_bytes_per_s=0: memory_bandwidth_bytes_per_s: value must be > 0, got 0.0. Correct the value."),
    ],
)  # fmt: skip
def test_wrong_paths_and_values_are_refused_in_words(
    path: str, value: float, expected: str
) -> None:
    with pytest.raises(InputError) as problem:
        with_quantity(PROFILE, path, value)
    assert expected == str(problem.value)


def test_an_unknown_key_lists_those_that_lead_to_quantities() -> None:
    with pytest.raises(UnknownNameError) as problem:
        with_quantity(PROFILE, "host.launch_gil", 1.0)
    message = str(problem.value)
    assert message.endswith("Did you mean 'launch_gil_s'?")
    assert "launch_free_s" in message
    assert "cores" not in message


def test_a_network_keeps_all_but_its_bandwidth() -> None:
    network = files.find(Network, "10gbe")
    fast = network_at(network, 2e9)
    assert "10gbe at 2 GB/s" == fast.name
    assert (2e9, 2e9) == (fast.bandwidth_bytes_per_s.value, fast.flow_bytes_per_s.value)
    assert (network.latency_s, network.rdma) == (fast.latency_s, fast.rdma)


def test_a_network_of_unknown_kind_is_slow_to_answer() -> None:
    custom = network_at(None, 1e9)
    assert ("custom", False, 25e-6) == (custom.name, custom.rdma, custom.latency_s.value)
    assert "command line" == custom.bandwidth_bytes_per_s.source
    assert Basis.ASSUMED is custom.bandwidth_bytes_per_s.basis
