"""Small PTX texts and functions that run them: one instruction on some lanes, or a whole kernel on named arrays."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.machine import Outcome, launch
from ragged_attention.testing.ptx.memory import Memory
from ragged_attention.testing.ptx.parsing import parse
from ragged_attention.testing.ptx.tensor_maps import TensorMap

REGISTERS = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}  # register type by the element size in bytes


def kernel_text(body: str, pointers: Sequence[str], threads: int, maps: Sequence[str] = ()) -> str:
    """A kernel whose parameters are pointers (loaded into %p_<name>) and tensor maps, with registers of every kind."""
    params = ", ".join(
        [f".param .u64 {name}" for name in pointers] + [f".param .align 64 .b8 {name}[128]" for name in maps]
    )
    loads = "\n".join(f"ld.param.b64 %p_{name}, [{name}];" for name in pointers)
    loads += "".join(f"\nmov.b64 %p_{name}, {name};\ncvta.param.u64 %p_{name}, %p_{name};" for name in maps)
    declared = "".join(f".reg .b64 %p_{name};\n" for name in (*pointers, *maps))
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry test({params})
.reqntid {threads}
{{
.reg .pred %p<16>;
.reg .b16 %h<64>;
.reg .b32 %r<512>;
.reg .b64 %d<64>;
.reg .b32 %thread;
{declared}{loads}
mov.u32 %thread, %tid.x;
{body}
ret;
}}
"""


def run_text(
    text: str,
    arrays: Mapping[str, NDArray[Any]],
    *,
    grid: Sequence[int] = (1,),
    shared: int = 0,
    unwritten: Sequence[str] = (),
    maps: Mapping[str, tuple[str, TensorMap]] | None = None,
    **options: Any,
) -> Outcome:
    """Run a text on arrays, which it changes in place; the arrays named in `unwritten` are uninitialised.

    `maps` has, for each tensor map's name, the name of its array and the map. The map's address is relative to the
    array.
    """
    kernel, memory = parse(text), Memory()
    params: dict[str, Any] = {}
    for name, array in arrays.items():
        data = array.reshape(-1).view(np.uint8)
        ready = np.zeros(data.size, bool) if name in unwritten else None
        params[name] = np.uint64(memory.add(data, name, None, ready))
    for name, (of, one) in (maps or {}).items():
        params[name] = dataclasses.replace(one, address=int(params[of]) + one.address).pack()
    memory.add_variables(kernel.variables)
    memory.seal()
    outcome = launch(kernel, memory, params, grid, kernel.threads, shared, **options)
    memory.back()
    return outcome


def evaluate(code: str, *inputs: Any, result: str, shared: int = 0) -> NDArray[Any]:
    """The values of %out, of dtype `result`, after `code` has run on one element of each input per lane.

    The inputs are in the registers %a, %b, %c and %e.
    """
    arrays = [np.atleast_1d(given) for given in inputs]
    count = max(array.size for array in arrays)
    threads = -(-count // 32) * 32
    given = {f"in{i}": np.ascontiguousarray(np.resize(array, threads)) for i, array in enumerate(arrays)}
    given["out"] = np.zeros(threads, result)
    lines = [f".reg .{REGISTERS[given['out'].itemsize]} %out;"]
    for name, array in zip("abce", list(given.values())[:-1], strict=False):
        lines.append(f".reg .{REGISTERS[array.itemsize]} %{name};")
    for index, name in enumerate("abce"[: len(arrays)]):
        size = given[f"in{index}"].itemsize
        lines += [
            f"mul.wide.u32 %d60, %thread, {size};",
            f"add.s64 %d61, %p_in{index}, %d60;",
            f"ld.global.{'s' if arrays[index].dtype.kind == 'i' else 'b'}{8 * size} %{name}, [%d61];",
        ]
    size = given["out"].itemsize
    lines += [code, f"mul.wide.u32 %d60, %thread, {size};", "add.s64 %d61, %p_out, %d60;"]
    lines.append(f"st.global.b{8 * size} [%d61], %out;")
    outcome = run_text(kernel_text("\n".join(lines), list(given), threads), given, shared=shared)
    assert not outcome.reports
    return given["out"][:count]


def texts_of(outcome: Outcome) -> str:
    """The texts of all reports, one per line."""
    return "\n".join(report.text for report in outcome.reports.values())


def without(body: str, mark: str, instead: str = "") -> str:
    """The body with the single line that ends in `// <mark>` replaced by `instead`."""
    lines = [line for line in body.split("\n") if line.rstrip().endswith(f"// {mark}")]
    assert len(lines) == 1, f"{len(lines)} lines are marked {mark}"
    return body.replace(lines[0], instead)
