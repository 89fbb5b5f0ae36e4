from pathlib import Path

import pytest
import torch

from calibrate.fused import fused_calls
from calibrate.trace import trace
from dpsim.workload import OpClass

MODELS = Path(__file__).parent / "traced_models.py"


def traced(name, *inputs):
    return trace(f"{MODELS}:{name}", inputs=inputs, optimizers=())


@pytest.mark.parametrize(
    ("name", "gates", "directions"),
    [
        ("Recurrent", 4, 1),
        ("gated_recurrent", 3, 1),
        ("bidirectional", 4, 2),
        ("PackedRecurrent", 4, 1),
        ("RecurrentOnData", 4, 1),
    ],
)
def test_recurrent_layers_are_one_fused_call_each_way(name, gates, directions):
    workload = traced(name, "7x8")
    (forward,) = [op for op in workload.forward if op.op_class is OpClass.RNN]
    (backward,) = [op for op in workload.backward if op.op_class is OpClass.RNN]
    size, steps = 16, 7
    products = gates * size * ((8 + size) + (directions * size + size)) * directions
    assert 2 * steps * products == forward.flops.per_sample
    assert 2 * forward.flops.per_sample == backward.flops.per_sample
    assert (2 * 2 * directions, 4 * 2 * directions) == (forward.kernels, backward.kernels)
    kept = steps * 2 * directions * (gates + 2) * size * 4
    assert kept < workload.saved_bytes.per_sample < 2 * kept
    rnn = [p for p in workload.parameters if p.name.startswith("rnn")]
    assert 4 * 2 * directions == len(rnn)
    assert len(workload.parameters) == len(workload.gradients)


def test_step_of_an_lstm_cell_is_two_products_and_one_kernel():
    ops = [op.name for op in traced("Cell", "4").forward if op.kernels]
    assert 2 == ops.count("aten.mm")
    assert 1 == ops.count("aten._thnn_fused_lstm_cell")
    assert not {"aten.sigmoid", "aten.sigmoid_", "aten.tanh", "aten.tanh_"} & set(ops)


def test_attention_moves_no_square_matrix():
    words, width = 512, 16
    workload = traced("Attention", f"{words}x{width}")
    name = "aten._scaled_dot_product_efficient_attention"
    forward = next(op for op in workload.forward if op.name == name)
    backward = next(op for op in workload.backward if op.name == f"{name}_backward")
    assert 4 * words * words * width == forward.flops.per_sample
    assert 2.5 * forward.flops.per_sample == backward.flops.per_sample
    tensor, square = words * width * 4, 4 * words * words * 4
    assert 4 * tensor < forward.bytes_moved.per_sample < 5 * tensor < square
    assert 8 * tensor < backward.bytes_moved.per_sample < 10 * tensor
    assert not any(op.name == "aten._softmax" for op in workload.forward)


def test_mask_is_read_once_for_all_samples_and_heads():
    words = 64
    plain, masked = (traced(name, f"{words}x16") for name in ("Attention", "Masked"))
    name = "aten._scaled_dot_product_efficient_attention"
    without, with_mask = (
        next(op for op in w.forward if op.name == name).bytes_moved for w in (plain, masked)
    )
    assert with_mask.per_sample == without.per_sample
    assert 4 * words * words == with_mask.fixed - without.fixed


def test_grouped_queries_repeat_keys_before_the_fused_call():
    workload = trace(f"{MODELS}:GroupedQueries", inputs=["8x16"], loss="sum", optimizers=())
    (op,) = [op for op in workload.forward if op.op_class is OpClass.ATTENTION]
    assert 4 * 8 * 8 * 16 == op.flops.per_sample


def test_attention_without_heads_is_split_as_on_cuda():
    workload = trace(f"{MODELS}:HeadlessAttention", inputs=["8x16"], loss="sum", optimizers=())
    assert not [op for op in workload.forward if op.op_class is OpClass.ATTENTION]
    assert 2 == sum(op.name == "aten.bmm" for op in workload.forward)


def test_dropout_is_one_kernel_each_way():
    with fused_calls(real=True):
        x = torch.ones(1000, requires_grad=True)
        y = torch.nn.functional.dropout(x, 0.5)
        assert "NativeDropoutBackward0" == type(y.grad_fn).__name__
        y.sum().backward()
        assert y.equal(x.grad)
        assert x is torch.nn.functional.dropout(x, 0.5, training=False)


@pytest.mark.parametrize("real", [True, False])
def test_replaced_functions_come_back_even_after_an_error(real):
    before = torch._VF.lstm, torch._VF.dropout, torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="stop"), fused_calls(real=real):
        raise RuntimeError("stop")
    after = torch._VF.lstm, torch._VF.dropout, torch.nn.functional.scaled_dot_product_attention
    assert before == after
