"""Memory, copies, warps and warpgroups: from one instruction to calls of the objects that do the work.

In the Python code `memory`, `shared`, `copies`, `warps` and `warpgroups` are those of the machine. Generic addresses,
local memory, clusters, `mbarrier`, TMA and cache policies are not known.
"""

import re
from collections.abc import Mapping

from ragged_attention.testing.ptx.arithmetic import Handler
from ragged_attention.testing.ptx.operands import Statement, Type, pieces_of

# Hints, which change how fast memory is and nothing else.
CACHE_HINTS = (
    *("ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc"),
    *(f"L1::{word}" for word in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")),
    *("L2::64B", "L2::128B", "L2::256B"),
)
SCOPES = ("cta", "cluster", "gpu", "sys")
# What orders memory accesses, which here happen in the order of the text, or schedules kernels.
WITHOUT_EFFECT = {
    *(f"membar.{scope}" for scope in ("cta", "gl", "sys")),
    *(f"fence.{order}.{scope}" for order in ("acq_rel", "sc", "acquire", "release") for scope in SCOPES),
    *("griddepcontrol.wait", "griddepcontrol.launch_dependents", "fence.proxy.async.global"),
}
WORD, LONG = ("u", 4), ("u", 8)
# The types that each atomic operation is known on.
ATOMIC = {
    **dict.fromkeys(("and", "or", "xor", "exch", "cas"), (WORD, LONG)),
    **dict.fromkeys(("min", "max"), (WORD, LONG, ("s", 4), ("s", 8))),
    **dict.fromkeys(("inc", "dec"), (WORD,)),
    "add": (WORD, LONG, ("s", 4), ("f", 4), ("f", 8), ("h", 2), ("h", 4)),
}
# How many registers hold the left and the right operand of `mma`.
SHAPES = {
    ("m16n8k8", "bf16"): (2, 1), ("m16n8k16", "bf16"): (4, 2), ("m16n8k8", "f16"): (2, 1), ("m16n8k16", "f16"): (4, 2),
    ("m16n8k4", "tf32"): (2, 1), ("m16n8k8", "tf32"): (4, 2), ("m16n8k32", "e4m3"): (4, 2),
    ("m16n8k32", "e5m2"): (4, 2),
}  # fmt: skip


def _hints(s: Statement) -> None:
    while s.take(*CACHE_HINTS):
        pass


def _space(s: Statement) -> str:
    """`memory` or `shared`."""
    return "memory" if s.need("global", "shared", "shared::cta") == "global" else "shared"


def load(s: Statement) -> list[str]:
    """ld.param, ld.global, ld.shared; vectors too."""
    t = s.type()
    s.expect(2)
    if s.flag("param"):
        return s.extend(s.names.parameter(s.operands[1], t.size), "u", t.size)
    space = _space(s)
    _hints(s)
    registers = _registers(s, 0, s.take("v2", "v4"))
    if any(register != "_" and s.names.size_of(register) < t.size for register in registers):
        raise s.refused("a register that is too narrow")
    letter = "s" if t.letter == "s" else "u"
    targets = "".join(f"{_target(s, register, letter)}, " for register in registers)
    address, offset = s.names.address(s.operands[1])
    dtype = f"{'i' if letter == 's' else 'u'}{t.size}"
    return [f"{space}.load(({targets}), {address}, {offset}, '{dtype}', {s.mask}, {s.line})"]


def store(s: Statement) -> list[str]:
    """st.global, st.shared; vectors too."""
    t, space = s.type(), _space(s)
    s.expect(2)
    _hints(s)
    operands = _registers(s, 1, s.take("v2", "v4"))
    letter = "f" if t.letter == "f" else "u"
    values = "".join(f"{s.names.value(operand, letter, t.size, letter == 'u')}, " for operand in operands)
    address, offset = s.names.address(s.operands[0])
    return [f"{space}.store(({values}), {address}, {offset}, {t.size}, {s.mask}, {s.line})"]


def _target(s: Statement, register: str, letter: str = "u") -> str:
    """The array of a register to write, or None for `_`, which takes what nobody wants."""
    return "None" if register == "_" else s.names.register(register, letter)


def _registers(s: Statement, index: int, vector: str | None) -> list[str]:
    pieces = pieces_of(s.operands[index])
    if len(pieces) != int((vector or "v1")[1:]):
        raise s.refused("a vector of another length")
    return pieces


def atomic(s: Statement) -> list[str]:
    """atom, red on global memory."""
    t = s.type()
    s.need("global")
    s.take("relaxed", "acquire", "release", "acq_rel")
    s.take("cta", "gpu", "sys")
    _hints(s)
    if t.letter == "h":
        s.need("noftz")
    operation = s.need(*ATOMIC)
    vector = s.take("v2", "v4")
    if t[:2] not in ATOMIC[operation]:
        raise s.refused("an atomic operation on these")
    returns = s.head == "atom"
    s.expect(2 + returns + (operation == "cas"))
    targets = _registers(s, 0, vector) if returns else []
    if any(target != "_" and s.names.size_of(target) != t.size for target in targets):
        raise s.refused("a result of another width")
    address, offset = s.names.address(s.operands[returns])
    values = [
        "".join(f"{s.names.value(piece, 'u' if t.letter == 'h' else t.letter, t.size)}, " for piece in row)
        for row in (_registers(s, index, vector) for index in range(returns + 1, len(s.operands)))
    ]
    results = "".join(f"{_target(s, target)}, " for target in targets)
    arguments = "".join(f"({row}), " for row in values)
    kind = t.half or t.letter
    return [
        f"memory.atomic('{operation}', '{kind}', {t.size}, ({results}), {address}, {offset}, ({arguments}), "
        f"{s.mask}, {s.line})"
    ]


def copy(s: Statement) -> list[str]:
    """cp.async of up to 16 bytes; its groups and their waits."""
    if s.instruction.opcode in ("cp.async.commit_group", "cp.async.wait_all"):
        s.expect(0)
        s.modifiers.clear()
        return [f"copies.{'commit' if 'commit' in s.instruction.opcode else 'wait_all'}({s.mask}, {s.line})"]
    if s.instruction.opcode == "cp.async.wait_group":
        s.expect(1)
        s.modifiers.clear()
        return [f"copies.wait({int(s.operands[0])}, {s.mask}, {s.line})"]
    s.need("async")
    s.need("ca", "cg")
    s.need("shared", "shared::cta")
    s.need("global")
    _hints(s)
    s.expect(3, 4)
    if len(s.operands) == 4 and s.names.kernel.type_of(s.operands[3].lstrip("!")) == "pred":
        raise s.refused("a predicate that has the source ignored")
    given = s.value(3, "u", 4) if len(s.operands) == 4 else "None"
    (target, target_offset), (source, source_offset) = map(s.names.address, s.operands[:2])
    size = int(s.operands[2], 0)
    return [f"copies.start({target}, {target_offset}, {source}, {source_offset}, {size}, {given}, {s.mask}, {s.line})"]


def nothing(s: Statement) -> list[str]:
    """Fences that are not needed here, and the one between the generic proxy and the asynchronous one, which is."""
    if s.instruction.opcode in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
        s.modifiers.clear()
        return [f"shared.fence({s.mask})"]
    if s.instruction.opcode in WITHOUT_EFFECT:
        s.modifiers.clear()
    elif s.instruction.opcode == "bar.warp.sync":
        s.modifiers.clear()
        s.expect(1)
        return [f"warps.meet({s.value(0, 'u', 4)}, {s.mask}, {s.line})"]
    if s.modifiers:
        raise s.refused("a fence or barrier that is not known")
    return []


def trap(s: Statement) -> list[str]:
    return [f"warps.trap({s.mask}, {s.line})"]


def shuffle(s: Statement) -> list[str]:
    """shfl.sync."""
    s.need("sync")
    mode = s.need("up", "down", "bfly", "idx")
    s.expect(5)
    if s.type() != Type("u", 4):
        raise s.refused("a shuffle of these")
    target, _, flag = (part.strip() for part in s.operands[0].partition("|"))
    inside = s.names.predicate(flag) if flag else "None"
    arguments = ", ".join(s.values((1, 2, 3, 4), "u", 4))
    return [f"warps.shuffle({s.names.register(target)}, {inside}, '{mode}', {arguments}, {s.mask}, {s.line})"]


def reduce(s: Statement) -> list[str]:
    """redux.sync."""
    s.need("sync")
    t = s.type()
    mode = s.need(*(("and", "or", "xor", "min", "max", "add") if t.letter == "u" else ("min", "max", "add")))
    s.expect(3)
    if t.letter not in "us" or t.size != 4:
        raise s.refused("a reduction of these")
    target, value = s.names.register(s.operands[0], t.letter), s.value(1, t.letter, 4)
    return [f"warps.reduce({target}, {value}, '{mode}', {s.value(2, 'u', 4)}, {s.mask}, {s.line})"]


def vote(s: Statement) -> list[str]:
    """vote.sync."""
    s.need("sync")
    mode = s.need("all", "any", "uni", "ballot")
    s.expect(3)
    t = s.type()
    if t != (Type("u", 4) if mode == "ballot" else Type("p", 1)):
        raise s.refused("a vote of these")
    target = s.names.register(s.operands[0]) if mode == "ballot" else s.names.predicate(s.operands[0])
    given, members = s.names.predicate(s.operands[1]), s.value(2, "u", 4)
    return [f"warps.vote({target}, {given}, '{mode}', {members}, {s.mask}, {s.line})"]


def matrix(s: Statement) -> list[str]:
    """ldmatrix, stmatrix: 8 x 8 matrices of 16 bits."""
    for modifier in ("sync", "aligned", "m8n8"):
        s.need(modifier)
    count, trans = s.need("x1", "x2", "x4"), s.flag("trans")
    s.need("shared", "shared::cta")
    s.need("b16")
    s.expect(2)
    storing = s.head == "stmatrix"
    address, offset = s.names.address(s.operands[0 if storing else 1])
    if len(pieces_of(s.operands[storing])) != int(count[1:]):
        raise s.refused("a vector of another length")
    name = "store_matrices" if storing else "load_matrices"
    return [f"warps.{name}({s.vector(int(storing))}, {address}, {offset}, {trans}, {s.mask}, {s.line})"]


def multiply(s: Statement) -> list[str]:
    """mma.sync with float32 sums."""
    for modifier in ("sync", "aligned", "row", "col"):
        s.need(modifier)
    shape = s.modifiers.pop(0)
    kinds, s.modifiers = s.modifiers, []
    s.expect(4)
    if len(kinds) != 4 or kinds[0] != "f32" or kinds[3] != "f32":
        raise s.refused("a product of these")
    lengths = SHAPES.get((shape, kinds[1])), SHAPES.get((shape, kinds[2]))
    numbers = [len(pieces_of(operand)) for operand in s.operands]
    if lengths[0] != lengths[1] or lengths[0] is None or numbers != [4, *lengths[0], 4]:
        raise s.refused("a product of these")
    if kinds[1] != kinds[2] and not kinds[1].startswith("e"):
        raise s.refused("a product of two kinds")
    return [
        f"warps.multiply({s.vector(0, 'f')}, {s.vector(1)}, {s.vector(2)}, {s.vector(3, 'f')}, "
        f"{tuple(kinds[1:3])}, {s.mask}, {s.line})"
    ]


def warpgroup(s: Statement) -> list[str]:
    """wgmma on bfloat16 and float16 with float32 sums; its groups and their waits."""
    kind = s.need("mma_async", "fence", "commit_group", "wait_group")
    s.need("sync")
    s.need("aligned")
    if kind == "fence":
        return [f"warpgroups.fence({s.mask}, {s.line})"]
    if kind == "commit_group":
        return [f"warpgroups.commit({s.mask}, {s.line})"]
    if kind == "wait_group":
        s.expect(1)
        return [f"warpgroups.wait({int(s.operands[0])}, {s.mask}, {s.line})"]
    kinds, s.modifiers = s.modifiers[1:], s.modifiers[:1]
    shape = re.fullmatch(r"m64n(\d+)k16", s.modifiers.pop())
    if not shape or kinds not in (["f32", "bf16", "bf16"], ["f32", "f16", "f16"]):
        raise s.refused("a product of these")
    from_registers = s.operands[1].startswith("{")
    s.expect(7 if from_registers else 8)
    signs_and_order = [int(text) for text in s.operands[4:]]
    if signs_and_order[:2] != [1, 1]:
        raise s.refused("an operand negated")
    columns = int(shape[1])
    if len(pieces_of(s.operands[0])) != columns // 2 or columns % 8:
        raise s.refused("a result of another size")
    order = (0, *signs_and_order[2:]) if from_registers else tuple(signs_and_order[2:])
    left = s.vector(1) if from_registers else s.names.register(s.operands[1])
    names = tuple(pieces_of(s.operands[0])), tuple(pieces_of(s.operands[1])) if from_registers else ()
    return [
        f"warpgroups.multiply({s.vector(0)}, {left}, {s.names.register(s.operands[2])}, "
        f"{s.names.predicate(s.operands[3])}, '{kinds[1]}', {order}, {s.names.constant(names)}, {s.mask}, {s.line})"
    ]


def address_space(s: Statement) -> list[str]:
    """cvta to and from global memory, whose addresses are the generic ones."""
    s.take("to")
    s.need("global")
    s.expect(2)
    t = s.type()
    return s.assign(s.value(1, "u", t.size), "u", t.size)


HANDLERS: Mapping[str, Handler] = {
    "ld": load, "st": store, "atom": atomic, "red": atomic, "cp": copy, "fence": nothing, "membar": nothing,
    "griddepcontrol": nothing, "bar": nothing, "trap": trap, "shfl": shuffle, "redux": reduce, "vote": vote,
    "ldmatrix": matrix, "stmatrix": matrix, "mma": multiply, "wgmma": warpgroup, "cvta": address_space,
}  # fmt: skip
