"""Tests of the reader of AMD's machine code: a loop counted by hand, a compiled kernel, and the decoding of e4m3."""

from typing import Any

import numpy as np
import pytest

from benchmarks.compiled import amd, document, gcn
from benchmarks.compiled.gcn import CHIPS, ISSUE, LDS_LATENCY
from ragged_attention.reference._kv_layout import encode as reference_encode
from tests.processes import printed

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from ragged_attention.kernels_triton._formats import decode, encode, number_format  # noqa: E402

MI300X, MI355X = CHIPS["gfx942"], CHIPS["gfx950"]

# Two nested loops. The inner loop requests the next keys and a page number, reads the current keys, multiplies, and
# stores the keys that have arrived.
CODE = """
	.text
kernel:                                 ; @kernel
; %bb.0:
	s_mov_b32 s0, 0
.LBB0_1:                                ; =>This Loop Header: Depth=1
	v_mov_b32_e32 v0, 0
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
	.loc	1 5 3                           ; kernel.py:5:3
	buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen
	buffer_load_dword v8, v2, s[4:7], 0 offen
	ds_read_b128 v[12:15], v3
	s_waitcnt lgkmcnt(0)
	v_mfma_f32_32x32x8_bf16 v[16:31], v[12:13], v[14:15], v[16:31]
	v_exp_f32_e32 v9, v9
	v_add_f32_e32 v10, v16, v9
	s_waitcnt vmcnt(1)
	ds_write_b32 v3, v4
	s_barrier
	s_cbranch_scc1 .LBB0_2
; %bb.3:
	s_cbranch_scc1 .LBB0_1
; %bb.4:
	s_endpgm
.Lfunc_end0:
    .agpr_count:     4
    .vgpr_count:     186
"""


def inner() -> list[gcn.Instruction]:
    (found,) = gcn.multiplying_loops(CODE)
    return found


def test_the_inner_loop_is_found() -> None:
    assert [line.kind for line in inner()] == [
        "load", "load", "read", "wait", "matrix", "special", "vector", "wait", "write", "barrier", "scalar",
    ]  # fmt: skip
    counts = gcn.count(inner())
    assert counts.products == {"32x32x8_bf16": 1}
    assert counts.widths == {"load": {16: 1, 4: 1}, "read": {16: 1}, "write": {4: 1}}
    assert amd.accesses(counts, "load", "direct") == "16 B x 1, 4 B x 1"
    assert (gcn.metadata(CODE, "vgpr_count"), gcn.metadata(CODE, "agpr_count")) == (186, 4)


@pytest.mark.parametrize(
    ("name", "operands", "kind", "width"),
    [
        ("buffer_load_dwordx4", "v2, s[72:75], 0 offen lds", "direct", 16),
        ("global_load_lds_dword", "v[2:3], off", "direct", 4),
        ("global_load_ubyte", "v1, v2, s[0:1]", "load", 1),
        ("ds_read2st64_b64", "v[0:3], v4 offset1:1", "read", 16),
        ("ds_read_b64_tr_b16", "v[0:1], v4", "read", 8),
        ("ds_read_u16", "v0, v4", "read", 2),
        ("ds_bpermute_b32", "v0, v1, v2", "exchange", 4),
        ("v_cvt_scalef32_pk_f16_fp8", "v0, v1, 1.0", "convert", 4),
        ("v_accvgpr_read_b32", "v0, a1", "copy", 4),
        ("scratch_load_dwordx2", "v[0:1], off", "scratch", 8),
    ],
)
def test_instructions_by_kind(name: str, operands: str, kind: str, width: int) -> None:
    line = gcn.Instruction(0, name, operands)
    assert (line.kind, line.width) == (kind, width)


def test_registers_of_both_files() -> None:
    line = gcn.Instruction(0, "v_mfma_f32_16x16x16_bf16", "a[0:3], v[8:9], v[10:11], 0")
    assert (line.written, line.read) == ([256, 257, 258, 259], [8, 9, 10, 11])


def test_cycles_by_hand() -> None:
    got = gcn.busy(inner(), num_warps=8, chip=MI300X)  # two waves on each SIMD
    assert got == {"matrices": 2 * 32, "vectors": 2 * (16 + 4), "LDS": 8 * (2 * 2 + 64 * (16 + 4) / 128)}
    got = gcn.busy(inner(), num_warps=4, chip=MI355X)  # on MI355X, exponentials and reads are twice as fast
    assert got == {"matrices": 32, "vectors": 8 + 4, "LDS": 4 * (2 * 2 + 64 * (16 / 256 + 4 / 128))}
    assert gcn.copied(inner(), num_warps=4) == 4 * 64 * 16  # the 4-byte load is a page number and does not count
    shapes = ("32x32x8_bf16", "16x16x16_f16", "16x16x32_bf16", "16x16x4_f32", "32x32x2_f32", "4x4x4_16b_f16")
    assert [gcn.matrix_cycles(f"v_mfma_f32_{shape}") for shape in shapes] == [32, 16, 16, 32, 64, 8]


def test_a_turn_by_hand() -> None:
    """The time of an iteration equals a count by hand.

    One program runs two loads, a read of 10 cycles for each of four waves, the product, and then the instructions that
    depend on the product.
    """
    read = 3 * ISSUE + 4 * 10 + LDS_LATENCY + ISSUE
    product = read + 32
    alone = gcn.turn(inner(), 4, MI300X, 0.0)
    asked = ISSUE  # the cycle in which the keys are requested
    assert alone.lead == product + ISSUE - asked
    assert alone.cycles == product + 5 * ISSUE  # the sum, a wait, a write, a barrier and the branch
    assert (alone.least_wait, alone.in_flight) == (1, 4096)
    late = gcn.turn(inner(), 4, MI300X, 1000.0)
    assert late.cycles == pytest.approx(asked + 1000 + 4 * ISSUE)


@pytest.mark.parametrize(
    ("vectors", "lds", "num_warps", "chip", "programs"),
    [
        (128, 0, 4, MI300X, 4),
        (129, 0, 4, MI300X, 3),
        (256, 0, 4, MI300X, 2),
        (257, 0, 4, MI300X, 1),
        (24, 0, 4, MI300X, 8),
        (256, 0, 8, MI300X, 1),
        (512, 0, 8, MI300X, 0),
        (128, 33 * 1024, 4, MI300X, 1),
        (128, 33 * 1024, 4, MI355X, 4),
    ],
)  # fmt: skip
def test_programs_at_once(vectors: int, lds: int, num_warps: int, chip: gcn.Chip, programs: int) -> None:
    assert gcn.programs_at_once(vectors, lds, num_warps, chip) == programs


def test_peaks_are_those_of_the_data_sheets() -> None:
    """The peak rates of 16-bit products agree with the data sheets: 1307 TFLOP/s on MI300X, 2517 on MI355X."""
    for chip, shape, rate in ((MI300X, (32, 32, 8), 1307e12), (MI355X, (32, 32, 16), 2517e12)):
        name = "v_mfma_f32_{}x{}x{}_bf16".format(*shape)
        each = 2 * np.prod(shape) / gcn.matrix_cycles(name)
        assert each * gcn.SIMDS * chip.units * chip.clock == pytest.approx(rate, rel=0.001)


def test_a_kernel_is_compiled_and_read() -> None:
    """Decoding e4m3 pages on MI300X takes less than twice as long as their memory. It once took nine times as long."""
    lines = printed("-m", "benchmarks.compiled.amd", "--jobs", "1", "--arch", "gfx942", "--case", "fp8_64x4k")
    rows = [line.strip("| ").split(" | ") for line in lines.splitlines() if line.startswith("| fp8_64x4k | split")]
    made, _, taken, _ = rows
    assert made[8].startswith("16x16x16_f16")
    assert made[5] == "0"  # spilled bytes
    _, _, _, vectors, _, memory, *_ = taken
    assert 0 < float(vectors) < 2 * float(memory)


@pytest.mark.parametrize("arch", CHIPS)
def test_every_part_of_the_document_is_written(arch: str) -> None:
    made, taken = document.part(arch, amd.DOCUMENT.read_text()).split("\n\n")
    for table in (made, taken):
        cases = [line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]]
        assert list(dict.fromkeys(cases)) == list(amd.SHOWN)
        assert len({line.count(" | ") for line in table.splitlines()[2:]}) == 1


# ---- e4m3 and e4m3fnuz


@pytest.mark.parametrize(
    ("arch", "form", "form_of_fnuz"),
    [
        ("sm_90", "e4m3", "e4m3fnuz_bits"),
        ("sm_80", "e4m3_bits", "e4m3fnuz_bits"),
        ("gfx942", "e4m3_pairs", "e4m3fnuz_pairs"),
        ("gfx950", "e4m3", "e4m3fnuz_pairs"),
        ("", "e4m3_bits", "e4m3fnuz_bits"),
    ],
)
def test_which_gpus_decode_e4m3_themselves(arch: str, form: str, form_of_fnuz: str) -> None:
    assert number_format("float8_e4m3fn", arch) == form
    assert number_format("float8_e4m3fnuz", arch) == form_of_fnuz


@triton.jit
def decode_kernel(codes_ptr, values_ptr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    places = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(values_ptr + places, decode(tl.load(codes_ptr + places), FORMAT, DTYPE).to(tl.float32))


@triton.jit
def encode_kernel(values_ptr, codes_ptr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes_ptr + places, encode(tl.load(values_ptr + places), FORMAT, DTYPE))


COMPILES = isinstance(decode_kernel, triton.JITFunction)
FORMS = {
    "float8_e4m3fn": ("e4m3_bits", "e4m3_pairs"),
    "float8_e4m3fnuz": ("e4m3fnuz_bits", "e4m3fnuz_pairs"),
}


@pytest.mark.skipif(COMPILES, reason="Triton compiles in this process")
@pytest.mark.parametrize("dtype", [tl.float16, tl.bfloat16, tl.float32])
@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS.items() for form in forms])
def test_every_code_is_decoded(name: str, form: str, dtype: Any) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = torch.empty(256)
    decode_kernel[(1,)](codes, values, form, dtype)
    want = codes.view(getattr(torch, name)).to(torch.float32)
    np.testing.assert_array_equal(values.numpy(), want.numpy())
    assert torch.equal(values.signbit()[want == 0], want.signbit()[want == 0])


@pytest.mark.skipif(COMPILES, reason="Triton compiles in this process")
@pytest.mark.parametrize("form", FORMS["float8_e4m3fnuz"])
def test_numbers_become_e4m3fnuz_in_every_form(form: str) -> None:
    """All bfloat16 numbers, their float32 neighbours and the ties between codes are encoded as by the reference."""
    upper = (np.arange(2**16, dtype=np.uint32) << 16).repeat(3)
    values = (upper + np.tile(np.array([0, 1, 0xFFFF], np.uint32), 2**16)).view(np.float32)
    codes = torch.empty(values.size, dtype=torch.uint8)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        encode_kernel[(values.size // 4096,)](torch.from_numpy(values), codes, form, tl.uint8, 4096)
    np.testing.assert_array_equal(codes.numpy(), reference_encode(values, "float8_e4m3fnuz"))
