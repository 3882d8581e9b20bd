"""Every Pallas kernel lowers for every kind of TPU, on a machine that has none."""

from pathlib import Path

import pytest

from benchmarks.cases import tpu as tpu_cases
from benchmarks.cases.tpu import CASES, TARGETS, TpuCase
from ragged_attention.errors import Unsupported
from ragged_attention.testing.drawing import PROFILES, examples_of

jax = pytest.importorskip("jax")

from jax import export  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh  # noqa: E402

FOLDER = Path(__file__).parent.parent / "kernels_pallas"
KINDS = list(TARGETS)
FIRST = {case.operation: case.name for case in reversed(CASES)}  # operation -> name of its first case


def kinds_of(case: TpuCase) -> list[str]:
    """The kinds of TPU for which a case is lowered.

    In the larger profiles, and for an operation's first case, these are all kinds. Otherwise it is one kind.
    """
    if examples_of() > PROFILES["dev"] or case.name in FIRST.values():
        return KINDS
    return [KINDS[CASES.index(case) % len(KINDS)]]


def lowered(case: TpuCase, kind: str) -> str:
    """The lowered module of a case, for a kind of TPU."""
    traced = tpu_cases.traceable(case)
    device = AbstractDevice(device_kind=TARGETS[kind][1], num_cores=1, platform="tpu")
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in traced.arrays.items()}
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return export.export(jax.jit(traced.function), platforms=["tpu"])(**shapes).mlir_module()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_lowers(case: TpuCase) -> None:
    for kind in kinds_of(case):
        if case.refused:
            with pytest.raises(Unsupported, match=case.refused):
                lowered(case, kind)
            continue
        count = lowered(case, kind).count("@tpu_custom_call")
        assert count > 1 if case.kernels is None else count == case.kernels, kind


def test_every_operation_of_the_room_has_a_case() -> None:
    assert tpu_cases.uncovered(FOLDER) == []


def test_an_operation_without_a_case_is_noticed(tmp_path: Path) -> None:
    for name in ("_blocks", "merge_attention_states", "mla_decode"):
        (tmp_path / f"{name}.py").touch()
    assert tpu_cases.uncovered(tmp_path) == ["merge_attention_states"]


def test_names_of_cases_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
