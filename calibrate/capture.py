"""Capture: record every ATen call of one training step at one batch size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

from calibrate.fused import fused_calls, rnn_flops
from calibrate.known import ASKS, KnownValues
from calibrate.loss import MakeTensor, chosen_loss, loss_value, target_tensors
from calibrate.opclass import Call, is_view, op_class, tensors_in
from calibrate.target import TensorSpec
from dpsim.records import record
from dpsim.workload import OpClass

Way = Literal["meta", "fake-cpu", "cpu"]
"""What the tensors are: without data, without data but on the CPU, or real."""
SILENT_NAMESPACES = ("profiler", "prim", "prims")
"""Calls of these namespaces are torch's own book-keeping."""


@record
class Recorded:
    """One ATen call at one batch size."""

    name: str
    op_class: OpClass
    module: str
    flops: int
    bytes_moved: int
    kernels: int
    module_calls: int


@record
class Capture:
    """One training step at one batch size; the fields are those of `Workload`, as numbers."""

    batch: int
    input_bytes: int
    target_bytes: int
    forward: tuple[Recorded, ...]
    loss_start: int
    backward: tuple[Recorded, ...]
    loss_backward_ops: int
    gradients: tuple[tuple[int, int], ...]  # parameter, backward op
    sparse: tuple[int, ...]  # parameters whose gradient is sparse
    saved_bytes: int
    output_bytes: int
    output_tensors: int


@record
class Step:
    """What one training step is, beside the model."""

    inputs: tuple[TensorSpec, ...]
    targets: tuple[TensorSpec, ...] = ()
    loss: str | None = None


class Recorder(TorchDispatchMode):
    """Writes down each ATen call that reaches the dispatcher while it is active."""

    def __init__(self, names: dict[int, str], device: str) -> None:
        """Know the modules by `id`; calls without a tensor on `device` run on the host."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Recorded] = []
        self.sequence_numbers: list[int | None] = []  # of the autograd node that ran, in backward
        self._names = names
        self._device = device
        self._stack: list[str] = []
        self._calls = 0
        self._module_of_node: dict[int, str] = {}
        self._known = KnownValues()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the call and write it down."""
        del types
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        if func.namespace not in SILENT_NAMESPACES:
            self._write(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._device != "meta":
            return func(*args, **kwargs)
        if func._schema.name.partition("::")[2] in ASKS:
            with contextlib.suppress(LookupError):
                return self._known.answer(func, args, kwargs)
        result = func(*args, **kwargs)
        self._known.follow(func, args, kwargs, result)
        return result

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        module = self._module(number)
        name = func._schema.name.replace("::", ".")
        on_host = is_view(func) or not self._on_device((args, kwargs.values(), result))
        call = Call(func, args, kwargs, result)
        entry = Recorded(
            name=name,
            op_class=OpClass.VIEW if on_host else op_class(call.name),
            module=module,
            flops=0 if on_host else _flops(func, call, args, kwargs),
            bytes_moved=0 if on_host else call.bytes_moved(),
            kernels=0 if on_host else call.kernels(),
            module_calls=self._calls,
        )
        self._calls = 0
        self.ops.append(entry)
        self.sequence_numbers.append(number)

    def _module(self, number: int | None) -> str:
        """Return the module that an op belongs to, in backward that of the forward op."""
        if number is None:
            module = self._stack[-1] if self._stack else ""
            # a call that is recorded runs below the autograd node it has just made
            self._module_of_node.setdefault(_next_node_number() - 1, module)
            return module
        if self._stack:  # recomputed in backward: activation checkpointing
            return self._stack[-1]
        last = self.ops[-1].module if self.ops else ""
        return self._module_of_node.get(number, last)

    def _on_device(self, values: Any) -> bool:
        args, kwargs, result = values
        return any(
            tensor.device.type == self._device
            for value in (args, list(kwargs), result)
            for tensor in tensors_in(value)
        )

    def start_section(self) -> tuple[Recorded, ...]:
        """Return the ops so far and begin anew; keep which module each autograd node is of."""
        ops = tuple(self.ops)
        self.ops, self.sequence_numbers = [], []
        return ops

    @contextlib.contextmanager
    def module_calls(self) -> Iterator[None]:
        """Follow `nn.Module.__call__` while the context lasts."""

        def enter(module: torch.nn.Module, _: Any) -> None:
            above = self._stack[-1] if self._stack else ""
            self._stack.append(self._names.get(id(module), above))
            self._calls += 1

        def leave(*_: Any) -> None:
            self._stack.pop()

        hooks = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take_calls(self) -> None:
        """Add calls of modules after which no op came to the last op."""
        if self.ops and self._calls:
            last = self.ops[-1]
            total = last.module_calls + self._calls
            self.ops[-1] = Recorded(**{**_fields(last), "module_calls": total})
        self._calls = 0


def capture(model: torch.nn.Module, step: Step, batch: int, way: Way) -> Capture:
    """Return one training step of `model` on `batch` samples.

    Args:
        model: In training mode, its parameters without gradients.
        step: Inputs, targets and loss.
        batch: Samples, >= 1.
        way: What the tensors are; for "fake-cpu" the caller has entered a FakeTensorMode.
    """
    device = "meta" if way == "meta" else "cpu"
    names = {id(module): name for name, module in model.named_modules()}
    recorder = Recorder(names, device)
    saved = _SavedTensors([*model.parameters(), *model.buffers()])
    watch = _GradientWatch(list(model.parameters()), recorder)
    run = _Run(model, step, batch, _maker(device))
    try:
        with recorder.module_calls(), fused_calls(real=way == "cpu"):
            with recorder:
                output = run.forward()
            recorder.take_calls()
            loss_start, first_number = len(recorder.ops), _next_node_number()
            targets = run.targets_for(output)
            with recorder:
                value = loss_value(run.loss, output, targets)
            recorder.take_calls()
            forward = recorder.start_section()
            with recorder:
                value.backward()
            recorder.take_calls()
            # a second forward, because the hooks would add calls to the backward recorded above
            with saved, Recorder(names, device):
                loss_value(run.loss, run.forward(), targets)
    finally:
        watch.remove()
        model.zero_grad(set_to_none=True)
    outputs = {id(tensor): tensor for tensor in tensors_in(output)}.values()
    return Capture(
        batch=batch,
        input_bytes=_nbytes(run.inputs),
        target_bytes=_nbytes(targets),
        forward=forward,
        loss_start=loss_start,
        backward=tuple(recorder.ops),
        loss_backward_ops=_leading(recorder.sequence_numbers, first_number),
        gradients=tuple(watch.ready),
        sparse=tuple(watch.sparse),
        saved_bytes=saved.nbytes(),
        output_bytes=_nbytes(outputs),
        output_tensors=max(1, len(outputs)),
    )


class _Run:
    """The tensors of one batch, and the calls of the model on them."""

    def __init__(self, model: torch.nn.Module, step: Step, batch: int, make: MakeTensor) -> None:
        self.loss = step.loss or ""  # "": chosen when the output is known
        self._model, self._step, self._batch, self._make = model, step, batch, make
        self.inputs = [make(spec.shape(batch), spec.dtype, spec.batch_dim) for spec in step.inputs]
        # targets that the model itself takes, by keyword; the first is `labels`
        self._labels = {
            spec.name or "labels": make(spec.shape(batch), spec.dtype, spec.batch_dim)
            for spec in (step.targets if step.loss == "model" else ())
        }

    def forward(self) -> Any:
        pairs = list(zip(self._step.inputs, self.inputs, strict=True))
        positional = [tensor for spec, tensor in pairs if not spec.name]
        keywords = {spec.name: tensor for spec, tensor in pairs if spec.name}
        return self._model(*positional, **keywords, **self._labels)

    def targets_for(self, output: Any) -> list[torch.Tensor]:
        self.loss = chosen_loss(self._step.loss, output)
        if self._labels:
            return list(self._labels.values())
        return target_tensors(self.loss, output, self._step.targets, self._batch, self._make)


def _maker(device: str) -> MakeTensor:
    def make(shape: Sequence[int], dtype_name: str, batch_dim: int = 0) -> torch.Tensor:
        """Return one sample repeated: what depends on the values is then linear in the batch."""
        dtype: torch.dtype = getattr(torch, dtype_name)
        if not dtype.is_floating_point:
            return torch.zeros(tuple(shape), dtype=dtype, device=device)
        one = (*shape[:batch_dim], 1, *shape[batch_dim + 1 :])
        sample = torch.randn(one, dtype=dtype, device=device)
        return sample.expand(tuple(shape)).contiguous()

    return make


class _GradientWatch:
    """Writes down after which backward op each gradient is ready, while its hooks are in place."""

    def __init__(self, parameters: Sequence[torch.Tensor], recorder: Recorder) -> None:
        self.ready: list[tuple[int, int]] = []
        self.sparse: list[int] = []
        self._recorder = recorder
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._write, index))
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def _write(self, index: int, parameter: torch.Tensor) -> None:
        self.ready.append((index, max(0, len(self._recorder.ops) - 1)))
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            self.sparse.append(index)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _SavedTensors:
    """Counts the distinct storages that autograd keeps, parameters and buffers excluded."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._hooks: Any = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                # the storage is held, or its address could be given to another one
                self._kept[storage._cdata] = storage
        return tensor

    def __enter__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def __exit__(self, *problem: Any) -> None:
        self._hooks.__exit__(*problem)

    def nbytes(self) -> int:
        return sum(int(storage.nbytes()) for storage in self._kept.values())


def _flops(func: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the FLOPs as FlopCounterMode counts them, and those of fused recurrences.

    Unlike it, the weight gradient of a grouped convolution costs what forward costs: torch 2.13
    leaves the groups out there and counts depthwise layers hundreds of times.
    """
    if call.name == "convolution_backward" and call.arguments["groups"] > 1:
        halves = sum(bool(wanted) for wanted in call.arguments["output_mask"][:2])
        source, weight, grad = (
            list(call.arguments[name].shape) for name in ("input", "weight", "grad_output")
        )
        is_transposed = bool(call.arguments["transposed"])
        return halves * int(conv_flop_count(source, weight, grad, transposed=is_transposed))
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=call.result))
    if call.name in ("rnn", "rnn_backward"):
        forward = rnn_flops(call.arguments["input"], call.arguments["weights"])
        return forward if call.name == "rnn" else 2 * forward
    return 0


def _next_node_number() -> int:
    """Return the sequence number that the next autograd node of this thread will get."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _leading(numbers: Sequence[int | None], first_number: int) -> int:
    """Return how many ops run before the first that belongs to the model, not to the loss."""
    for index, number in enumerate(numbers):
        if number is not None and number < first_number:
            return index
    return len(numbers)


def _nbytes(tensors: Any) -> int:
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


def _fields(entry: Recorded) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in Recorded.__dataclass_fields__}
