"""What all tests share: the seed of Hypothesis, and the reason why GPU tests are skipped."""

from __future__ import annotations

import os
from functools import cache

import hypothesis
import pytest

# No deadline: a busy machine is slow, not wrong. With CI set, the examples are the same every time.
hypothesis.settings.register_profile("dpsim", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("dpsim")


@cache
def why_no_gpu() -> str:
    """Return why GPU tests cannot run here, or "" if they can. Imports torch."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)
