"""Options, backends and examples for the whole test suite; a CPU runs Triton by its interpreter."""

import collections
from collections.abc import Iterator

import pytest

from ragged_attention.pytest_plugin import add_options
from ragged_attention.testing import environment

environment.prepare("cpu")  # before any test module imports triton or jax

from ragged_attention.testing import suite  # noqa: E402
from ragged_attention.testing.collection import *  # noqa: E402, F403
from ragged_attention.testing.drawing import PROFILES, examples_of  # noqa: E402
from ragged_attention.testing.heads_first import suite as heads_first_suite  # noqa: E402
from ragged_attention.testing.mla import suite as mla_suite  # noqa: E402
from ragged_attention.testing.varlen import suite as varlen_suite  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


# Of the corners and laws these runners take every so many by default, and all in the larger profiles: each example is
# traced, compiled and launched anew in jax, and interpreted line by line in Triton. Of latent caches and of heads-first
# pages, whose kernels have much in common with each other, they take fewer; and of packed sequences and gradients,
# where each is a forward and a backward.
EVERY = {"jax-xla": 6, "jax-triton": 8, "torch-triton": 5}
EVERY_YOUNGER = {"jax-xla": 20, "jax-triton": 45, "jax-reference": 36, "torch-triton": 6}
EVERY_GRADIENT = {"jax-xla": 20, "jax-triton": 45, "jax-reference": 36, "torch-triton": 10}
# Of the cases of these tests, each of which is slow, the default profile takes every so many.
SAMPLED = {
    "test_compat_easydel": {"test_any_heads_and_page_sizes": 2, "test_every_length_of_a_chunk": 3},
    "test_compat_ejkernel": {"test_agreement_with_the_definition": 2},
    "test_compat_flash_mla": {"test_a_covering_part_on_the_interpreter": 2},
    "test_compat_jax_pallas": {
        "test_ragged_attention_agrees_with_jaxs_reference_and_the_definition": 2,
        "test_decode_agrees_with_jaxs_reference_and_the_definition": 2,
        "test_quantised_caches": 2,
    },
    "test_demo": {"test_the_triton_kernels_run_in_the_interpreter_without_being_told": 2},
    "test_heads_first_mutants": {"test_a_wrong_prefill_is_caught": 3},
    "test_jax_reference": {"test_agrees_with_the_reference_of_jax": 2},
    "test_mla_jax_front_end": {
        "test_the_fallback_agrees_with_the_definition": 2,
        "test_quantised_bytes_are_those_of_the_definition": 2,
    },
    "test_mla_mutants": {"test_a_wrong_decode_is_caught": 2},
    "test_tpu_lowering": {"test_a_case_lowers": 3},
    "test_tpu_mutants": {"test_a_planted_fault_is_caught": 2},
}
CHECKS = [str(check) for of in (suite.corners, suite.laws) for check in of()]
EVERY_OF = {
    str(check): every
    for every, suites in ((EVERY_YOUNGER, (mla_suite, heads_first_suite)), (EVERY_GRADIENT, (varlen_suite,)))
    for younger in suites
    for of in (younger.corners, younger.laws)
    for check in of()
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    spared = [*filter(_spared, items), *_unsampled(items)] if examples_of() == PROFILES["dev"] else []
    items[:] = [item for item in items if item not in spared]
    config.hook.pytest_deselected(items=spared)


def _spared(item: pytest.Item) -> bool:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    check = str(params.get("check"))
    every = EVERY_OF.get(check, EVERY).get(str(params.get("runner")), 1)
    return check in CHECKS and CHECKS.index(check) % every > 0


def _unsampled(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    met: collections.Counter[str] = collections.Counter()
    for item in items:
        name = getattr(item, "originalname", item.name)
        every = SAMPLED.get(item.path.stem, {}).get(name, 1)
        if met[name] % every:
            yield item
        met[name] += 1


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests start without the wishes of whoever runs them."""
    for name in ("RAGGED_ATTENTION_BACKEND", "RAGGED_ATTENTION_CONFIG", "RAGGED_ATTENTION_VALIDATE"):
        monkeypatch.delenv(name, raising=False)
