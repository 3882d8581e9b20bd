"""The C ABI of csrc/api.h, described for ctypes. The header explains each field."""

import ctypes

from ragged_attention.calls import CacheFormat
from ragged_attention.errors import BackendMissing

VERSION = 3
# The error codes of api.h; positive codes are those of CUDA.
WRONG_DEVICE, NO_KERNEL, DEADLOCK, NO_TENSOR_MAP = -1, -2, -3, -4
DTYPES = {"bfloat16": 0, "float16": 1}
PLAIN, FP8_V32, FP8_V4, FP8_V41, FP8_V41_PAGE, FP4_V41, FP4_V41_PAGE = range(7)  # cache formats
OTHER = -1  # any cache format without kernels
# The code of each quantised format for which kernels are compiled. `code_of` names the fields of a key.
FORMATS = {
    ("float8_e4m3fn", 512, 128, "float32", 64, 656, False): FP8_V32,
    ("float8_e4m3fn", 448, 64, "float8_e8m0fnu", 64, 584, True): FP8_V4,
    ("float8_e4m3fn", 512, 32, "float8_e8m0fnu", 0, 528, False): FP8_V41,
    ("float8_e4m3fn", 512, 32, "float8_e8m0fnu", 0, 528, True): FP8_V41_PAGE,
    ("float4_e2m1fn", 512, 16, "float8_e4m3fn", 0, 288, False): FP4_V41,
    ("float4_e2m1fn", 512, 16, "float8_e4m3fn", 0, 288, True): FP4_V41_PAGE,
}


def code_of(form: CacheFormat) -> int:
    """The ABI's code of a cache format; OTHER if no kernel is compiled for it."""
    if not form.quantized:
        return PLAIN
    fields = (form.codes, form.values, form.group, form.scales, form.rotary, form.token_bytes, form.planar)
    return FORMATS.get(fields, OTHER)


class Latent(ctypes.Structure):
    """`RaLatent`: attention over latent rows, dense or sparse."""

    OPERANDS = ("q", "kv", "lists", "lens", "sinks", "parts", "extra_kv", "extra_lists", "extra_lens")
    RESULTS = ("out", "lse", "max_logits", "partial_out", "partial_lse", "partial_max")
    NUMBERS = (
        "num_seqs", "num_q_tokens", "num_q_heads", "num_kv_heads", "d_qk",
        "dtype", "format", "extra_format", "sparse", "causal",
        "q_seq_stride", "q_token_stride", "q_head_stride",
        "num_pages", "page_size", "page_stride", "slot_stride", "head_stride",
        "list_seq_stride", "list_token_stride", "list_head_stride", "list_length",
        "lens_seq_stride", "lens_token_stride",
        "extra_num_pages", "extra_page_size", "extra_page_stride", "extra_slot_stride",
        "extra_list_seq_stride", "extra_list_token_stride", "extra_list_length",
        "extra_lens_seq_stride", "extra_lens_token_stride",
        "num_parts", "num_splits", "num_partials",
    )  # fmt: skip
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*OPERANDS, *RESULTS)),
        *((name, ctypes.c_int64) for name in NUMBERS),
        ("sm_scale", ctypes.c_double),
    )


class Schedule(ctypes.Structure):
    """`RaSchedule`: how the sequences' blocks of keys are divided among parts."""

    OPERANDS = ("lens", "extra_lens")
    RESULTS = ("parts", "num_splits")
    NUMBERS = ("num_seqs", "num_parts", "overhead", "sparse")
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*OPERANDS, *RESULTS)),
        *((name, ctypes.c_int64) for name in NUMBERS),
    )


# Every launcher takes the record of its call and a stream, and returns a code.
LAUNCHERS = {
    "ra_mla_decode_dense": Latent,
    "ra_sparse_mla_prefill": Latent,
    "ra_mla_decode_sparse_fp8": Latent,
    "ra_mla_decode_sparse_fp8_narrow": Latent,
    "ra_mla_decode_sparse_fp8_v4": Latent,
    "ra_mla_decode_sparse_v41": Latent,
    "ra_make_decode_schedule": Schedule,
}


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the types of the library's functions. Raises `BackendMissing` if its ABI is a different one."""
    version = library.ra_abi_version()
    if version != VERSION:
        raise BackendMissing(f"expected CUDA kernels of ABI version {VERSION}, got {version}")
    for name, record in (("ra_size_of_latent", Latent), ("ra_size_of_schedule", Schedule)):
        function = getattr(library, name)
        function.argtypes, function.restype = (), ctypes.c_int64
        if function() != ctypes.sizeof(record):
            raise BackendMissing(f"expected {name}() == {ctypes.sizeof(record)} of the CUDA kernels, got {function()}")
    number = ctypes.POINTER(ctypes.c_int)
    library.ra_status.argtypes = (ctypes.c_int, number, number, number)
    library.ra_status.restype = ctypes.c_int
    library.ra_versions.argtypes, library.ra_versions.restype = (number, number), None
    library.ra_error_string.argtypes = (ctypes.c_int,)
    library.ra_error_string.restype = ctypes.c_char_p
    for name, record in LAUNCHERS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = (ctypes.POINTER(record), ctypes.c_void_p), ctypes.c_int
    return library
