"""Trace: turn any nn.Module into a `Workload`. The body of the command `dpsim trace`.

The model is run on meta tensors, which have a shape and no data. Models that need data fall back
to fake CPU tensors, then to a real run of small batches on the CPU; `Source.capture` says which
way worked.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from calibrate.capture import Capture, Step, capture
from calibrate.linear import fit, fit_ops
from calibrate.loss import check_loss, dtype_name
from calibrate.optimizer import IMPLEMENTATIONS, OPTIMIZERS, optimizer_ops
from calibrate.target import (
    brief,
    checked_model,
    definition,
    dpsim_version,
    parse_spec,
    resolve_model,
)
from dpsim.errors import CaptureError, DpsimError, InputError, UnknownNameError
from dpsim.records import record
from dpsim.workload import DTYPE_BYTES, GradientReady, OptimizerOps, Source, Tensor, Workload

BATCHES = (2, 4, 8)
"""Two batches to fit and one to check. Not 1: BatchNorm refuses one value a channel."""


@record
class TraceOptions:
    """What the flags of `dpsim trace` say, as the user wrote them."""

    target: str
    inputs: tuple[str, ...]
    targets: tuple[str, ...] = ()
    loss: str | None = None
    name: str | None = None
    sample: str = "sample"
    batches: tuple[int, ...] = BATCHES
    tolerance: float = 0.0
    optimizers: tuple[str, ...] = OPTIMIZERS
    citation: str = ""
    output: str = ""

    def command(self) -> str:
        """Return the command line that makes this workload again."""
        words = ["dpsim", "trace", self.target]
        words += [word for text in self.inputs for word in ("--input", text)]
        words += [word for text in self.targets for word in ("--target", text)]
        plain = TraceOptions(target=self.target, inputs=self.inputs)
        for flag in ("loss", "name", "sample", "batches", "tolerance", "optimizers", "citation"):
            value = getattr(self, flag)
            if value != getattr(plain, flag):
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words += [f"--{flag}", text]
        words += ["-o", self.output] if self.output else []
        return shlex.join(words)


def trace(  # noqa: PLR0913 - one argument for each flag of `dpsim trace`
    target: str,
    *,
    inputs: Sequence[str],
    targets: Sequence[str] = (),
    loss: str | None = None,
    name: str | None = None,
    sample: str = "sample",
    batches: Sequence[int] = BATCHES,
    tolerance: float = 0.0,
    optimizers: Sequence[str] = OPTIMIZERS,
    citation: str = "",
    output: str = "",
) -> Workload:
    """Return one training step of a model: its ops, parameters, gradients and optimizers.

    Args:
        target: MODULE:CALLABLE that returns an nn.Module without arguments, or names one; MODULE
            may be the path of a .py file.
        inputs: One text for each tensor of forward, `[NAME=][DTYPE:]DIMS` without the batch.
        targets: The same for the labels; with the loss `model` they go to forward as keywords.
        loss: "cross-entropy", "mse", "sum", "model" (the model returns it) or MODULE:CALLABLE
            as (output, target); None chooses cross-entropy for a 2-D float output.
        name: Of the workload; the callable's name if None.
        sample: Word for one unit of the batch: "image", "sequence".
        batches: Three batches: two to fit, the last to check.
        tolerance: Relative error allowed at the third batch.
        optimizers: Names of `calibrate.optimizer.OPTIMIZERS`.
        citation: Where the model comes from.
        output: The path of -o, for `Source.command` alone; nothing is written.

    Raises:
        InputError: A flag breaks a rule, or the model cannot be found.
        CaptureError: The model ran in none of the ways tried, or is not linear in the batch.
    """
    options = TraceOptions(
        target=target,
        inputs=tuple(inputs),
        targets=tuple(targets),
        loss=loss,
        name=name,
        sample=sample,
        batches=tuple(batches),
        tolerance=tolerance,
        optimizers=tuple(optimizers),
        citation=citation,
        output=output,
    )
    step = _checked_step(options)
    make = resolve_model(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other libraries; ours are errors
        way, model, captures = _first_that_works(options, make, step)
        return _workload(options, way, model, captures)


def _checked_step(options: TraceOptions) -> Step:
    if not options.inputs:
        raise InputError(
            "--input must be given at least once, got none. Example: --input 3x224x224"
        )
    batches = options.batches
    if len(set(batches)) != 3 or len(batches) != 3 or min(batches) < 1:
        got = ",".join(map(str, batches))
        raise InputError(
            f"--batches must be three different whole numbers >= 1, got {got}. Example: 2,4,8"
        )
    if not 0.0 <= options.tolerance < 1.0:
        raise InputError(
            f"--tolerance must be in [0, 1), got {options.tolerance}. It is a relative error: 0.05."
        )
    for optimizer in options.optimizers:
        if optimizer not in OPTIMIZERS:
            raise UnknownNameError("optimizer", optimizer, OPTIMIZERS)
    check_loss(options.loss)
    return Step(
        inputs=tuple(parse_spec(text, "--input") for text in options.inputs),
        targets=tuple(parse_spec(text, "--target") for text in options.targets),
        loss=options.loss,
    )


RunModel = Callable[[TraceOptions, Any, Step], tuple[torch.nn.Module, list[Capture]]]


def _first_that_works(
    options: TraceOptions, make: Any, step: Step
) -> tuple[str, torch.nn.Module, list[Capture]]:
    failures = {}
    for name, way in WAYS.items():
        try:
            return name, *way(options, make, step)
        except DpsimError:
            raise
        except Exception as problem:  # noqa: BLE001 - a model may raise anything
            failures[name] = brief(problem)
    given = " ".join(f"--input {text}" for text in options.inputs)
    if len(set(failures.values())) == 1:
        tried = f"the same error in every way tried ({', '.join(failures)}): {failures['cpu']}"
    else:
        tried = "; ".join(f"{name}: {text}" for name, text in failures.items())
    raise CaptureError(
        f"{options.target}: one training step must run with {given}, got {tried}. "
        "Check that forward takes inputs of this shape and dtype (the batch is added in front)."
    )


def _on_meta(options: TraceOptions, make: Any, step: Step) -> tuple[torch.nn.Module, list[Capture]]:
    try:
        with torch.device("meta"):
            model = _build(options, make)
    except DpsimError:
        raise
    except Exception:  # noqa: BLE001 - constructors that compute with data
        model = _build(options, make)
    model = model.to("meta").train()
    return model, [capture(model, step, batch, "meta") for batch in options.batches]


def _on_fake_cpu(
    options: TraceOptions, make: Any, step: Step
) -> tuple[torch.nn.Module, list[Capture]]:
    # a shape environment lets .item() of unknown data pass as long as nothing branches on it
    with _quiet_log(), FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        model = _build(options, make).train()
        return model, [capture(model, step, batch, "fake-cpu") for batch in options.batches]


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """Keep torch from logging a traceback of a failure that the next way may repair."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _on_cpu(options: TraceOptions, make: Any, step: Step) -> tuple[torch.nn.Module, list[Capture]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _build(options, make).cpu().train()
        _check_memory(model)
        return model, [capture(model, step, batch, "cpu") for batch in options.batches]


WAYS: dict[str, RunModel] = {"meta": _on_meta, "fake-cpu": _on_fake_cpu, "cpu": _on_cpu}
"""The ways to run a model, the cheapest first; the keys are values of `Source.capture`."""


def _build(options: TraceOptions, make: Any) -> torch.nn.Module:
    made = copy.deepcopy(make) if isinstance(make, torch.nn.Module) else make()
    return checked_model(made, options.target)


def _check_memory(model: torch.nn.Module) -> None:
    """Refuse a real run that would take the machine's memory: parameters and gradients."""
    needed = 2 * sum(p.nbytes for p in model.parameters())
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > installed // 2:
        raise MemoryError(f"parameters and gradients take {needed / 2**30:.0f} GiB")


def _workload(
    options: TraceOptions, way: str, model: torch.nn.Module, captures: Sequence[Capture]
) -> Workload:
    batches, allowed = options.batches, options.tolerance
    first = captures[0]

    def line(field: str) -> Any:
        return fit(batches, [getattr(c, field) for c in captures], allowed, field.replace("_", " "))

    forward = fit_ops(captures, "forward", allowed)
    return Workload(
        name=options.name or options.target.rpartition(":")[2],
        source=_source(options, way, model, first),
        input_bytes=line("input_bytes"),
        target_bytes=line("target_bytes"),
        parameters=tuple(_tensors(model.named_parameters(), options.target, first.sparse)),
        buffers=tuple(_tensors(model.named_buffers(), options.target)),
        modules=sum(1 for _ in model.modules()),
        forward=forward,
        loss_start=first.loss_start,
        backward=fit_ops(captures, "backward", allowed),
        loss_backward_ops=first.loss_backward_ops,
        gradients=tuple(
            GradientReady(parameter=index, after_op=after) for index, after in first.gradients
        ),
        saved_bytes=line("saved_bytes"),
        output_bytes=line("output_bytes"),
        output_tensors=first.output_tensors,
        optimizers=tuple(_optimizers(options, model, first)),
        sample=options.sample,
        citation=options.citation,
        flops_per_sample_forward=sum(op.flops.per_sample for op in forward),
    )


def _optimizers(
    options: TraceOptions, model: torch.nn.Module, first: Capture
) -> Iterator[OptimizerOps]:
    parameters = list(model.parameters())
    trained = [parameters[index] for index, _ in sorted(first.gradients)]
    with contextlib.ExitStack() as stack:
        if not trained:
            return
        stack.enter_context(torch._subclasses.fake_tensor.unset_fake_temporarily())
        for name in options.optimizers:
            for implementation in IMPLEMENTATIONS:
                yield optimizer_ops(name, implementation, trained)


def _source(options: TraceOptions, way: str, model: torch.nn.Module, first: Capture) -> Source:
    ready = {index for index, _ in first.gradients}
    unused = [
        name
        for index, (name, parameter) in enumerate(model.named_parameters())
        if parameter.requires_grad and index not in ready
    ]
    note = f"no gradient reaches {len(unused)}: {', '.join(unused[:5])}" if unused else ""
    return Source(
        command=options.command(),
        definition=definition(options.target, model),
        dpsim_version=dpsim_version(),
        torch_version=torch.__version__.partition("+")[0],
        capture=way,
        batches=options.batches,
        note=note,
    )


def _tensors(named: Any, target: str, sparse: Sequence[int] = ()) -> Iterator[Tensor]:
    for index, (name, tensor) in enumerate(named):
        dtype = dtype_name(tensor)
        if dtype not in DTYPE_BYTES:
            raise CaptureError(
                f"{target}: dtype of '{name}' must be one of {', '.join(DTYPE_BYTES)}, got {dtype}."
                " Convert it in the model."
            )
        yield Tensor(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype,
            trainable=tensor.requires_grad,
            sparse_gradient=index in sparse,
        )
