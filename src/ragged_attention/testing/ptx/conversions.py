"""Translates `cvt` to lines of Python.

Conversions to floats round to nearest even. To tf32 they may also round ties away from zero, and from float32 to 16-bit
floats also towards zero. Conversions to integers take any rounding and saturate. Conversions to 8-bit floats need
`.satfinite`. Other modes and formats are refused.
"""

from ragged_attention.testing.ptx.numbers import WHOLE
from ragged_attention.testing.ptx.operands import LETTERS, Statement, Type, type_of

PAIRS_OF_FP8 = ("e4m3x2", "e5m2x2")


def convert(s: Statement) -> list[str]:
    """Translate cvt.<modes>.<to>.<from>."""
    if len(s.modifiers) < 2:
        raise s.refused("fewer than two types")
    source, target = s.modifiers.pop(), s.modifiers.pop()
    s.expect(3 if target in ("bf16x2", "f16x2", *PAIRS_OF_FP8) and source == "f32" else 2)
    if source in PAIRS_OF_FP8 or target in PAIRS_OF_FP8:
        return _fp8(s, target, source)
    if target == "tf32" and source == "f32":
        ties = {"rna": "away", "rn": "even"}[s.need("rna", "rn")]
        return s.assign(f"n.tf32_bits({s.value(1, 'f', 4)}, '{ties}')", "u", 4)
    if target in ("bf16x2", "f16x2") and source == "f32":
        kind = target[:-2] if s.need("rn", "rz") == "rn" else f"{target[:-2]}_down"
        return s.assign(f"n.pack({s.value(1, 'f', 4)}, {s.value(2, 'f', 4)}, '{kind}')", "u", 4)
    to, of = type_of(target), type_of(source)
    if to is None or of is None or "p" in to.letter + of.letter or "x2" in target + source:
        raise s.refused("a conversion between these types")
    value = s.value(1, "u" if of.letter == "h" else of.letter, of.size, convert=of.letter in "us")
    if of.letter in "us" and to.letter in "us":
        return _integers(s, to, value)
    if to.letter in "us":
        return _to_integer(s, to, of, value)
    return _to_float(s, to, of, value)


def _fp8(s: Statement, target: str, source: str) -> list[str]:
    s.need("rn")
    if target == "f16x2":
        return s.assign(f"n.fp8_to_f16({s.value(1, 'u', 2)}, '{source[:4]}')", "u", 4)
    s.need("satfinite")
    if source == "f32":
        return s.assign(f"n.fp8_pair({s.value(1, 'f', 4)}, {s.value(2, 'f', 4)}, '{target[:4]}')", "u", 2)
    if source == "f16x2":
        word = s.value(1, "u", 4)
        high, low = f"n.f16_value(({word} >> 16).astype('u2'))", f"n.f16_value({word}.astype('u2'))"
        return s.assign(f"n.fp8_pair({high}, {low}, '{target[:4]}')", "u", 2)
    raise s.refused("a conversion between these types")


def _integers(s: Statement, to: Type, value: str) -> list[str]:
    dtype = f"{LETTERS[to.letter]}{to.size}"
    text = f"n.clip_integer({value}, '{dtype}')" if s.flag("sat") else f"{value}.astype('{dtype}')"
    return s.extend(text, to.letter, to.size)


def _to_integer(s: Statement, to: Type, of: Type, value: str) -> list[str]:
    mode = s.need(*WHOLE)
    s.take("sat")  # this conversion always saturates
    if of.letter == "h":
        value = f"n.{of.half}_value({value})"
    elif s.flag("ftz"):
        value = f"n.flush({value})"
    return s.extend(f"n.to_integer({value}, '{mode}', '{LETTERS[to.letter]}{to.size}')", to.letter, to.size)


def _to_float(s: Statement, to: Type, of: Type, value: str) -> list[str]:
    """A conversion to a float of 16, 32 or 64 bits."""
    ftz = s.flag("ftz")
    if ftz and Type("f", 4) not in (to, of):
        raise s.refused(".ftz without an f32")
    if of.letter == "h":
        value = f"n.{of.half}_value({value})"
    elif ftz and of == Type("f", 4):
        value = f"n.flush({value})"
    if to.letter == "h":
        # Compilers write `cvt.bf16.f16` without `.rn`, which can only mean rounding to nearest.
        down = "_down" if of == Type("f", 4) and s.take("rz") else ""
        if not down and s.take("rn") is None and of.letter != "h":
            raise s.refused("no rounding mode")
        if of.letter in "us":
            if of.size == 8:
                raise s.refused("a conversion between these types")
            value = f"{value}.astype('f8')"
        return s.assign(f"n.{to.half}_bits{down}({value})", "u", to.size)
    if of.letter in "us":
        s.need("rn")
        return s.assign(value, "f", to.size)
    same = (of.size if of.letter == "f" else 0) == to.size
    if same and (mode := s.take(*WHOLE)):
        value = f"n.WHOLE['{mode}']({value})"
    elif of.size > to.size:
        s.need("rn")
    if s.flag("sat"):
        value = f"n.saturate({value})"
    flushed = ftz and to == Type("f", 4) and of.size > 4
    return s.assign(f"n.flush({value})" if flushed else value, "f", to.size)


HANDLERS = {"cvt": convert}
