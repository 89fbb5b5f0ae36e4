"""Optimizer: the kernels of one step of SGD, momentum, Adam and AdamW, as CUDA launches them.

`foreach` (CUDA's default) and `for-loop` are recorded from torch.optim on meta tensors, at the
second step, when the state exists. `fused` does not run on meta and is written from its kernel's
arguments: one multi-tensor call.

In `for-loop`, a row with kernels stands for the same ATen call over all tensors: as many calls as
`kernels` (a row for each would make the files ten times longer). Host-only rows are one call each.

Source: torch/optim/{sgd,adam}.py; ATen/native/cuda/MultiTensorApply.cuh, built for CUDA 12.
Leaves out: mixed dtypes and devices, which torch splits into groups; sparse gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from calibrate.opclass import Call, is_view, tensors_in
from dpsim.workload import Linear, Op, OpClass, OptimizerOps

CHUNK_ELEMENTS = 65_536
"""Elements that one block of a multi-tensor kernel works on (kChunkSize)."""
MAX_BLOCKS = 320
"""Blocks of one launch (depth_to_max_blocks)."""
MAX_TENSORS = (110, 64, 48, 36, 30)
"""Tensors of one launch by list depth 1, 2, ... (depth_to_max_tensors)."""
MAX_TENSORS_SCALAR_LIST = (96, 64, 48, 36, 30)
"""The same where each tensor has its own scalar (depth_to_max_tensors_scalarlist)."""

Implementation = Literal["foreach", "fused", "for-loop"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("foreach", "fused", "for-loop")

_MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **k: torch.optim.SGD(p, lr=0.1, **k),
    "momentum": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, **k),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
OPTIMIZERS = tuple(_MAKERS)
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors that an optimizer keeps for each parameter, of the parameter's size."""


def optimizer_ops(name: str, implementation: Implementation, shapes: Sequence[Any]) -> OptimizerOps:
    """Return one step over all trainable parameters, in the state of the second step.

    Args:
        name: One of `OPTIMIZERS`.
        implementation: One of `IMPLEMENTATIONS`.
        shapes: Trainable parameters, on any device; only shape and dtype are used.
    """
    parameters = [
        torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for p in shapes
    ]
    if implementation == "fused":
        ops = list(_fused_ops(name, parameters))
    else:
        ops = _recorded_ops(name, parameters, is_foreach=implementation == "foreach")
        if implementation == "for-loop":
            ops = _merged(ops, len(parameters))
    return OptimizerOps(
        name=name,
        implementation=implementation,
        ops=tuple(ops),
        state_bytes=STATES[name] * sum(p.nbytes for p in parameters),
    )


def launches(sizes: Sequence[int], max_tensors: int) -> int:
    """Return the kernels that a multi-tensor call launches.

    A launch is full with `max_tensors` whole tensors or `MAX_BLOCKS` chunks; a tensor that is cut
    goes on in the next launch and counts there again.

    >>> launches([1] * 161, 110), launches([65_536 * 321], 110)
    (2, 2)

    Args:
        sizes: Elements of each tensor; empty tensors are skipped.
        max_tensors: Tensors of one launch.
    """
    count = tensors = blocks = 0
    for size in sizes:
        chunks = ceil(size / CHUNK_ELEMENTS)
        if not chunks:
            continue
        tensors += 1
        for chunk in range(chunks):
            blocks += 1
            is_last = chunk == chunks - 1
            if (tensors == max_tensors and is_last) or blocks == MAX_BLOCKS:
                count += 1
                blocks = 0
                tensors = 0 if is_last else 1
    return count + (blocks > 0)


def _fused_ops(name: str, parameters: Sequence[torch.Tensor]) -> Iterator[Op]:
    """Yield the one kernel call, and Adam's count of steps, which is kept on the device.

    Each list is read and all but the gradients are written: 12, 20 or 28 bytes a float32 element.
    """
    depth = 2 + STATES[name]
    sizes = [p.numel() for p in parameters]
    if "adam" in name:
        yield Op(
            name="aten._foreach_add_",
            op_class=OpClass.ELEMENTWISE,
            bytes_moved=Linear(fixed=8.0 * len(sizes)),
            kernels=launches([1] * len(sizes), MAX_TENSORS[0]),
        )
    yield Op(
        name="aten._fused_sgd_" if depth < 4 else f"aten._fused_{name}_",
        op_class=OpClass.ELEMENTWISE,
        bytes_moved=Linear(fixed=float((2 * depth - 1) * sum(p.nbytes for p in parameters))),
        kernels=launches(sizes, MAX_TENSORS[depth - 1]),
    )


class _StepRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "aten":
            self.ops.append(_op(func, args, kwargs, result))
        return result


def _op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Op:
    name = func._schema.name.replace("::", ".")
    tensors = list(tensors_in([args, list(kwargs.values()), result]))
    # Adam counts its steps in CPU tensors, one a parameter
    if is_view(func) or all(tensor.device.type != "meta" for tensor in tensors):
        return Op(name=name, op_class=OpClass.VIEW, kernels=0)
    call = Call(func, args, kwargs, result)
    return Op(
        name=name,
        op_class=OpClass.ELEMENTWISE,
        bytes_moved=Linear(fixed=float(call.bytes_moved())),
        kernels=_launches_of(func, call) if "_foreach_" in name else 1,
    )


def _launches_of(func: Any, call: Call) -> int:
    """Return the launches of a `_foreach` call: its depth counts the lists, results included."""
    lists = [value for value in call.arguments.values() if _is_tensor_list(value)]
    results = 0 if call.mutated else 1
    limits = MAX_TENSORS_SCALAR_LIST if func._overloadname == "ScalarList" else MAX_TENSORS
    sizes = [tensor.numel() for tensor in lists[0]]
    return launches(sizes, limits[len(lists) + results - 1])


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def _recorded_ops(
    name: str, parameters: Sequence[torch.nn.Parameter], *, is_foreach: bool
) -> list[Op]:
    optimizer = _MAKERS[name](parameters, foreach=is_foreach)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()  # makes the state; the second step is the one that repeats
    recorder = _StepRecorder()
    with recorder:
        optimizer.step()
    return recorder.ops


def _merged(ops: Sequence[Op], tensors: int) -> list[Op]:
    """Return one row for each place in the loop over tensors, its kernels and bytes added up."""
    period = len(ops) // tensors
    rows: list[Op] = []
    for place in range(period):
        calls = ops[place::period]
        if not calls[0].kernels:  # host only: no kernels to add up
            rows += calls
            continue
        moved = sum(call.bytes_moved.fixed for call in calls)
        rows.append(
            Op(
                name=calls[0].name,
                op_class=calls[0].op_class,
                bytes_moved=Linear(fixed=moved),
                kernels=sum(call.kernels for call in calls),
            )
        )
    return rows
