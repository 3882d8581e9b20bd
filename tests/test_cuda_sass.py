"""The machine code of the CUDA kernels is as planned, and its reader tells good code from bad."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.compiled import cuda_sass, sass
from ragged_attention.errors import BackendMissing
from ragged_attention.kernels_cuda import _native
from ragged_attention.kernels_cuda._build import compile, toolchain

# A loop over blocks that contains a wait, whose slow path follows the kernel's end, and a loop that does no work.
CODE = """\
		Function : _ZN2op6kernelI6SeesawIN7cutlass10bfloat16_tELi576ELb1EEiEEvT0_
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                          /* 0x00000a00ff017b82 */
                                                                                   /* 0x000fe20000000800 */
        /*0010*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xd8 ;        /* 0x000000d8000079c8 */
        /*0020*/              @!P2 BRA 0x90 ;                                      /* 0x00000000008a947 */
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x0060000004187df0 */
        /*0040*/              @!P0 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;  /* 0x0060000004187df0 */
        /*0050*/                   MUFU.EX2 R2, R2 ;                               /* 0x0000000200027308 */
        /*0060*/               @P1 BRA 0x20 ;                                      /* 0xfffffffc00f08947 */
        /*0070*/              @!P1 BRA 0x70 ;                                      /* 0xfffffffc00f08947 */
        /*0080*/                   EXIT ;                                          /* 0x000000000000794d */
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R2 ;  /* 0x00000002ff0075a7 */
        /*00a0*/              @!P2 BRA 0x90 ;                                      /* 0xfffffffc00f08947 */
        /*00b0*/                   BRA 0x30 ;                                      /* 0xfffffffc00f08947 */
        /*00c0*/                   NOP ;                                           /* 0x0000000000007918 */
		Function : plain
        /*0000*/                   STL [R1], R2 ;                                  /* 0x0000000201007387 */
        /*0010*/                   EXIT ;                                          /* 0x000000000000794d */
"""
USAGE = """\
Resource usage:
 Common:
  GLOBAL:0
 Function _ZN2op6kernelI6SeesawIN7cutlass10bfloat16_tELi576ELb1EEiEEvT0_:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:904 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function plain:
  REG:8 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:904 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_machine_code_is_read() -> None:
    attention, plain = sass.kernels_of(CODE, USAGE)
    assert (attention.name, attention.type) == (
        "Seesaw<bf16, 576, true>",
        "Seesaw<cutlass::bfloat16_t, 576, true>",
    )
    assert (attention.registers, attention.stack, attention.static_shared, attention.set_registers) == (
        168,
        0,
        1024,
        (216,),
    )
    assert attention.counts.instructions == 12
    assert attention.counts.products == (("64x64x16", 1), ("64x256x16", 1))
    assert (
        attention.counts["HGMMA"],
        attention.counts["EX2"],
        attention.counts["mbarrier"],
        attention.counts["LDL"],
    ) == (
        2,
        1,
        1,
        0,
    )
    assert (plain.name, plain.stack, plain.counts["STL"], plain.loops) == ("plain", 16, 1, ())


def test_the_loop_that_works_is_found_with_its_slow_paths() -> None:
    (loop,) = sass.kernels_of(CODE, USAGE)[0].loops
    assert loop.instructions == 8  # 0x20 to 0x60, and the slow path of the wait at 0x90
    assert (loop["HGMMA"], loop["mbarrier"]) == (2, 1)


def test_of_nested_loops_the_inner_one_is_meant() -> None:
    def loops(edges: dict[int, list[int]]) -> list[set[int]]:
        return sorted(sass.natural_loops(edges), key=len)

    assert loops({0: [1], 1: [2], 2: [2, 3], 3: [1, 4], 4: []}) == [{2}, {1, 2, 3}]
    assert loops({0: [1, 2], 1: [2], 2: [1, 3], 3: []}) == []  # a cycle with two entry points is not a natural loop


# A loop over blocks of keys as Triton compiles it, a loop over pages, and a loop of plain products.
LOOPS = """\
        /*0000*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0010*/               @P1 BRA 0x0 ;
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.128 [R4], desc[UR4][R2.64], P0 ;
        /*0030*/               @P3 LDGSTS.E.64 [R4], desc[UR4][R2.64] ;
        /*0040*/                   LDG.E.U8 R2, desc[UR4][R2.64] ;
        /*0050*/                   LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;
        /*0060*/                   {} ;
        /*0070*/                   LDL.LU R8, [R1] ;
        /*0080*/                   BRA.U UP0, 0x20   &req={{1}}   ?trans5;   /* 0x0000000000007918 */
        /*0090*/                   FFMA R2, R2, R2, R2 ;
        /*00a0*/                   FFMA R2, R2, R2, R2 ;
        /*00b0*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*00c0*/               @P1 BRA 0x90 ;
        /*00d0*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("product", "shape", "kind"),
    [("HGMMA.64x8x16.F32 R2, gdesc[UR4], R2", "64x8x16", "HGMMA"), ("HMMA.16816.F32 R2, R2, R2, R2", "16816", "HMMA"),
     ("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]", None, "UTCMMA")],
)  # fmt: skip
def test_loops_of_matrix_products_are_found(product: str, shape: str | None, kind: str) -> None:
    (found,) = map(sass.count, sass.multiplying_loops(sass.instructions_of(LOOPS.format(product))))
    assert found.products == (((shape, 1),) if shape else ())
    assert [name for name in sass.MATRIX if found[name]] == [kind]
    assert found.loads == ((16, 2), (8, 1), (1, 1))
    assert (found.instructions, found["LDL"]) == (7, 1)


def test_without_a_matrix_product_loops_of_plain_ones_are_found() -> None:
    (found,) = map(sass.count, sass.multiplying_loops(sass.instructions_of(LOOPS.format("FADD R2, R2, R2"))))
    assert (found["FFMA"], found.loads) == (2, ((4, 1),))


@pytest.mark.parametrize(
    ("name", "width"),
    [("LDG.E", 4), ("LDG.E.64", 8), ("LDG.E.ENL2.256", 32), ("LDG.E.S8", 1), ("LDG.E.U16.CONSTANT", 2),
     ("LDGSTS.E.BYPASS.LTC128B.128", 16), ("LDGSTS.E.LTC128B", 4)],
)  # fmt: skip
def test_the_width_of_a_load(name: str, width: int) -> None:
    assert sass.load_width(name) == width


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        ("void op::kernel<Combine<cutlass::half_t>, int>(int)", "Combine<cutlass::half_t>"),
        ("void op::kernel<A<B<int>, 3>, C<int>::D<char> >(C<int>::D<char>)", "A<B<int>, 3>"),
        ("schedule(int, int*)", "schedule"),
    ],
)
def test_a_kernel_is_named_by_its_body(signature: str, body: str) -> None:
    assert sass.body_type(signature) == body


def planned(**changes: object) -> sass.Kernel:
    """A kernel without problems, with some of its fields changed."""
    kinds = {"HGMMA": 44, "LDGSTS": 64}
    settled = changes.pop("settled", 3)
    consumer = sass.Counts(900, (("64x64x16", 36),), {"HGMMA": 22, "settled": settled})  # type: ignore[dict-item]
    producer = sass.Counts(700, (), {"LDGSTS": 64})
    kernel = sass.Kernel(
        "k", "Seesaw<cutlass::half_t, 576, true>", 168, 0, 0, 1024, (72, 216),
        sass.Counts(6000, (), kinds | dict(changes.pop("kinds", {}))),  # type: ignore[call-overload]
        (producer, consumer, consumer),
    )  # fmt: skip
    return dataclasses.replace(kernel, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"kinds": {"LDL": 2, "STL": 1}}, "2 loads and 1 stores of local memory"),
        ({"local": 8}, "0 loads and 0 stores of local memory"),
        ({"registers": 160}, "160 registers, 168 are planned"),
        ({"set_registers": (72, 224)}, "registers are changed to 72, 224, 512 are available"),
        ({"set_registers": (112, 200, 208)}, "registers are changed to 112, 200, 208, 512 are available"),
        ({"set_registers": ()}, "registers are changed to nothing, 512 are available"),
        ({"kinds": {"HGMMA": 0}}, "no HGMMA"),
        ({"kinds": {"LDGSTS": 0}}, "no LDGSTS"),
        ({"kinds": {"UTMALDG": 3}}, "3 UTMALDG, TMA is for pages of dense calls"),
        ({"type": "Seesaw<cutlass::half_t, 576, false>"}, "0 UTMALDG, TMA is for pages of dense calls"),
        ({"settled": 20}, "20 waits for 22 products, which should run one after another"),
        ({"loops": ()}, "0 inner loops, one per consumer and the producer's are planned"),
    ],
)
def test_what_counts_as_a_failure(changes: dict[str, object], failure: str) -> None:
    assert cuda_sass.failures([planned()], {}) == []
    kernel = planned(**changes)
    assert dict.fromkeys(cuda_sass.failures([kernel], {})) == {f"{kernel.name}: {failure}": None}


def test_a_kernel_of_few_heads_has_products_and_copies_of_its_own() -> None:
    kinds = {"HMMA": 136, "UBLKCP": 1, "HGMMA": 0, "LDGSTS": 0}
    loops = tuple(sass.Counts(600, (), kind) for kind in ({"HMMA": 68}, {"HMMA": 68}, {"UBLKCP": 1}))
    plan = {"type": "Narrow<2, false>", "set_registers": (40, 232), "loops": loops}
    assert cuda_sass.failures([planned(**plan, kinds=kinds)], {}) == []
    for kind in ("HMMA", "UBLKCP"):
        assert cuda_sass.failures([planned(**plan, kinds=kinds | {kind: 0})], {}) == [f"Narrow<2, false>: no {kind}"]


def test_shared_memory_has_a_limit() -> None:
    size = {planned().type: 232448}
    assert cuda_sass.failures([planned()], size) == []
    (wrong,) = cuda_sass.failures([planned(static_shared=1025)], size)
    assert wrong.endswith("needs 232449 bytes of shared memory, a thread block has 232448")


def test_a_library_without_attention_is_a_failure() -> None:
    assert cuda_sass.failures([planned(type="Combine<cutlass::half_t>", loops=())], {}) == [
        "no attention kernel is in the library"
    ]


def test_check_compares_with_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = [planned()]
    monkeypatch.setattr(cuda_sass, "DOCUMENT", tmp_path / "page.md")
    monkeypatch.setattr(cuda_sass.build_cuda, "shown", lambda recipe, console: tmp_path)
    monkeypatch.setattr(cuda_sass.sass, "read", lambda path: kernels)
    monkeypatch.setattr(cuda_sass, "shared_memory", lambda found: {planned().type: 229376})
    monkeypatch.setattr(cuda_sass, "compiler", lambda: "nvcc 1.")
    assert cuda_sass.main(["--check"]) == 1
    assert cuda_sass.main([]) == 0
    assert cuda_sass.main(["--check"]) == 0
    kernels[:] = [dataclasses.replace(planned(), stack=8)]
    capsys.readouterr()
    assert cuda_sass.main(["--check"]) == 1
    assert "+| `Seesaw<f16, 576, true>` | 168 | 72, 216 | 8 | 0 | 229376 |" in capsys.readouterr().err
    # The code of another compiler version is checked, but not compared with the saved table.
    monkeypatch.setattr(cuda_sass, "compiler", lambda: "nvcc 2.")
    assert cuda_sass.main(["--check"]) == 0
    assert "written with another compiler than nvcc 2." in capsys.readouterr().err
    kernels[:] = [planned(local=8)]
    assert cuda_sass.main(["--check"]) == 1


def test_without_a_compiler_there_is_nothing_to_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> compile.Recipe:
        raise BackendMissing(toolchain.NO_NVCC)

    monkeypatch.setattr(compile, "kernels_recipe", missing)
    assert cuda_sass.main([]) == 2
    assert toolchain.NO_NVCC in capsys.readouterr().err


@pytest.fixture(scope="module")
def kernels() -> list[sass.Kernel]:
    pytest.importorskip("triton")  # provides the disassembler
    if reason := _native.why_not():
        pytest.skip(reason)
    return sass.read(Path(_native.library()._name))


def test_the_kernels_are_as_planned(kernels: list[sass.Kernel]) -> None:
    assert cuda_sass.failures(kernels, cuda_sass.shared_memory(kernels)) == []


def test_the_page_has_every_kernel(kernels: list[sass.Kernel]) -> None:
    page = cuda_sass.DOCUMENT.read_text()
    for kernel in kernels:
        assert f"| `{kernel.name}` | {kernel.registers} | " in page
    assert "no failures" in page
