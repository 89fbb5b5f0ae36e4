"""Options: the flags of `dpsim simulate`.

Nothing but click is imported at the top: `dpsim --help` passes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from dpsim._parameters import (
    MOST_GPUS,
    MOST_SEED,
    Listed,
    Named,
    Number,
    OutputDevice,
    Pair,
    Text,
    Value,
    Whole,
)

F = TypeVar("F", bound=Callable[..., Any])


def _modes() -> list[str]:
    from dpsim.schedules import SCHEDULES  # noqa: PLC0415 - not before a mode is asked for

    return SCHEDULES.names()


def _algorithms() -> list[str]:
    from dpsim.collectives import ALGORITHMS  # noqa: PLC0415 - the same

    return ["auto", *ALGORITHMS.names()]


class Flag(click.Option):
    """An option that knows the heading in the help, and the mode that reads it."""

    def __init__(self, *args: Any, heading: str, mode: str = "", **kwargs: Any) -> None:
        """Take what `click.Option` takes; `mode` "" is read by all modes."""
        self.heading = heading
        self.mode = mode
        super().__init__(*args, **kwargs)


class SectionedCommand(click.Command):
    """A command whose help has a section for each heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "heading", "Output"), []).append(record)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def given_flags(ctx: click.Context) -> list[Flag]:
    """Return the flags that stand on the command line."""
    return [
        param
        for param in ctx.command.params
        if isinstance(param, Flag)
        and param.name is not None
        and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
    ]


def ignored_flags(flags: Iterable[Flag], mode: str) -> list[str]:
    """Return a warning for each flag that the mode does not read."""
    return [
        f"{flag.opts[0]} is read by --mode {flag.mode} alone; --mode {mode} ignores it"
        for flag in flags
        if flag.mode and mode.partition("-")[0] != flag.mode
    ]


def _section(heading: str, mode: str = "") -> Callable[..., Callable[[F], F]]:
    """Return what makes the options of one section."""

    def option(*names: str, about: str, **settings: Any) -> Callable[[F], F]:
        return click.option(*names, cls=Flag, heading=heading, mode=mode, help=about, **settings)

    return option


_what = _section("What is trained, and on what")
_loop = _section("The training loop")
_shape = _section("Who does what")
_known = _section("What you have measured")
_dp = _section("--mode dp (nn.DataParallel)", "dp")
_ring = _section("--mode ring (DistributedDataParallel)", "ring")
_ps = _section("--mode ps (parameter server)", "ps")

_COUNT = Whole(1, infeasible=True)
_GPUS = Whole(1, most=MOST_GPUS, infeasible=True)
_RATE = Number(infinite=True)

SIMULATE: tuple[Callable[[Any], Any], ...] = (
    _what(
        "--model",
        type=Text(),
        about="Workload: shipped name, file, or - for standard input; resnet50 if not given.",
    ),
    _what("--profile", type=Text(), about="Machine: shipped name or file; a100-sxm if not given."),
    _what(
        "--network",
        type=Text(),
        about="Wire between nodes: shipped name or file; the machine's usual one if not given.",
    ),
    _what(
        "--mode",
        type=Named("mode", _modes),
        about="How the batch is spread; single on one GPU and ring on several if not given.",
    ),
    _what("--gpus", type=_GPUS, about="GPUs in all."),
    _what("--nodes", type=_COUNT, about="Nodes; as few as hold the GPUs if not given."),
    _what(
        "--batch",
        type=_COUNT,
        about="Samples of all GPUs together; compared with one GPU that takes them all.",
    ),
    _what(
        "--batch-per-gpu",
        type=_COUNT,
        about="Samples of one GPU, instead of --batch; 32 if neither is given.",
    ),
    _loop(
        "--precision",
        "--dtype",
        type=Named("precision", ("fp32", "tf32", "fp16", "bf16", "amp")),
        about="Of the arithmetic; fp32 if not given.",
    ),
    _loop(
        "--optimizer",
        type=Text(),
        about="As far as the workload has it: sgd, momentum, adam, adamw; momentum if not given.",
    ),
    _loop(
        "--optimizer-implementation",
        type=Named("optimizer implementation", ("foreach", "fused", "for-loop")),
        about="PyTorch's three ways; foreach if not given.",
    ),
    _loop("--keep-gradients", is_flag=True, about="zero_grad(set_to_none=False)."),
    _loop("--accumulate", type=Whole(1), about="Micro-steps for each step of the optimizer."),
    _loop(
        "--sync",
        type=Named("sync point", ("item-after-loss", "item-after-step", "none")),
        about="Where the loop waits for the device; item-after-step if not given.",
    ),
    _loop("--pinned-input", is_flag=True, about="Input from pinned memory, non_blocking."),
    _loop("--evaluation", is_flag=True, about="Forward only, without a graph."),
    _loop(
        "--iteration",
        type=Whole(0, most=3),
        about="Which step: 1, 2, 3, or 0 for the steady state.",
    ),
    _shape(
        "--device-ids",
        type=Listed(Whole(0), "ID,ID,..."),
        about="GPUs of the node, as many as --gpus.",
    ),
    _shape(
        "--split",
        type=Listed(_COUNT, "B,B,..."),
        about="Samples of each rank, which sum to the batch.",
    ),
    _shape(
        "--straggler",
        "stragglers",
        type=Pair(":", "RANK:FACTOR", Whole(0), Number()),
        multiple=True,
        about="A rank that computes slower by a factor; repeatable.",
    ),
    _shape("--seed", type=Whole(0, most=MOST_SEED), about="Of everything random."),
    _known(
        "--anchor-step-ms",
        type=Number(),
        about="A measured step of one GPU; computation is scaled to it.",
    ),
    _known(
        "--anchor-batch", type=_COUNT, about="The batch of that step; one GPU's share if not given."
    ),
    _known(
        "--network-gbytes-per-s",
        type=_RATE,
        about="Bandwidth between nodes, decimal GB/s, payload.",
    ),
    _known(
        "--set",
        "settings",
        type=Pair("=", "PATH=VALUE", Text(), Value()),
        multiple=True,
        about="Replace a number of the machine, as host.launch_gil_s=2e-5; repeatable.",
    ),
    _dp(
        "--output-device",
        type=OutputDevice(0),
        about="Where outputs are gathered: a position in the device ids, or cpu.",
    ),
    _dp(
        "--loss-in-forward",
        is_flag=True,
        about="The loss is part of the module, so that losses are gathered.",
    ),
    _dp("--no-nccl", is_flag=True, about="A build without NCCL, which copies instead."),
    _dp(
        "--input-on",
        type=Named("place of the input", ("gpu", "cpu")),
        about="Does the batch go to GPU 0 before it is scattered? gpu if not given.",
    ),
    _dp(
        "--keep-replicas",
        is_flag=True,
        about="Replicas are made once: parallel_apply alone, with --evaluation.",
    ),
    _ring(
        "--bucket-mb",
        type=Number(),
        about="bucket_cap_mb, MiB; 25 with a first bucket of 1 if not given.",
    ),
    _ring(
        "--bucket-list-mb",
        type=Listed(Number(), "X,X,..."),
        about="bucket_cap_mb_list, MiB: the limit of each bucket.",
    ),
    _ring("--find-unused-parameters", is_flag=True, about="As in the constructor."),
    _ring("--static-graph", is_flag=True, about="As in the constructor."),
    _ring("--gradient-as-bucket-view", is_flag=True, about="As in the constructor."),
    _ring("--no-broadcast-buffers", is_flag=True, about="broadcast_buffers=False."),
    _ring(
        "--gradient-hook",
        type=Named("gradient hook", ("none", "fp16", "bf16")),
        about="Compression of gradients; none if not given.",
    ),
    _ring(
        "--all-reduce",
        type=Named("all-reduce algorithm", _algorithms),
        about="Algorithm; auto if not given.",
    ),
    _ps("--servers", type=Whole(1), about="How many servers; chosen by --placement if not given."),
    _ps(
        "--placement",
        type=Named("placement", ("auto", "gpu0", "cpu", "dedicated", "colocated")),
        about="Where servers are; auto if not given.",
    ),
    _ps(
        "--sharding",
        type=Named("sharding", ("round-robin", "greedy", "split")),
        about="How parameters are spread over servers; split if not given.",
    ),
    _ps(
        "--update-on",
        type=Named("place of the update", ("server", "worker")),
        about="Who runs the optimizer; server if not given.",
    ),
    _ps(
        "--path",
        type=Named("path", ("auto", "gpu", "host")),
        about="GPU to GPU, or through host memory; auto if not given.",
    ),
    _ps(
        "--gpus-per-worker",
        type=Whole(1),
        about="GPUs that reduce among themselves before they push.",
    ),
    _ps(
        "--reduce-gbytes-per-s",
        type=_RATE,
        about="Gradients that a CPU server adds, decimal GB/s, all threads; inf for free.",
    ),
    _ps("--reduce-threads", type=Whole(1), about="Threads of a CPU server."),
)
"""All flags of `dpsim simulate` but those of its output, in the order of the help."""


def simulate_options(command: F) -> F:
    """Give a command the flags of `SIMULATE`; usable as a decorator."""
    for option in reversed(SIMULATE):
        command = option(command)
    return command
