"""Translates instructions on mbarriers, bulk copies and tensor maps to calls of the objects that execute them.

In the generated Python, `mbarriers` and `bulk` are the machine's objects. There are no clusters, so an address in
`.shared::cluster` is one in the CTA's own shared memory. Anything that names another CTA (multicast) is refused.
"""

import re
from collections.abc import Mapping

from ragged_attention.testing.ptx.arithmetic import Handler
from ragged_attention.testing.ptx.operands import Statement, pieces_of
from ragged_attention.testing.ptx.tensor_maps import LAYOUT

DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
CHANGES = ("add", "min", "max", "inc", "dec", "and", "or", "xor")  # the operations of cp.reduce
COMMIT = "cp.async.bulk.commit_group"
WAITS = ("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read")
LOADS, STORES = ["global", "mbarrier::complete_tx::bytes"], ["global", "shared::cta", "bulk_group"]
# Fields of a tensor map that hold one code, so that `tensormap.replace` takes no ordinal for them.
CODES = ("rank", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode")
ACQUIRE = re.compile(r"fence\.proxy\.tensormap::generic\.acquire\.(cta|cluster|gpu|sys)")
PUBLISH = re.compile(
    r"tensormap\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release\.(cta|cluster|gpu|sys)\.sync\.aligned"
)


def _address(s: Statement, index: int) -> str:
    """An address operand, as the text of a Python pair: register or None, and offset in bytes."""
    register, offset = s.names.address(s.operands[index])
    return f"({register}, {offset})"


def _semantics(s: Statement, acquires: bool) -> bool:
    """Whether an operation is ordered, that is, not relaxed. Removes the modifiers for order and scope."""
    relaxed = s.take("relaxed", "acquire" if acquires else "release") == "relaxed"
    s.take("cta", "cluster")
    return not relaxed


def mbarrier(s: Statement) -> list[str]:
    """Translate mbarrier.init, inval, expect_tx, complete_tx, arrive, test_wait and try_wait."""
    s.need("b64")
    kind = s.need("init", "inval", "expect_tx", "complete_tx", "arrive", "test_wait", "try_wait")
    if kind == "arrive":
        return _arrive(s)
    if kind in ("test_wait", "try_wait"):
        return _wait(s, kind)
    ends = f"{s.mask}, {s.line}"
    if kind in ("expect_tx", "complete_tx"):
        s.take("relaxed")
        s.take("cta", "cluster")
    s.need("shared", "shared::cta")
    s.expect(1 if kind == "inval" else 2)
    address, offset = s.names.address(s.operands[0])
    if kind == "inval":
        return [f"mbarriers.invalidate({address}, {offset}, {ends})"]
    count = s.value(1, "u", 4)
    if kind == "init":
        return [f"mbarriers.init({address}, {offset}, {count}, {ends})"]
    return [f"mbarriers.expect_bytes({address}, {offset}, {count}, {1 if kind == 'expect_tx' else -1}, {ends})"]


def _arrive(s: Statement) -> list[str]:
    """Translate mbarrier.arrive, with or without bytes to expect. Its result is the old state; `_` discards it."""
    expects, release = s.flag("expect_tx"), _semantics(s, acquires=False)
    s.need("shared", "shared::cta")
    s.expect(*((3,) if expects else (2, 3)))
    state = "None" if s.operands[0] == "_" else s.names.register(s.operands[0])
    if state != "None" and s.names.size_of(s.operands[0]) != 8:
        raise s.refused("a state that does not have 64 bits")
    address, offset = s.names.address(s.operands[1])
    number = s.value(2, "u", 4) if len(s.operands) == 3 else "1"
    count, expected = ("1", number) if expects else (number, "None")
    return [f"mbarriers.arrive({state}, {address}, {offset}, {count}, {expected}, {release}, {s.mask}, {s.line})"]


def _wait(s: Statement, kind: str) -> list[str]:
    """Translate test_wait and try_wait for a state or a parity. The time limit of try_wait has no effect."""
    parity = s.flag("parity")
    if not _semantics(s, acquires=True):
        raise s.refused("a relaxed wait")
    s.need("shared", "shared::cta")
    s.expect(*((3, 4) if kind == "try_wait" else (3,)))
    out = s.names.predicate(s.operands[0])
    address, offset = s.names.address(s.operands[1])
    phase = s.value(2, "u", 4 if parity else 8)
    return [f"mbarriers.wait({out}, {address}, {offset}, {phase}, {parity}, {s.mask}, {s.line})"]


def arrive_after_copies(s: Statement) -> list[str]:
    """Translate cp.async.mbarrier.arrive."""
    for modifier in ("async", "mbarrier", "arrive"):
        s.need(modifier)
    counted = s.flag("noinc")
    s.need("shared", "shared::cta")
    s.need("b64")
    s.expect(1)
    address, offset = s.names.address(s.operands[0])
    return [f"copies.arrive_at(mbarriers, {address}, {offset}, {counted}, {s.mask}, {s.line})"]


def bulk_copy(s: Statement) -> list[str]:
    """Translate cp.async.bulk of bytes and tiles, cp.reduce of tiles, and the groups of stores to global memory."""
    if s.instruction.opcode == COMMIT:
        s.expect(0)
        s.modifiers.clear()
        return [f"bulk.commit({s.mask}, {s.line})"]
    if s.instruction.opcode in WAITS:
        s.expect(1)
        s.modifiers.clear()
        wait = "wait_read" if s.instruction.opcode.endswith(".read") else "wait"
        return [f"bulk.{wait}({int(s.operands[0], 0)}, {s.mask}, {s.line})"]
    change = s.need(*CHANGES) if s.flag("reduce") else None
    for modifier in ("async", "bulk"):
        s.need(modifier)
    dimensions = s.need(*DIMENSIONS) if s.flag("tensor") else None
    s.take("tile")
    hinted = s.flag("L2::cache_hint")  # a cache policy, which has no effect here
    operands = s.operands[:-1] if hinted else s.operands
    path, s.modifiers = s.modifiers, []
    loading = path[:1] in (["shared::cta"], ["shared::cluster"]) and path[1:] == LOADS
    if (not loading and path != STORES) or (change and (loading or not dimensions)):
        raise s.refused(f"a bulk copy with .{'.'.join(path)}")
    return _tile(s, operands, dimensions, loading, change) if dimensions else _bytes(s, operands, loading)


def _bytes(s: Statement, operands: tuple[str, ...], loading: bool) -> list[str]:
    if len(operands) != 3 + loading:
        raise s.refused(f"{len(s.operands)} operands")
    target, source, size = _address(s, 0), _address(s, 1), s.value(2, "u", 4)
    if loading:
        return [f"bulk.load({target}, {source}, {size}, {_address(s, 3)}, {s.mask}, {s.line})"]
    return [f"bulk.store({target}, {source}, {size}, {s.mask}, {s.line})"]


def _tile(s: Statement, operands: tuple[str, ...], dimensions: str, loading: bool, change: str | None) -> list[str]:
    """Translate a copy of a tile. Its tensor operand has the form [map, {coordinates}]."""
    if len(operands) != 2 + loading:
        raise s.refused(f"{len(s.operands)} operands")
    named = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*\{([^}]*)\}\s*\]", operands[1 if loading else 0])
    if not named or len(coordinates := pieces_of(named[2])) != int(dimensions[0]):
        raise s.refused("a tensor operand of an unknown form")
    register, offset = s.names.address(f"[{named[1]}]")
    corner = "".join(f"{s.names.value(one, 's', 4)}, " for one in coordinates)
    ends = f"{s.mask}, {s.line}"
    if loading:
        return [f"bulk.load_tile({_address(s, 0)}, ({register}, {offset}), ({corner}), {_address(s, 2)}, {ends})"]
    return [f"bulk.store_tile(({register}, {offset}), ({corner}), {_address(s, 1)}, {change!r}, {ends})"]


def tensor_map(s: Statement) -> list[str]:
    """Translate tensormap.replace in shared memory, and the copy of a map to global memory."""
    if PUBLISH.fullmatch(s.instruction.opcode):
        s.modifiers.clear()
        s.expect(3)
        if int(s.operands[2], 0) != LAYOUT.itemsize:
            raise s.refused("a tensor map of another size")
        return [f"bulk.publish_map({_address(s, 0)}, {_address(s, 1)}, {s.mask}, {s.line})"]
    s.need("replace")
    s.need("tile")
    field = s.need(*(LAYOUT.names or ()))
    s.need("shared::cta")
    s.need("b1024")
    size = {"b32": 4, "b64": 8}[s.need("b32", "b64")]
    indexed = field not in (*CODES, "global_address")
    s.expect(2 + indexed)
    ordinal = int(s.operands[1], 0) if indexed else 0
    value = s.value(1 + indexed, "u", size)
    return [f"bulk.replace_field({_address(s, 0)}, '{field}', {ordinal}, {value}, {s.mask}, {s.line})"]


def acquire_map(s: Statement) -> list[str]:
    """Translate fence.proxy.tensormap, which makes a tensor map visible that was written on the device."""
    if not ACQUIRE.fullmatch(s.instruction.opcode) or int(s.operands[1], 0) != LAYOUT.itemsize:
        raise s.refused("an unknown fence")
    s.modifiers.clear()
    s.expect(2)
    return [f"bulk.acquire_map({_address(s, 0)}, {s.mask}, {s.line})"]


def prefetch(s: Statement) -> list[str]:
    """Translate prefetch of a tensor map, which has no effect here."""
    s.need("tensormap")
    s.take("param", "const")
    s.expect(1)
    return []


HANDLERS: Mapping[str, Handler] = {"mbarrier": mbarrier, "tensormap": tensor_map, "prefetch": prefetch}
