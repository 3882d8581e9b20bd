"""Translates arithmetic, comparison, selection and bit instructions to lines of Python.

Each function removes the modifiers that it knows and returns the lines, in which `n` is the module `numbers`. Rounding
is to nearest; `add`, `sub`, `mul` and `fma` of float32 may also round towards zero. Other modes are refused.
"""

from collections.abc import Callable, Mapping, Sequence

from ragged_attention.testing.ptx.operands import Statement, Type, pieces_of

Handler = Callable[[Statement], list[str]]
BINARY = {"add": "np.add", "sub": "np.subtract", "mul": "np.multiply"}
BITWISE = {"and": "np.bitwise_and", "or": "np.bitwise_or", "xor": "np.bitwise_xor", "not": "np.bitwise_not"}
LOGICAL = {"and": "np.logical_and", "or": "np.logical_or", "xor": "np.logical_xor", "not": "np.logical_not"}
COMPARISONS = {
    "eq": "np.equal", "ne": "np.not_equal", "lt": "np.less", "le": "np.less_equal", "gt": "np.greater",
    "ge": "np.greater_equal",
}  # fmt: skip
PACKED = ("s16x2", "u16x2")
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
APPROXIMATE = {
    "ex2": "np.exp2({})", "lg2": "np.log2({})", "sin": "np.sin({})", "cos": "np.cos({})", "tanh": "np.tanh({})",
    "rsqrt": "1 / np.sqrt({})", "rcp": "1 / {}", "sqrt": "np.sqrt({})",
}  # fmt: skip


def floats(s: Statement, t: Type, template: str, arguments: Sequence[int]) -> list[str]:
    """Lines for a formula of floats, with `.ftz` and `.sat`; `template` has a {} for each argument."""
    ftz, sat = s.flag("ftz"), s.flag("sat")
    if ftz and t.size != 4:
        raise s.refused(".ftz on a type other than f32")
    values = s.values(arguments, "f", t.size)
    text = template.format(*(f"n.flush({value})" if ftz else value for value in values))
    text = f"n.flush({text})" if ftz else text
    return s.assign(f"n.saturate({text})" if sat else text, "f", t.size)


def halves(s: Statement, t: Type, function: str, arguments: Sequence[int]) -> list[str]:
    """Lines for a function of 16-bit floats, one or two per register: computed in float64, then rounded once."""
    if s.flag("relu"):
        function = f"lambda *x: n.relu({function}(*x))"
    elif s.flag("sat"):
        function = f"lambda *x: n.saturate({function}(*x))"
    return s.assign(f"n.on_halves({function}, '{t.half}', {', '.join(s.values(arguments, 'u', t.size))})", "u", t.size)


def packed(s: Statement, function: str) -> list[str]:
    """Lines for a function of 16-bit integers, two per register."""
    dtype = {"s": "i2", "u": "u2"}[s.modifiers.pop()[0]]
    s.expect(3)
    function = f"lambda *x: n.relu({function}(*x))" if s.flag("relu") else function
    return s.assign(f"n.on_pairs({function}, '{dtype}', {', '.join(s.values((1, 2), 'u', 4))})", "u", 4)


def add(s: Statement) -> list[str]:
    """Translate `add`, `sub`, and `mul` of floats."""
    if s.head == "add" and s.modifiers[-1] in PACKED:
        return packed(s, "np.add")
    t = s.type()
    if "cc" in s.modifiers:
        return carrying(s, t)
    s.expect(3)
    function = BINARY[s.head]
    if t == Type("f", 4) and s.flag("rz"):
        exact = {"add": "n.odd_sum({}, {})", "sub": "n.odd_sum({}, -{})", "mul": "np.float64({}) * np.float64({})"}
        return floats(s, t, f"n.toward_zero({exact[s.head]})", (1, 2))
    if t.letter in "fh":
        s.take("rn")
    if t.letter == "h":
        return halves(s, t, function, (1, 2))
    if t.letter == "f" and {"ftz", "sat"} & {*s.modifiers}:
        return floats(s, t, function + "({}, {})", (1, 2))
    if s.flag("sat"):
        if t != Type("s", 4):
            raise s.refused(".sat on an integer type other than s32")
        return s.assign(f"n.saturated({function}, {', '.join(s.values((1, 2), 's', 4))})", "s", 4)
    return s.apply(function, s.values((1, 2), t.letter, t.size), t.letter, t.size)


def carrying(s: Statement, t: Type) -> list[str]:
    """Translate sums that read a carry or write a carry: add.cc, sub.cc, addc, subc, mad.cc and madc."""
    takes, leaves = s.head.endswith("c"), s.flag("cc")
    head = s.head.removesuffix("c")
    if t.letter not in "us" or t.size < 4:
        raise s.refused("a carry on this type")
    a, *rest = s.values(range(1, 4 if head == "mad" else 3), "u", t.size)
    s.expect(4 if head == "mad" else 3)
    if head == "mad":
        lower = s.need("lo", "hi") == "lo"
        if not lower and t.letter == "s":
            raise s.refused("the upper half of a signed product with a carry")
        b = rest.pop(0)
        a = f"np.multiply({a}, {b})" if lower else f"n.high_half({a}, {b}, False)"
    carry = s.names.carry()
    function = "n.borrow" if head == "sub" else "n.carry"
    lines = [f"total, over = {function}({a}, {rest[0]}, {carry if takes else None})"]
    lines += s.assign("total", "u", t.size)
    return lines + ([f"np.copyto({carry}, over, where={s.mask})"] if leaves else [])


def added_with_carry(s: Statement) -> list[str]:
    """Translate `addc`, `subc` and `madc`."""
    return carrying(s, s.type())


def mul(s: Statement) -> list[str]:
    if s.modifiers and s.modifiers[-1][:1] in "us":
        s.expect(3)
        return product(s, None)
    return add(s)


def mad(s: Statement) -> list[str]:
    if "cc" in s.modifiers:
        return carrying(s, s.type())
    s.expect(4)
    return product(s, 3)


def product(s: Statement, addend: int | None) -> list[str]:
    """Translate `mul` and `mad` of integers: the lower or upper half of the product, or all of it."""
    t, part = s.type(), s.need("lo", "hi", "wide")
    if t.letter not in "us":
        raise s.refused("an integer product on this type")
    a, b = s.values((1, 2), t.letter, t.size)
    size = t.size
    if part == "wide":
        size *= 2
        text = f"np.multiply({a}, {b}, dtype='{'i' if t.letter == 's' else 'u'}{size}')"
    elif part == "hi":
        text = f"n.high_half({a}, {b}, {t.letter == 's'})"
    else:
        text = f"np.multiply({a}, {b})"
    if addend is not None:
        text = f"np.add({text}, {s.value(addend, t.letter, size)})"
    return s.assign(text, t.letter, size)


def fma(s: Statement) -> list[str]:
    t = s.type()
    s.expect(4)
    if t == Type("f", 4) and s.flag("rz"):
        return floats(s, t, "n.toward_zero(n.odd_sum(np.float64({}) * np.float64({}), {}))", (1, 2, 3))
    s.need("rn")
    if t.letter == "h":
        return halves(s, t, "n.fma_wide", (1, 2, 3))
    if t.letter != "f":
        raise s.refused("fma on a type that is not a float")
    return floats(s, t, f"n.fma{8 * t.size}({{}}, {{}}, {{}})", (1, 2, 3))


def smaller(s: Statement) -> list[str]:
    """Translate `min` and `max`."""
    longer = {"min": "minimum", "max": "maximum"}[s.head]
    if s.modifiers[-1] in PACKED:
        return packed(s, f"np.{longer}")
    t = s.type()
    s.expect(3)
    if t.letter in "us":
        if s.flag("relu"):
            return s.assign(f"np.maximum(np.{longer}({', '.join(s.values((1, 2), 's', t.size))}), 0)", "s", t.size)
        return s.apply(f"np.{longer}", s.values((1, 2), t.letter, t.size), t.letter, t.size)
    function = f"n.{longer}_nan" if s.flag("NaN") else f"n.{longer}"
    if t.letter == "f" and s.flag("xorsign"):
        s.need("abs")
        return floats(s, t, f"n.signed_by_both({function}(np.abs({{0}}), np.abs({{1}})), {{0}}, {{1}})", (1, 2))
    return halves(s, t, function, (1, 2)) if t.letter == "h" else floats(s, t, function + "({}, {})", (1, 2))


def sign(s: Statement) -> list[str]:
    """Translate `neg` and `abs`."""
    t = s.type()
    s.expect(2)
    if t.letter == "h":
        function = {"neg": "n.negate_halves", "abs": "n.absolute_halves"}[s.head]
        return s.assign(f"{function}({s.value(1, 'u', t.size)})", "u", t.size)
    function = {"neg": "np.negative", "abs": "np.abs"}[s.head]
    if t.letter == "f" and "ftz" in s.modifiers:
        return floats(s, t, function + "({})", (1,))
    return s.apply(function, s.values((1,), t.letter, t.size), t.letter, t.size)


def divide(s: Statement) -> list[str]:
    """Translate `div` and `rem`."""
    t = s.type()
    s.expect(3)
    if t.letter in "us":
        function = {"div": "n.quotient", "rem": "n.remainder"}[s.head]
        return s.assign(f"{function}({', '.join(s.values((1, 2), t.letter, t.size))})", t.letter, t.size)
    if s.head != "div" or t.letter != "f" or (s.need("rn", "full", "approx") != "rn" and t.size != 4):
        raise s.refused("a division on this type or with this rounding")
    return floats(s, t, "np.divide({}, {})", (1, 2))


def function(s: Statement) -> list[str]:
    """Translate `ex2`, `lg2`, `sin`, `cos`, `tanh`, `rsqrt`, `rcp` and `sqrt`."""
    t = s.type()
    s.expect(2)
    approximate = s.need("approx", *(("rn",) if s.head in ("rcp", "sqrt") else ())) == "approx"
    if t.letter == "h" and s.head in ("ex2", "tanh"):
        name = APPROXIMATE[s.head].partition("(")[0]
        flushing = f"lambda x: n.flush_halves({name}(n.flush_halves(x, '{t.half}')), '{t.half}')"
        return halves(s, t, flushing if s.flag("ftz") else name, (1,))
    if t.letter != "f" or (approximate and t.size != 4):
        raise s.refused("this function on this type")
    return floats(s, t, APPROXIMATE[s.head], (1,))


def bitwise(s: Statement) -> list[str]:
    """Translate `and`, `or`, `xor` and `not`."""
    t = s.type()
    count = 1 if s.head == "not" else 2
    s.expect(count + 1)
    if t.letter not in "up":
        raise s.refused("a bitwise operation on this type")
    functions = LOGICAL if t.letter == "p" else BITWISE
    return s.apply(functions[s.head], s.values(range(1, count + 1), t.letter, t.size), t.letter, t.size)


def shift(s: Statement) -> list[str]:
    """Translate `shl` and `shr`."""
    t = s.type()
    s.expect(3)
    if t.letter not in "us":
        raise s.refused("a shift on this type")
    name = {"shl": "n.shift_left", "shr": "n.shift_right"}[s.head]
    return s.assign(f"{name}({s.value(1, t.letter, t.size)}, {s.value(2, 'u', 4)})", t.letter, t.size)


def funnel_shift(s: Statement) -> list[str]:
    """Translate `shf`."""
    left, wrap = s.need("l", "r") == "l", s.need("wrap", "clamp") == "wrap"
    s.expect(4)
    if s.type() != Type("u", 4):
        raise s.refused("a shift on this type")
    return s.assign(f"n.funnel({', '.join(s.values((1, 2, 3), 'u', 4))}, {left}, {wrap})", "u", 4)


def bfe(s: Statement) -> list[str]:
    t = s.type()
    s.expect(4)
    arguments = [s.value(1, "u", t.size), *s.values((2, 3), "u", 4)]
    return s.assign(f"n.bfe({', '.join(arguments)}, {t.letter == 's'})", "u", t.size)


def bfi(s: Statement) -> list[str]:
    t = s.type()
    s.expect(5)
    return s.assign(f"n.bfi({', '.join([*s.values((1, 2), 'u', t.size), *s.values((3, 4), 'u', 4)])})", "u", t.size)


def lop3(s: Statement) -> list[str]:
    t = s.type()
    s.expect(5)
    return s.assign(f"n.lop3({', '.join(s.values((1, 2, 3), 'u', t.size))}, {int(s.operands[4], 0)})", "u", t.size)


def prmt(s: Statement) -> list[str]:
    mode = s.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    t = s.type() if s.modifiers else None
    s.expect(4)
    if t != Type("u", 4):
        raise s.refused("a permutation on this type")
    return s.assign(f"n.prmt({', '.join(s.values((1, 2, 3), 'u', 4))}, {mode!r})", "u", 4)


def count(s: Statement) -> list[str]:
    """Translate `popc`, `clz` and `brev`."""
    t = s.type()
    s.expect(2)
    name = {"popc": "count_ones", "clz": "leading_zeros", "brev": "reverse_bits"}[s.head]
    return s.assign(f"n.{name}({s.value(1, 'u', t.size)})", "u", t.size if s.head == "brev" else 4)


def copysign(s: Statement) -> list[str]:
    t = s.type()
    s.expect(3)
    return s.assign(f"np.copysign({s.value(2, 'f', t.size)}, {s.value(1, 'f', t.size)})", "f", t.size)


def compare(s: Statement) -> list[str]:
    """Translate `setp`: a comparison, which may be combined with a predicate.

    A second target gets the negated comparison, combined with the same predicate. For pairs of 16-bit floats, the two
    targets get the comparisons of the low and of the high numbers.
    """
    t = s.type()
    comparison = s.modifiers.pop(0)
    joint = s.take("and", "or", "xor")
    s.expect(4 if joint else 3)
    if t.letter == "h" and t.size == 4:
        return _compare_pairs(s, t, comparison, joint)
    lines = [f"holds = {_comparison(s, t, comparison)}"]
    other = s.names.predicate(s.operands[3]) if joint else ""
    for target, result in zip(s.operands[0].split("|"), ("holds", "np.logical_not(holds)"), strict=False):
        if target.strip() != "_":
            joined = f"np.logical_{joint}({result}, {other})" if joint else result
            lines.append(f"np.copyto({s.names.predicate(target.strip())}, {joined}, where={s.mask})")
    return lines


def _compare_pairs(s: Statement, t: Type, comparison: str, joint: str | None) -> list[str]:
    if joint:
        raise s.refused("a comparison of pairs that is combined with a predicate")
    lines = []
    for target, number in zip(s.operands[0].split("|"), ("{} & 0xFFFF", "{} >> 16"), strict=True):
        a, b = (f"n.{t.half}_value(({number.format(value)}).astype('u2'))" for value in s.values((1, 2), "u", 4))
        lines.append(
            f"np.copyto({s.names.predicate(target.strip())}, {_of_floats(s, comparison, a, b)}, where={s.mask})"
        )
    return lines


def set_halves(s: Statement) -> list[str]:
    """Translate `set`: 1.0 where a comparison of 16-bit floats holds, else 0.0."""
    t, comparison = s.type(), s.modifiers.pop(0)
    s.expect(3)
    if t.letter != "h" or s.type() != t:
        raise s.refused("types other than one 16-bit float for operands and result")
    return halves(s, t, f"lambda a, b: ({_of_floats(s, comparison, 'a', 'b')}).astype('f8')", (1, 2))


def _comparison(s: Statement, t: Type, name: str) -> str:
    if t.letter not in "fh":
        name = UNSIGNED.get(name, name) if t.letter == "u" else name
        if name not in COMPARISONS or t.letter == "p":
            raise s.refused("an unknown comparison")
        return f"{COMPARISONS[name]}({', '.join(s.values((1, 2), t.letter, t.size))})"
    if t.letter == "h":
        a, b = (f"n.{t.half}_value({value})" for value in s.values((1, 2), "u", 2))
    else:
        a, b = s.values((1, 2), "f", t.size)
        if s.flag("ftz"):
            a, b = f"n.flush({a})", f"n.flush({b})"
    return _of_floats(s, name, a, b)


def _of_floats(s: Statement, name: str, a: str, b: str) -> str:
    if name in ("num", "nan"):
        return f"np.logical_not(n.either_nan({a}, {b}))" if name == "num" else f"n.either_nan({a}, {b})"
    ordered = name if name in COMPARISONS else name.removesuffix("u")
    if ordered not in COMPARISONS:
        raise s.refused("an unknown comparison")
    text = f"{COMPARISONS[ordered]}({a}, {b})"
    if name != ordered:  # an unordered comparison is true for NaN
        return f"np.logical_or({text}, n.either_nan({a}, {b}))"
    return f"np.logical_and({text}, np.logical_not(n.either_nan({a}, {b})))" if name == "ne" else text


def select(s: Statement) -> list[str]:
    """Translate `selp`."""
    t = s.type()
    s.expect(4)
    letter = "u" if t.letter == "h" else t.letter
    a, b = s.values((1, 2), letter, t.size)
    return s.assign(f"np.where({s.names.predicate(s.operands[3])}, {a}, {b})", letter, t.size)


def move(s: Statement) -> list[str]:
    """Translate `mov`: a plain copy, or packing halves or quarters into a wider register, or unpacking them."""
    t = s.type()
    s.expect(2)
    if t.letter == "p":
        return s.assign(s.names.predicate(s.operands[1]), "p")
    if s.operands[1].startswith("{"):
        parts = pieces_of(s.operands[1])
        size = t.size // len(parts)
        words = [f"{s.names.value(part, 'u', size)}.astype('u{t.size}')" for part in parts]
        shifted = [f"({word} << np.uint{8 * t.size}({8 * size * index}))" for index, word in enumerate(words)]
        return s.assign(" | ".join(shifted), "u", t.size)
    if s.operands[0].startswith("{"):
        parts = pieces_of(s.operands[0])
        size, whole = t.size // len(parts), s.value(1, "u", t.size)
        if any(part != "_" and s.names.size_of(part) != size for part in parts):
            raise s.refused("parts whose widths do not match")
        return [
            f"np.copyto({s.names.register(part)}, {whole} >> np.uint{8 * t.size}({8 * size * index}), "
            f"casting='unsafe', where={s.mask})"
            for index, part in enumerate(parts)
            if part != "_"
        ]
    return s.assign(s.value(1, "u", t.size), "u", t.size)


HANDLERS: Mapping[str, Handler] = {
    "add": add, "sub": add, **dict.fromkeys(("addc", "subc", "madc"), added_with_carry),
    "mul": mul, "mad": mad, "fma": fma, "min": smaller, "max": smaller, "neg": sign,
    "abs": sign, "div": divide, "rem": divide,
    **dict.fromkeys(APPROXIMATE, function), **dict.fromkeys(BITWISE, bitwise),
    "shl": shift, "shr": shift, "shf": funnel_shift, "bfe": bfe, "bfi": bfi, "lop3": lop3, "prmt": prmt, "popc": count,
    "clz": count, "brev": count, "copysign": copysign, "setp": compare, "set": set_halves, "selp": select, "mov": move,
}  # fmt: skip
