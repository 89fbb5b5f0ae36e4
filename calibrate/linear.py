"""Linear: fit the costs of three captures as `fixed + per_sample * batch`, and check the fit."""

from __future__ import annotations

from collections.abc import Sequence

from calibrate.capture import Capture, Recorded
from dpsim.errors import CaptureError
from dpsim.workload import Linear, Op

ADVICE = (
    "A workload is linear in the batch: capture near the batch you will simulate "
    "(--batches 30,32,34), or allow an error (--tolerance 0.05)."
)


def fit(batches: Sequence[int], values: Sequence[float], tolerance: float, what: str) -> Linear:
    """Return the line through the first two values; the third must lie on it.

    >>> fit((2, 4, 8), (5, 9, 17), 0.0, "an op").at(16)
    33.0

    Args:
        batches: Three different batches.
        values: The quantity at each batch.
        tolerance: Allowed relative error at the third batch.
        what: What the values are, for the message.

    Raises:
        CaptureError: The third value lies elsewhere.
    """
    first, second, third = batches
    slope = (values[1] - values[0]) / (second - first)
    line = Linear(fixed=values[0] - slope * first, per_sample=slope)
    expected = line.fixed + line.per_sample * third
    rounding = 1e-9  # floats that stand for whole numbers below 2**53
    if abs(expected - values[2]) > max(tolerance, rounding) * max(abs(values[2]), 1.0):
        got = ", ".join(f"{value:.0f}" for value in values)
        at = ", ".join(str(batch) for batch in batches)
        raise CaptureError(
            f"{what} must be linear in the batch, got {got} at batches {at} "
            f"({expected:.0f} expected at the last). {ADVICE}"
        )
    return line


def fit_ops(captures: Sequence[Capture], part: str, tolerance: float) -> tuple[Op, ...]:
    """Return the ops of one part, "forward" or "backward", with costs linear in the batch.

    Raises:
        CaptureError: The ops differ between the captures, or a cost is not linear.
    """
    batches = [capture.batch for capture in captures]
    lists = [getattr(capture, part) for capture in captures]
    _check_same_ops(batches, lists, part)
    ops = []
    for index, entries in enumerate(zip(*lists, strict=True)):
        first: Recorded = entries[0]
        where = f"{part} op {index} {first.name} of module '{first.module}'"
        flops = fit(batches, [e.flops for e in entries], tolerance, f"{where}: FLOPs")
        moved = fit(batches, [e.bytes_moved for e in entries], tolerance, f"{where}: bytes moved")
        ops.append(
            Op(
                name=first.name,
                op_class=first.op_class,
                module=first.module,
                flops=flops,
                bytes_moved=moved,
                kernels=first.kernels,
                module_calls=first.module_calls,
            )
        )
    return tuple(ops)


def _check_same_ops(
    batches: Sequence[int], lists: Sequence[tuple[Recorded, ...]], part: str
) -> None:
    at = ", ".join(str(batch) for batch in batches)
    counts = [len(ops) for ops in lists]
    if len(set(counts)) > 1:
        got = ", ".join(str(count) for count in counts)
        raise CaptureError(
            f"{part}: the number of ops must be the same at every batch, got {got} at batches "
            f"{at}. The model loops over the batch or branches on it: compute the batch in one op, "
            "or choose batches that give one number of ops with --batches."
        )
    for index, entries in enumerate(zip(*lists, strict=True)):
        kinds = [(e.name, e.module, e.kernels) for e in entries]
        if len(set(kinds)) > 1:
            got = ", ".join(f"{name} of module '{module}'" for name, module, _ in kinds)
            raise CaptureError(
                f"{part} op {index} must be the same at every batch, got {got} at batches {at}. "
                "The model branches on the batch: choose batches of one branch with --batches."
            )
