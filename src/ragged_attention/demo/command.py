"""The command `ragged-attention demo`."""

import argparse
import importlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ragged_attention import config, dispatch
from ragged_attention.demo.check import check
from ragged_attention.demo.engine import Engine, Limits, Sequence
from ragged_attention.demo.model import KINDS, load_weights
from ragged_attention.demo.prompts import PROMPTS
from ragged_attention.demo.view import View
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported, how_to_install
from ragged_attention.tools.arguments import Parser, at_least
from ragged_attention.tools.samples import FRAMEWORKS


def main(argv: list[str] | None = None) -> int:
    """Serve the prompts and check every token. Returns 1 if any token differs, else 0; raises for a user's mistake."""
    arguments = _parser().parse_args(argv)
    if arguments.make_tiny is not None and arguments.model in KINDS:
        raise InvalidInput(
            f"expected a folder as --model with --make-tiny, to write the checkpoint to, got {arguments.model}"
        )
    if arguments.model not in KINDS:
        return serve_checkpoint(arguments)
    kind, framework = arguments.model, chosen_framework(arguments.framework)
    limits = Limits()
    model = build_model(kind, framework, limits, arguments.device, arguments.backend)
    sequences = [
        Sequence(number, prompt.text.encode(), arguments.max_new_tokens) for number, prompt in enumerate(PROMPTS)
    ]
    engine = Engine(model, limits)
    for sequence in sequences:
        engine.expect_servable(sequence)
    served = f"{len(sequences)} prompts, at most {limits.max_tokens} tokens per step"
    title = f"{kind}, {framework} on {model.platform}: {served}"
    with View(Console(), title, limits.num_pages, model.backends) as view:
        began = time.perf_counter()
        num_steps = serve(engine, sequences, view)
        seconds = time.perf_counter() - began
    view.texts(sequences)
    view.line(f"\n{num_steps} steps in {seconds:.1f} s; {engine.pages.hits} pages shared instead of computed")
    verdict = check(model, sequences)
    view.verdict(verdict, KINDS[kind].checked_by)
    return 0 if verdict.agrees else 1


def serve_checkpoint(arguments: argparse.Namespace) -> int:
    """Serve the prompts with a checkpoint of transformers."""
    if arguments.framework == "jax":
        raise InvalidInput("expected --framework torch with a checkpoint, got jax")
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise BackendMissing(f"{package} is not installed: {how_to_install('transformers')}")
    checkpoint = importlib.import_module("ragged_attention.demo.checkpoint")
    with config.use_backend(arguments.backend or "auto"):
        return checkpoint.main(Path(arguments.model), arguments.make_tiny, arguments.max_new_tokens, arguments.device)


def serve(engine: Engine, sequences: list[Sequence], view: View) -> int:
    """Step until all prompts have arrived and all sequences have ended. Returns the number of steps."""
    arriving = sorted(zip([prompt.arrives for prompt in PROMPTS], sequences, strict=True), key=lambda pair: pair[0])
    number = clock = 0
    while arriving or engine.busy:
        if not engine.busy:
            clock = max(clock, arriving[0][0])  # skip the steps without work
        while arriving and arriving[0][0] <= clock:
            engine.submit(arriving.pop(0)[1])
        view.step(number, engine.step(), sequences)
        number, clock = number + 1, clock + 1
    return number


def chosen_framework(request: str | None) -> str:
    """The requested framework, or the first one installed."""
    installed = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    if request in installed:
        return request
    if request is not None:
        raise BackendMissing(dispatch.missing_package(request))
    if not installed:
        raise BackendMissing(f"the demo needs torch or jax, and neither is installed: {how_to_install('torch')}")
    return installed[0]


def build_model(kind: str, framework: str, limits: Limits, device: str | None, backend: str | None) -> Any:
    module = importlib.import_module(f"ragged_attention.demo.{framework}_model")
    device = module.device_named(device)
    if device == "cpu" and "triton" in (config.requested(KINDS[kind].operation, backend) or ()):
        interpret_triton()
    return module.Model(kind, load_weights(kind), limits, device=device, backend=backend)


def interpret_triton() -> None:
    """Run the kernels with Triton's interpreter. Triton reads the environment when it is imported."""
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
        raise Unsupported("expected TRITON_INTERPRET=1 before triton is imported, got it imported without")
    os.environ["TRITON_INTERPRET"] = "1"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ragged-attention demo",
        description="Serve a dozen prompts with a tiny model by continuous batching, and check every token.",
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, help="default: torch if it is installed, else jax")
    parser.add_argument(
        "--backend", metavar="NAME", help="a backend, or several in order: a,b,c (default: as configured)"
    )
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, cuda, ... (default: a GPU or TPU if the framework sees one)"
    )
    parser.add_argument(
        "--max-new-tokens", type=at_least(1), default=48, metavar="N",
        help="tokens to write for each prompt (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--model", default="gqa", metavar="gqa|mla|DIR",
        help="a tiny model with grouped queries (gqa), one with latents in an 8-bit cache (mla), or a folder with a "
        "checkpoint of transformers (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--make-tiny", metavar="FAMILY",
        help="first write a tiny model with random weights to the folder of --model; FAMILY is one of transformers "
        "such as qwen3",
    )  # fmt: skip
    return parser
