"""Workload: one training step of one model, as ops whose cost is linear in the batch."""

from __future__ import annotations

from enum import StrEnum
from math import prod
from typing import Literal

from dpsim.records import Count, FiniteFloat, Name, NonNegativeFloat, PositiveCount, record

FORMAT = "dpsim.workload"
VERSION = 1
"""Version history of the file format. 1: first."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's dtype name."""


class OpClass(StrEnum):
    """What bounds an op, and which efficiency table it is looked up in."""

    GEMM = "gemm"  # matrix products: FLOP-bound when large
    CONV = "conv"  # convolutions, forward and both backward halves
    ATTENTION = "attention"  # fused scaled-dot-product attention
    RNN = "rnn"  # fused recurrent layers (cuDNN)
    ELEMENTWISE = "elementwise"  # add, relu, dropout, casts, fills: byte-bound
    NORMALIZATION = "normalization"  # batch, layer and group normalisation
    REDUCTION = "reduction"  # sums, softmax, losses
    POOL = "pool"  # pooling, up-sampling
    EMBEDDING = "embedding"  # gathers and scatters by index
    COPY = "copy"  # cat, clone, contiguous
    VIEW = "view"  # no kernel; host cost only


@record
class Linear:
    """A quantity that is `fixed + per_sample * batch`."""

    fixed: FiniteFloat = 0.0
    per_sample: FiniteFloat = 0.0

    def at(self, batch: int) -> float:
        """Return the value for a batch of `batch` samples; never negative."""
        return max(0.0, self.fixed + self.per_sample * batch)


@record
class Op:
    """One ATen call: its kernels on the device and its launch on the host.

    `flops` counts a multiply-add as two, as torch's FlopCounterMode does, and only for matrix
    products, convolutions, attention and fused recurrences; `bytes_moved` is what is read and
    written (semantics: each tensor argument once, each result once).
    """

    name: Name  # "aten.convolution", overload dropped
    op_class: OpClass
    module: str = ""  # qualified name of the innermost module, "" for the root
    flops: Linear = Linear()
    bytes_moved: Linear = Linear()  # in float32 training; other precisions scale it
    kernels: Count = 1  # 0: a view, host cost only
    module_calls: Count = 0  # nn.Module.__call__ frames entered just before this op


@record
class Tensor:
    """A parameter or a buffer, in definition order."""

    name: Name
    shape: tuple[Count, ...]
    dtype: Literal[tuple(DTYPE_BYTES)] = "float32"  # type: ignore[valid-type]
    trainable: bool = True  # False for buffers and for frozen parameters
    sparse_gradient: bool = False

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.numel * DTYPE_BYTES[self.dtype]


@record
class GradientReady:
    """When one gradient is complete: after backward op `after_op` (its index)."""

    parameter: Count  # index into Workload.parameters
    after_op: Count  # index into Workload.backward


@record
class OptimizerOps:
    """The kernels of one optimizer step over all trainable parameters."""

    name: Name  # "sgd", "momentum", "adam", "adamw"
    implementation: Literal["foreach", "fused", "for-loop"] = "foreach"
    ops: tuple[Op, ...] = ()
    state_bytes: Count = 0  # kept per process between steps


@record
class Source:
    """Where a record came from."""

    command: str = ""  # the command that made it, to be run again
    definition: str = ""  # "torchvision 0.29.1 torchvision.models.resnet50"
    dpsim_version: str = ""
    torch_version: str = ""
    capture: str = ""  # "meta", "fake-cpu", "cpu", "table": which way worked
    batches: tuple[PositiveCount, ...] = ()  # two fitted, the third checked
    note: str = ""


@record
class Workload:
    """One training step of a model.

    `forward` includes the ops of the loss from index `loss_start` on; `backward` is in execution
    order and begins with the backward ops of the loss, of which there are `loss_backward_ops`.
    All costs are for one replica that computes the batch it is asked for.
    """

    name: Name
    source: Source
    input_bytes: Linear  # inputs of one batch
    target_bytes: Linear  # labels of one batch
    parameters: tuple[Tensor, ...]  # definition order, shared ones once
    buffers: tuple[Tensor, ...]  # definition order
    modules: PositiveCount  # nn.Modules in the tree, the root included
    forward: tuple[Op, ...]
    loss_start: Count
    backward: tuple[Op, ...]
    loss_backward_ops: Count
    gradients: tuple[GradientReady, ...]  # in the order observed
    saved_bytes: Linear  # distinct storages kept for backward, parameters excluded
    output_bytes: Linear  # what forward returns
    output_tensors: PositiveCount = 1
    optimizers: tuple[OptimizerOps, ...] = ()
    sample: str = "sample"  # what one unit of the batch is: "image", "sequence"
    citation: str = ""
    flops_per_sample_forward: NonNegativeFloat = 0.0  # summary, for lists

    @property
    def parameter_bytes(self) -> int:
        """Return S, the bytes of all parameters, frozen ones included."""
        return sum(p.nbytes for p in self.parameters)

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients of all trainable parameters."""
        return sum(p.nbytes for p in self.parameters if p.trainable)

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(b.nbytes for b in self.buffers)

    def optimizer(self, name: str, implementation: str = "foreach") -> OptimizerOps | None:
        """Return the captured optimizer of that name, or None."""
        for entry in self.optimizers:
            if (entry.name, entry.implementation) == (name, implementation):
                return entry
        return None
