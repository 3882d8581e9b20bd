"""Several cores give the right results together: a simulated chip with two cores, and heads sharded over 8 devices."""

import json
import subprocess
import sys
from typing import Any

import pytest

from ragged_attention.testing.drawing import PROFILES, examples_of

pytest.importorskip("jax")

from ragged_attention.testing import tpu_interpreter as interpreter
from tests import two_cores

DEV = examples_of() == PROFILES["dev"]
# For each operation whose kernels share work between cores, a batch with enough work.
SHARED = (
    "corner: attention, every edge at once",
    "corner: chunked prefill, a partial chunk",
    "corner: paged decode, lengths of every kind",
    "corner: latent decode, dense, two KV heads",
    "corner: ragged latents, every edge at once",
    "corner: indexer logits, every edge at once",
    "corner: indexer top-k, exact, every edge at once",
    *(() if DEV else ("corner: attention, speculative",)),
)
MODES = list(interpreter.MODES)[: 1 if DEV else None]  # the first mode detects races


@pytest.mark.parametrize("mode", MODES)
def test_two_cores_share_a_decode_in_every_way(mode: str) -> None:
    names = [str(check) for check in two_cores.CHECKS]
    command = (sys.executable, "-m", "tests.two_cores")
    verdicts = list(interpreter.judged("pallas", names, mode=mode, cores=2, command=command))
    assert [verdict for verdict in verdicts if verdict.result != "passed"] == []


@pytest.mark.parametrize("mode", MODES)
def test_two_cores_agree_with_the_definition(mode: str) -> None:
    verdicts = list(interpreter.judged("pallas", SHARED, mode=mode, cores=2))
    assert [verdict for verdict in verdicts if verdict.result != "passed"] == []


def sharded(how: str) -> dict[str, Any]:
    """The result that `tests.sharded` prints as JSON for one of its arguments."""
    command = [sys.executable, "-m", "tests.sharded", how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ["xla", *MODES])
def test_sharded_heads_give_the_unsharded_result(how: str) -> None:
    found = sharded(how)
    assert found["devices"] == 8
    assert found["difference"] <= 2e-6
    assert found["same"] or how == "xla"  # XLA may compile other loops for fewer heads per device


def test_explicit_axes_are_refused_with_what_works_instead() -> None:
    found = sharded("explicit")
    text = "expected q on a mesh whose axes are Auto or Manual, got Explicit heads: call it by over_heads"
    counts = {backend: len(messages) for backend, messages in found["said"].items()}
    assert counts == {"numba": 8, "xla": 4, "triton": 4, "reference": 4}  # `numba` is called by name and as the default
    for backend, messages in found["said"].items():
        assert all(f"{backend}: {text}" in said for said in messages)
    assert found["explained"].count("got Explicit heads") >= 2
    assert found["difference"] <= 2e-6
