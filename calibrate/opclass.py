"""Op class: what kind of work an ATen call is, how many kernels it launches and what they move.

The counts are those of CUDA in float32, whatever device the call was recorded on.

Source: the kernels of ATen (aten/src/ATen/native/cuda) of PyTorch 2.13.
Leaves out: helper kernels whose number depends on the batch (sorts in the backward of embeddings,
split-k reductions, layout changes inside cuDNN), so the counts err on the low side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from dpsim.workload import OpClass

HOST_ONLY = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided lift lift_fresh "
    "_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk _reshape_alias detach_ "
    "requires_grad_ resize_ resize_as_ set_ as_strided_ is_same_size is_pinned "
    "sym_size sym_stride sym_numel sym_storage_offset record_stream squeeze_ unsqueeze_ t_ "
    "transpose_ _efficientzerotensor".split()
)
"""Calls that launch nothing though their schema does not say that they are views."""

PATTERNS: tuple[tuple[OpClass, str], ...] = (
    (OpClass.ATTENTION, r".*attention.*"),
    (OpClass.ELEMENTWISE, r"_thnn_fused_.*"),
    (OpClass.RNN, r"rnn.*|_cudnn_rnn.*|lstm.*|gru.*|mkldnn_rnn.*"),
    (OpClass.CONV, r".*convolution.*|conv\dd.*|.*conv_depthwise.*|slow_conv.*"),
    (
        OpClass.GEMM,
        r"(add|b|badd|baddb|addb)?(mm|mv)_?|addmm_activation|_addmm.*|dot|vdot|ger|addr|matmul"
        r"|linear|bilinear|_trilinear|_scaled_mm|_grouped_mm|_int_mm|einsum|linalg_matmul|baddbmm_?",
    ),
    (
        OpClass.NORMALIZATION,
        r".*(batch|layer|group|instance|rms)_norm.*|batch_norm.*|_native_batch_norm.*",
    ),
    (OpClass.POOL, r".*pool\dd.*|.*upsample.*|.*avg_pool.*|.*max_pool.*"),
    (
        OpClass.EMBEDDING,
        r"_?embedding.*|index|index_(select|put|add|copy|fill|reduce).*|_index_put_impl_|_unsafe_index.*"
        r"|gather.*|scatter.*|take.*|masked_(select|scatter).*|grid_sampler.*|nonzero.*|put_?",
    ),
    (
        OpClass.REDUCTION,
        r".*softmax.*|.*_loss.*|sum|nansum|mean|std|var|(std|var)_mean.*|prod|norm|linalg_vector_norm"
        r"|amax|amin|argmax|argmin|max|min|any|all|logsumexp|cum(sum|prod|max|min).*|topk|sort|argsort"
        r"|count_nonzero|median|kthvalue|mode|unique.*|_unique.*|bincount|histc|equal",
    ),
    (
        OpClass.COPY,
        r"cat|_?stack|clone|copy_?|_to_copy|contiguous|repeat.*|roll|flip|constant_pad_nd|.*_pad\dd.*"
        r"|(slice|select|diagonal|as_strided|unfold)_(backward|scatter)|tril_?|triu_?|.*_copy"
        r"|_local_scalar_dense|im2col|col2im|_pack_padded_sequence.*|_conj_physical|pixel_(un)?shuffle",
    ),
)
"""The class of an op by its name; the first pattern that matches wins, else it is element-wise."""

SHAPE_ONLY: dict[str, frozenset[str]] = {
    name: frozenset({"self"})
    for name in (
        "max_pool2d_with_indices_backward",
        "max_pool3d_with_indices_backward",
        "avg_pool2d_backward",
        "avg_pool3d_backward",
        "_adaptive_avg_pool2d_backward",
        "_adaptive_avg_pool3d_backward",
        "adaptive_max_pool2d_backward",
        "nll_loss_backward",
        "nll_loss2d_backward",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_zeros",
        "new_ones",
        "new_full",
    )
}
"""Arguments that are passed for their shape and never read."""

KERNELS: dict[str, int] = {
    "max_pool2d_with_indices_backward": 2,  # fills the result with zeros first
    "max_pool3d_with_indices_backward": 2,
    "native_layer_norm_backward": 2,  # input; gain and bias
    "native_group_norm": 3,  # moments, coefficients, apply
    "native_group_norm_backward": 3,
    "nll_loss_backward": 2,  # zeros, then one value a row
    "nll_loss2d_backward": 2,
    "embedding_dense_backward": 2,  # zeros, then a scatter-add
    "slice_backward": 2,  # zeros, then a copy
    "select_backward": 2,
    "constant_pad_nd": 2,  # fill, then a copy
    "index_put": 2,  # clone, then a scatter
    "scatter": 2,
    "scatter_add": 2,
    "index_add": 2,
    "mse_loss": 2,  # squares, then their mean
    "_scaled_dot_product_efficient_attention_backward": 3,  # two for the row sums of grad * out
}

_EXTRA_READS: dict[str, tuple[str, ...]] = {
    "native_batch_norm": ("input",),  # statistics first, then the values again
    "_native_batch_norm_legit": ("input",),
    "_native_batch_norm_legit_no_training": (),
    "_batch_norm_with_update": ("input",),
    "native_batch_norm_backward": ("grad_out", "input"),
    "batch_norm_backward": ("grad_out", "input"),
    "native_group_norm": ("input",),
    "native_group_norm_backward": ("grad_out", "input"),
    "native_layer_norm_backward": ("grad_out", "input"),
}
"""Arguments that are read twice."""

_GATHERS = frozenset(
    "embedding index index_select gather take _unsafe_index _embedding_bag".split()
)
_SCATTERS = frozenset(
    "index_put_ _index_put_impl_ index_put scatter scatter_ scatter_add scatter_add_ index_add "
    "index_add_ _unsafe_index_put".split()
)
_ZERO_FILLED = frozenset(
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward nll_loss_backward".split()
)


def op_class(name: str) -> OpClass:
    """Return the class of an op by its ATen name, without namespace and overload.

    >>> op_class("native_batch_norm_backward").value
    'normalization'
    """
    for found, pattern in PATTERNS:
        if re.fullmatch(pattern, name):
            return found
    return OpClass.ELEMENTWISE


def is_view(func: torch._ops.OpOverload) -> bool:
    """Return whether a call launches no kernel: a view, an allocation or a query."""
    if func._schema.name.partition("::")[2] in HOST_ONLY:
        return True
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested value: lists, tuples, mappings and model outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for child in value:
            yield from tensors_in(child)
    elif hasattr(value, "values") and hasattr(value, "keys"):
        for child in value.values():
            yield from tensors_in(child)


def touched(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that lie in memory: an expanded dimension counts once."""
    if tensor.layout is not torch.strided:
        return sum(touched(part) for part in (tensor._indices(), tensor._values()))
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(int(size) for size, stride in pairs if stride != 0 or size == 0) * (
        tensor.element_size()
    )


class Call:
    """One ATen call with its arguments by name: what it reads and writes."""

    def __init__(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Name the arguments as the schema does."""
        self.name = func._schema.name.partition("::")[2]
        names = [argument.name for argument in func._schema.arguments]
        self.arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        self.result = result
        self.returns = func._schema.returns
        self.mutated = {
            argument.name
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }

    def size(self, name: str) -> int:
        """Return the bytes of one argument, 0 if it is not given."""
        return sum(touched(tensor) for tensor in tensors_in(self.arguments.get(name)))

    def result_size(self) -> int:
        """Return the bytes of all results."""
        return sum(touched(tensor) for tensor in tensors_in(self.result))

    def kernels(self) -> int:
        """Return the number of CUDA kernels of the call."""
        if self.name == "convolution":
            return 2 if self.arguments.get("bias") is not None else 1  # cuDNN adds it afterwards
        if self.name == "convolution_backward":
            return sum(bool(wanted) for wanted in self.arguments["output_mask"])
        if self.name in ("rnn", "rnn_backward"):
            layers = int(self.arguments["hidden"][0].size(0))
            # a product for all steps, then the sequence; backward both for data and for weights
            return layers * (2 if self.name == "rnn" else 4)
        return KERNELS.get(self.name, 1)

    def bytes_moved(self) -> int:
        """Return the bytes read and written: each distinct tensor once, each result once.

        Exceptions are kernels that read twice, that use an argument for its shape alone, or that
        touch a few rows of a table.
        """
        if self.name == "convolution":
            out = self.result_size()
            bias = self.size("bias")
            return self._generic() + (2 * out if bias else 0)
        if self.name == "convolution_backward":
            return self._convolution_backward()
        if self.name in _GATHERS:
            return self._indices() + 2 * self.result_size()
        if self.name in _SCATTERS:
            return self._scatter()
        if self.name == "embedding_dense_backward":
            return 3 * self.size("grad_output") + self.size("indices") + self.result_size()
        if self.name in ("nll_loss_forward", "nll_loss2d_forward"):
            return self._loss_forward()
        extra = sum(self.size(argument) for argument in _EXTRA_READS.get(self.name, ()))
        if self.name in _ZERO_FILLED:
            extra += self.result_size()
        return self._generic() + extra

    def _generic(self) -> int:
        unread = SHAPE_ONLY.get(self.name, frozenset())
        read: dict[tuple[Any, ...], int] = {}
        written = 0
        for name, value in self.arguments.items():
            for tensor in tensors_in(value):
                size = touched(tensor)
                if name in self.mutated:
                    written += size
                if name not in unread and not self._overwrites(name):
                    read[_key(tensor)] = size
        return sum(read.values()) + written + sum(touched(tensor) for tensor in self._fresh())

    def _fresh(self) -> Iterator[torch.Tensor]:
        """Yield the results that are not an argument written in place."""
        results = self.result if isinstance(self.result, tuple) else (self.result,)
        for value, returned in zip(results, self.returns, strict=False):
            if returned.alias_info is None:
                yield from tensors_in(value)

    def _overwrites(self, name: str) -> bool:
        """Return whether an argument is written without being read."""
        filled = self.name in ("copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_")
        return name in self.mutated and (filled or name == "out")

    def _convolution_backward(self) -> int:
        grad, source, weight = (self.size(n) for n in ("grad_output", "input", "weight"))
        data, weights, bias = self.arguments["output_mask"]
        total = self.result_size()
        total += grad + weight if data else 0
        total += grad + source if weights else 0
        return total + (grad if bias else 0)

    def _indices(self) -> int:
        return sum(self.size(name) for name in ("index", "indices", "offsets"))

    def _scatter(self) -> int:
        values = max(self.size(name) for name in ("values", "src", "source", "value"))
        copied = 0 if self.mutated else self.size("self") + self.result_size()
        return copied + self._indices() + 3 * values

    def _loss_forward(self) -> int:
        picked = sum(t.numel() for t in tensors_in(self.arguments["target"]))
        element = self.arguments["self"].element_size()
        return self.size("target") + picked * int(element) + self.result_size()


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (
        tensor.untyped_storage()._cdata,
        int(tensor.storage_offset()),
        tuple(int(n) for n in tensor.shape),
        tensor.stride(),
    )
