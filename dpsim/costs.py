"""Costs: ops of a workload on a device and a host, as arrays of nanoseconds for one batch.

A kernel takes t = max(F / (share_c(F) * peak), bytes / (share_m(bytes) * bandwidth), floor), where
F are its FLOP and the shares are the profile's efficiency tables. Source: the roofline model
(Williams et al., CACM 52(4), 2009) with a floor; the tables carry the rest.
Leaves out: cache hits between ops, tile quantisation, clock changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dpsim.errors import InfeasibleError
from dpsim.hardware import EfficiencyTable, HardwareProfile, Quantity
from dpsim.scenario import Precision
from dpsim.timeline import Int64
from dpsim.units import NS_PER_S, to_ns
from dpsim.workload import Op, OpClass

Floats = npt.NDArray[np.float64]
COMPUTE = (OpClass.GEMM, OpClass.CONV, OpClass.ATTENTION, OpClass.RNN)
"""Classes that are looked up by FLOP and use the tensor cores where the precision allows."""
CUDNN = (OpClass.CONV, OpClass.RNN)
"""Classes that cuDNN computes."""
Peak = Literal["fp32", "tf32", "fp16", "bf16"]
HALF = 0.5
"""float16 and bfloat16 take half the bytes of float32."""
DEFAULT_SHARE = 0.7
"""Share of peak for a class without table: between the 0.5 and 0.85 that large kernels reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Factors that an anchor puts on all kernels and on all host work."""

    kernels: float = 1.0
    host: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Ops as arrays of length K: those with kernels, views folded into the op that follows."""

    names: tuple[str, ...]
    op_class: Int64  # index into OpClass
    flops: tuple[Floats, Floats]  # fixed, per sample
    nbytes: tuple[Floats, Floats]
    kernels: Int64
    views: Int64  # views just before the op
    module_calls: Int64  # module calls before the op, since the last kernel
    last_views: int  # after the last op
    last_module_calls: int
    index: Int64  # position in the workload's list


CLASSES = tuple(OpClass)


_FOLDED: dict[int, tuple[tuple[Op, ...], Columns]] = {}
"""By identity of the tuple, which is kept alive: hashing thousands of records costs more."""


def columns(ops: tuple[Op, ...]) -> Columns:
    """Return ops as columns; the same tuple is converted once."""
    kept = _FOLDED.get(id(ops))
    if kept is None:
        kept = _FOLDED[id(ops)] = (ops, _fold(ops))
    return kept[1]


def _fold(ops: tuple[Op, ...]) -> Columns:
    kept = [i for i, op in enumerate(ops) if op.kernels]
    views = np.cumsum([0] + [0 if op.kernels else 1 for op in ops])
    calls = np.cumsum([0] + [op.module_calls for op in ops])
    edges = np.array([0] + [i + 1 for i in kept], dtype=np.int64)
    chosen = [ops[i] for i in kept]

    def linear(name: str) -> tuple[Floats, Floats]:
        values = [getattr(op, name) for op in chosen]
        return (
            np.array([v.fixed for v in values], dtype=float),
            np.array([v.per_sample for v in values], dtype=float),
        )

    return Columns(
        names=tuple(f"{op.module}: {op.name}" if op.module else op.name for op in chosen),
        op_class=np.array([CLASSES.index(op.op_class) for op in chosen], dtype=np.int64),
        flops=linear("flops"),
        nbytes=linear("bytes_moved"),
        kernels=np.array([op.kernels for op in chosen], dtype=np.int64),
        views=np.diff(views[edges]).astype(np.int64),
        module_calls=np.diff(calls[edges]).astype(np.int64),
        last_views=int(views[-1] - views[edges[-1]]),
        last_module_calls=int(calls[-1] - calls[edges[-1]]),
        index=np.array(kept, dtype=np.int64),
    )


class DeviceCosts:
    """Kernel times of one device at one precision."""

    def __init__(
        self, profile: HardwareProfile, precision: Precision, scaling: Scaling | None = None
    ) -> None:
        """Take a profile, a precision, and the factor of an anchor.

        Raises:
            InfeasibleError: The device has no peak for the precision.
        """
        self.device = profile.device
        self.precision = precision
        self.factor = scaling.kernels if scaling else 1.0
        self.peak = _peak(profile, precision)
        self.activation_scale = HALF if precision in ("fp16", "bf16", "amp") else 1.0
        self.parameter_scale = HALF if precision in ("fp16", "bf16") else 1.0
        self.bandwidth = self.device.memory_bandwidth_bytes_per_s.value

    def optimizer_ns(self, ops: Columns, straggle: float = 1.0) -> Int64:
        """Return the device time of each op of an optimizer step, ns, shape [K].

        Autocast keeps parameters, gradients and optimizer state in 32 bits.
        """
        return self._ns(ops, 0, straggle, self.parameter_scale)

    def op_ns(self, ops: Columns, batch: int, straggle: float = 1.0) -> Int64:
        """Return the device time of each op at `batch` samples, ns, shape [K]."""
        return self._ns(ops, batch, straggle, self.activation_scale)

    def _ns(self, ops: Columns, batch: int, straggle: float, scale: float) -> Int64:
        flops = np.maximum(ops.flops[0] + ops.flops[1] * batch, 0.0) / ops.kernels
        nbytes = np.maximum(ops.nbytes[0] + ops.nbytes[1] * batch, 0.0) / ops.kernels
        nbytes = nbytes * scale
        seconds = np.full(len(flops), self.device.kernel_floor_s.value)
        for code, op_class in enumerate(CLASSES):
            mine = ops.op_class == code
            if mine.any():
                seconds[mine] = self._class_s(op_class, flops[mine], nbytes[mine])
        seconds *= ops.kernels * (self.factor * straggle)
        return np.asarray(seconds * NS_PER_S + 0.5, dtype=np.int64)

    def memory_ns(self, nbytes: float, straggle: float = 1.0) -> int:
        """Return the time of one byte-bound kernel that moves `nbytes`, ns."""
        share = self.table(OpClass.COPY)
        rate = self.bandwidth * (float(share.at(np.array([nbytes]))[0]) if share else DEFAULT_SHARE)
        seconds = max(nbytes / rate, self.device.kernel_floor_s.value)
        return to_ns(seconds * self.factor * straggle)

    def _class_s(self, op_class: OpClass, flops: Floats, nbytes: Floats) -> Floats:
        floor = self.device.kernel_floor_s.value
        by_bytes = self.table(OpClass.ELEMENTWISE if op_class in COMPUTE else op_class)
        by_bytes = by_bytes or self.table(OpClass.ELEMENTWISE)
        share = by_bytes.at(nbytes) if by_bytes else DEFAULT_SHARE
        seconds = np.maximum(nbytes / (share * self.bandwidth), floor)
        if op_class in COMPUTE:
            precision = self.compute_precision(op_class)
            table = self.table(op_class, precision)
            reached = table.at(flops) if table else DEFAULT_SHARE
            peak = self.device.peak_flop_per_s[precision]
            seconds = np.maximum(seconds, flops / (reached * peak.value))
        return np.asarray(seconds)

    def compute_precision(self, op_class: OpClass) -> Peak:
        """Return the precision that a class computes in.

        PyTorch lets cuDNN use TF32 by default, but not cuBLAS (torch.backends.cudnn.allow_tf32 is
        True, torch.backends.cuda.matmul.allow_tf32 is False), so "fp32" on a device with TF32 has
        its convolutions and recurrences in TF32.
        """
        if self.precision == "amp":
            return "fp16" if "fp16" in self.device.peak_flop_per_s else "bf16"
        if self.precision == "fp32" and op_class in CUDNN:
            return "tf32" if "tf32" in self.device.peak_flop_per_s else "fp32"
        return self.precision

    def table(self, op_class: OpClass, precision: str = "") -> EfficiencyTable | None:
        """Return the efficiency table of a class: that of the precision, else that of any."""
        for dtype in (precision, ""):
            for table in self.device.efficiency:
                if (table.op_class, table.dtype) == (op_class, dtype):
                    return table
        return None


def _peak(profile: HardwareProfile, precision: Precision) -> Quantity:
    peaks = profile.device.peak_flop_per_s
    names: tuple[Peak, ...] = ("fp16", "bf16") if precision == "amp" else (precision,)
    for name in names:
        if name in peaks:
            return peaks[name]
    raise InfeasibleError(
        f"profile {profile.name}: {profile.device.name} has no peak for precision '{precision}', "
        f"only for {', '.join(sorted(peaks))}. Choose one of them with --precision."
    )


class HostCosts:
    """Launch times of one host."""

    def __init__(self, profile: HardwareProfile, scaling: Scaling | None = None) -> None:
        """Take a profile, and the factor of an anchor."""
        self.host = profile.host
        self.factor = scaling.host if scaling else 1.0

    def ns(self, quantity: Quantity, count: float = 1.0) -> int:
        """Return `count` times a host quantity, ns."""
        return to_ns(quantity.value * count * self.factor)

    def python_ns(self, ops: Columns) -> tuple[Int64, Int64, int]:
        """Return time with the lock, time without it (ns, [K]), and what follows the last op."""
        host = self.host
        locked = (
            host.launch_gil_s.value
            + ops.views * host.view_s.value
            + ops.module_calls * host.module_call_s.value
        )
        unlocked = host.launch_free_s.value + (ops.kernels - 1) * host.kernel_launch_s.value
        rest = ops.last_views * host.view_s.value + ops.last_module_calls * host.module_call_s.value
        return self._array(locked), self._array(unlocked), to_ns(rest * self.factor)

    def engine_ns(self, ops: Columns) -> tuple[Int64, int]:
        """Return the time of each launch by the C++ autograd engine (ns, [K]), and the rest.

        A node without kernel costs what a view costs in Python, times the ratio of an engine
        launch to a Python launch.
        """
        host = self.host
        python = host.launch_gil_s.value + host.launch_free_s.value
        view = host.view_s.value * (host.backward_launch_s.value / python if python else 1.0)
        each = (
            host.backward_launch_s.value
            + (ops.kernels - 1) * host.kernel_launch_s.value
            + ops.views * view
        )
        return self._array(each), to_ns(ops.last_views * view * self.factor)

    def handover_ns(self, threads: int) -> Int64:
        """Return the extra time of one lock retake with 0..threads-1 other threads, ns."""
        table = self.host.gil_handover_s
        others = np.arange(threads, dtype=float)
        return self._array(np.interp(others, table.at, table.value))

    def _array(self, seconds: npt.NDArray[np.floating]) -> Int64:
        return np.asarray(seconds * (self.factor * NS_PER_S) + 0.5, dtype=np.int64)
