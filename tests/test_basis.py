"""Basis: only what was used is named, and the weakest entry speaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpsim import files
from dpsim.basis import MODEL_SPREAD, NO_TABLE, basis_of
from dpsim.hardware import Basis, EfficiencyTable, HardwareProfile, Network, Quantity
from dpsim.prediction import BasisEntry
from dpsim.scenario import RingOptions, Scenario
from dpsim.simulate import simulate
from dpsim.workload import OpClass, Workload
from tests.synthetic import workload

V100 = files.find(HardwareProfile, "v100-dgx1")
A100 = files.find(HardwareProfile, "a100-sxm")
PRODUCTS = workload([(64, 64)] * 3)


def known(profile: HardwareProfile, basis: Basis = Basis.MEASURED) -> HardwareProfile:
    """Return a profile whose device is known throughout."""

    def sure(quantity: Quantity) -> Quantity:
        return replace(quantity, basis=basis, source="sure", spread=0.01)

    device = profile.device
    return replace(
        profile,
        device=replace(
            device,
            peak_flop_per_s={k: sure(q) for k, q in device.peak_flop_per_s.items()},
            memory_bandwidth_bytes_per_s=sure(device.memory_bandwidth_bytes_per_s),
            kernel_floor_s=sure(device.kernel_floor_s),
            efficiency=tuple(
                replace(table, basis=basis, source="sure", spread=0.01)
                for table in device.efficiency
            ),
        ),
    )


def weaken(
    profile: HardwareProfile, op_class: OpClass, dtype: str | None = None
) -> HardwareProfile:
    """Return a profile of which one table is a guess."""
    tables = tuple(
        replace(table, basis=Basis.ASSUMED, source="guess", spread=0.7)
        if table.op_class == op_class and dtype in (None, table.dtype)
        else table
        for table in profile.device.efficiency
    )
    return replace(profile, device=replace(profile.device, efficiency=tables))


def entries(
    profile: HardwareProfile,
    scenario: Scenario | None = None,
    it: Workload = PRODUCTS,
    network: Network | None = None,
) -> dict[str, BasisEntry]:
    done = simulate(it, profile, scenario or Scenario(), network)
    return {entry.what: entry for entry in basis_of(done.cluster, anchored=False)}


def test_the_weakest_entry_of_compute_speaks() -> None:
    sure = known(A100)
    assert ("sure", Basis.MEASURED) == (
        entries(sure)["compute"].source,
        entries(sure)["compute"].basis,
    )
    guess = entries(weaken(sure, OpClass.GEMM))["compute"]
    assert ("guess", Basis.ASSUMED, 0.7) == (guess.source, guess.basis, guess.spread)


@pytest.mark.parametrize(
    "unused", [OpClass.CONV, OpClass.ATTENTION, OpClass.RNN, OpClass.EMBEDDING]
)
def test_a_table_of_ops_that_do_not_occur_is_not_named(unused: OpClass) -> None:
    assert "sure" == entries(weaken(known(A100), unused))["compute"].source


@pytest.mark.parametrize("used", [OpClass.GEMM, OpClass.REDUCTION, OpClass.ELEMENTWISE])
def test_a_table_of_ops_that_occur_is(used: OpClass) -> None:
    assert "guess" == entries(weaken(known(A100), used))["compute"].source


def test_evaluation_does_not_use_the_optimizer() -> None:
    net = files.find(Workload, "vgg16")
    guess = weaken(known(V100), OpClass.REDUCTION)  # bias gradients, in backward
    assert "guess" == entries(guess, Scenario(batch=2), net)["compute"].source
    forward = replace(net, forward=net.forward[: net.loss_start])
    assert "sure" == entries(guess, Scenario(batch=2, evaluation=True), forward)["compute"].source


def test_copies_of_chunks_count_with_several_gpus() -> None:
    guess = weaken(known(V100), OpClass.COPY)
    assert "sure" == entries(guess)["compute"].source
    assert "guess" == entries(guess, Scenario(mode="dp", gpus=2))["compute"].source


@pytest.mark.parametrize(
    ("precision", "used"), [("fp32", "fp32"), ("tf32", "tf32"), ("bf16", "bf16"), ("amp", "fp16")]
)
def test_the_peak_of_the_precision_counts_and_no_other(precision: Any, used: str) -> None:
    sure = known(A100)
    for name in ("fp32", "tf32", "fp16", "bf16"):
        peak = replace(
            sure.device.peak_flop_per_s[name], basis=Basis.ASSUMED, source="guess", spread=0.5
        )
        peaks: Any = {**sure.device.peak_flop_per_s, name: peak}
        profile = replace(sure, device=replace(sure.device, peak_flop_per_s=peaks))
        expected = "guess" if name == used else "sure"
        assert expected == entries(profile, Scenario(precision=precision))["compute"].source, name


def test_convolutions_in_fp32_name_the_table_of_tf32_where_it_exists() -> None:
    net = files.find(Workload, "vgg16")
    tables = {t.dtype for t in A100.device.efficiency if t.op_class is OpClass.CONV}
    assert "tf32" in tables
    scenario = Scenario(batch=2)
    guess = weaken(known(A100), OpClass.CONV, "tf32")
    assert "guess" == entries(guess, scenario, net)["compute"].source
    others = weaken(known(A100), OpClass.CONV, "fp16")
    assert "sure" == entries(others, scenario, net)["compute"].source


def test_a_class_without_table_is_assumed() -> None:
    sure = known(V100)
    tables: tuple[EfficiencyTable, ...] = tuple(
        t for t in sure.device.efficiency if t.op_class is not OpClass.GEMM
    )
    bare = replace(sure, device=replace(sure.device, efficiency=tables))
    it = entries(bare)["compute"]
    assert (NO_TABLE.basis, NO_TABLE.source, NO_TABLE.spread) == (it.basis, it.source, it.spread)


def test_the_widest_spread_is_told_even_where_another_entry_is_weaker() -> None:
    sure = known(V100)
    wide = replace(sure.device.kernel_floor_s, spread=0.9)
    profile = weaken(replace(sure, device=replace(sure.device, kernel_floor_s=wide)), OpClass.GEMM)
    it = entries(profile)["compute"]
    assert ("guess", 0.9) == (it.source, it.spread)


def test_one_gpu_has_no_collective_and_no_network() -> None:
    assert ["compute", "host", "links"] == list(entries(V100))


def test_a_measured_collective_names_its_table() -> None:
    scenario = Scenario(mode="ring", gpus=8, batch=64)
    it = entries(V100, scenario, files.find(Workload, "resnet50"))
    (table,) = (
        t for t in V100.collectives if (t.collective, t.ranks, t.nodes) == ("all_reduce", 8, 1)
    )
    assert (table.basis, table.source, table.spread) == (
        it["collectives (all-reduce)"].basis,
        it["collectives (all-reduce)"].source,
        it["collectives (all-reduce)"].spread,
    )
    assert "collectives (broadcast)" in it  # of buffers


@pytest.mark.parametrize(
    ("algorithm", "source"),
    [
        ("nccl", "NCCL's time model on the graph of profile v100-dgx1"),
        ("ring", "the textbook ring on the graph of profile v100-dgx1"),
    ],
)
def test_a_modelled_collective_names_its_model(algorithm: str, source: str) -> None:
    ring = RingOptions(all_reduce=algorithm)
    it = entries(V100, Scenario(mode="ring", gpus=8, batch=64, ring=ring))
    entry = it["collectives (all-reduce)"]
    assert (Basis.MODELLED, source, MODEL_SPREAD) == (entry.basis, entry.source, entry.spread)


def test_two_nodes_name_the_network() -> None:
    network = files.find(Network, "infiniband-edr")
    it = entries(V100, Scenario(mode="ring", gpus=16, batch=64), PRODUCTS, network)
    assert it["network"].source in (
        network.bandwidth_bytes_per_s.source,
        network.latency_s.source,
    )


def test_an_anchor_comes_first_and_is_measured() -> None:
    done = simulate(PRODUCTS, V100, Scenario())
    first, *others = basis_of(done.cluster, anchored=True)
    assert ("one GPU", Basis.MEASURED, 0.0, "the anchor") == (
        first.what, first.basis, first.spread, first.source
    )  # fmt: skip
    assert others == list(basis_of(done.cluster, anchored=False))
