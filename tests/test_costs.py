"""Costs of ops: the closed form of a kernel, precisions, and what launching costs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dpsim import files
from dpsim.costs import DEFAULT_SHARE, DeviceCosts, HostCosts, Scaling, columns
from dpsim.errors import InfeasibleError
from dpsim.hardware import Basis, EfficiencyTable, HardwareProfile, Quantity
from dpsim.scenario import Precision
from dpsim.units import NS_PER_S
from dpsim.workload import Linear, Op, OpClass

V100 = files.find(HardwareProfile, "v100-dgx1")
FLOOR_S = 5e-6
BANDWIDTH = 1e12
PEAKS = {"fp32": 1e13, "tf32": 5e13, "fp16": 1e14, "bf16": 8e13}


def quantity(value: float) -> Quantity:
    return Quantity(value=value, basis=Basis.ASSUMED, source="test", spread=0.2)


def table(op_class: OpClass, share: float, dtype: str = "") -> EfficiencyTable:
    return EfficiencyTable(
        op_class=op_class,
        work=(1.0,),
        share=(share,),
        basis=Basis.ASSUMED,
        source="test",
        dtype=dtype,
    )


def device(*tables: EfficiencyTable, peaks: Any = tuple(PEAKS)) -> HardwareProfile:
    """Return a profile with round numbers."""
    made = replace(
        V100.device,
        peak_flop_per_s={name: quantity(PEAKS[name]) for name in peaks},
        memory_bandwidth_bytes_per_s=quantity(BANDWIDTH),
        kernel_floor_s=quantity(FLOOR_S),
        efficiency=tables,
    )
    return replace(V100, device=made)


ALL = device(
    table(OpClass.GEMM, 0.5),
    table(OpClass.CONV, 0.4),
    table(OpClass.CONV, 0.25, "tf32"),
    table(OpClass.ELEMENTWISE, 0.8),
    table(OpClass.COPY, 0.5),
)


def op(
    op_class: OpClass = OpClass.ELEMENTWISE,
    *,
    flops: float = 0.0,
    nbytes: float = 0.0,
    kernels: int = 1,
    calls: int = 0,
) -> Op:
    return Op(
        name="aten.op",
        op_class=op_class,
        flops=Linear(per_sample=flops),
        bytes_moved=Linear(per_sample=nbytes),
        kernels=kernels,
        module_calls=calls,
    )


def time_ns(
    it: Op, batch: int = 1, precision: Precision = "fp32", profile: HardwareProfile = ALL
) -> int:
    (ns,) = DeviceCosts(profile, precision).op_ns(columns((it,)), batch)
    return int(ns)


# The kernel: a roofline with a floor


def test_a_small_kernel_takes_the_floor() -> None:
    assert FLOOR_S * NS_PER_S == time_ns(op(nbytes=1.0))
    assert FLOOR_S * NS_PER_S == time_ns(op(OpClass.GEMM, flops=1.0))


def test_a_large_kernel_takes_the_longer_of_flop_and_bytes() -> None:
    by_flop = op(OpClass.GEMM, flops=1e10, nbytes=1e8)
    assert 1e10 / (0.5 * PEAKS["fp32"]) * NS_PER_S == time_ns(by_flop)
    by_bytes = op(OpClass.GEMM, flops=1e8, nbytes=1e9)
    assert pytest.approx(1e9 / (0.8 * BANDWIDTH) * NS_PER_S, abs=1) == time_ns(by_bytes)


def test_costs_are_linear_in_the_batch_above_the_floor() -> None:
    it = op(OpClass.GEMM, flops=1e9)
    assert 64 * time_ns(it) == time_ns(it, 64)


def test_kernels_of_one_op_share_its_work_and_pay_a_floor_each() -> None:
    it = op(OpClass.GEMM, flops=1e10, kernels=4)
    assert time_ns(op(OpClass.GEMM, flops=1e10)) == time_ns(it)
    assert 4 * FLOOR_S * NS_PER_S == time_ns(op(nbytes=1.0, kernels=4))


@given(
    st.sampled_from([c for c in OpClass if c is not OpClass.VIEW]),
    st.floats(0, 1e13),
    st.floats(0, 1e10),
    st.integers(1, 4),
    st.integers(1, 64),
)
def test_the_closed_form(
    op_class: OpClass, flops: float, nbytes: float, kernels: int, batch: int
) -> None:
    tables = {OpClass.GEMM: 0.5, OpClass.CONV: 0.25, OpClass.COPY: 0.5}
    compute = op_class in (OpClass.GEMM, OpClass.CONV, OpClass.ATTENTION, OpClass.RNN)
    share = tables.get(op_class, DEFAULT_SHARE)
    memory = 0.5 if op_class is OpClass.COPY else 0.8  # others move bytes as elementwise ops do
    tf32 = op_class in (OpClass.CONV, OpClass.RNN)
    peak = PEAKS["tf32" if tf32 else "fp32"]
    each = max(
        FLOOR_S,
        nbytes * batch / kernels / (memory * BANDWIDTH),
        flops * batch / kernels / (share * peak) if compute else 0.0,
    )
    it = op(op_class, flops=flops, nbytes=nbytes, kernels=kernels)
    assert pytest.approx(each * kernels * NS_PER_S, abs=0.51, rel=1e-12) == time_ns(it, batch)


def test_a_fixed_cost_below_zero_is_not_a_gain() -> None:
    """A fit through two batches may cross zero below them."""
    it = Op(name="aten.op", op_class=OpClass.GEMM, flops=Linear(fixed=-1e12, per_sample=1e9))
    assert FLOOR_S * NS_PER_S == time_ns(it)


def test_a_table_is_interpolated_on_the_logarithm_of_work() -> None:
    grows = EfficiencyTable(
        op_class=OpClass.GEMM,
        work=(1e8, 1e10),
        share=(0.1, 0.5),
        basis=Basis.ASSUMED,
        source="test",
    )
    profile = device(grows)
    for flops, share in ((1e6, 0.1), (1e8, 0.1), (1e9, 0.3), (1e10, 0.5), (1e12, 0.5)):
        expected = max(FLOOR_S, flops / (share * PEAKS["fp32"])) * NS_PER_S
        assert pytest.approx(expected, abs=1) == time_ns(
            op(OpClass.GEMM, flops=flops), profile=profile
        )


def test_no_bandwidth_and_no_peak_limit_what_is_infinite() -> None:
    free = replace(
        ALL.device,
        memory_bandwidth_bytes_per_s=quantity(math.inf),
        peak_flop_per_s={"fp32": quantity(math.inf)},
        kernel_floor_s=quantity(0.0),
    )
    it = op(OpClass.GEMM, flops=1e15, nbytes=1e12)
    assert 0 == time_ns(it, profile=replace(ALL, device=free))


def test_a_straggler_and_an_anchor_multiply_kernels() -> None:
    ops = columns((op(OpClass.GEMM, flops=1e10), op(nbytes=1.0)))
    plain = DeviceCosts(ALL, "fp32").op_ns(ops, 8)
    slow = DeviceCosts(ALL, "fp32", Scaling(kernels=2.0)).op_ns(ops, 8, straggle=1.5)
    assert (3 * plain).tolist() == slow.tolist()


# Precisions


@pytest.mark.parametrize(
    ("op_class", "precision", "share", "peak"),
    [
        (OpClass.GEMM, "fp32", 0.5, "fp32"),  # allow_tf32 is off for cuBLAS
        (OpClass.CONV, "fp32", 0.25, "tf32"),  # and on for cuDNN
        (OpClass.RNN, "fp32", DEFAULT_SHARE, "tf32"),
        (OpClass.ATTENTION, "fp32", DEFAULT_SHARE, "fp32"),
        (OpClass.GEMM, "tf32", 0.5, "tf32"),
        (OpClass.GEMM, "fp16", 0.5, "fp16"),
        (OpClass.CONV, "fp16", 0.4, "fp16"),
        (OpClass.GEMM, "bf16", 0.5, "bf16"),
        (OpClass.GEMM, "amp", 0.5, "fp16"),
    ],
)
def test_each_precision_has_its_peak_and_its_table(
    op_class: OpClass, precision: Precision, share: float, peak: str
) -> None:
    expected = 1e12 / (share * PEAKS[peak]) * NS_PER_S
    assert pytest.approx(expected, abs=1) == time_ns(op(op_class, flops=1e12), 1, precision)


def test_without_tf32_convolutions_stay_in_fp32() -> None:
    old = device(table(OpClass.CONV, 0.4), peaks=("fp32", "fp16"))
    expected = 1e12 / (0.4 * PEAKS["fp32"]) * NS_PER_S
    assert expected == time_ns(op(OpClass.CONV, flops=1e12), profile=old)


def test_amp_without_fp16_takes_bf16() -> None:
    it = device(table(OpClass.GEMM, 0.5), peaks=("fp32", "bf16"))
    expected = 1e12 / (0.5 * PEAKS["bf16"]) * NS_PER_S
    assert expected == time_ns(op(OpClass.GEMM, flops=1e12), 1, "amp", it)


@pytest.mark.parametrize(
    ("precision", "activations", "parameters"),
    [("fp32", 1.0, 1.0), ("tf32", 1.0, 1.0), ("fp16", 0.5, 0.5), ("bf16", 0.5, 0.5), ("amp", 0.5, 1.0)],
)  # fmt: skip
def test_sixteen_bits_halve_bytes_but_autocast_keeps_the_optimizer(
    precision: Precision, activations: float, parameters: float
) -> None:
    costs = DeviceCosts(ALL, precision)
    ops = columns((Op(name="o", op_class=OpClass.ELEMENTWISE, bytes_moved=Linear(fixed=8e9)),))
    whole = 8e9 / (0.8 * BANDWIDTH) * NS_PER_S
    assert [activations * whole] == costs.op_ns(ops, 1).tolist()
    assert [parameters * whole] == costs.optimizer_ns(ops).tolist()


@pytest.mark.parametrize(
    ("precision", "known"), [("bf16", ("fp32", "fp16")), ("amp", ("fp32", "tf32"))]
)
def test_a_precision_without_peak_is_refused(precision: Precision, known: tuple[str, ...]) -> None:
    with pytest.raises(InfeasibleError) as error:
        DeviceCosts(device(peaks=known), precision)
    assert (
        f"profile v100-dgx1: {V100.device.name} has no peak for precision '{precision}', only for "
        f"{', '.join(sorted(known))}. Choose one of them with --precision."
    ) == str(error.value)


def test_a_copy_moves_bytes_at_its_own_share() -> None:
    costs = DeviceCosts(ALL, "fp32")
    assert 1e9 / (0.5 * BANDWIDTH) * NS_PER_S == costs.memory_ns(1e9)
    assert FLOOR_S * NS_PER_S == costs.memory_ns(0)
    assert pytest.approx(1e9 / (DEFAULT_SHARE * BANDWIDTH) * NS_PER_S, abs=1) == DeviceCosts(
        device(), "fp32"
    ).memory_ns(1e9)


# Efficiency tables


def test_a_convolution_may_seem_to_exceed_the_peak_as_winograd_does() -> None:
    assert (2.5,) == table(OpClass.CONV, 2.5).share
    for op_class, share, limit in (
        (OpClass.CONV, 2.51, "2.5"),
        (OpClass.GEMM, 1.01, "1"),
        (OpClass.ELEMENTWISE, 2.0, "1"),
    ):
        with pytest.raises(ValidationError) as error:
            table(op_class, share)
        assert f"share must be <= {limit} for {op_class}, got {share}" in str(error.value)


@pytest.mark.parametrize("share", [0.0, -0.5, math.nan, math.inf])
@pytest.mark.parametrize("op_class", [OpClass.CONV, OpClass.COPY])
def test_a_share_is_a_finite_number_above_zero(op_class: OpClass, share: float) -> None:
    with pytest.raises(ValidationError):
        table(op_class, share)


# Columns


def test_views_and_their_module_calls_fold_into_the_op_that_follows() -> None:
    view = op(OpClass.VIEW, kernels=0, calls=1)
    kernel = op(calls=2)
    folded = columns((view, view, kernel, kernel, view, kernel, view, view, view))
    assert [2, 0, 1] == folded.views.tolist()
    assert [4, 2, 3] == folded.module_calls.tolist()
    assert [2, 3, 5] == folded.index.tolist()
    assert (3, 3) == (folded.last_views, folded.last_module_calls)
    assert 3 == len(folded.names)


def test_views_alone_have_no_launch_but_cost_the_host() -> None:
    folded = columns((op(OpClass.VIEW, kernels=0, calls=1),))
    locked, unlocked, rest = HostCosts(V100).python_ns(folded)
    assert (0, 0) == (len(locked), len(unlocked))
    expected = V100.host.view_s.value + V100.host.module_call_s.value
    assert pytest.approx(expected * NS_PER_S, abs=1) == rest
    assert 0 == len(DeviceCosts(V100, "fp32").op_ns(folded, 1))


def test_no_ops_are_no_columns() -> None:
    folded = columns(())
    assert (0, 0) == (len(folded.index), folded.last_views)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=20))
def test_folding_loses_no_kernel_view_or_call(shape: list[tuple[int, int]]) -> None:
    folded = columns(tuple(op(kernels=k, calls=c) for k, c in shape))
    assert sum(k for k, _ in shape) == folded.kernels.sum()
    assert sum(c for _, c in shape) == folded.module_calls.sum() + folded.last_module_calls
    assert sum(k == 0 for k, _ in shape) == folded.views.sum() + folded.last_views


def test_the_same_ops_are_folded_once() -> None:
    ops = (op(), op())
    assert columns(ops) is columns(ops)


# Host


def test_a_python_launch_holds_the_lock_for_python_and_not_for_the_rest() -> None:
    host = V100.host
    ops = columns((op(OpClass.VIEW, kernels=0), op(kernels=3, calls=2)))
    locked, unlocked, rest = HostCosts(V100).python_ns(ops)
    holds = host.launch_gil_s.value + host.view_s.value + 2 * host.module_call_s.value
    frees = host.launch_free_s.value + 2 * host.kernel_launch_s.value
    assert pytest.approx([holds * NS_PER_S], abs=1) == locked.tolist()
    assert pytest.approx([frees * NS_PER_S], abs=1) == unlocked.tolist()
    assert 0 == rest


def test_the_autograd_engine_pays_views_in_proportion_to_its_launches() -> None:
    host = V100.host
    ops = columns((op(OpClass.VIEW, kernels=0), op(), op(OpClass.VIEW, kernels=0)))
    each, rest = HostCosts(V100).engine_ns(ops)
    launch = host.backward_launch_s.value
    view = host.view_s.value * launch / (host.launch_gil_s.value + host.launch_free_s.value)
    assert pytest.approx([(launch + view) * NS_PER_S], abs=1) == each.tolist()
    assert pytest.approx(view * NS_PER_S, abs=1) == rest


def test_a_handover_follows_its_table_and_stays_beyond_it() -> None:
    table = V100.host.gil_handover_s
    others = int(table.at[-1]) + 2
    costs = HostCosts(V100).handover_ns(others + 1)
    assert 0 == costs[0]  # a thread alone
    for at, value in zip(table.at, table.value, strict=True):
        assert pytest.approx(value * NS_PER_S, abs=1) == costs[int(at)]
    assert costs[int(table.at[-1])] == costs[others]


def test_an_anchor_multiplies_all_host_work() -> None:
    ops = columns((op(OpClass.VIEW, kernels=0), op(kernels=3), op(OpClass.VIEW, kernels=0)))
    plain, slow = HostCosts(V100), HostCosts(V100, Scaling(host=3.0))
    for ours, theirs in zip(plain.python_ns(ops), slow.python_ns(ops), strict=True):
        assert pytest.approx(3 * np.asarray(ours), abs=2) == np.asarray(theirs)
    assert pytest.approx(3 * plain.handover_ns(4), abs=2) == slow.handover_ns(4)
    assert pytest.approx(3 * plain.ns(V100.host.sync_s, 2), abs=3) == slow.ns(V100.host.sync_s, 2)
