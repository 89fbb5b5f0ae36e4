"""Anchor: one measured step of one GPU is met, or why not is said."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dpsim import files
from dpsim.anchor import LARGEST, SMALLEST, solve
from dpsim.answer import bound_of, predict
from dpsim.costs import Scaling
from dpsim.errors import InfeasibleError
from dpsim.hardware import HardwareProfile
from dpsim.scenario import Scenario
from dpsim.simulate import simulate
from dpsim.units import NS_PER_S
from dpsim.workload import Workload

V100 = files.find(HardwareProfile, "v100-dgx1")


def machine(device_ns: float, host_ns: float, fixed_ns: float = 0.0) -> Callable[[Scaling], int]:
    """Return a step that waits for the longer of two, then for something that is not scaled."""

    def step_ns(scaling: Scaling) -> int:
        return round(max(device_ns * scaling.kernels, host_ns * scaling.host) + fixed_ns)

    return step_ns


@given(st.floats(1e6, 1e9), st.floats(1e6, 1e9), st.floats(0, 1e6), st.floats(0.05, 20))
def test_the_measured_step_is_met(device: float, host: float, fixed: float, ratio: float) -> None:
    step_ns = machine(device, host, fixed)
    anchor_s = ratio * (max(device, host) + fixed) / NS_PER_S
    if anchor_s * NS_PER_S <= fixed + 0.002 * max(device, host):
        return
    scaling = solve(step_ns, "device" if device >= host else "host", anchor_s)
    assert pytest.approx(anchor_s * NS_PER_S, rel=1e-8, abs=1) == step_ns(scaling)


def test_what_bounds_the_step_is_scaled_alone() -> None:
    assert 1.0 == solve(machine(9e6, 5e6), "device", 12e-3).host
    assert 1.0 == solve(machine(5e6, 9e6), "host", 12e-3).kernels
    assert pytest.approx(12 / 9) == solve(machine(9e6, 5e6), "device", 12e-3).kernels
    assert pytest.approx(12 / 9) == solve(machine(5e6, 9e6), "host", 12e-3).host


def test_both_are_scaled_where_one_does_not_reach() -> None:
    scaling = solve(machine(9e6, 5e6), "device", 3e-3)
    assert scaling.kernels == scaling.host == pytest.approx(1 / 3)


def test_an_anchor_that_is_met_already_changes_nothing() -> None:
    assert pytest.approx(1.0, rel=1e-6) == solve(machine(9e6, 5e6), "device", 9e-3).kernels


def test_an_anchor_below_what_is_not_scaled_is_refused_in_words() -> None:
    with pytest.raises(InfeasibleError) as error:
        solve(machine(9e6, 5e6, 2e6), "device", 1e-3)
    assert (
        "--anchor-step-ms must be reachable, got 1.000 ms: the copies of the batch and the waits "
        "alone take 2.009 ms. Check the batch of the measurement (--anchor-batch) and the profile."
    ) == str(error.value)


@pytest.mark.parametrize(("anchor_s", "shown"), [(10.0, "10.000 s"), (1e300, f"{1e300:.3f} s")])
def test_an_anchor_beyond_any_machine_is_refused_in_words(anchor_s: float, shown: str) -> None:
    with pytest.raises(InfeasibleError) as error:
        solve(machine(9e6, 5e6), "device", anchor_s)
    if anchor_s < 1e300:
        assert (
            f"--anchor-step-ms must be reachable, got {shown}: work 1000 times slower than the "
            "profile's takes 9.000 s. Check the unit, the batch of the measurement "
            "(--anchor-batch) and the profile."
        ) == str(error.value)


def test_the_factors_tried_are_a_thousandfold_either_way() -> None:
    assert SMALLEST * LARGEST == 1
    assert pytest.approx(SMALLEST, rel=1e-4) == solve(machine(9e6, 0), "device", 9e-6).kernels
    assert pytest.approx(LARGEST, rel=1e-4) == solve(machine(9e6, 0), "device", 9.0).kernels


@pytest.mark.parametrize("anchor_s", [0.0, -1.0, math.nan, math.inf])
def test_an_anchor_is_a_finite_number_above_zero(anchor_s: float) -> None:
    with pytest.raises(ValidationError):
        Scenario(anchor_step_s=anchor_s)


# With real workloads


@pytest.mark.parametrize(
    ("name", "batch", "anchor_s", "bound"),
    [
        ("resnet50", 32, 0.120, "device"),
        ("vgg16", 32, 0.150, "device"),
        ("deep-mlp", 256, 12.39e-3, "host"),
        ("small-cnn", 64, 2.5e-3, "host"),
    ],
)
def test_one_gpu_takes_the_anchor(name: str, batch: int, anchor_s: float, bound: str) -> None:
    workload = files.find(Workload, name)
    scenario = Scenario(mode="dp", gpus=2, batch=2 * batch, scaling="weak", anchor_step_s=anchor_s)
    it = predict(workload, V100, scenario)
    assert bound == it.bound
    assert pytest.approx(anchor_s * NS_PER_S, rel=1e-4) == it.baseline.step_ns
    assert batch == it.baseline.batch


def test_an_anchor_at_another_batch_tells_of_the_machine() -> None:
    """The baseline is at 64 samples and takes what the machine that was measured at 32 takes."""
    workload = files.find(Workload, "resnet50")
    there = predict(workload, V100, Scenario(batch=32, anchor_step_s=0.12))
    scenario = Scenario(batch=64, anchor_step_s=0.12, anchor_batch=32)
    it = predict(workload, V100, scenario)
    assert 1.8 < it.baseline.step_ns / there.baseline.step_ns < 2.0


def test_accumulation_does_not_change_the_machine_that_was_measured() -> None:
    workload = files.find(Workload, "resnet50")
    once, four = (
        predict(workload, V100, Scenario(batch=32, accumulation=k, anchor_step_s=0.12)).step_ns
        for k in (1, 4)
    )
    assert pytest.approx(4 * once, rel=0.03) == four  # three times no optimizer, three adds


def test_what_a_step_is_bound_by_after_the_anchor_is_told() -> None:
    """So fast a device that its kernels no longer count."""
    workload = files.find(Workload, "resnet50")
    slow = predict(workload, V100, Scenario(batch=8))
    fast = predict(workload, V100, Scenario(batch=8, anchor_step_s=0.0165))
    assert ("device", "host") == (slow.bound, fast.bound)


def test_the_bound_is_the_busier_of_device_and_host() -> None:
    workload = files.find(Workload, "small-cnn")
    for batch, bound in ((8, "host"), (8192, "device")):
        assert bound == bound_of(simulate(workload, V100, Scenario(batch=batch)))
