"""The jax serving example gives the right tokens on one and on eight devices, and detects planted faults."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import QUICK_TO_COMPILE

jax = pytest.importorskip("jax")
ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "serve_jax.py"
SHORT = ["--requests", "5", "--max-new-tokens", "9"]
HOLDS = "check: as on one device: yes, as a dense forward pass: yes, pages donated: yes\n"


@pytest.fixture
def main() -> Callable[..., int]:
    return runpy.run_path(str(SCRIPT))["main"]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a separate process, in which jax has not initialised its devices yet."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_TO_COMPILE}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, cwd=ROOT, env=environment
    )


@pytest.mark.parametrize("devices", [1, 8])
def test_the_tokens_are_those_of_one_device_and_of_a_dense_pass(devices):
    done = run_python(str(SCRIPT), "--devices", str(devices), *SHORT, "--backend", "xla")
    assert done.returncode == 0, done.stdout + done.stderr
    *runs, check = done.stdout.splitlines(keepends=True)
    assert check == HOLDS
    assert [line.partition(";")[0] for line in runs] == [f"devices: {number}" for number in sorted({1, devices})]
    assert all("45 tokens of 5 requests" in line and "tokens per second" in line for line in runs)


def test_sequences_join_and_leave_and_steps_are_mixed(main, capsys, monkeypatch):
    seen: list[list[tuple[Any, int]]] = []
    chunks_of = main.__globals__["chunks_of"]

    def watched(running: Any) -> Any:
        seen.append(chunks_of(running))
        return seen[-1]

    monkeypatch.setitem(main.__globals__, "chunks_of", watched)
    assert main([*SHORT, "--backend", "xla"]) == 0
    assert capsys.readouterr().out.endswith(HOLDS)
    together = [{id(request) for request, _ in chunks} for chunks in seen]
    assert len(set.union(*together)) == 5 > max(map(len, together)) > 1
    assert any({count == 1 for _, count in chunks} == {True, False} for chunks in seen)
    requests = {id(request): request for chunks in seen for request, _ in chunks}.values()
    assert len({token for request in requests for token in request.generated}) > 10
    pages = [page for request in requests for page in request.pages]
    assert len(set(pages)) < len(pages)  # some pages are used by a second request after the first


def test_a_wrong_page_table_shows(main, capsys, monkeypatch):
    right = main.__globals__["table_row"]

    def wrong(request: Any) -> list[int]:
        first, _, *others = right(request)
        return [first, first, *others]

    monkeypatch.setitem(main.__globals__, "table_row", wrong)
    assert main([*SHORT, "--backend", "xla"]) == 1
    assert "as a dense forward pass: NO, pages donated: yes" in capsys.readouterr().out


def test_pages_that_are_not_donated_show(main, capsys, monkeypatch):
    right = jax.jit
    monkeypatch.setattr(jax, "jit", lambda step, *, donate_argnums=None, **named: right(step, **named))
    assert main([*SHORT, "--requests", "1", "--backend", "xla"]) == 1
    said = capsys.readouterr().out
    assert " 0 bytes written in place" in said
    assert "as a dense forward pass: yes, pages donated: NO" in said


def test_a_sum_that_leaves_devices_out_shows():
    done = run_python("-m", "tests.programs.serve_jax_without_sum")
    assert done.returncode == 1, done.stderr
    assert "as on one device: NO, as a dense forward pass: NO" in done.stdout


@pytest.mark.parametrize(("wrong", "message"), [
    (["--requests", "0"], "expected --requests >= 1, got 0"),
    (["--max-new-tokens", "33"], "expected --max-new-tokens from 1 to 32, got 33"),
    (["--devices", "3"], "argument --devices: invalid choice: 3"),
    (["--devices", "8"], "expected --devices of at most 1, which is what jax has here, got 8"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_what_the_command_refuses(main, capsys, monkeypatch, wrong, message):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # restores the variable after the test
    monkeypatch.setattr(jax, "devices", lambda: [None])
    with pytest.raises(SystemExit):
        main(wrong)
    assert message in capsys.readouterr().err
