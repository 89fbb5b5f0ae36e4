"""Loss: what turns the output of a model into the scalar that backward starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional

from calibrate.opclass import tensors_in
from calibrate.target import TensorSpec, resolve
from dpsim.errors import InputError

LOSSES = ("cross-entropy", "mse", "sum", "model")
AUXILIARY_WEIGHTS = {"aux_logits": 0.4, "aux_logits1": 0.3, "aux_logits2": 0.3, "aux": 0.5}
"""Weights of side outputs in torchvision's training scripts: Inception, GoogLeNet, DeepLab."""


class MakeTensor(Protocol):
    """Makes a tensor of a shape and a dtype by name, whose samples lie along `batch_dim`."""

    def __call__(self, shape: Sequence[int], dtype_name: str, batch_dim: int = 0) -> Tensor:
        """Return the tensor."""
        ...


def chosen_loss(loss: str | None, output: Any) -> str:
    """Return the loss to use: `loss`, or the default for this output.

    Default: the model's own loss if it returns one, else cross-entropy for a 2-D float output.

    Raises:
        InputError: No default suits this output.
    """
    if loss is not None:
        return loss
    if getattr(output, "loss", None) is not None:
        return "model"
    first = main_output(output)
    if first.dim() == 2 and first.is_floating_point():
        return "cross-entropy"
    raise InputError(
        f"--loss must be given for an output of shape {tuple(first.shape)} and dtype "
        f"{dtype_name(first)}: only a 2-D float output has a default. "
        f"Choose one of {', '.join(LOSSES)}, or MODULE:CALLABLE(output, target)."
    )


def check_loss(loss: str | None) -> None:
    """Refuse a loss that is neither known nor MODULE:CALLABLE.

    Raises:
        InputError: Neither.
    """
    if loss is None or loss in LOSSES:
        return
    if ":" not in loss:
        raise InputError(
            f"--loss must be one of {', '.join(LOSSES)}, or MODULE:CALLABLE, got '{loss}'. "
            "Correct the name."
        )
    if not callable(resolve(loss, "--loss")):
        raise InputError(f"--loss {loss}: must be callable as loss(output, target). Name another.")


def target_tensors(
    loss: str, output: Any, specs: Sequence[TensorSpec], batch: int, make: MakeTensor
) -> list[Tensor]:
    """Return the targets of one batch: those that `--target` describes, or what the loss needs."""
    if specs or loss not in ("cross-entropy", "mse"):
        return [make(spec.shape(batch), spec.dtype, spec.batch_dim) for spec in specs]
    first = main_output(output)
    if loss == "mse":
        return [make(first.shape, dtype_name(first))]
    return [make(_class_shape(first), "int64")]


def loss_value(loss: str, output: Any, targets: Sequence[Tensor]) -> Tensor:
    """Return the scalar loss.

    Raises:
        InputError: The loss is not a scalar that depends on the parameters.
    """
    value = _raw_loss(loss, output, targets)
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.requires_grad:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, Tensor) and value.dim() == 0:
            got = "one without a gradient"
        raise InputError(
            f"--loss {loss}: must give a scalar that depends on the parameters, got {got}. "
            "Choose another loss."
        )
    return value


def _raw_loss(loss: str, output: Any, targets: Sequence[Tensor]) -> Any:
    if loss == "model":
        own = getattr(output, "loss", None)
        return own if own is not None else next(tensors_in(output), None)
    if loss == "sum":
        floats = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
        return sum((t.sum() for t in floats[1:]), start=floats[0].sum()) if floats else None
    if loss == "mse":
        return functional.mse_loss(main_output(output), targets[0])
    if loss == "cross-entropy":
        value = _cross_entropy(main_output(output), targets[0])
        for weight, side in _side_outputs(output):
            value = value + weight * _cross_entropy(side, targets[0])
        return value
    target: Any = tuple(targets) if len(targets) > 1 else next(iter(targets), None)
    return resolve(loss, "--loss")(output, target)


def main_output(output: Any) -> Tensor:
    """Return the tensor that a loss is computed from: `logits`, `out`, or the first one.

    Raises:
        InputError: The model returns no tensor.
    """
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out"):
        found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    first = next(tensors_in(output), None)
    if first is None:
        raise InputError(f"the model must return a tensor, got {type(output).__name__}. Wrap it.")
    return first


def _side_outputs(output: Any) -> list[tuple[float, Tensor]]:
    found = []
    for name, weight in AUXILIARY_WEIGHTS.items():
        side = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(side, Tensor):
            found.append((weight, side))
    return found


def _class_shape(logits: Tensor) -> tuple[int, ...]:
    """Return the shape of the classes: the last dimension holds them in 3-D, the second else."""
    shape = tuple(logits.shape)
    return shape[:-1] if len(shape) in (1, 3) else (shape[0], *shape[2:])


def _cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    if logits.dim() == 3:  # one class for each token: (batch, tokens, classes)
        return functional.cross_entropy(logits.flatten(0, 1), classes.flatten())
    return functional.cross_entropy(logits, classes)


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of a dtype: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")
