"""Quantised rows equal those of other projects' writers, byte for byte.

`python -m benchmarks.vllm_formats --record` wrote quantised_rows.json. The file holds bfloat16 rows and the bytes that
vLLM 0.32's kernels and functions, and FlashInfer 0.7.2.post1's function for an nvfp4 block, store for them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ragged_attention.integrations import _vllm_rotation
from ragged_attention.torch import dequantize_kv, ragged_paged_attention, write_kv_pages

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("quantised_rows.json").read_text())
BACKENDS = ("reference", "eager", "numba", "triton")
COLUMNS = 32
BYTES, E4M3, E8M0 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
FORMATS = {
    "int8_per_token_head": (torch.int8, COLUMNS, torch.float32, 1),
    "fp8_per_token_head": (E4M3, COLUMNS, torch.float32, 1),
    "int4_per_token_head": (BYTES, COLUMNS // 2, torch.float32, 1),
    "mxfp8": (E4M3, COLUMNS, E8M0, COLUMNS // 32),
    "mxfp4": (BYTES, COLUMNS // 2, E8M0, COLUMNS // 32),
    "nvfp4": (BYTES, COLUMNS // 2, E4M3, COLUMNS // 16),
}


def recorded(text: str, dtype: torch.dtype, width: int) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=BYTES).view(dtype).view(-1, 1, width)


ROWS = recorded("".join(RECORDED["rows"]), torch.bfloat16, COLUMNS)
WRITERS = [name for name in RECORDED if isinstance(RECORDED[name], dict)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("writer", WRITERS)
def test_bytes(writer, backend):
    held, (dtype, width, scales_dtype, count) = RECORDED[writer], FORMATS[writer.partition(",")[0]]
    pages, scales = (
        [torch.zeros(len(ROWS), 1, 1, size * kind.itemsize, dtype=BYTES).view(kind) for _ in range(2)]
        for kind, size in ((dtype, width), (scales_dtype, count))
    )
    write_kv_pages(
        ROWS, ROWS.flip(0), (pages[0], pages[1]), torch.arange(len(ROWS)), k_scale=held["scale"], v_scale=held["scale"],
        k_scale_pages=scales[0], v_scale_pages=scales[1], backend=backend,
    )  # fmt: skip
    for found, kind, size, name in ((pages, dtype, width, "codes"), (scales, scales_dtype, count, "scales")):
        want = recorded(held[name], BYTES, size * kind.itemsize)
        assert torch.equal(found[0].view(BYTES).squeeze(1), want)
        assert torch.equal(found[1].view(BYTES).squeeze(1).flip(0), want)


@pytest.mark.parametrize("backend", ["reference", "eager", "numba"])
@pytest.mark.parametrize("name", FORMATS)
def test_infinities_are_stored_as_the_docstring_says(name: str, backend: str) -> None:
    dtype, width, scales_dtype, count = FORMATS[name]
    codes, scales = (
        [torch.zeros(1, 4, 1, size * kind.itemsize, dtype=BYTES).view(kind) for _ in range(2)]
        for kind, size in ((dtype, width), (scales_dtype, count))
    )
    rows = torch.randn(4, 1, COLUMNS)
    rows[1, 0, 3], rows[2, 0, :2], rows[3] = -torch.inf, torch.tensor([torch.inf, -torch.inf]), torch.inf
    given: dict[str, Any] = {"k_scale_pages": scales[0], "v_scale_pages": scales[1], "backend": backend}
    write_kv_pages(rows, rows, (codes[0], codes[1]), torch.arange(4), **given)
    stored, (plain, *infinite) = scales[0][0, :, 0, 0].float(), dequantize_kv(codes[0], scales[0])[0, :, 0]
    assert plain.isfinite().all()
    if scales_dtype is torch.float32:
        assert not dequantize_kv(codes[0], torch.ones_like(scales[0]))[0, 1:].any()  # their codes are 0
        assert stored[1:3].tolist() == 2 * [torch.inf]
        assert stored[3].isnan() if name.startswith("int4") else stored[3].isinf()
        tables = torch.arange(1, 5).int(), torch.zeros(4, 1).int(), torch.arange(5).int()
        out = ragged_paged_attention(torch.ones(4, 1, COLUMNS), (codes[0], codes[1]), *tables, **given)
        assert out[0].isfinite().all()
        assert out[1:].isnan().all()
    else:
        largest = 448.0 if scales_dtype is E4M3 else 2.0**127
        code = 448.0 if dtype is E4M3 else 6.0
        assert (stored[1:] == largest).all()
        assert [row[index].item() for row, index in zip(infinite, (3, 0, 5), strict=True)] == [
            torch.tensor(sign * code * largest).item() for sign in (-1, 1, 1)
        ]


def test_the_rotation_is_vllms():
    turned = recorded(RECORDED["rotated"], torch.float32, COLUMNS)
    _vllm_rotation._matrix.cache_clear()
    with torch.device("meta"):  # the default device must not matter: vLLM sets it to the GPU
        ours = _vllm_rotation.rotated(ROWS.float())
    assert torch.allclose(ours, turned, rtol=1e-6, atol=1e-6 * float(turned.abs().max()))
    assert torch.allclose(_vllm_rotation.rotated_back(ours), ROWS.float(), rtol=1e-5, atol=1e-5)
