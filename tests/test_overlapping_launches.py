"""A kernel that starts before the previous kernel has ended waits before it reads results, as the PTX shows."""

import json

import pytest

from tests.processes import printed

READS = ["memory", "ret"]


def test_kernels_wait_for_what_they_read() -> None:
    """The combine kernel waits for its predecessor before it touches memory.

    The split kernel reads no result of the tile kernel. It waits only before it ends, so a kernel that waits for the
    split kernel also finds the rows of the tile kernel. The first kernel of a call starts after all earlier work.
    """
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
