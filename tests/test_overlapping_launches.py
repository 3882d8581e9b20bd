"""Kernels that begin before the one that they follow has ended wait for it where they have to, read in their PTX."""

import json

import pytest

from tests.apart import printed

READS = ["memory", "ret"]


def test_kernels_wait_for_what_they_read() -> None:
    """The combine kernel before it touches memory; the split kernel, which reads nothing of the tile kernel, before it
    ends, so that whoever waits for it finds those rows too. What is launched first begins when all before has ended."""
    pytest.importorskip("triton")
    said = json.loads(printed("-m", "tests.overlapping_kernels"))
    assert said["mixed, sm_90"] == [
        ["tile_kernel", False, ["begin", *READS]],
        ["split_kernel", True, ["begin", "memory", "wait", "ret"]],
        ["combine_kernel", True, ["wait", *READS]],
    ]
    assert said["decode, sm_90"] == [
        ["split_kernel", False, ["begin", *READS]],
        ["combine_kernel", True, ["wait", *READS]],
    ]
    older = [["split_kernel", False, READS], ["combine_kernel", False, READS]]
    assert said["decode, sm_80"] == older
    assert said["mixed, sm_80"] == [["tile_kernel", False, READS], *older]
