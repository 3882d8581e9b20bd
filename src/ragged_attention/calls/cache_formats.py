"""The formats of KV caches: how the bytes of a token store its keys and values, or its latent row."""

import dataclasses

from ragged_attention.calls.fields import QUANTIZED, WIDE_FLOATS
from ragged_attention.errors import InvalidInput

LAYOUTS = ("token", "page")
SCALE_BYTES = {"float32": 4, "float8_e8m0fnu": 1, "float8_e4m3fn": 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """The bytes of one token of a cache: their content and order.

    `plain` caches hold numbers of one dtype and no scales; for 8-bit numbers, the call may give a scale.
    `fp8_v32`: 512 e4m3 values, 4 float32 scales, 64 bfloat16 rotary values.
    `fp8_v4`: 448 e4m3 values, 64 bfloat16 rotary values, 7 e8m0 scales and a byte of padding.
    `fp8_v41`: 512 e4m3 values, 16 e8m0 scales; the rotary columns are quantised like all other columns.
    `fp4_v41`: 512 e2m1 values, two per byte with the even column in the low half; 32 e4m3 scales.

    In the layout "token" the bytes of a token follow one another: values, scales, rotary columns. In the layout "page"
    a page of G tokens holds G rows of values and rotary columns, then G rows of scales and padding; so the values of
    token t of `fp8_v4` begin at byte 576 t of its page, its scales at 576 G + 8 t. `fp8_v32` is always "token",
    `fp8_v4` is always "page", `fp8_v41` and `fp4_v41` can be "token" or "page".
    """

    name: str
    codes: str  # the dtype of a stored value
    values: int = 0  # number of columns stored as codes, from the first column on; 0 means every column of a row
    rotary: int = 0  # number of bfloat16 columns after the coded columns
    group: int = 0  # number of columns that share a scale; 0 if there are no scales
    scales: str = ""  # the dtype of a scale; empty if there are no scales
    token_bytes: int = 0  # 0 if it depends on the width of a row
    layouts: tuple[str, ...] = LAYOUTS[:1]  # the layouts of this format, the default first
    layout: str = LAYOUTS[0]
    mixable: bool = False  # whether a call's two caches may have different formats, if both formats are mixable

    @property
    def quantized(self) -> bool:
        """Whether the cache holds values with scales."""
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
        """The number of columns of a row, `d_qk`."""
        return self.values + self.rotary

    @property
    def planar(self) -> bool:
        """Whether a page holds the scales of all its tokens after all their values."""
        return self.layout == "page"

    @property
    def num_groups(self) -> int:
        """The number of scales of a token."""
        return self.values // self.group if self.group else 0

    @property
    def packed_codes(self) -> bool:
        """Whether a byte holds the codes of two columns, with the even column in the low half."""
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
        """Bytes of a token's values and rotary columns: in the layout "page", the stride of rows."""
        return self.value_bytes + 2 * self.rotary

    @property
    def rotary_at(self) -> int:
        """The byte of a token's row at which its rotary columns begin."""
        return self.value_bytes if self.planar else self.value_bytes + self.padded_scale_bytes

    @property
    def folded(self) -> bool:
        """Whether kernels multiply scales into logits and softmax weights, not into the operands of matrix products.

        bfloat16 holds the product of a code and an e8m0 or e4m3 scale exactly, but no 16-bit operand holds the product
        of a code and a float32 scale.
        """
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
    """The quantised format `name` in `cache_layout`, or in its default layout if that is None."""
    form = CACHE_FORMATS[name]
    return form if cache_layout is None else dataclasses.replace(form, layout=cache_layout)


def stored_format(name: str, cache_layout: str | None, dtype: str) -> CacheFormat:
    """The format `name`, quantised or `plain`, in a layout, for a cache of `dtype`."""
    return PLAIN_FORMATS[dtype] if name == "plain" else laid_out(name, cache_layout)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """How a cache stores one row, the keys or the values of a position and KV head: as codes, perhaps with scales.

    Without scales, a code is a number of the pages' dtype. The scales are in separate arrays, the *scale pages*
    `[P, G, K, n]`. Each of a row's n scales belongs to a block of `group` columns, or one scale belongs to the whole
    row. The value of a column is `code * scale`, or `(code - zero) * scale` if the format has zero points. In every
    format, the call's own scale, a number or an array of one scale per KV head, also multiplies the values.
    """

    name: str
    codes: str  # the dtype of a code; "uint4" codes are the numbers 0 to 15
    scales: str = ""  # the dtype of a stored scale; empty if no scales are stored
    group: int = 0  # the columns of a block with a scale of its own; 0 if one scale belongs to the whole row
    # The place of a row's zero point. "": the format has no zero points. "mantissa": it is the lowest 4 bits of the
    # float32 scale, which then do not belong to the scale. "stored": it follows the scale, on an axis of size two.
    zero: str = ""

    @property
    def packed_codes(self) -> bool:
        """Whether a byte holds the codes of two columns, with the even column in the low half."""
        return self.codes in FOUR_BITS

    @property
    def eight_bit(self) -> bool:
        """Whether the codes are 8-bit numbers without stored scales."""
        return not self.scales and self.codes in QUANTIZED

    @property
    def scaled(self) -> bool:
        """Whether the cache stores scales, in scale pages."""
        return bool(self.scales)

    @property
    def quantized(self) -> bool:
        """Whether a code has 8 bits or fewer."""
        return self.scaled or self.eight_bit

    @property
    def columns_per_element(self) -> int:
        """The number of columns that one element of the pages stores."""
        return 2 if self.packed_codes else 1

    def scales_of_row(self, width: int) -> int:
        """The numbers in scale pages for a row of `width` columns: its scales, and the zero point if it is stored."""
        if self.group:
            return width // self.group
        return 2 if self.zero == "stored" else 1


UINT4 = "uint4"
FOUR_BITS = (UINT4, E2M1)
E4M3_FNUZ = "float8_e4m3fnuz"
SCALED_FORMATS = (
    KvFormat(name="int8_token_head", codes="int8", scales="float32"),
    KvFormat(name="e4m3_token_head", codes=E4M3, scales="float32"),
    KvFormat(name="e4m3fnuz_token_head", codes=E4M3_FNUZ, scales="float32"),
    KvFormat(name="e5m2_token_head", codes="float8_e5m2", scales="float32"),
    KvFormat(name="int4_token_head", codes=UINT4, scales="float32", zero="mantissa"),
    KvFormat(name="int4_token_head", codes=UINT4, scales="float32", zero="stored"),
    KvFormat(name="int4_token_head", codes=UINT4, scales="float16", zero="stored"),
    KvFormat(name="nvfp4", codes=E2M1, scales=E4M3, group=16),
    KvFormat(name="mxfp8", codes=E4M3, scales=E8M0, group=32),
    KvFormat(name="mxfp4", codes=E2M1, scales=E8M0, group=32),
)
SCALE_PAGES_DTYPES = tuple(dict.fromkeys(form.scales for form in SCALED_FORMATS))
UNSCALED_FORMATS = {dtype: KvFormat(name="plain", codes=dtype) for dtype in (*WIDE_FLOATS, *QUANTIZED)}


def advice_on_scales(dtype: str) -> str:
    """The end of an error message about scales of a wrong dtype; empty unless that dtype is uint8."""
    names: dict[str, list[str]] = {}
    for form in SCALED_FORMATS:
        if form.group:
            names.setdefault(form.scales, []).append(form.name)
    views = " or ".join(f"{scales} ({', '.join(forms)})" for scales, forms in names.items())
    return f": view the bytes as {views}, as by .view(torch.{E4M3})" if dtype == "uint8" else ""


def advice_on_width(form: KvFormat, width: int) -> str:
    """The end of an error message about a row whose `width` is not a multiple of the format's `group`."""
    return f": append zeros up to {-(-width // form.group) * form.group}"


def element_of(form: KvFormat) -> str:
    """The dtype of the pages of a format."""
    return "uint8" if form.packed_codes else form.codes


def scaled_format(name: str, pages_dtype: str, scales_dtype: str, count: int) -> KvFormat:
    """The format of pages with `count` numbers per row in their scale pages. Errors call the scale pages `name`."""
    known = [form for form in SCALED_FORMATS if element_of(form) == pages_dtype]
    if not known:
        pages = " or ".join(dict.fromkeys(map(element_of, SCALED_FORMATS)))
        raise InvalidInput(f"expected {name} only with pages of {pages}, got pages of {pages_dtype}")
    same_scales = [form for form in known if form.scales == scales_dtype]
    matches = [form for form in same_scales if form.group or form.scales_of_row(0) == count]
    if not same_scales:
        expected = " or ".join(dict.fromkeys(form.scales for form in known))
        raise InvalidInput(
            f"expected {name}.dtype for pages of {pages_dtype} to be {expected}, "
            f"got {scales_dtype}{advice_on_scales(scales_dtype)}"
        )
    if not matches:
        expected = " or ".join("2 (scale, zero point)" if form.zero == "stored" else "1" for form in same_scales)
        raise InvalidInput(
            f"expected {name} for pages of {pages_dtype} to have {expected} {scales_dtype} for each row, got {count}"
        )
    return matches[0]


def named_format(name: str, zero: str | None, scales_dtype: str | None) -> KvFormat:
    """The format with scales that the arguments of `quantize_kv` describe."""
    known = [form for form in SCALED_FORMATS if form.name == name and form.codes in (*QUANTIZED, *FOUR_BITS)]
    if not known:
        names = dict.fromkeys(form.name for form in SCALED_FORMATS if form.codes in (*QUANTIZED, *FOUR_BITS))
        raise InvalidInput(f"expected format to be {' or '.join(map(repr, names))}, got {name!r}")
    if zero is not None and not known[0].zero:
        raise InvalidInput(f"expected zero=None with {name!r}, which has no zero points, got {zero!r}")
    of_zero = [form for form in known if form.zero == (known[0].zero if zero is None else zero)]
    matches = [form for form in of_zero if scales_dtype in (None, form.scales)]
    if not matches:
        expected = " or ".join(form.scales for form in of_zero)
        raise InvalidInput(f"expected scales_dtype of {name!r} to be {expected}, got {scales_dtype}")
    return matches[0]
