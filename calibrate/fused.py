"""Fused: calls that CUDA runs as one kernel and other devices split, recorded as CUDA runs them.

While a model is recorded, four functions of torch are replaced:

* `scaled_dot_product_attention` becomes ATen's memory-efficient kernel, CUDA's choice in float32:
  one call forward, one backward, no S x S matrix. Its formulas are in FlopCounterMode.
* `lstm`, `gru`, `rnn_tanh` and `rnn_relu` become one call `dpsim::rnn`, as cuDNN's: the products
  are counted as FLOPs, the gates that cuDNN keeps as saved bytes.
* `lstm_cell` becomes two products and ATen's fused point-wise kernel.
* `dropout` becomes `native_dropout`: one kernel each way.

Source: aten/src/ATen/native/{transformers/cuda/sdp_utils.cpp, cudnn/RNN.cpp, RNN.cpp, Dropout.cpp}.
Leaves out: a model that imported one of these names before, or calls matmul and softmax itself,
stays as written; a GRU cell stays split; attention in half precision (flash) has the same counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Products of one step, in hidden sizes."""
KEPT_BESIDES_GATES = 2
"""What cuDNN keeps of one step beside its gates, in hidden sizes: cell state and layer output."""


CUDA_ONLY = (
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_lstm_cell_backward_impl",
)
"""ATen calls without a CPU kernel; in a real run stand-ins return zeros of the right shapes."""


@contextlib.contextmanager
def fused_calls(*, real: bool) -> Iterator[None]:
    """Replace the split calls while the context lasts.

    Args:
        real: The tensors are real CPU tensors.
    """
    _library()
    with contextlib.ExitStack() as stack:
        if real:
            stack.enter_context(_cpu_stand_ins())
        stack.enter_context(_replaced_functions())
        yield


@contextlib.contextmanager
def _replaced_functions() -> Iterator[None]:
    names = torch._VF
    replaced: list[tuple[Any, str, Any]] = [(names, "dropout", _dropout)]
    replaced += [(names, kind, _recurrent(kind)) for kind in GATES]
    replaced.append((names, "lstm_cell", _lstm_cell))
    replaced.append((functional, "scaled_dot_product_attention", _attention))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


@contextlib.contextmanager
def _cpu_stand_ins() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in CUDA_ONLY:
            library.impl(name, partial(_zeros_like_meta, getattr(torch.ops.aten, name)), "CPU")
        yield


def _zeros_like_meta(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Return zeros of the shapes that the call's meta kernel gives."""
    on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
    result = call(*on_meta[0], **on_meta[1])
    return tree_map_only(
        Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu"), result
    )


_split_attention = functional.scaled_dot_product_attention


def _attention(  # noqa: PLR0913 - the signature is torch's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.dim() != 4:  # CUDA splits these too
        return _split_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if enable_gqa:
        repeats = query.size(1) // key.size(1)
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            kept = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = kept.masked_fill_(attn_mask.logical_not(), float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    result: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _dropout(value: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0.0:
        return value
    return torch.native_dropout(value, p, train)[0]


def _lstm_cell(
    value: Tensor,
    hidden: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from_input = torch.matmul(value, w_ih.t())
    from_hidden = torch.matmul(hidden[0], w_hh.t())
    new, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(
        from_input, from_hidden, hidden[1], b_ih, b_hh
    )
    return new, cell


def _recurrent(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    def call(value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        is_packed = isinstance(rest[0 if kind == "lstm" else 1], Tensor)
        hidden, weights, _, _, _, _, bidirectional = rest[1:8] if is_packed else rest[:7]
        states = list(hidden) if isinstance(hidden, list | tuple) else [hidden]
        sizes = (GATES[kind], 2 if bidirectional else 1, len(states))
        result = _Recurrent.apply(*sizes, value, *states, *weights)  # type: ignore[no-untyped-call]
        return tuple(result)

    return call


class _Recurrent(torch.autograd.Function):
    """One fused recurrence; the values it returns are zeros, only the costs are right."""

    @staticmethod
    def forward(
        ctx: Any, gates: int, directions: int, states: int, value: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        hidden, weights = tensors[:states], tensors[states:]
        result = torch.ops.dpsim.rnn(value, hidden, weights, gates, directions)
        ctx.save_for_backward(value, *tensors, result[0], result[-1])
        ctx.states = states
        return tuple(result[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        value, *tensors, output, reserve = ctx.saved_tensors
        given = [grad for grad in grads if grad is not None]
        hidden, weights = tensors[: ctx.states], tensors[ctx.states :]
        results = torch.ops.dpsim.rnn_backward(value, hidden, weights, output, reserve, given)
        needed = zip(results, ctx.needs_input_grad[3:], strict=True)
        return (None, None, None, *(grad if wanted else None for grad, wanted in needed))


@cache
def _library() -> torch.library.Library:
    """Define the two recurrent calls once, for CPU, meta and fake tensors."""
    library = torch.library.Library("dpsim", "DEF")
    tensors = "Tensor input, Tensor[] hidden, Tensor[] weights"
    library.define(f"rnn({tensors}, int gates, int directions) -> Tensor[]")
    library.define(
        f"rnn_backward({tensors}, Tensor output, Tensor reserve, Tensor[] grads) -> Tensor[]"
    )
    for name, function in (("rnn", _rnn), ("rnn_backward", _rnn_backward)):
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"dpsim::{name}", function, lib=library)
    return library


def _rnn(
    value: Tensor, hidden: list[Tensor], weights: list[Tensor], gates: int, directions: int
) -> list[Tensor]:
    layers = hidden[0].size(0)  # times directions
    steps = value.shape[:-1]
    output = value.new_zeros((*steps, directions * hidden[0].size(-1)))
    size = weights[0].size(0) // gates
    reserve = value.new_zeros((*steps, layers, (gates + KEPT_BESIDES_GATES) * size))
    return [output, *(torch.zeros_like(state) for state in hidden), reserve]


def _rnn_backward(
    value: Tensor,
    hidden: list[Tensor],
    weights: list[Tensor],
    output: Tensor,
    reserve: Tensor,
    grads: list[Tensor],
) -> list[Tensor]:
    del output, reserve, grads
    return [torch.zeros_like(tensor) for tensor in (value, *hidden, *weights)]


def rnn_flops(value: Tensor, weights: Sequence[Tensor]) -> int:
    """Return the FLOPs of a fused recurrence forward: two for each weight and step."""
    steps = int(value.numel()) // int(value.size(-1))
    return 2 * steps * sum(int(w.numel()) for w in weights if w.dim() == 2)
