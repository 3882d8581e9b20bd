"""Translates instructions on memory, copies, warps and warpgroups to calls of the objects that execute them.

In the generated Python, `memory`, `shared`, `copies`, `warps` and `warpgroups` are the machine's objects. Instructions
on mbarriers and tensor maps are in `asynchronous`. Generic addresses of shared memory and clusters are refused.
"""

import re
from collections.abc import Mapping

from ragged_attention.testing.ptx import asynchronous
from ragged_attention.testing.ptx.arithmetic import Handler
from ragged_attention.testing.ptx.operands import LOCAL_WINDOW, PARAM_WINDOW, Statement, Type, pieces_of

# Cache hints, which affect only speed.
CACHE_HINTS = (
    *("ca", "cg", "cs", "cv", "lu", "wb", "wt"),
    *(f"L1::{word}" for word in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")),
    *("L2::64B", "L2::128B", "L2::256B"),
)
# Fences that order accesses of different CTAs.
FENCES = {
    *("membar.gl", "membar.sys"),
    *(f"fence.{order}.{scope}" for order in ("acq_rel", "sc", "acquire", "release") for scope in ("gpu", "sys")),
}
# Fences within a CTA, and instructions that schedule kernels. Accesses of a CTA happen in the order of the text here.
WITHOUT_EFFECT = {
    "membar.cta",
    *(f"fence.{order}.{scope}" for order in ("acq_rel", "sc", "acquire", "release") for scope in ("cta", "cluster")),
    "fence.proxy.async.global",
    "griddepcontrol.launch_dependents",  # lets the next launch begin before this one has ended
    "fence.mbarrier_init.release.cluster",  # only for the other CTAs of a cluster, and there are no clusters
}
WORD, LONG = ("u", 4), ("u", 8)
# The types that each atomic operation supports.
ATOMIC = {
    **dict.fromkeys(("and", "or", "xor", "exch", "cas"), (WORD, LONG)),
    **dict.fromkeys(("min", "max"), (WORD, LONG, ("s", 4), ("s", 8))),
    **dict.fromkeys(("inc", "dec"), (WORD,)),
    "add": (WORD, LONG, ("s", 4), ("f", 4), ("f", 8), ("h", 2), ("h", 4)),
}
# The numbers of registers of the left and the right operand of `mma`, by the shape and the bits of an element.
SHAPES = {
    ("m16n8k8", 16): (2, 1), ("m16n8k16", 16): (4, 2), ("m16n8k4", 32): (2, 1), ("m16n8k8", 32): (4, 2),
    ("m16n8k16", 8): (2, 1), ("m16n8k32", 8): (4, 2),
}  # fmt: skip
BITS = {"bf16": 16, "f16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
# MIXED: element types that one matrix product may combine. SUMS: accumulator types, by element type.
MIXED = ({"e4m3", "e5m2"}, {"s8", "u8"})
SUMS = {
    **dict.fromkeys(("bf16", "tf32"), ("f32",)), **dict.fromkeys(("f16", "e4m3", "e5m2"), ("f32", "f16")),
    **dict.fromkeys(("s8", "u8"), ("s32",)),
}  # fmt: skip


def _expect_product(s: Statement, left: str, right: str, sums: str) -> None:
    """Refuse element types, and accumulator types, that cannot be combined."""
    if left != right and not any({left, right} <= mixed for mixed in MIXED):
        raise s.refused("a product of two element types")
    if sums not in SUMS.get(left, ()):
        raise s.refused("a product of these types and shapes")


def _hints(s: Statement) -> None:
    while s.take(*CACHE_HINTS):
        pass


def _space(s: Statement) -> str:
    """The space that an access names: `memory`, `shared` or `local`; if it names none, `generic`."""
    modifier = s.take("global", "shared", "shared::cta", "local")
    return {"global": "memory", "local": "local", None: "generic"}.get(modifier, "shared")


def _address(s: Statement, operand: str, space: str) -> tuple[str, int]:
    """The name of the array with the address register's values, and the offset in bytes.

    The name is "None" if the address is a symbol or a number.
    """
    address, offset = s.names.address(operand, space == "params")
    if space == "generic" and address == "None":
        raise s.refused("a generic address that is not in a register")
    return address, offset


def load(s: Statement) -> list[str]:
    """Translate `ld` from parameter, global, shared, local and generic memory, also of vectors."""
    t = s.type()
    s.expect(2)
    if s.modifiers == ["param"] and s.names.is_parameter(s.operands[1]):
        s.modifiers.clear()
        return s.extend(s.names.parameter(s.operands[1], t.size), "u", t.size)
    space = "params" if s.flag("param") else _space(s)
    constant = space == "memory" and s.flag("nc")
    _hints(s)
    strong = _strong(s, "acquire") if space == "memory" else None
    registers = _registers(s, 0, s.take("v2", "v4"))
    if any(register != "_" and s.names.size_of(register) < t.size for register in registers):
        raise s.refused("a register that is too narrow")
    letter = "s" if t.letter == "s" else "u"
    targets = "".join(f"{_target(s, register, letter)}, " for register in registers)
    address, offset = _address(s, s.operands[1], space)
    ends = f"{s.mask}, {s.line}"
    if strong:
        if t.letter == "s" or len(registers) > 1:
            raise s.refused("an ordered load of a vector or of signed integers")
        orders = (strong == "acquire", False)
        return [f"memory.atomic('look', 'u', {t.size}, ({targets}), {address}, {offset}, (), {orders}, {ends})"]
    dtype = f"{'i' if letter == 's' else 'u'}{t.size}"
    name = "load_constant" if constant else "load"
    return [f"{space}.{name}(({targets}), {address}, {offset}, '{dtype}', {ends})"]


def store(s: Statement) -> list[str]:
    """Translate `st` to global, shared, local and generic memory, also of vectors."""
    t, space = s.type(), _space(s)
    s.expect(2)
    _hints(s)
    strong = _strong(s, "release") if space == "memory" else None
    operands = _registers(s, 1, s.take("v2", "v4"))
    letter = "f" if t.letter == "f" else "u"
    values = "".join(f"{s.names.value(operand, letter, t.size, letter == 'u')}, " for operand in operands)
    address, offset = _address(s, s.operands[0], space)
    ends = f"{s.mask}, {s.line}"
    if strong:
        if letter == "f" or len(operands) > 1:
            raise s.refused("an ordered store of a vector or of floats")
        orders = (False, strong == "release")
        return [f"memory.atomic('exch', 'u', {t.size}, (), {address}, {offset}, (({values}),), {orders}, {ends})"]
    return [f"{space}.store(({values}), {address}, {offset}, {t.size}, {ends})"]


def _strong(s: Statement, order: str) -> str | None:
    """Remove and return the order of an access ("relaxed", "volatile" or `order`), and remove its scope."""
    semantics = s.take("relaxed", "volatile", order)
    if semantics in ("relaxed", order):
        s.need("cta", "gpu", "sys")
    return semantics


def _target(s: Statement, register: str, letter: str = "u") -> str:
    """The array of a register to write, or "None" for `_`, which discards the value."""
    return "None" if register == "_" else s.names.register(register, letter)


def _registers(s: Statement, index: int, vector: str | None) -> list[str]:
    pieces = pieces_of(s.operands[index])
    if len(pieces) != int((vector or "v1")[1:]):
        raise s.refused("a vector of another length")
    return pieces


def atomic(s: Statement) -> list[str]:
    """Translate `atom` and `red` on global and shared memory."""
    t = s.type()
    space = s.need("global", "shared", "shared::cta")
    order = s.take("relaxed", "acquire", "release", "acq_rel")
    s.take("cta", "gpu", "sys")
    orders = order in ("acquire", "acq_rel"), order in ("release", "acq_rel")
    _hints(s)
    if t.letter == "h":
        s.need("noftz")
    operation = s.need(*ATOMIC)
    vector = s.take("v2", "v4")
    if t[:2] not in ATOMIC[operation]:
        raise s.refused("an atomic operation on this type")
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
    call = f"'{operation}', '{kind}', {t.size}, ({results}), {address}, {offset}, ({arguments})"
    if space != "global":
        if vector:
            raise s.refused("an atomic operation on a vector in shared memory")
        return [f"shared.change({call}, {s.mask}, {s.line})"]
    return [f"memory.atomic({call}, {orders}, {s.mask}, {s.line})"]


def copy(s: Statement) -> list[str]:
    """Translate cp.async of up to 16 bytes, its groups and their waits. Bulk copies are in `asynchronous`."""
    if "bulk" in s.modifiers:
        return asynchronous.bulk_copy(s)
    if "mbarrier" in s.modifiers:
        return asynchronous.arrive_after_copies(s)
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
    policy = s.flag("L2::cache_hint")
    _hints(s)
    s.expect(3 + policy, 4 + policy)
    if policy:  # a cache policy has no effect, but must be an operand of 8 bytes
        s.value(len(s.operands) - 1, "u", 8)
    sized = len(s.operands) == 4 + policy
    if sized and s.names.kernel.type_of(s.operands[3].lstrip("!")) == "pred":
        raise s.refused("a predicate that lets the source be ignored")
    source_size = s.value(3, "u", 4) if sized else "None"
    (target, target_offset), (source, source_offset) = map(s.names.address, s.operands[:2])
    size = int(s.operands[2], 0)
    places = f"{target}, {target_offset}, {source}, {source_offset}"
    return [f"copies.start({places}, {size}, {source_size}, {s.mask}, {s.line})"]


def fence(s: Statement) -> list[str]:
    """Translate fences, griddepcontrol and bar.warp.sync. Some of them have no effect here."""
    if s.instruction.opcode in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
        s.modifiers.clear()
        return [f"shared.fence({s.mask})"]
    if s.instruction.opcode.startswith("fence.proxy.tensormap"):
        return asynchronous.acquire_map(s)
    if s.instruction.opcode in FENCES:
        s.modifiers.clear()
        return [f"memory.fence({s.mask})"]
    if s.instruction.opcode == "griddepcontrol.wait":
        s.modifiers.clear()
        return [f"memory.wait_for_launch_before({s.mask})"]
    if s.instruction.opcode in WITHOUT_EFFECT:
        s.modifiers.clear()
    elif s.instruction.opcode == "bar.warp.sync":
        s.modifiers.clear()
        s.expect(1)
        return [f"warps.meet({s.value(0, 'u', 4)}, {s.mask}, {s.line})"]
    if s.modifiers:
        raise s.refused("an unknown fence or barrier")
    return []


def elect(s: Statement) -> list[str]:
    """Translate elect.sync: the lowest of the members is the leader."""
    s.need("sync")
    s.expect(2)
    target, _, flag = (part.strip() for part in s.operands[0].partition("|"))
    members = s.value(1, "u", 4)
    return [f"warps.elect({_target(s, target)}, {s.names.predicate(flag)}, {members}, {s.mask}, {s.line})"]


def registers(s: Statement) -> list[str]:
    """Translate setmaxnreg, of which only the sum over a CTA matters here."""
    s.need("inc", "dec")
    for modifier in ("sync", "aligned", "u32"):
        s.need(modifier)
    s.expect(1)
    count = int(s.operands[0])
    if count % 8 or not 24 <= count <= 256:
        raise s.refused("an invalid number of registers")
    return [f"warps.reserve({count}, {s.mask}, {s.line})"]


def trap(s: Statement) -> list[str]:
    return [f"warps.trap({s.mask}, {s.line})"]


def shuffle(s: Statement) -> list[str]:
    """Translate shfl.sync."""
    s.need("sync")
    mode = s.need("up", "down", "bfly", "idx")
    s.expect(5)
    if s.type() != Type("u", 4):
        raise s.refused("a shuffle of this type")
    target, _, flag = (part.strip() for part in s.operands[0].partition("|"))
    inside = s.names.predicate(flag) if flag else "None"
    arguments = ", ".join(s.values((1, 2, 3, 4), "u", 4))
    return [f"warps.shuffle({s.names.register(target)}, {inside}, '{mode}', {arguments}, {s.mask}, {s.line})"]


def reduce(s: Statement) -> list[str]:
    """Translate redux.sync."""
    s.need("sync")
    t = s.type()
    mode = s.need(*(("and", "or", "xor", "min", "max", "add") if t.letter == "u" else ("min", "max", "add")))
    s.expect(3)
    if t.letter not in "us" or t.size != 4:
        raise s.refused("a reduction of this type")
    target, value = s.names.register(s.operands[0], t.letter), s.value(1, t.letter, 4)
    return [f"warps.reduce({target}, {value}, '{mode}', {s.value(2, 'u', 4)}, {s.mask}, {s.line})"]


def vote(s: Statement) -> list[str]:
    """Translate vote.sync."""
    s.need("sync")
    mode = s.need("all", "any", "uni", "ballot")
    s.expect(3)
    t = s.type()
    if t != (Type("u", 4) if mode == "ballot" else Type("p", 1)):
        raise s.refused("a vote of this type")
    target = s.names.register(s.operands[0]) if mode == "ballot" else s.names.predicate(s.operands[0])
    flag, members = s.names.predicate(s.operands[1]), s.value(2, "u", 4)
    return [f"warps.vote({target}, {flag}, '{mode}', {members}, {s.mask}, {s.line})"]


def matrix(s: Statement) -> list[str]:
    """Translate ldmatrix and stmatrix: 8 x 8 matrices of 16-bit elements."""
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
    """Translate mma.sync."""
    for modifier in ("sync", "aligned", "row", "col"):
        s.need(modifier)
    limited = s.flag("satfinite")
    shape, *kinds = s.modifiers
    s.modifiers = []
    s.expect(4)
    if len(kinds) != 4 or kinds[0] != kinds[3]:
        raise s.refused("a product of these types and shapes")
    sums, left, right = kinds[:3]
    _expect_product(s, left, right, sums)
    lengths = SHAPES.get((shape, BITS[left]))
    count = 2 if sums == "f16" else 4
    if lengths is None or [len(pieces_of(operand)) for operand in s.operands] != [count, *lengths, count]:
        raise s.refused("a product of these types and shapes")
    if limited and sums != "s32":
        raise s.refused(".satfinite on accumulators other than s32")
    vectors = ", ".join(s.vector(index) for index in range(4))
    return [f"warps.multiply({vectors}, {(left, right, sums)}, {limited}, {s.mask}, {s.line})"]


def warpgroup(s: Statement) -> list[str]:
    """Translate wgmma, its groups and their waits."""
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
    limited = s.flag("satfinite")
    shape, *kinds = s.modifiers
    s.modifiers = []
    if len(kinds) != 3:
        raise s.refused("a product of these types and shapes")
    sums, left_kind, right_kind = kinds
    _expect_product(s, left_kind, right_kind, sums)
    bits = BITS[left_kind]
    size = re.fullmatch(rf"m64n(\d+)k{256 // bits}", shape)
    if not size or int(size[1]) % 8 or not 8 <= int(size[1]) <= 256 or (limited and sums != "s32"):
        raise s.refused("a product of these types and shapes")
    if len(pieces_of(s.operands[0])) != int(size[1]) // (4 if sums == "f16" else 2):
        raise s.refused("a result of another size")
    from_registers = s.operands[1].startswith("{")
    signs, orders = 2 * (sums != "s32"), (2 - from_registers) * (bits == 16)  # how many immediates follow
    s.expect(4 + signs + orders)
    rest = [int(text) for text in s.operands[4:]]
    if rest[:signs] != [1] * signs:
        raise s.refused("a negated operand")
    order = (0, 0) if not orders else (0, *rest[signs:]) if from_registers else tuple(rest[signs:])
    left = s.vector(1) if from_registers else s.names.register(s.operands[1])
    names = tuple(pieces_of(s.operands[0])), tuple(pieces_of(s.operands[1])) if from_registers else ()
    return [
        f"warpgroups.multiply({s.vector(0)}, {left}, {s.names.register(s.operands[2])}, "
        f"{s.names.predicate(s.operands[3])}, {(left_kind, right_kind, sums)}, {order}, {limited}, "
        f"{s.names.constant(names)}, {s.mask}, {s.line})"
    ]


def address_space(s: Statement) -> list[str]:
    """Translate cvta to and from global memory, whose generic addresses are equal, and from local and param memory."""
    s.expect(2)
    t = s.type()
    value = s.value(1, "u", t.size)
    windows = {"param": PARAM_WINDOW, "local": LOCAL_WINDOW}
    space = None if s.flag("to") else s.take(*windows)
    if space is None:
        s.need("global")
        return s.assign(value, "u", t.size)
    return s.assign(f"{value} + np.uint{8 * t.size}({windows[space]})", "u", t.size)


HANDLERS: Mapping[str, Handler] = {
    "ld": load, "st": store, "atom": atomic, "red": atomic, "cp": copy, "fence": fence, "membar": fence,
    "griddepcontrol": fence, "bar": fence, "trap": trap, "shfl": shuffle, "redux": reduce, "vote": vote,
    "ldmatrix": matrix, "stmatrix": matrix, "mma": multiply, "wgmma": warpgroup, "cvta": address_space,
    "elect": elect, "setmaxnreg": registers,
}  # fmt: skip
