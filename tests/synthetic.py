"""Workloads of a few ops, whose costs can be told by hand."""

from __future__ import annotations

from collections.abc import Sequence

from dpsim.workload import (
    GradientReady,
    Linear,
    Op,
    OpClass,
    OptimizerOps,
    Source,
    Tensor,
    Workload,
)

MOMENTUM_BYTES = 32
"""Foreach momentum reads and writes 8 float32 of each parameter (semantics 7.4)."""


def workload(
    shapes: Sequence[tuple[int, ...]],
    *,
    flops: float = 1e6,
    input_bytes: float = 1000.0,
    output_bytes: float = 40.0,
) -> Workload:
    """Return a chain of matrix products, one for each parameter.

    Args:
        shapes: Of the parameters, first layer first.
        flops: Of the whole forward, for each sample; backward has twice as many.
        input_bytes: Of one sample.
        output_bytes: Of one sample.
    """
    parameters = tuple(Tensor(name=f"p{i}", shape=shape) for i, shape in enumerate(shapes))
    count = len(parameters)
    forward = tuple(_product(p, flops / count, 1.0) for p in parameters)
    backward = tuple(_product(p, 2 * flops / count, 2.0) for p in reversed(parameters))
    loss = OpClass.REDUCTION
    return Workload(
        name="synthetic",
        source=Source(),
        input_bytes=Linear(per_sample=input_bytes),
        target_bytes=Linear(per_sample=8.0),
        parameters=parameters,
        buffers=(),
        modules=count + 1,
        forward=(*forward, Op(name="aten.nll_loss_forward", op_class=loss)),
        loss_start=count,
        backward=(Op(name="aten.nll_loss_backward", op_class=loss), *backward),
        loss_backward_ops=1,
        gradients=tuple(
            GradientReady(parameter=count - 1 - i, after_op=1 + i) for i in range(count)
        ),
        saved_bytes=Linear(per_sample=input_bytes),
        output_bytes=Linear(per_sample=output_bytes),
        optimizers=(_momentum(parameters),),
    )


def _product(parameter: Tensor, flops: float, passes: float) -> Op:
    return Op(
        name="aten.mm",
        op_class=OpClass.GEMM,
        flops=Linear(per_sample=flops),
        bytes_moved=Linear(fixed=passes * parameter.nbytes),
        module_calls=1,
    )


def _momentum(parameters: tuple[Tensor, ...]) -> OptimizerOps:
    elements = sum(p.numel for p in parameters)
    op = Op(
        name="aten._foreach_add_",
        op_class=OpClass.ELEMENTWISE,
        bytes_moved=Linear(fixed=float(MOMENTUM_BYTES * elements)),
    )
    return OptimizerOps(name="momentum", ops=(op,), state_bytes=4 * elements)
