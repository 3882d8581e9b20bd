"""Compile attention for Hopper with `causal=True` and with an equivalent key range; print the cost of a block of rows.

The output is the JSON of {kernel: [causal, key range]}, where each entry is [programs resident on a multiprocessor,
cycles]. The cycles are those of the busiest unit for 2048 keys (query rows in dkv_kernel), of which 128 go through the
masked loop.
"""

import dataclasses
import json

from benchmarks.cases import catalogue
from benchmarks.compiled import compiling, hopper
from ragged_attention.tools.samples import device_of

KEYS, MASKED = 2048, 128


def cost(launch: compiling.Launch) -> tuple[int, float]:
    """The resident programs of a launch and its cycles over KEYS keys.

    The kernel's first loop has no masks and its last loop has masks; in dkv_kernel they are in reverse order.
    """
    facts = compiling.compile_launch(launch, hopper.ARCH)
    config = launch.arguments["CONFIG"].plain
    loop = config.ATTENTION.LOOP if hasattr(config, "ATTENTION") else config
    of_keys = launch.name == "dkv_kernel"
    block = loop.BLOCK_Q if of_keys else loop.BLOCK_KV
    loops = (facts.loops[-1], facts.loops[0]) if of_keys else (facts.loops[0], facts.loops[-1])
    whole, ends = (max(dict(each.cycles).values()) for each in loops)
    programs = hopper.programs_at_once(facts.registers, facts.shared, launch.num_warps)
    return programs, whole * (KEYS - MASKED) / block + ends * MASKED / getattr(loop, "EDGE_KV", block)


costs: dict[str, list[tuple[int, float]]] = {}
for name in ("one_range_4k", "mha_one_range_128", "mha_one_range_128_backward"):
    ranged = catalogue.find(name)
    packed = {"causal": True} if name.startswith("mha") else {}
    for case in (dataclasses.replace(ranged, key_ranges=None, **packed), ranged):
        call = case.attention_call(device_of("torch", hopper.ARCH))
        for launch in compiling.record(call, compiling.tile_of(case, call)):
            if launch.name in ("tile_kernel", "split_kernel", "forward_kernel", "dq_kernel", "dkv_kernel"):
                costs.setdefault(launch.name, []).append(cost(launch))
print(json.dumps(costs))
