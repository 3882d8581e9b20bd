"""The command line: `ragged-attention demo | doctor | explain | view | bench | conformance | build-cuda | warmup`.

Each command is imported when it is called, so that help loads no framework. A user's mistake gives one line of text
and exit code 2.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import ragged_attention
from ragged_attention import config, dispatch
from ragged_attention.calls import CACHE_FORMATS, CALLS
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported
from ragged_attention.explain import answers
from ragged_attention.tools.samples import (
    FRAMEWORKS,
    KINDS,
    KV_FORMATS,
    LatentSample,
    Sample,
    VarlenSample,
    device_of,
    sample_of,
)

# Commands that parse their own arguments: the module with `main(argv)`, and a description.
OTHER_COMMANDS = {
    "demo": ("ragged_attention.demo", "serve a dozen prompts with a tiny model and check every token"),
    "view": ("ragged_attention.tools.view", "show a batch: its pages, the keys of each program, how they fill a GPU"),
    "bench": ("benchmarks.run", "measure this machine (in a checkout of the repository)"),
    "conformance": ("ragged_attention.testing.conformance", "judge a backend by the shipped suite"),
    "build-cuda": ("ragged_attention.tools.build_cuda", "build the CUDA kernels for Hopper ahead of time"),
    "warmup": ("ragged_attention.tools.warmup", "compile the kernels for this CPU ahead of time"),
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
        parsed = _parser().parse_args(arguments)
        return parsed.run(parsed)
    except SystemExit as stop:  # argparse has printed help or an error message
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except USER_ERRORS as error:
        return _fail(str(error), 2)
    except ImportError as error:
        return _fail(f"{type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(message: str, code: int) -> int:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]ragged-attention:[/] {escape(message)}", highlight=False)
    return code


def _run_other(command: str, arguments: Sequence[str]) -> int:
    module, _ = OTHER_COMMANDS[command]
    if command == "bench" and not _exists(module):
        return _fail("bench needs the folder benchmarks/: run it in a checkout of the repository", 2)
    try:
        main = importlib.import_module(module).main
    except ImportError as error:
        if command != "conformance":  # whose exit code 1 says that a check failed
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
    parser = argparse.ArgumentParser(prog="ragged-attention", description="Ragged paged attention for every device.")
    parser.add_argument("--version", action="version", version=ragged_attention.__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (_, purpose) in OTHER_COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    doctor = commands.add_parser("doctor", help="versions, devices, backends, configuration, and what would be picked")
    doctor.set_defaults(run=lambda _: importlib.import_module("ragged_attention.tools.doctor").report(Console()))
    _add_explain(commands.add_parser("explain", help="what each backend says to a representative call"))
    return parser


def _add_explain(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    paged, latent, varlen = Sample(), LatentSample(), VarlenSample()

    def default(name: str) -> str:
        values = {str(getattr(paged, name)): ""}
        for kind, sample in (("of latents", latent), ("without a cache", varlen)):
            values.setdefault(str(getattr(sample, name, getattr(paged, name))), f"{kind}, ")
        return f"default: {' or, '.join(kind + value for value, kind in values.items())}"

    add("operation", metavar="OPERATION", help=", ".join(CALLS))
    add("--framework", choices=FRAMEWORKS, help="default: torch if it is installed, else jax")
    add("--device", help="cpu, cuda:0, ...; tpu, sm_90, gfx942, ... need not be here (default: this machine's)")
    add("--backend", help="a name, or an ordered list a,b,c (default: the configuration in force)")
    add("--dtype", help=f"of the queries ({default('dtype')})")
    add("--heads", type=_heads, help="query heads / KV heads (default: 32/8 or, of latents, 128/1)")
    add("--page-size", type=int, help=default("page_size"))
    add("--num-tokens", type=int, help=f"query tokens of the batch ({default('num_tokens')})")
    add("--max-num-seqs", type=int, help=f"sequences ({default('max_num_seqs')})")
    add("--max-len", type=int, help=f"positions a sequence can have ({default('max_len')})")
    add("--sinks", action="store_true", default=None)
    add = parser.add_argument_group("of paged attention").add_argument
    add("--cache-dtype", help="of the pages: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, int8 (default: as --dtype)")
    add("--kv-format", help=f"of rows that have scales: {', '.join(KV_FORMATS)} (default: none)")
    add("--head-dim", type=int, help=f"default: {paged.head_dim}")
    add("--split-pages", action="store_true", default=None, help="k_pages and v_pages apart")
    add("--sliding-window", type=int, help="default: none")
    add("--soft-cap", type=float, help="default: none")
    add("--return-lse", action="store_true", default=None)
    add = parser.add_argument_group("of latent attention").add_argument
    add("--cache-format", help=f"plain, {', '.join(CACHE_FORMATS)} (default: {latent.cache_format})")
    add("--d-qk", type=int, help="default: the format's own, of plain 576")
    add("--d-v", type=int, help=f"default: {latent.d_v} or, without a cache, as --head-dim")
    add("--topk", type=int, help=f"keys that a query lists, 0 for a dense call (default: {latent.topk})")
    parser.set_defaults(run=_explain)


def _heads(text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"(\d+)(?:/(\d+))?", text)) or "0" in match.groups():
        raise argparse.ArgumentTypeError(f"expected heads such as 32/8, got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def _explain(parsed: argparse.Namespace) -> int:
    framework = parsed.framework or next((name for name in FRAMEWORKS if importlib.util.find_spec(name)), "torch")
    if importlib.util.find_spec(framework) is None:
        what = f"{framework} is not" if parsed.framework else "neither torch nor jax is"
        raise BackendMissing(f"{what} installed: install ragged-attention[{framework}]")
    fields = {field.name for kind in KINDS for field in dataclasses.fields(kind)}
    options = {name: value for name, value in vars(parsed).items() if name in fields and value is not None}
    if parsed.heads:
        options |= dict(zip(("num_q_heads", "num_kv_heads"), parsed.heads, strict=True))
    for name in ("page_size", "max_num_seqs", "max_len"):
        if options.get(name, 1) < 1:
            raise InvalidInput(f"expected --{name.replace('_', '-')} >= 1, got {options[name]}")
    sample = sample_of(parsed.operation, **options)
    call = sample.call(parsed.operation, device_of(framework, parsed.device))
    verdicts = answers(call, backend=parsed.backend)
    where = call.device.name or call.device.arch or call.device.platform
    columns = (Column(heading, overflow="fold") for heading in ("", "backend", "answer"))
    table = Table(*columns, title=f"{call.OPERATION} from {framework} on {where}", title_justify="left")
    for answer in verdicts:
        style = "bold green" if answer.chosen else "" if answer.takes else "dim"
        table.add_row("*" if answer.chosen else "", answer.backend, escape(answer.text), style=style)
    console = Console()
    console.print(table)
    if not any(answer.chosen for answer in verdicts):
        console.print("[red]no backend asked for takes this call[/]")
        return 1
    choice = dispatch.choose(call, backend=parsed.backend)
    console.print(f"runs with {escape(str(choice.tile))}", highlight=False, soft_wrap=True)
    if (request := config.requested(parsed.operation, parsed.backend)) is not None:
        console.print(f"asked for: {escape(', '.join(request))}", highlight=False)
    return 0
