import pytest
import torch

from calibrate.opclass import Call, is_view, op_class, tensors_in, touched
from dpsim.workload import OpClass

META = torch.device("meta")


@pytest.mark.parametrize(
    ("expected", "names"),
    [
        ("gemm", "mm addmm bmm baddbmm addmv _scaled_mm"),
        ("conv", "convolution convolution_backward"),
        ("attention", "_scaled_dot_product_efficient_attention _flash_attention_backward"),
        ("rnn", "rnn rnn_backward _cudnn_rnn"),
        ("elementwise", "add mul_ relu threshold_backward native_dropout gelu_backward fill_"),
        ("elementwise", "_thnn_fused_lstm_cell addcmul addcdiv_ bernoulli_ maximum where zeros"),
        ("normalization", "native_batch_norm native_layer_norm_backward native_group_norm"),
        ("reduction", "sum mean _softmax _log_softmax_backward_data nll_loss_forward mse_loss var"),
        ("pool", "max_pool2d_with_indices avg_pool2d_backward upsample_nearest2d"),
        ("pool", "_adaptive_avg_pool2d max_pool2d_with_indices_backward"),
        ("embedding", "embedding embedding_dense_backward index index_put_ gather scatter_add_"),
        ("copy", "cat clone copy_ _to_copy constant_pad_nd slice_backward _local_scalar_dense"),
    ],
)
def test_every_class_knows_its_ops(expected, names):
    assert {name: OpClass(expected) for name in names.split()} == {
        name: op_class(name) for name in names.split()
    }


@pytest.mark.parametrize(
    "name", ["view", "t", "detach", "expand", "empty", "_unsafe_view", "split"]
)
def test_views_and_allocations_launch_nothing(name):
    packet = getattr(torch.ops.aten, name)
    assert is_view(getattr(packet, packet.overloads()[0]))


@pytest.mark.parametrize("name", ["add_", "relu", "clone", "copy_", "sum", "zero_", "_to_copy"])
def test_what_writes_is_no_view(name):
    packet = getattr(torch.ops.aten, name)
    assert not is_view(getattr(packet, packet.overloads()[0]))


def call(packet, *args, **kwargs):
    func = packet.Tensor if "Tensor" in packet.overloads() else packet.default
    return Call(func, args, kwargs, func(*args, **kwargs))


def test_each_distinct_tensor_is_read_once():
    x, y = torch.empty(10, 7, device=META), torch.empty(10, 7, device=META)
    assert 2 * 280 == call(torch.ops.aten.mul, x, x).bytes_moved()
    assert 3 * 280 == call(torch.ops.aten.mul, x, y).bytes_moved()
    assert 3 * 280 == call(torch.ops.aten.add_, x, y).bytes_moved()


def test_expanded_dimensions_lie_in_memory_once():
    assert 4 == touched(torch.empty(1, device=META).expand(5, 7))
    assert 0 == touched(torch.empty(0, 3, device=META))


def test_embedding_reads_only_the_rows_it_picks():
    table, words = torch.empty(1000, 8, device=META), torch.zeros(5, dtype=int, device=META)
    assert 5 * 8 + 2 * 5 * 8 * 4 == call(torch.ops.aten.embedding, table, words).bytes_moved()


def test_convolution_adds_its_bias_in_a_second_kernel():
    x = torch.empty(2, 3, 8, 8, device=META)
    w, b = torch.empty(4, 3, 1, 1, device=META), torch.empty(4, device=META)
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    plain = call(torch.ops.aten.convolution, x, w, None, *rest)
    biased = call(torch.ops.aten.convolution, x, w, b, *rest)
    assert (1, 2) == (plain.kernels(), biased.kernels())
    out = 2 * 4 * 64 * 4
    assert 2 * out + 16 == biased.bytes_moved() - plain.bytes_moved()


def test_copying_does_not_read_what_it_overwrites():
    x, y = torch.empty(10, device=META), torch.empty(10, device=META)
    assert 80 == call(torch.ops.aten.copy_, x, y).bytes_moved()


def test_tensors_are_found_in_nested_values():
    x = torch.empty(1)
    assert [x, x, x] == list(tensors_in([x, {"a": (x, None)}, 3, [[x]]]))
