"""Known: values of meta tensors that do not depend on the data, such as positions and masks.

A meta tensor has no values, so `.item()` on one fails. But many models ask for values that follow
from shapes alone (`arange`, comparisons of positions, steps of a schedule): those are computed on
the CPU beside the recorded calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from calibrate.opclass import tensors_in

MAX_ELEMENTS = 1 << 20
"""Values are kept of tensors up to this size: masks of 1024 positions, not images."""
MAKERS = frozenset(
    "arange linspace logspace zeros ones full eye scalar_tensor tril_indices triu_indices "
    "zeros_like ones_like full_like new_zeros new_ones new_full".split()
)
"""Calls whose values follow from their arguments without a tensor's values."""
ASKS = ("_local_scalar_dense", "nonzero", "equal")
"""Calls that need values to return at all."""


class _UnknownError(Exception):
    """An argument has no known values."""


class KnownValues:
    """The values of data-independent meta tensors, by identity."""

    def __init__(self) -> None:
        """Know nothing."""
        self._values: dict[int, tuple[Tensor, Tensor]] = {}

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call of `ASKS` gives on known values.

        Raises:
            LookupError: The values are not known.
        """
        try:
            found = func(*self._real(args), **self._real(kwargs))
        except _UnknownError:
            raise LookupError from None
        if isinstance(found, Tensor):
            result = found.to("meta")
            self._values[id(result)] = (result, found)
            return result
        return found

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Compute the values of `result` too, if those of the arguments are known."""
        name = func._schema.name.partition("::")[2]
        tensors = tensors_in(args)
        makes = name in MAKERS
        # the usual case is a call on data: leave it as early as possible
        if not makes and not any(id(tensor) in self._values for tensor in tensors):
            return
        if torch.Tag.nondeterministic_seeded in func.tags or not isinstance(result, Tensor):
            self._forget(args)
            return
        if result.numel() > MAX_ELEMENTS or result.device.type != "meta":
            return
        try:
            real = func(*self._real(args, makes), **self._real(kwargs, makes))
        except (_UnknownError, RuntimeError, NotImplementedError):
            self._forget([result])
            return
        self._values[id(result)] = (result, real)

    def _real(self, values: Any, makes: bool = False) -> Any:
        def real(value: Any) -> Any:
            if isinstance(value, Tensor) and value.device.type == "meta":
                if id(value) in self._values:
                    return self._values[id(value)][1]
                if not makes or value.numel() > MAX_ELEMENTS:
                    raise _UnknownError
                return torch.empty(value.shape, dtype=value.dtype)  # only its shape is used
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return value

        return tree_map(real, values)

    def _forget(self, values: Any) -> None:
        for tensor in tensors_in(values):
            self._values.pop(id(tensor), None)
