"""Both front ends of the CUDA kernels: accepted calls, the division of work, and the arguments of the C ABI and XLA.

Most tests use `plain_abi.cc`, which implements the C ABI with plain loops in place of the kernels. It refuses calls
that the ABI does not allow.
"""

import contextlib
import ctypes
import dataclasses
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention import dispatch
from ragged_attention.calls import CACHE_FORMATS, CALLS, Device, MlaDecode
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.explain import explanation
from ragged_attention.kernels_cuda import (
    _abi,
    _latent,
    _native,
    make_decode_schedule,
    mla_decode,
    sparse_mla_prefill,
)
from ragged_attention.kernels_cuda._build import compile, toolchain
from ragged_attention.reference.mla_decode import mla_decode as reference
from ragged_attention.testing.compare import agrees
from ragged_attention.testing.mla.cache_specs import schedule_batch
from ragged_attention.testing.mla.oracle import (
    check_decode,
    check_decode_by_schedule,
    check_prefill,
    check_schedule,
    decode_agrees,
)
from ragged_attention.testing.mla.specs import DecodeSpec, PrefillSpec
from ragged_attention.testing.runner import FRAMEWORKS, Runner
from ragged_attention.tools.samples import FakeArray, LatentSample, device_of

HOPPER = Device(framework="torch", platform="cuda", arch="sm_90", num_multiprocessors=132)
MODULES = {
    "mla_decode": mla_decode,
    "sparse_mla_prefill": sparse_mla_prefill,
    "make_decode_schedule": make_decode_schedule,
}
DENSE = DecodeSpec(
    topk=0, heads=5, d_qk=576, d_v=512, dtype="bfloat16", q_tokens=2, kv_lens=(37, 0, 5), spare_columns=1, garbage=True
)
LISTS = dataclasses.replace(DENSE, topk=19, lens="wild")
PREFILL = PrefillSpec(heads=6, kv_heads=2, d_qk=576, d_v=512, dtype="bfloat16", topk=13, lens="wild", poison="nan")


@pytest.fixture(scope="module")
def plain_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a library that implements the C ABI with plain loops; its name contains a digest of the source."""
    if (gxx := toolchain.gxx()) is None:
        pytest.skip(toolchain.NO_GXX)
    source = Path(__file__).with_name("plain_abi.cc")
    path = tmp_path_factory.mktemp("plain") / f"libplain-{compile.digest_of(source)}.so"
    flags = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-Wl,-soname,{path.name}")
    subprocess.run([gxx, *flags, f"-I{compile.SOURCES}", str(source), "-o", str(path)], check=True, timeout=300)
    return path


@pytest.fixture(scope="module")
def loaded() -> dict[Any, Any]:
    """A separate table of loaded libraries for the plain library, so that the kernels' own table stays unchanged."""
    return {}


@pytest.fixture
def plain(plain_library: Path, loaded: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The plain library, installed in place of the emulation, with its own FFI library."""
    library = _abi.bind(ctypes.CDLL(str(plain_library)))
    monkeypatch.setattr(_native, "emulation", lambda: library)
    monkeypatch.setattr(compile, "cache_folder", lambda: plain_library.parent)
    monkeypatch.setattr(_native, "_loaded", loaded)
    return library


@pytest.fixture
def emulating(plain: ctypes.CDLL) -> Iterator[None]:
    with _native.emulating():
        yield


@pytest.fixture(params=FRAMEWORKS)
def front(request: pytest.FixtureRequest) -> Runner:
    pytest.importorskip(request.param)
    return Runner(framework=request.param, backend="cuda")


# ---- accepted calls


def refusal(operation: str, device: Device = HOPPER, **sample: Any) -> str | None:
    return MODULES[operation].why_not(LatentSample(**sample).call(operation, device))


@pytest.fixture
def nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the kernels can be built on this machine."""
    monkeypatch.setattr(_native, "why_not", lambda: None)


@pytest.mark.usefixtures("nothing_missing")
@pytest.mark.parametrize(
    ("operation", "sample"),
    [
        ("mla_decode", {"topk": 0}),
        ("mla_decode", {"topk": 0, "dtype": "float16"}),
        ("mla_decode", {"topk": 0, "num_q_heads": 3, "page_size": 1}),
        ("mla_decode", {"cache_format": "plain"}),
        ("mla_decode", {"cache_format": "fp8_v32", "topk": 100}),
        ("sparse_mla_prefill", {"cache_format": "plain"}),
        ("sparse_mla_prefill", {"cache_format": "fp8_v32"}),
        ("sparse_mla_prefill", {"cache_format": "fp8_v4"}),
        ("sparse_mla_prefill", {"cache_format": "fp8_v41"}),
        ("sparse_mla_prefill", {"cache_format": "fp4_v41"}),
        ("mla_decode", {"cache_format": "fp8_v41"}),
        ("mla_decode", {"cache_format": "fp4_v41", "extra_topk": 20}),
        ("mla_decode", {"cache_format": "fp8_v4", "extra_topk": 20}),
        ("mla_decode", {"cache_format": "plain", "extra_topk": 20}),
        ("make_decode_schedule", {}),
    ],
)
def test_what_is_taken(operation: str, sample: dict[str, Any]) -> None:
    if sample.get("topk") == 0:
        sample["cache_format"] = "plain"
    assert refusal(operation, **sample) is None
    call = LatentSample(**sample).call(operation, HOPPER)
    assert MODULES[operation].why_not_by_default(call) == _latent.NOT_BY_DEFAULT


@pytest.mark.usefixtures("nothing_missing")
@pytest.mark.parametrize(
    ("operation", "sample", "text"),
    [
        (
            "mla_decode",
            {"topk": 0, "cache_format": "fp8_v32"},
            "takes cache_format 'plain' in a dense call (one without indices), got 'fp8_v32'",
        ),
        (
            "mla_decode",
            {"cache_format": "fp8_v32", "extra_topk": 20},
            "takes extra_kv_cache with any other cache_format, got 'fp8_v32'",
        ),
        (
            "mla_decode",
            {"topk": 0, "cache_format": "fp4_v41"},
            "takes cache_format 'plain' in a dense call (one without indices), got 'fp4_v41'",
        ),
        (
            "mla_decode",
            {"topk": 0, "cache_format": "plain", "dtype": "float32"},
            "takes q.dtype bfloat16 or float16 in a dense call, got float32",
        ),
        *(
            (
                operation,
                {"cache_format": form, "dtype": "float16"},
                "takes q.dtype bfloat16 in a sparse call, got float16",
            )
            for operation in ("mla_decode", "sparse_mla_prefill")
            for form in ("plain", "fp8_v32", "fp8_v41")
        ),
    ],
)
def test_what_is_refused_and_why(operation: str, sample: dict[str, Any], text: str) -> None:
    assert refusal(operation, **sample) == text


@pytest.mark.usefixtures("nothing_missing")
@pytest.mark.parametrize("operation", ["mla_decode", "sparse_mla_prefill"])
def test_other_widths_are_refused(operation: str) -> None:
    def ask(d_qk: int, d_v: int) -> str | None:
        arrays = (
            {"q": FakeArray((2, 1, 4, d_qk), "bfloat16"), "kv_cache": FakeArray((3, 64, 1, d_qk), "bfloat16")}
            if operation == "mla_decode"
            else {"q": FakeArray((2, 4, d_qk), "bfloat16"), "kv": FakeArray((99, 1, d_qk), "bfloat16")}
        )
        call = CALLS[operation](**arrays, indices=FakeArray((2, 1, 64), "int32"), d_v=d_v, device=HOPPER)  # type: ignore[call-arg]
        return MODULES[operation].why_not(call)

    assert [ask(576, 512), ask(512, 512)] == [None, None]
    assert ask(640, 512) == "takes d_qk 576 or 512, got 640"
    assert ask(576, 256) == "takes d_v 512, got 256"


@pytest.mark.usefixtures("nothing_missing")
@pytest.mark.parametrize(("cache_format", "row"), [("plain", 1152), ("fp8_v32", 656)])
def test_a_cache_of_more_than_64_gib_is_refused(cache_format: str, row: int) -> None:
    most = (2**36 - 16) // row // 64  # the largest number of pages

    def ask(pages: int) -> str | None:
        cache = (
            FakeArray((pages, 64, 1, 576), "bfloat16")
            if cache_format == "plain"
            else FakeArray((pages, 64, 1, row), "uint8")
        )
        q, lists = FakeArray((2, 1, 4, 576), "bfloat16"), FakeArray((2, 1, 64), "int32")
        return mla_decode.why_not(MlaDecode(q=q, kv_cache=cache, indices=lists, device=HOPPER))

    assert ask(most) is None
    size = (most + 1) * 64 * row
    assert ask(most + 1) == f"takes a cache of at most 68719476720 bytes, got {size}"


@pytest.mark.usefixtures("nothing_missing")
def test_a_second_cache_is_taken() -> None:
    cache, lists = FakeArray((3, 64, 1, 576), "bfloat16"), FakeArray((2, 1, 64), "int32")
    call = MlaDecode(
        q=FakeArray((2, 1, 4, 576), "bfloat16"), kv_cache=cache, indices=lists, extra_kv_cache=cache,
        extra_indices=FakeArray((2, 1, 8), "int32"), device=HOPPER,
    )  # fmt: skip
    assert dispatch.refusal("cuda", call) is None


@pytest.mark.parametrize("operation", MODULES)
def test_where_the_kernels_run(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample: dict[str, Any] = {"cache_format": "plain"}
    monkeypatch.setattr(_native, "why_not", lambda: "no nvcc in CUDACXX")
    assert refusal(operation, **sample) == "no nvcc in CUDACXX"
    assert refusal(operation, device_of("torch", "sm_100"), **sample) == "runs on sm_90 GPUs, got a call from sm_100"
    assert refusal(operation, device_of("torch", "gfx942"), **sample) == "runs on sm_90 GPUs, got a call from gfx942"
    elsewhere = Device(framework="torch", platform="mps")
    assert refusal(operation, elsewhere, **sample) == "runs on sm_90 GPUs, got a call from mps"
    here = Device(framework="torch", platform="cpu")
    inside = "on a CPU inside ragged_attention.kernels_cuda.emulating() only"
    assert refusal(operation, here, **sample) == f"runs on sm_90 GPUs, {inside}"


def test_only_by_name_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "why_not", lambda: None)
    for operation in MODULES:
        call = LatentSample(cache_format="plain").call(operation, HOPPER)
        assert dispatch.choose(call).backend == "triton"
        assert dispatch.choose(call, backend="cuda").backend == "cuda"
        assert dispatch.choose(call, backend=["cuda", "auto"]).backend == "cuda"
        lines = explanation(call).splitlines()
        assert lines[1] == f"  cuda       {_latent.NOT_BY_DEFAULT}"
        assert "* triton     chosen" in lines


# ---- the division of work


def test_few_heads_have_a_kernel_of_their_own() -> None:
    def function(heads: int, narrow: bool = True, cache_format: str = "fp8_v32") -> str:
        call: Any = LatentSample(num_q_heads=heads, cache_format=cache_format).call("mla_decode", HOPPER)
        return _latent.function_of(call, _latent.Tile(narrow=narrow)).name

    assert [function(heads) for heads in (1, 8, 32)] == ["ra_mla_decode_sparse_fp8_narrow"] * 3
    assert function(33) == function(16, narrow=False) == "ra_mla_decode_sparse_fp8"
    assert function(16, cache_format="fp8_v4") == "ra_mla_decode_sparse_fp8_v4"
    with pytest.raises(InvalidInput, match=r"^expected narrow to be a bool, got 1$"):
        _latent.Tile(narrow=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_seqs", [1, 4, 8, 16, 64])
def test_with_few_heads_all_multiprocessors_have_work(num_seqs: int) -> None:
    """With few heads and lists of 2048 keys, which are 32 blocks each, all multiprocessors have work."""
    sample: Any = {"cache_format": "fp8_v32", "num_q_heads": 16, "num_tokens": num_seqs, "topk": 2048}
    num_splits = splits_of("mla_decode", max_num_seqs=num_seqs, **sample)
    assert min(32 * num_seqs, 120) <= num_splits * num_seqs <= 132


@pytest.mark.parametrize("value", [0, 257, 2.0])
@pytest.mark.parametrize("module", [mla_decode, sparse_mla_prefill])
def test_splits_have_limits(module: Any, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"^expected num_splits from 1 to 256, got {value}$"):
        module.Tile(num_splits=value)


def splits_of(operation: str, **sample: Any) -> int:
    return MODULES[operation].heuristic(LatentSample(**sample).call(operation, HOPPER)).num_splits


def test_splits_fill_the_multiprocessors_and_no_more() -> None:
    dense = {"topk": 0, "cache_format": "plain", "num_q_heads": 128}
    assert splits_of("mla_decode", **dense, max_num_seqs=66, num_tokens=66) == 1
    assert splits_of("mla_decode", **dense, max_num_seqs=1, num_tokens=1, max_len=64) == 1
    assert 33 < splits_of("mla_decode", **dense, max_num_seqs=1, num_tokens=1, max_len=131072) <= 66
    assert splits_of("mla_decode", **dense, max_len=8192) == 2
    assert splits_of("sparse_mla_prefill", cache_format="plain", num_tokens=4096, topk=2048) == 1
    assert splits_of("sparse_mla_prefill", cache_format="plain", num_tokens=4, topk=2048) > 1


def test_kinds_are_of_static_facts() -> None:
    def kind(operation: str, **sample: Any) -> str:
        return MODULES[operation].kind_of(LatentSample(**sample).call(operation, HOPPER))

    assert kind("mla_decode", topk=0, cache_format="plain", max_num_seqs=5, num_tokens=5, max_len=5000) == (
        "heads=128/1 q=1 d=576 cache=plain seqs<=8 blocks<=128"
    )
    assert kind("mla_decode", topk=2048, cache_format="fp8_v32", max_num_seqs=1, num_tokens=1) == (
        "heads=128/1 q=1 d=576 cache=fp8_v32 seqs<=1 topk=2048"
    )
    assert kind("sparse_mla_prefill", topk=2048, cache_format="plain", num_tokens=4000) == (
        "heads=128/1 d=576 cache=plain tokens<=4096 topk=2048"
    )


# ---- arguments of the C ABI

CASES = [
    DENSE,
    dataclasses.replace(DENSE, dtype="float16", causal=True, page_size=16),
    dataclasses.replace(DENSE, kv_heads=5, heads=10, d_qk=512, page_size=1, sinks="mixed"),
    dataclasses.replace(DENSE, invalid_pages=True, kv_lens=(130, 64), page_size=64, poison="nan"),
    LISTS,
    dataclasses.replace(LISTS, lens_by_query=True, d_qk=512, sinks="normal", poison="nan"),
    dataclasses.replace(LISTS, format="fp8_v32", lens_by_query=True, sm_scale=0.3, poison="nan"),
    dataclasses.replace(LISTS, format="fp8_v32", cache_dtype="float8_e4m3fn", lens=None, entries="none"),
    dataclasses.replace(LISTS, format="fp8_v32", cache_dtype="int8", strided=True),
]


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("spec", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("options", [None, {"num_splits": 3}], ids=["", "split"])
def test_decode(front: Runner, spec: DecodeSpec, options: Any) -> None:
    check_decode(front, dataclasses.replace(spec, strided=options is not None).build(), options)


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("spec", [DENSE, LISTS], ids=["dense", "lists"])
def test_decode_by_schedule(front: Runner, spec: DecodeSpec) -> None:
    check_schedule(front, schedule_batch(spec.build()))
    check_decode_by_schedule(front, spec.build())


PREFILLS = [
    PREFILL,
    dataclasses.replace(PREFILL, page_size=7, d_qk=512, sinks="mixed"),
    dataclasses.replace(PREFILL, kv_heads=1, format="fp8_v32", page_size=4, lens=None),
]


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("spec", PREFILLS, ids=range(len(PREFILLS)))
@pytest.mark.parametrize("options", [None, {"num_splits": 3}], ids=["", "split"])
def test_prefill(front: Runner, spec: PrefillSpec, options: Any) -> None:
    check_prefill(front, dataclasses.replace(spec, strided=options is not None).build(), options)


@pytest.mark.usefixtures("emulating")
def test_empty_batches_and_caches(front: Runner) -> None:
    batch = DENSE.build()
    nobody = {name: getattr(batch, name)[:0] for name in ("q", "page_indices", "kv_lens")}
    out, lse = front.run("mla_decode", batch.change(**nobody))
    assert (out.shape, lse.shape) == ((0, 2, 5, 512), (0, 5, 2))
    schedule = front.schedule(schedule_batch(batch.change(**nobody)))
    out, _ = front.run("mla_decode", batch.change(**nobody), schedule=schedule)
    assert out.shape == (0, 2, 5, 512)
    for changes in ({"kv_cache": batch.kv_cache[:0]}, {"page_indices": np.zeros((3, 0), np.int32)}):
        out, lse = front.run("mla_decode", batch.change(**changes))
        assert (out == 0).all()
        assert np.isneginf(lse).all()
    prefill = PREFILL.build()
    out, max_logits, lse = front.run("sparse_mla_prefill", prefill.change(kv=prefill.kv[:0]))
    assert (out == 0).all()
    assert np.isneginf([max_logits, lse]).all()
    given = {name: getattr(prefill, name)[:0] for name in ("q", "indices", "topk_lens")}
    assert [array.shape[0] for array in front.run("sparse_mla_prefill", prefill.change(**given))] == [0, 0, 0]


@pytest.mark.usefixtures("emulating")
def test_a_schedule_without_parts_divides_nothing(front: Runner) -> None:
    batch = DENSE.build()
    schedule = front.schedule(schedule_batch(batch))
    empty = dataclasses.replace(schedule, parts=schedule.parts[:0])
    decode_agrees(front.run("mla_decode", batch, schedule=empty), front.run("mla_decode", batch))


@pytest.mark.usefixtures("emulating")
def test_a_code_becomes_an_exception_with_the_shapes(front: Runner) -> None:
    """An error code becomes an exception that lists the shapes; here `plain_abi.cc` refuses a scale of 700."""
    with pytest.raises(
        RuntimeError, match=r"ra_mla_decode_dense failed with code 1008, said by plain_abi.cc: "
    ) as raised:
        front.run("mla_decode", dataclasses.replace(DENSE, sm_scale=700.0).build())
    arrays = "q [3, 2, 5, 576], kv [14, 4, 1, 576], lists [3, 11], lens [3], out [3, 2, 5, 512], lse [3, 5, 2]"
    assert arrays in str(raised.value)


def test_outside_the_emulation_a_cpu_is_refused_again(plain: ctypes.CDLL, front: Runner) -> None:
    """After `emulating()` a CPU is refused again: plans and traces from inside are not reused outside."""
    batch = DENSE.build()
    arguments = {name: front._bring(batch, name, value) for name, value in batch.arguments().items()}

    def call() -> Any:
        return front.front.operations.mla_decode(**arguments, backend="cuda")

    for _ in range(2):
        with pytest.raises(Unsupported, match=r"cuda: runs on sm_90 GPUs, on a CPU inside .*emulating\(\) only"):
            call()
        with _native.emulating():
            call()


def test_a_launcher_refuses_a_cpu_too(plain: ctypes.CDLL) -> None:
    with pytest.raises(Unsupported, match=r"^runs on sm_90 GPUs, on a CPU inside .*emulating\(\) only$"):
        _latent.DENSE.on("cpu")
    with _native.emulating():
        assert _latent.DENSE.on("cpu").__name__ == plain.ra_mla_decode_dense.__name__


# ---- the torch front end


def test_rows_are_copied_only_where_they_must_be() -> None:
    torch = pytest.importorskip("torch")
    from ragged_attention.torch._launcher import LAUNCHER

    base = torch.zeros(6, 4, 2, 576 + 8, dtype=torch.bfloat16)
    kept = [
        base,
        base[..., :576],  # the row stride is a multiple of 16 bytes
        base[::2, :, :, 8:],
        base.transpose(0, 1),
        torch.as_strided(base, (3, 1, 576), (584, 7, 1)),  # the stride of an axis of size 1 does not matter
        torch.as_strided(base, (1, 1), (3, 5)),
        base[:0],
        base[:1].expand(5, 4, 2, 584),
    ]
    copied = [
        base[..., 4:580],  # rows are not aligned to 16 bytes
        torch.as_strided(base, (3, 2, 576), (584, 580, 1)),
        torch.as_strided(base, (3, 576), (1152, 2)),  # the last stride is 2
    ]
    for tensor in kept:
        assert LAUNCHER.aligned(tensor) is tensor
    for tensor in copied:
        found = LAUNCHER.aligned(tensor)
        assert found.is_contiguous()
        assert found.data_ptr() != tensor.data_ptr()
        assert torch.equal(found, tensor)
    assert LAUNCHER.aligned(base[..., 4:580], bytes=8) is not base
    assert LAUNCHER.aligned(torch.zeros(3, 6, dtype=torch.uint8)[:, :3], bytes=4).shape == (3, 3)


@pytest.mark.usefixtures("emulating")
def test_what_is_strided_is_read_where_it_lies() -> None:
    torch = pytest.importorskip("torch")
    from ragged_attention.torch import mla_decode as attend

    seed = torch.Generator().manual_seed(0)

    def randoms(*shape: int) -> Any:
        return torch.randn(shape, generator=seed).to(torch.bfloat16)

    q, pool = randoms(2, 5, 3, 580)[..., :576].transpose(1, 2), randoms(4, 3, 16, 576).transpose(1, 2)[:, 1:]
    table = torch.tensor([[0, 9, 3, 9, 1], [2, 9, 0, 9, 9]], dtype=torch.int32)[:, ::2]
    lens, sinks = torch.tensor([35, 0, 17, 0], dtype=torch.int32)[::2], torch.randn(10, generator=seed)[::2]
    given = (q[:, :, :3], pool, table, lens)
    wide = (q[:, :, :3].contiguous(), pool.contiguous(), table.contiguous(), lens.contiguous())
    sinks = sinks[:3]
    for options in ({"num_splits": 1}, {"num_splits": 2}):
        got = attend(*given, sinks=sinks, causal=True, backend="cuda", options=options)
        want = attend(*wide, sinks=sinks.contiguous(), causal=True, backend="reference")
        assert all(agrees(mine.float(), theirs.float(), f"decode {name}") for mine, theirs, name in zip(
            got, want, ("out", "lse"), strict=True))  # fmt: skip


def test_a_gpu_gets_its_own_device_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call on a (fake) GPU runs on that device and its current stream."""
    torch = pytest.importorskip("torch")
    from ragged_attention.torch._launcher import LAUNCHER

    seen: list[Any] = []

    @contextlib.contextmanager
    def guard(device: Any) -> Iterator[None]:
        seen.append(("device", device))
        yield
        seen.append("left")

    def launch(record: Any, stream: Any) -> int:
        found = ctypes.cast(record, ctypes.POINTER(_abi.Schedule)).contents
        seen.append((found.lens, found.extra_lens, found.parts, found.num_parts, stream))
        return 0

    there, result = torch.device("cuda:1"), torch.zeros(4, 8)
    lens = SimpleNamespace(device=there, data_ptr=lambda: 4096)
    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77 + device.index))
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: result)
    function = SimpleNamespace(record=_abi.Schedule, on={"cuda": launch}.__getitem__)
    outputs = {"parts": ((4, 8), "int32"), "num_splits": None}
    found = LAUNCHER.native(function, {"lens": lens, "extra_lens": None}, outputs, {"num_parts": 4})  # type: ignore[dict-item]
    assert found == {"parts": result, "num_splits": None}
    assert seen == [("device", there), (4096, None, result.data_ptr(), 4, 78), "left"]


# ---- the jax front end


def jax_case(seed: int = 0) -> tuple[Any, ...]:
    jnp = pytest.importorskip("jax.numpy")
    rng = np.random.default_rng(seed)
    q, kv = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((2, 2, 5, 576), (6, 16, 1, 576)))
    return q, kv, jnp.asarray([[0, 1, 2], [5, -1, 3]], jnp.int32), jnp.asarray([40, 20], jnp.int32)


@pytest.mark.usefixtures("emulating")
def test_under_jit_and_vmap() -> None:
    jax = pytest.importorskip("jax")
    from ragged_attention.jax import mla_decode as attend

    q, kv, table, lens = jax_case()

    @jax.jit
    def both(scale: Any) -> Any:
        return attend(q * scale, kv, table, lens, backend="cuda", options={"num_splits": 2})

    scales = jax.numpy.asarray([1.0, -0.5], "bfloat16")
    outs, lses = jax.vmap(both)(scales)
    for scale, out, lse in zip(scales, outs, lses, strict=True):
        want = attend(q * scale, kv, table, lens, backend="reference")
        assert all(map(agrees, (out, lse), want, ("decode out", "decode lse")))


def lowered(function: Any, *arguments: Any) -> str:
    jax = pytest.importorskip("jax")
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("nothing_missing")
def test_lowering_for_a_gpu_needs_none() -> None:
    jax = pytest.importorskip("jax")
    export = pytest.importorskip("jax.export")
    from ragged_attention.jax import make_decode_schedule as schedule_of
    from ragged_attention.jax import mla_decode as attend
    from ragged_attention.jax import sparse_mla_prefill as prefill

    q, kv, table, lens = jax_case()
    lists = jax.numpy.zeros((2, 2, 70), "int32")
    caches = {
        name: jax.numpy.zeros((6, 16, 1, CACHE_FORMATS[name].token_bytes), "uint8")
        for name in ("fp8_v32", "fp8_v4", "fp8_v41", "fp4_v41")
    }

    def step(q: Any, kv: Any, caches: Any, table: Any, lens: Any, lists: Any) -> Any:
        schedule = schedule_of(lens, 2, 2, 5, num_parts=4, backend="cuda")
        dense = attend(q, kv, table, lens, schedule=schedule, backend="cuda")
        sparse = attend(q, kv, indices=lists, backend="cuda")
        packed = prefill(q[0], kv, lists[0][:, None], backend="cuda")
        narrow, wide = (
            attend(many, caches["fp8_v32"], indices=lists, backend="cuda", options={"num_splits": 2})
            for many in (q, jax.numpy.tile(q, (1, 1, 7, 1)))
        )
        plain = q[..., :512]
        of_v4 = attend(plain, caches["fp8_v4"], indices=lists, backend="cuda")
        of_two = {
            kind: attend(
                plain, caches[kind], indices=lists, cache_format=kind, backend="cuda",
                extra_kv_cache=caches[other], extra_indices=lists[:, :, :64],
            )
            for kind, other in (("fp8_v4", "fp8_v4"), ("fp8_v41", "fp4_v41"), ("fp4_v41", "fp4_v41"))
        }  # fmt: skip
        return dense, sparse, packed, narrow, wide, of_v4, of_two

    arguments = (q, kv, caches, table, lens, lists)
    text = lowered(step, *arguments)
    calls = re.findall(r"custom_call @(\w+)\(([^)]*)\)", text)
    counts = {name: [len(operands.split(",")) for found, operands in calls if found == name] for name in _abi.LAUNCHERS}
    assert counts == {
        "ra_mla_decode_dense": [9],
        "ra_sparse_mla_prefill": [9, 9],
        "ra_mla_decode_sparse_fp8": [9],
        "ra_mla_decode_sparse_fp8_narrow": [9],
        "ra_mla_decode_sparse_fp8_v4": [9, 9],
        "ra_mla_decode_sparse_v41": [9, 9],
        "ra_make_decode_schedule": [2],
    }
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _abi.LAUNCHERS]
    exported = export.export(jax.jit(step), platforms=["cuda"], disabled_checks=checks)(*arguments)
    assert exported.platforms == ("cuda",)


def test_lowering_without_a_toolchain_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    from ragged_attention.jax import mla_decode as attend

    monkeypatch.setattr(_native, "why_not", lambda: "no CUTLASS headers: install them")
    q, kv, table, lens = jax_case()
    with pytest.raises(Unsupported, match=r"\n  cuda: runs on sm_90 GPUs, on a CPU inside"):
        lowered(lambda *arrays: attend(*arrays, sm_scale=0.123, backend="cuda"), q, kv, table, lens)
    with ra.use_backend({"*": ["cuda", "xla"]}):
        text = lowered(lambda *arrays: attend(*arrays, sm_scale=0.123), q, kv, table, lens)
    assert "ra_mla_decode_dense" not in text


# ---- refusals of the FFI library

OPERANDS, RESULTS = _abi.Latent.OPERANDS, _abi.Latent.RESULTS
SHAPES = {
    "q": ((2, 3, 4, 576), "bfloat16"),
    "kv": ((5, 16, 1, 576), "bfloat16"),
    "lists": ((2, 6), "int32"),
    "lens": ((2,), "int32"),
    "sinks": ((4,), "float32"),
    "parts": ((0,), "int32"),
    "extra_kv": ((0,), "bfloat16"),
    "extra_lists": ((0,), "int32"),
    "extra_lens": ((0,), "int32"),
    "out": ((2, 3, 4, 512), "bfloat16"),
    "lse": ((2, 4, 3), "float32"),
    "max_logits": ((2, 4, 3), "float32"),
    "partial_out": ((4, 3, 4, 512), "float32"),
    "partial_lse": ((4, 3, 4), "float32"),
    "partial_max": ((4, 3, 4), "float32"),
}
NUMBERS = {
    "num_seqs": 2, "num_q_tokens": 3, "num_q_heads": 4, "num_kv_heads": 1, "d_qk": 576,
    "q_seq_stride": 6912, "q_token_stride": 2304, "q_head_stride": 576,
    "num_pages": 5, "page_size": 16, "page_stride": 9216, "slot_stride": 576, "head_stride": 576,
    "list_seq_stride": 6, "list_length": 6, "lens_seq_stride": 1, "extra_page_size": 1,
    "num_parts": 4, "num_splits": 2, "num_partials": 4,
}  # fmt: skip


def called(function: str = "ra_mla_decode_dense", drop: str = "", numbers: Any = None, **changes: Any) -> Any:
    """The result of an FFI call like the launcher's, with some arguments changed."""
    jax = pytest.importorskip("jax")
    from ragged_attention.jax._launcher import _target

    name = _target(dataclasses.replace(_latent.DENSE, name=function), "cpu")
    arrays = {name: changes.get(name, given) for name, given in SHAPES.items() if name != drop}
    operands = [jax.numpy.zeros(*arrays[name]) for name in OPERANDS if name in arrays]
    results = [jax.ShapeDtypeStruct(*arrays[name]) for name in RESULTS if name in arrays]
    if numbers is None:
        given = {name: changes.get(name, NUMBERS.get(name, 0)) for name in _abi.Latent.NUMBERS}
        numbers = list(given.values())
    return jax.ffi.ffi_call(name, results)(*operands, numbers=np.array(numbers, np.int64), sm_scale=0.5)


@pytest.mark.usefixtures("emulating")
def test_the_ffi_library_takes_what_it_should() -> None:
    out, lse, *_ = called()
    assert (np.asarray(out, np.float32) == 0).all()
    assert np.isneginf(lse).all()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"drop": "parts"}, "expected 9 operands, got 8"),
    ({"drop": "partial_max"}, "expected 6 results, got 5"),
    ({"extra_num_pages": 3, "extra_page_size": 2}, "expected extra_kv of 3456 entries, got [0]"),
    ({"extra_list_length": 5}, "expected extra_lists of 30 entries, got [0]"),
    ({"extra_page_size": 0}, "expected sizes from 1 to 2^31, got 0"),
    ({"numbers": [1, 2, 3]}, "expected 36 numbers, got 3"),
    ({"num_seqs": -1}, "expected sizes below 2^31, got -1"),
    ({"num_q_heads": 0}, "expected sizes from 1 to 2^31, got 0"),
    ({"page_size": 2**31}, "expected sizes from 1 to 2^31, got 2147483648"),
    ({"dtype": 2}, "expected dtype 0 or 1, got 2"),
    ({"format": -1}, "expected a format from 0 to 6, got -1"),
    ({"dtype": 1}, "expected q of float16, got bfloat16"),
    ({"q": ((2, 3, 4, 576), "float32")}, "expected q of bfloat16, got float32"),
    ({"kv": ((5, 16, 1, 576), "float16")}, "expected kv of bfloat16, got float16"),
    ({"format": 1}, "expected kv of uint8, got bfloat16"),
    ({"lists": ((2, 6), "uint8")}, "expected lists of int32, got uint8"),
    ({"lens": ((2,), "uint32")}, "expected lens of int32, got another type"),
    ({"sinks": ((4,), "bfloat16")}, "expected sinks of float32, got bfloat16"),
    ({"out": ((2, 3, 4, 512), "float32")}, "expected out of bfloat16, got float32"),
    ({"lse": ((2, 4, 3), "int32")}, "expected lse of float32, got int32"),
    ({"q": ((2, 3, 4, 575), "bfloat16")}, "expected q of 13824 entries, got [2, 3, 4, 575]"),
    ({"kv": ((5, 16, 2, 576), "bfloat16")}, "expected kv of 46080 entries, got [5, 16, 2, 576]"),
    ({"lists": ((2, 5), "int32")}, "expected lists of 12 entries, got [2, 5]"),
    ({"lens": ((3,), "int32")}, "expected lens of 2 entries, got [3]"),
    ({"sinks": ((5,), "float32")}, "expected sinks of 4 entries, got [5]"),
    ({"parts": ((3, 8), "int32")}, "expected parts of 32 entries, got [3, 8]"),
    ({"out": ((2, 3, 4, 576), "bfloat16")}, "expected out of 12288 entries, got [2, 3, 4, 576]"),
    ({"lse": ((2, 4), "float32")}, "expected lse of 24 entries, got [2, 4]"),
    ({"max_logits": ((2, 4), "float32")}, "expected max_logits of 24 entries, got [2, 4]"),
    ({"partial_out": ((0,), "float32")}, "expected partial_out of 24576 entries, got [0]"),
    ({"partial_lse": ((4, 3), "float32")}, "expected partial_lse of 48 entries, got [4, 3]"),
    ({"partial_max": ((0,), "float32")}, "expected partial_max of 48 entries, got [0]"),
    ({"num_splits": 0}, "expected num_splits of at least 1, got 0"),
    ({"num_splits": 3}, "expected 6 parts, got 4"),
    ({"parts": ((4, 8), "int32")}, "expected at least 8 partial results, got 4"),
    ({"q_seq_stride": 6913}, "expected strides of q that end within it, got 13825 entries of 13824"),
    ({"q_head_stride": -576}, "expected strides of q from 0 to its entries, got -576"),
    ({"slot_stride": 577}, "expected strides of kv that end within it, got 46095 entries of 46080"),
    ({"list_seq_stride": 7}, "expected strides of lists that end within it, got 13 entries of 12"),
    ({"lens_seq_stride": 2}, "expected strides of lens that end within it, got 3 entries of 2"),
    ({"d_qk": 2**31 - 1, "num_q_heads": 2**31 - 1}, "expected q of too many entries, got [2, 3, 4, 576]"),
]


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_the_ffi_library_refuses_what_does_not_fit(changes: dict[str, Any], text: str) -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"INVALID_ARGUMENT: ra_mla_decode_dense: {text}")):
        jax.block_until_ready(called(**changes))


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize(
    ("lens", "extra", "parts", "splits", "numbers", "text"),
    [
        ((2,), (0,), (4, 8), (3,), [2, 4, 5], "expected 4 numbers, got 3"),
        ((2,), (0,), (4, 8), (3,), [2, 0, 5, 0], "expected num_parts of at least 1, got 0"),
        ((3,), (0,), (4, 8), (3,), [2, 4, 5, 0], "expected lens of 2 entries, got [3]"),
        ((2,), (1,), (4, 8), (3,), [2, 4, 5, 0], "expected extra_lens of 2 entries, got [1]"),
        ((2,), (2,), (4, 7), (3,), [2, 4, 5, 0], "expected parts of 32 entries, got [4, 7]"),
        ((2,), (2,), (4, 8), (2,), [2, 4, 5, 0], "expected num_splits of 3 entries, got [2]"),
    ],
)
def test_the_ffi_library_refuses_schedules_that_do_not_fit(
    lens: Any, extra: Any, parts: Any, splits: Any, numbers: list[int], text: str
) -> None:
    jax = pytest.importorskip("jax")
    from ragged_attention.jax._launcher import _target

    results = [jax.ShapeDtypeStruct(shape, "int32") for shape in (parts, splits)]
    call = jax.ffi.ffi_call(_target(make_decode_schedule.SCHEDULE, "cpu"), results)
    operands = [jax.numpy.zeros(shape, "int32") for shape in (lens, extra)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"ra_make_decode_schedule: {text}")):
        jax.block_until_ready(call(*operands, numbers=np.array(numbers, np.int64)))


@pytest.mark.usefixtures("plain")
def test_on_a_gpu_the_ffi_library_asks_for_the_stream(plain_library: Path) -> None:
    """The FFI library that is built for GPUs requests the stream, so that a call on a CPU fails."""
    jax = pytest.importorskip("jax")
    recipe = compile.ffi_recipe(jax.ffi.include_dir(), plain_library)
    library = ctypes.CDLL(str(compile.build(recipe)))
    jax.ffi.register_ffi_target("made_for_gpus", jax.ffi.pycapsule(library.ra_make_decode_schedule_ffi), platform="cpu")
    results = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((4, 8), (3,))]
    call = jax.ffi.ffi_call("made_for_gpus", results)
    lens = jax.numpy.zeros(2, "int32")
    with pytest.raises(jax.errors.JaxRuntimeError, match="Failed to get platform stream"):
        jax.block_until_ready(call(lens, lens[:0], numbers=np.array([2, 4, 5, 0], np.int64)))


# ---- the kernels themselves

REAL = [
    dataclasses.replace(DENSE, heads=3, kv_lens=(70, 5), page_size=16),
    dataclasses.replace(LISTS, heads=3),
    dataclasses.replace(LISTS, heads=3, format="fp8_v32"),
]


@pytest.fixture
def emulation() -> Iterator[None]:
    """Run the code of the kernels in the emulation, on CPU threads."""
    if reason := toolchain.missing_to_emulate():
        pytest.skip(reason)
    with _native.emulating():
        yield


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("spec", REAL, ids=["dense", "lists", "fp8"])
def test_the_kernels_through_a_front_end(front: Runner, spec: DecodeSpec) -> None:
    check_decode(front, spec.build(), {"num_splits": 2})
    check_decode_by_schedule(front, spec.build())


@pytest.mark.usefixtures("emulation")
def test_the_kernels_prefill_through_a_front_end(front: Runner) -> None:
    check_prefill(front, dataclasses.replace(PREFILL, topk=70).build(), {"num_splits": 2})


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_schedule_for_other_lengths_divides_badly_and_no_worse(front: Runner, num_parts: int) -> None:
    then = dataclasses.replace(DENSE, heads=1, kv_lens=(0, 300, 64, 129), page_size=16)
    now = dataclasses.replace(then, kv_lens=(300, 1, 299, 0))
    schedule = front.schedule(schedule_batch(then.build(), num_parts, overhead=0))
    batch = now.build()
    decode_agrees(front.run("mla_decode", batch, schedule=schedule), reference(**batch.arguments()))
