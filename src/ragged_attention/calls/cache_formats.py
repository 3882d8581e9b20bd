"""How a KV cache stores its elements: one table for keys and values per head and for latents."""

import dataclasses

from ragged_attention.calls.fields import QUANTIZED, WIDE_FLOATS

LAYOUTS = ("token", "page")
SCALE_BYTES = {"float32": 4, "float8_e8m0fnu": 1, "float8_e4m3fn": 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """What the bytes of one token of a cache hold, and where they lie.

    `plain` caches hold numbers of one dtype and no scales; where the numbers have 8 bits, the call may give a scale.
    `fp8_v32`: 512 e4m3 values, 4 float32 scales, 64 bfloat16 rotary values.
    `fp8_v4`: 448 e4m3 values, 64 bfloat16 rotary values, 7 e8m0 scales and a byte of padding.
    `fp8_v41`: 512 e4m3 values, 16 e8m0 scales; the rotary columns are quantised like the others.
    `fp4_v41`: 512 e2m1 values, two to a byte, that of the even column in its low half; 32 e4m3 scales.

    In the layout "token" the bytes of a token follow one another: values, scales, rotary columns. In the layout "page"
    a page of G tokens holds G rows of values and rotary columns, then G rows of scales and padding; so the values of
    token t of `fp8_v4` begin at byte 576 t of its page, its scales at 576 G + 8 t. `fp8_v32` is "token", `fp8_v4` is
    "page", the others can be either.
    """

    name: str
    codes: str  # the dtype of a stored value
    values: int = 0  # columns stored as codes, the first ones of a row; 0: all columns of a row of any width
    rotary: int = 0  # bfloat16 columns that follow them
    group: int = 0  # stored columns that share a scale; 0: the cache holds no scales
    scales: str = ""  # the dtype of a scale; empty: the cache holds no scales
    token_bytes: int = 0  # 0: the width of a row decides
    layouts: tuple[str, ...] = LAYOUTS[:1]  # those that exist, the format's own first
    layout: str = LAYOUTS[0]
    mixable: bool = False  # whether the second cache may have another format that is mixable

    @property
    def quantized(self) -> bool:
        """Whether the cache holds scales beside its values."""
        return bool(self.scales)

    @property
    def eight_bit(self) -> bool:
        """Whether the cache holds 8-bit numbers and no scales."""
        return not self.scales and self.codes in QUANTIZED

    @property
    def code_dtype(self) -> str | None:
        """The dtype of 8-bit numbers without scales, None for any other format."""
        return self.codes if self.eight_bit else None

    @property
    def width(self) -> int:
        """Columns of a row, `d_qk`."""
        return self.values + self.rotary

    @property
    def planar(self) -> bool:
        """Whether a page holds the scales of all its tokens after all their values."""
        return self.layout == "page"

    @property
    def num_groups(self) -> int:
        """Scales of a token."""
        return self.values // self.group if self.group else 0

    @property
    def packed_codes(self) -> bool:
        """Whether a byte holds the codes of two columns, that of the even column in its low half."""
        return self.codes == "float4_e2m1fn"

    @property
    def value_bytes(self) -> int:
        """Bytes of a token's values."""
        return self.values // 2 if self.packed_codes else self.values

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scales, without padding."""
        return self.num_groups * SCALE_BYTES[self.scales] if self.scales else 0

    @property
    def padded_scale_bytes(self) -> int:
        """Bytes of a token's scales, with padding."""
        return max(self.token_bytes - self.row_bytes, 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's values and rotary columns: in the layout "page", the distance of two rows."""
        return self.value_bytes + 2 * self.rotary

    @property
    def rotary_at(self) -> int:
        """The byte of a token's row at which its rotary columns begin."""
        return self.value_bytes if self.planar else self.value_bytes + self.padded_scale_bytes

    @property
    def folded(self) -> bool:
        """Whether scales are multiplied into logits and weights: no 16-bit operand holds the product of a code and a
        float32 scale, while bfloat16 holds the product of a code and an e8m0 or e4m3 scale exactly."""
        return self.scales == "float32"


E4M3, E2M1, E8M0 = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu"
CACHE_FORMATS = {
    form.name: form
    for form in (
        CacheFormat(
            name="fp8_v32", codes=E4M3, values=512, rotary=64, group=128, scales="float32", token_bytes=656
        ),
        CacheFormat(
            name="fp8_v4", codes=E4M3, values=448, rotary=64, group=64, scales=E8M0, token_bytes=584,
            layouts=LAYOUTS[1:], layout=LAYOUTS[1],
        ),
        CacheFormat(
            name="fp8_v41", codes=E4M3, values=512, group=32, scales=E8M0, token_bytes=528, layouts=LAYOUTS,
            mixable=True,
        ),
        CacheFormat(
            name="fp4_v41", codes=E2M1, values=512, group=16, scales=E4M3, token_bytes=288, layouts=LAYOUTS,
            mixable=True,
        ),
    )
}  # fmt: skip
PLAIN_FORMATS = {dtype: CacheFormat(name="plain", codes=dtype) for dtype in (*WIDE_FLOATS, *QUANTIZED)}


def laid_out(name: str, cache_layout: str | None) -> CacheFormat:
    """The quantised format of that name in a layout, by default its own."""
    form = CACHE_FORMATS[name]
    return form if cache_layout is None else dataclasses.replace(form, layout=cache_layout)


def stored_format(name: str, cache_layout: str | None, dtype: str) -> CacheFormat:
    """The format of that name, `plain` among them, in a layout; `dtype` is the cache's."""
    return PLAIN_FORMATS[dtype] if name == "plain" else laid_out(name, cache_layout)
