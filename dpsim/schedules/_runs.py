"""Runs: the launches of a workload's phases at one batch, with what precision and hooks add."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dpsim.costs import Columns, DeviceCosts, HostCosts, columns
from dpsim.engine import Run
from dpsim.errors import InfeasibleError
from dpsim.scenario import Scenario
from dpsim.timeline import Int64
from dpsim.workload import Linear, Op, OpClass, OptimizerOps, Tensor, Workload

CAST_BYTES = 6
"""A cast reads 4 bytes and writes 2, or the other way round, for each element."""
ADD_BYTES = 3
"""An in-place add reads two operands and writes one, in units of the operand's size."""
MATRIX_DIMENSIONS = 2
"""Autocast casts the weights of matrix products and convolutions: two dimensions and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """Something done when a gradient is ready, after backward op `after` (-1: before the first)."""

    after: int
    name: str
    host: int  # ns on the launching thread
    duration: int | None = None  # ns on the device; None: no kernel


class Runs:
    """The launches of one replica. Batches differ between replicas, so all take a batch."""

    def __init__(
        self,
        workload: Workload,
        scenario: Scenario,
        costs: tuple[DeviceCosts, HostCosts],
        straggle: float = 1.0,
    ) -> None:
        """Take what is run, how, and on what; `straggle` multiplies kernel times."""
        self.workload = workload
        self.scenario = scenario
        self.device, self.host = costs
        self.straggle = straggle
        cut = workload.loss_start
        self._forward = columns(_slice(workload.forward, 0, cut))
        self._loss = columns(_slice(workload.forward, cut, len(workload.forward)))
        seed = workload.loss_backward_ops
        self._loss_backward = columns(_slice(workload.backward, 0, seed))
        self._backward = columns(_slice(workload.backward, seed, len(workload.backward)))
        self._casts = columns(_casts(workload.parameters)) if scenario.precision == "amp" else None

    @property
    def element_scale(self) -> float:
        """Return the factor on parameter and gradient bytes: a half for models in 16 bits."""
        return 0.5 if self.scenario.precision in ("fp16", "bf16") else 1.0

    def wire_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a parameter or gradient as it is kept and sent."""
        scale = self.element_scale if tensor.dtype == "float32" else 1.0
        return int(tensor.nbytes * scale)

    def forward(self, batch: int) -> Run:
        """Return forward without the loss; under autocast, with the casts of the weights."""
        run = self._python(self._forward, batch)
        return join(self._python(self._casts, batch), run) if self._casts else run

    def loss(self, batch: int) -> Run:
        """Return the ops of the loss, forward."""
        return self._python(self._loss, batch)

    def loss_backward(self, batch: int) -> Run:
        """Return the ops of the loss, backward."""
        return self._engine(self._loss_backward, batch)

    def backward(self, batch: int, hooks: list[Hook] | None = None) -> Run:
        """Return backward from the model's output on, hooks merged in where they fire."""
        run = self._engine(self._backward, batch)
        return merge(run, self.places(), hooks)[0] if hooks else run

    def places(self) -> Int64:
        """Return the position in Workload.backward of each launch of `backward`."""
        return self._backward.index + self.workload.loss_backward_ops

    def optimizer(self) -> Run:
        """Return the kernels of optimizer.step(); Python's fixed part is the caller's.

        Raises:
            InfeasibleError: The workload was not traced with this optimizer.
        """
        entry = self.optimizer_ops()
        ops = columns(entry.ops)
        locked, unlocked, rest = self.host.python_ns(ops)
        durations = self.device.optimizer_ns(ops, self.straggle)
        run = Run(names=ops.names, locked=locked, unlocked=unlocked, durations=durations, rest=rest)
        if entry.implementation != "for-loop":
            return run
        # A for-loop row stands for `kernels` separate calls: each pays a whole launch.
        free_ns = self.host.ns(self.host.host.launch_free_s)
        return replace(run, locked=run.locked * ops.kernels, unlocked=ops.kernels * free_ns)

    def optimizer_ops(self) -> OptimizerOps:
        """Return the traced optimizer of the scenario. Raises as `optimizer` does."""
        wanted = (self.scenario.optimizer, self.scenario.optimizer_implementation)
        entry = self.workload.optimizer(*wanted)
        if entry is None:
            known = ", ".join(f"{o.name}/{o.implementation}" for o in self.workload.optimizers)
            raise InfeasibleError(
                f"model {self.workload.name}: optimizer must be one it was traced with "
                f"({known or 'none'}), got {'/'.join(wanted)}. Choose one of them with "
                "--optimizer and --optimizer-implementation."
            )
        return entry

    def gradient_hooks(self, *, accumulate: bool) -> list[Hook]:
        """Return AccumulateGrad of each parameter, with an add where a gradient is kept."""
        host = self.host.ns(self.host.host.accumulate_grad_s)
        hooks = []
        for ready in self.workload.gradients:
            tensor = self.workload.parameters[ready.parameter]
            hooks.extend(self._grad_cast(ready.after_op, tensor))
            hooks.append(Hook(after=ready.after_op, name="AccumulateGrad", host=host))
            if accumulate:
                hooks.append(self.add_hook(ready.after_op, tensor))
        return hooks

    def cast_hooks(self) -> list[Hook]:
        """Return the casts of gradients to 32 bits that autocast's backward makes."""
        hooks = []
        for ready in self.workload.gradients:
            hooks.extend(self._grad_cast(ready.after_op, self.workload.parameters[ready.parameter]))
        return hooks

    def add_hook(self, after: int, tensor: Tensor) -> Hook:
        """Return the kernel that adds a gradient to one that is kept."""
        return Hook(
            after=after,
            name=f"{tensor.name}: add to .grad",
            host=self.host.ns(self.host.host.backward_launch_s),
            duration=self.device.memory_ns(ADD_BYTES * self.wire_bytes(tensor), self.straggle),
        )

    def _grad_cast(self, after: int, tensor: Tensor) -> list[Hook]:
        if self._casts is None or len(tensor.shape) < MATRIX_DIMENSIONS:
            return []
        return [
            Hook(
                after=after,
                name=f"{tensor.name}: cast gradient",
                host=self.host.ns(self.host.host.backward_launch_s),
                duration=self.device.memory_ns(CAST_BYTES * tensor.numel, self.straggle),
            )
        ]

    def _python(self, ops: Columns, batch: int) -> Run:
        locked, unlocked, rest = self.host.python_ns(ops)
        durations = self.device.op_ns(ops, batch, self.straggle)
        return Run(
            names=ops.names, locked=locked, unlocked=unlocked, durations=durations, rest=rest
        )

    def _engine(self, ops: Columns, batch: int) -> Run:
        host, rest = self.host.engine_ns(ops)
        durations = self.device.op_ns(ops, batch, self.straggle)
        return Run(
            names=ops.names,
            locked=np.zeros_like(host),
            unlocked=host,
            durations=durations,
            rest=rest,
        )


_SLICES: dict[tuple[int, int, int], tuple[tuple[Op, ...], tuple[Op, ...]]] = {}


def _slice(ops: tuple[Op, ...], first: int, last: int) -> tuple[Op, ...]:
    """Return ops[first:last], the same tuple for the same arguments, so that costs are kept."""
    key = (id(ops), first, last)
    kept = _SLICES.get(key)
    if kept is None:
        kept = _SLICES[key] = (ops, ops[first:last])
    return kept[1]


_CAST_OPS: dict[int, tuple[tuple[Tensor, ...], tuple[Op, ...]]] = {}


def _casts(parameters: tuple[Tensor, ...]) -> tuple[Op, ...]:
    """Return autocast's casts of the weights to 16 bits, once a forward (it caches them).

    They are put before the first op; autocast casts each just before its use.
    """
    kept = _CAST_OPS.get(id(parameters))
    if kept is None:
        ops = tuple(
            Op(
                name="aten._to_copy",
                module=tensor.name,
                op_class=OpClass.ELEMENTWISE,
                # op_ns halves bytes in 16-bit precisions; this op moves 32-bit data too.
                bytes_moved=Linear(fixed=2.0 * CAST_BYTES * tensor.numel),
            )
            for tensor in parameters
            if len(tensor.shape) >= MATRIX_DIMENSIONS
        )
        kept = _CAST_OPS[id(parameters)] = (parameters, ops)
    return kept[1]


def join(*runs: Run) -> Run:
    """Return runs one after the other; what follows the launches of one precedes the next."""
    runs = tuple(run for run in runs if len(run) or run.rest)
    if not runs:
        return EMPTY
    unlocked = [run.unlocked.copy() for run in runs]
    carried = 0
    for run, part in zip(runs, unlocked, strict=True):
        if len(part):
            part[0] += carried
            carried = 0
        carried += run.rest
    return Run(
        names=sum((run.names for run in runs), ()),
        locked=np.concatenate([run.locked for run in runs]),
        unlocked=np.concatenate(unlocked),
        durations=np.concatenate([run.durations for run in runs]),
        rest=carried,
    )


EMPTY = Run(
    names=(),
    locked=np.zeros(0, dtype=np.int64),
    unlocked=np.zeros(0, dtype=np.int64),
    durations=np.zeros(0, dtype=np.int64),
)


def merge(run: Run, places: Int64, hooks: list[Hook]) -> tuple[Run, dict[int, int]]:
    """Return a run with hooks put in after the ops they follow, and where each hook's kernel is.

    Args:
        run: K launches.
        places: Position of each launch in the list that `Hook.after` counts in, shape [K].
        hooks: In the order in which they fire among equals.
    """
    order = sorted(range(len(hooks)), key=lambda h: hooks[h].after)
    slots = np.searchsorted(places, [hooks[h].after for h in order], side="right").tolist()
    with_kernel = [
        (slot, h) for slot, h in zip(slots, order, strict=True) if hooks[h].duration is not None
    ]
    where = [slot for slot, _ in with_kernel]
    positions = {h: slot + i for i, (slot, h) in enumerate(with_kernel)}
    names = list(run.names)
    for h, position in positions.items():
        names.insert(position, hooks[h].name)
    unlocked = np.insert(run.unlocked, where, [hooks[h].host for _, h in with_kernel])
    rest, kernels_before = run.rest, 0
    for slot, h in zip(slots, order, strict=True):
        if hooks[h].duration is not None:
            kernels_before += 1
        elif slot + kernels_before < len(unlocked):  # host time falls on the next launch
            unlocked[slot + kernels_before] += hooks[h].host
        else:
            rest += hooks[h].host
    merged = Run(
        names=tuple(names),
        locked=np.insert(run.locked, where, 0),
        unlocked=unlocked,
        durations=np.insert(run.durations, where, [hooks[h].duration or 0 for _, h in with_kernel]),
        rest=rest,
    )
    return merged, positions
