"""One of two processes that train a small model with DistributedDataParallel on gloo.

Run as `python ddp_process.py RANK DIRECTORY`. Rank 0 writes to DIRECTORY/buckets.json, for each
setting and each of three iterations, the buckets in the order in which they were reduced.
No `from __future__ import annotations` here: DistributedDataParallel looks at those of a hook.
"""

import copy
import inspect
import itertools
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_cap_mb": {"bucket_cap_mb": 4},
    "bucket_cap_mb_list": {"bucket_cap_mb_list": [2, 8, 32]},
}
KNOWN = inspect.signature(DistributedDataParallel).parameters
UNUSED: dict[str, dict[str, Any]] = {
    "unused, find_unused_parameters": {"find_unused_parameters": True},
    "unused, static_graph": {"static_graph": True},
}


def model() -> nn.Module:
    sizes = [512, 1024, 2048, 2048, 1024, 10]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class WithUnused(nn.Module):
    """The second of three layers gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle, self.last = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def with_unused() -> nn.Module:
    return WithUnused()


def buckets(module: nn.Module, options: dict[str, Any], inputs: int) -> list[list[Any]]:
    """Return the buckets of each of three iterations: names of parameters, and bytes."""
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    wrapped = DistributedDataParallel(module, **options)
    iterations: list[list[Any]] = []

    def hook(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        names = [name_of[id(parameter)] for parameter in bucket.parameters()]
        iterations[-1].append([names, bucket.buffer().nbytes])
        work = distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    wrapped.register_comm_hook(None, hook)
    for _ in range(3):
        iterations.append([])
        wrapped.zero_grad()
        wrapped(torch.randn(2, inputs)).sum().backward()
    return iterations


def main() -> None:
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=(directory / "store").as_uri(),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    found = {}
    made = model()
    for name, options in SETTINGS.items():
        if all(option in KNOWN for option in options):
            found[name] = buckets(copy.deepcopy(made), options, 512)
    for name, options in UNUSED.items():
        found[name] = buckets(with_unused(), options, 8)
    if rank == 0:
        (directory / "buckets.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
