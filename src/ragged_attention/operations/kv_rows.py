"""Conversions of K or V rows to and from the formats of caches with scale pages, such as for inspecting a cache."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ragged_attention.calls import DequantizeKv, QuantizeKv
from ragged_attention.operations.base import Array, FrontEnd, Memory


class KvRows(FrontEnd[Array, Memory]):
    """Quantisation and dequantisation of K or V rows."""

    def quantize_kv(
        self,
        x: Array,
        format: str,
        scale: float | Array | None = None,
        *,
        zero: Literal["mantissa", "stored"] | None = None,
        scales_dtype: Any = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Array, Array]:
        """Quantise rows of keys or values to the codes and scales that `write_kv_pages` stores.

        Args:
            x: [..., K, D] float32, float16 or bfloat16, such as new rows [T, K, D] or pages [P, G, K, D]. D is from 16
                to 512, a multiple of 8 and of the format's block size.
            format: "int8_token_head", "e4m3_token_head", "e4m3fnuz_token_head", "e5m2_token_head", "int4_token_head",
                "nvfp4", "mxfp8" or "mxfp4". `write_kv_pages` describes them.
            scale: the `k_scale` or `v_scale` of the cache, a number or an array [] or [K].
            zero: where int4_token_head stores the zero point: "mantissa" (the default) in the lowest 4 bits of the
                float32 scale, "stored" after the scale.
            scales_dtype: the dtype of scales in int4_token_head with a stored zero point: "float32" (the default) or
                "float16". In other formats it is fixed.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            codes [..., K, D], or uint8 [..., K, D / 2] if they have 4 bits, and scales: [..., K] for one scale per row,
            [..., K, 2] with stored zero points, and otherwise [..., K, n], one scale for each block of a row. Every
            backend makes the same bytes, apart from subnormal numbers on devices that flush them.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(x=x, format=format, scale=scale, zero=zero, scales_dtype=scales_dtype)
        return self.run(QuantizeKv, arguments, backend, options)

    def dequantize_kv(
        self,
        codes: Array,
        scales: Array | None = None,
        scale: float | Array | None = None,
        dtype: Any = "float32",
        *,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """Dequantise rows of a cache.

        Args:
            codes: rows [..., K, D], such as pages [P, G, K, D], or uint8 [..., K, D / 2] with 4-bit codes. Combined
                pages hold keys in `kv_pages[:, :, 0::2]` and values in `kv_pages[:, :, 1::2]`.
            scales: the scales of the rows, as `quantize_kv` returns them; None for codes without scales. The format
                follows from the dtypes and shapes, as in `ragged_paged_attention`.
            scale: the `k_scale` or `v_scale` of the cache, a number or an array [] or [K]. The default is 1, except for
                int8 codes without `scales`, which need it.
            dtype: the dtype of the result, "float32", "float16" or "bfloat16", or the framework's dtype of that name.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            [..., K, D] of `dtype`: computed in float32, then rounded once.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(codes=codes, scales=scales, scale=scale, dtype=dtype)
        return self.run(DequantizeKv, arguments, backend, options)
