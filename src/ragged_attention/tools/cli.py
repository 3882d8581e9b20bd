"""The command line: `ragged-attention demo | doctor | explain | view | bench | conformance | build-cuda | warmup`.

Each command is imported when it is called, so that help loads no framework. For a user's mistake, a command prints one
line and exits with code 2.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import ragged_attention
from ragged_attention import config, dispatch
from ragged_attention.calls import CACHE_FORMATS, CALLS, Call
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported, how_to_install
from ragged_attention.explain import Answer, answers
from ragged_attention.tools.arguments import Parser, at_least, dtype, heads, nearest
from ragged_attention.tools.gpus import GPUS, verification_of
from ragged_attention.tools.samples import (
    FRAMEWORKS,
    KINDS,
    KV_FORMATS,
    LatentSample,
    Sample,
    VarlenSample,
    device_of,
    is_elsewhere,
    sample_of,
)

# Commands that parse their own arguments: the module with `main(argv)`, and a description.
OTHER_COMMANDS = {
    "view": ("ragged_attention.tools.view", "show a batch: its pages, the keys of each program, how they fill a GPU"),
    "demo": ("ragged_attention.demo", "serve a dozen prompts with a tiny model and check every token"),
    "conformance": ("ragged_attention.testing.conformance", "test a backend with the shipped suite"),
    "warmup": ("ragged_attention.tools.warmup", "compile the kernels for this CPU ahead of time"),
    "build-cuda": ("ragged_attention.tools.build_cuda", "build the CUDA kernels for Hopper ahead of time"),
    "bench": ("benchmarks.run", "measure this machine (in a checkout of the repository)"),
}
USER_ERRORS = (InvalidInput, Unsupported, TypeError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in OTHER_COMMANDS:
            return _run_other(arguments[0], arguments[1:])
        if not arguments:
            _parser().print_help(sys.stderr)
            return 2
        if not arguments[0].startswith("-"):
            _expect_command(arguments[0])
        parsed = _parser().parse_args(arguments)
        return parsed.run(parsed)
    except SystemExit as stop:  # argparse has printed help or an error message
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except USER_ERRORS as error:
        return _fail(str(error), 2)
    except ImportError as error:
        return _fail(f"{type(error).__name__}: {error}", 1)
    except BrokenPipeError:  # the reader of a pipe, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _expect_command(name: str) -> None:
    commands = ("doctor", "explain", *OTHER_COMMANDS)
    if name not in commands:
        raise InvalidInput(f"expected a command, one of {', '.join(commands)}, got {name!r}{nearest(name, commands)}")


def _fail(message: str, code: int) -> int:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]ragged-attention:[/] {escape(message)}", highlight=False)
    return code


def _run_other(command: str, arguments: Sequence[str]) -> int:
    module, _ = OTHER_COMMANDS[command]
    if command == "bench" and not _exists(module):
        return _fail("bench needs the folder benchmarks/: run it in a checkout of the repository", 2)
    if command == "conformance":
        environment = importlib.import_module("ragged_attention.testing.environment")
        if reason := environment.missing_tools():
            return _fail(f"conformance {reason}", 2)
    try:
        main = importlib.import_module(module).main
    except ImportError as error:
        if command != "conformance":  # its exit code 1 means that a check failed
            raise
        return _fail(f"{type(error).__name__}: {error}", 2)
    return main(arguments) or 0


def _exists(module: str) -> bool:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script does not search the working directory by itself
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ragged-attention", positional="COMMAND ", description="Ragged paged attention for every device.",
        epilog="`ragged-attention COMMAND --help` explains a command.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=ragged_attention.__version__, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor = commands.add_parser(
        "doctor", prog="ragged-attention doctor", help="show versions, devices, backends and configuration",
        description="Show versions, devices, backends and configuration, and which backend each operation would use.",
    )  # fmt: skip
    doctor.set_defaults(run=lambda _: importlib.import_module("ragged_attention.tools.doctor").report(Console()))
    _add_explain(
        commands.add_parser(
            "explain", prog="ragged-attention explain", positional="OPERATION ", help="show which backends take a call",
            description="Show whether each backend takes a representative call of an operation, and which backend is "
            "chosen. Nothing is run, so this machine need not have the device of the call.",
        )
    )  # fmt: skip
    for name, (_, purpose) in OTHER_COMMANDS.items():
        commands.add_parser(name, prog=f"ragged-attention {name}", help=purpose, add_help=False)
    return parser


def _add_explain(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    paged, latent, varlen = Sample(), LatentSample(), VarlenSample()

    def default(name: str) -> str:
        values = {str(getattr(paged, name)): ""}
        for kind, sample in (("for latents", latent), ("without a cache", varlen)):
            values.setdefault(str(getattr(sample, name, getattr(paged, name))), f"{kind}, ")
        return f"default: {' or, '.join(kind + value for value, kind in values.items())}"

    add("operation", metavar="OPERATION", help=f"one of {', '.join(CALLS)}")
    add("--framework", choices=FRAMEWORKS, help="default: torch if it is installed, else jax")
    add("--device", metavar="NAME", help=f"a device of this machine, such as cpu or cuda:0, or one that need not be "
        f"here: {', '.join((*GPUS, 'tpu'))}, or an architecture such as sm_89 (default: this machine's)")  # fmt: skip
    add("--backend", metavar="NAME", help="a backend, or several in order: a,b,c (default: as configured)")
    add("--dtype", type=dtype, metavar="DTYPE", help=f"the queries' dtype, such as bf16 or f32 ({default('dtype')})")
    add("--heads", type=heads, metavar="H/K", help="query heads and KV heads (default: 32/8 or, for latents, 128/1)")
    add(
        "--page-size", type=at_least(1), metavar="N", help=f"the number of positions in a page ({default('page_size')})"
    )
    add("--num-tokens", type=at_least(1), metavar="N", help=f"query tokens of the batch ({default('num_tokens')})")
    add("--max-num-seqs", type=at_least(1), metavar="N", help=f"sequences of the batch ({default('max_num_seqs')})")
    add("--max-len", type=at_least(1), metavar="N", help=f"positions that a sequence can have ({default('max_len')})")
    add("--sinks", action="store_true", default=None, help="the call has a sink for each query head")
    add = parser.add_argument_group("for paged attention").add_argument
    add(
        "--cache-dtype",
        type=dtype,
        metavar="DTYPE",
        help="the pages' dtype, such as fp8, e5m2 or int8 (default: as --dtype)",
    )
    add("--kv-format", metavar="NAME", help=f"a format whose rows have scales: {', '.join(KV_FORMATS)} (default: none)")
    add("--head-dim", type=at_least(1), metavar="N", help=f"default: {paged.head_dim}")
    add("--split-pages", action="store_true", default=None, help="k_pages and v_pages are two arrays")
    add(
        "--sliding-window",
        "--window",
        type=int,
        metavar="N",
        help="the number of keys that a query sees at most (default: all)",
    )
    add("--soft-cap", type=float, metavar="X", help="the soft cap of logits (default: none)")
    add("--return-lse", action="store_true", default=None, help="the call also returns lse")
    add = parser.add_argument_group("for latent attention").add_argument
    add("--cache-format", metavar="NAME", help=f"plain, {', '.join(CACHE_FORMATS)} (default: {latent.cache_format})")
    add("--d-qk", type=at_least(1), metavar="N", help="columns of a query (default: the format's own; of plain 576)")
    add(
        "--d-v",
        type=at_least(1),
        metavar="N",
        help=f"columns of a value (default: {latent.d_v} or, without a cache, as --head-dim)",
    )
    add(
        "--topk",
        type=at_least(0),
        metavar="N",
        help=f"keys in a query's list; 0 is a dense call (default: {latent.topk})",
    )
    parser.set_defaults(run=_explain)


def _framework(request: str | None) -> str:
    """The requested framework, or the first one that is installed."""
    installed = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    if request and request not in installed:
        raise BackendMissing(dispatch.missing_package(request))
    if not installed:
        raise BackendMissing(f"neither torch nor jax is installed: {how_to_install('torch')}")
    return request or installed[0]


def _call_of(parsed: argparse.Namespace) -> Call:
    """The representative call that the arguments describe."""
    if (name := parsed.operation) not in CALLS:
        raise InvalidInput(f"expected operation to be one of {', '.join(CALLS)}, got {name!r}{nearest(name, CALLS)}")
    device = device_of(_framework(parsed.framework), parsed.device)
    fields = {field.name for kind in KINDS for field in dataclasses.fields(kind)}
    options = {name: value for name, value in vars(parsed).items() if name in fields and value is not None}
    if parsed.heads:
        options |= dict(zip(("num_q_heads", "num_kv_heads"), parsed.heads, strict=True))
    return sample_of(parsed.operation, **options).call(parsed.operation, device)


def _explain(parsed: argparse.Namespace) -> int:
    call = _call_of(parsed)
    verdicts = answers(call, backend=parsed.backend)
    device = call.device
    where = (
        f"{device.name} ({device.arch})"
        if device.name and device.arch
        else device.name or device.arch or device.platform
    )
    columns = (Column(heading, overflow="fold") for heading in ("", "backend", "answer"))
    table = Table(*columns, title=f"{call.OPERATION} from {device.framework} on {where}", title_justify="left")
    for answer in verdicts:
        style = "bold green" if answer.chosen else "" if answer.takes else "dim"
        table.add_row("*" if answer.chosen else "", answer.backend, escape(answer.text), style=style)
    console = Console()
    if is_elsewhere(parsed.device) and (unknown := _unanswered(verdicts)):
        raise BackendMissing(f"what runs on {parsed.device} depends on {unknown}")
    console.print(table)
    if not any(answer.chosen for answer in verdicts):
        console.print("[red]no backend asked for takes this call[/]")
        return 1
    choice = dispatch.choose(call, backend=parsed.backend)
    console.print(f"runs with {escape(str(choice.tile))}", highlight=False, soft_wrap=True)
    if (request := config.requested(parsed.operation, parsed.backend)) is not None:
        console.print(f"asked for: {escape(', '.join(request))}", highlight=False)
    if is_elsewhere(parsed.device):
        console.print(verification_of(device), highlight=False, soft_wrap=True)
    return 0


def _unanswered(verdicts: Sequence[Answer]) -> str | None:
    """The first backend that precedes the chosen one and lacks a package here, so it cannot be asked; else None.

    The machine that has the device may have the package. So it is unknown whether that backend would run the call.
    """
    for answer in verdicts:
        if answer.chosen:
            break
        if (package := dispatch.missing_need(answer.backend)) is not None:
            return f"{answer.backend}, which cannot answer here: {dispatch.missing_package(package)}"
    return None
