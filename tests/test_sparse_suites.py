"""The recipes that run other projects' tests of sparse attention work on imitation checkouts.

The projects' real tests are not copied into this repository. An imitation checkout has the modules whose functions a
recipe replaces; each original function fails if it is called. It also has tests with the names that the recipe runs,
which compare the replaced functions with independent implementations.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.processes import run_python

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent
ABSENT = "def {name}(*given, **named):\n    raise AssertionError('not replaced')\n"
MASKED = """
import torch

def masked(q, k, v, mask, scale):
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    logits = logits.masked_fill(~mask, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v.double()), lse.T

def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
"""

AITER = (
    MASKED
    + """
import pytest
from aiter import pertoken_quant
from aiter.ops.triton.attention.pa_decode import paged_attention_decode

LENS, TABLE = torch.tensor([5, 9]), torch.tensor([[2, 0, 0], [1, 3, 0]]).int()

@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float8_e4m3fnuz])
def test_paged_attn(q_dtype):
    torch.manual_seed(0)
    q, keys, values = torch.randn(2, 4, 16).to(q_dtype), *torch.randn(2, 4, 2, 4, 16).to(torch.float8_e4m3fnuz)
    out = torch.zeros(2, 4, 16, dtype=torch.bfloat16, device="cuda")
    paged_attention_decode(out, q, keys, values, LENS, TABLE, 0.3, 9, None, torch.tensor([0.5]), torch.tensor([2.0]))
    for seq, length in enumerate(LENS.tolist()):
        k, v = (each.double()[TABLE[seq].long()].transpose(1, 2).flatten(0, 1)[:length] for each in (keys, values))
        want, _ = masked(q.double()[seq : seq + 1], k * 0.5, v * 2, torch.ones(1, length, dtype=bool), 0.3)
        torch.testing.assert_close(out[seq : seq + 1].double(), want, rtol=1e-2, atol=1e-2)

def test_paged_attn_per_token_quant():
    rows = torch.randn(4, 2, 4, 16)
    codes, scale = pertoken_quant(rows, scale_dtype=torch.float32, quant_dtype=torch.float8_e4m3fnuz)
    torch.testing.assert_close(codes.float() * scale, rows, rtol=0.07, atol=0.01)
    paged_attention_decode(rows, rows, codes, codes, LENS, TABLE, 0.3, 9, None, scale, scale)
"""
)

FLA = (
    MASKED
    + """
from fla.ops.nsa.compression import parallel_nsa_compression
from fla.ops.nsa.parallel import parallel_nsa, parallel_nsa_fwd, parallel_nsa_topk

SIZE, EDGES = 4, torch.tensor([0, 15, 22])
Q, K, V = (torch.randn(1, 22, heads, 16, generator=torch.Generator().manual_seed(heads)) for heads in (8, 2, 2))
DOCUMENT = torch.tensor([0] * 15 + [1] * 7)
POSITION = torch.arange(22) - EDGES[DOCUMENT]
CAUSAL = (DOCUMENT[:, None] == DOCUMENT) & (POSITION[:, None] >= POSITION)
LISTS = torch.randint(-1, 5, (1, 22, 2, 3), generator=torch.Generator().manual_seed(0))

def means(x):
    return torch.stack([part.mean(0) for row in x[0].split([15, 7]) for part in row.split(SIZE)])

def seen(lists):
    named = (lists[0][..., None] == POSITION // SIZE).any(2).transpose(0, 1)
    return (named & CAUSAL).repeat_interleave(4, 0)

def test_parallel():
    o, lse = parallel_nsa_fwd(Q, K, V, LISTS, 2, SIZE, 0.3, EDGES, EDGES)
    want, want_lse = masked(Q[0], K[0], V[0], seen(LISTS[..., :2]), 0.3)
    close(o[0], want)
    close(lse[0], want_lse)

def test_parallel_decode():
    few = torch.cat([LISTS[:, 13:15], LISTS[:, 20:]], 1)
    edges = torch.tensor([0, 2, 4])
    o, _ = parallel_nsa_fwd(torch.cat([Q[:, 13:15], Q[:, 20:]], 1), K, V, few, 3, SIZE, 0.3, edges, EDGES)
    want, _ = masked(Q[0], K[0], V[0], seen(LISTS), 0.3)
    close(o[0], want[[13, 14, 20, 21]])

def compressed():
    block = torch.tensor([0, 1, 2, 3, 0, 1])
    own = torch.tensor([0] * 4 + [1] * 2) == DOCUMENT[:, None]
    return own & ((block + 1) * SIZE - 1 <= POSITION[:, None])

def test_parallel_compressive():
    k, v = means(K), means(V)
    o, lse = parallel_nsa_compression(Q, k[None], v[None], 22, SIZE, 0.3, EDGES)
    want, want_lse = masked(Q[0], k, v, compressed(), 0.3)
    close(o[0], want)
    close(lse[0], want_lse.masked_fill(want_lse == -torch.inf, 0))

def test_parallel_topk_varlen():
    k, allowed = means(K), compressed()
    chosen = parallel_nsa_topk(Q, k[None], 22, None, 4, SIZE, 0.3, EDGES)
    for token in (14, 12, 21, 3, 0):
        first, own = (0, 4)[DOCUMENT[token]], int(POSITION[token]) // SIZE
        for head in (0, 1):
            logits = Q[0, token, 4 * head : 4 * head + 4] @ k[:, head].T * 0.3
            scores = logits.masked_fill(~allowed[token], -torch.inf).softmax(-1).nan_to_num(0).mean(0)[first:]
            always = sorted({0, own, max(own - 1, 0)})
            rest = [block for block in scores.argsort(descending=True).tolist() if allowed[token, first:][block]]
            want = always + sorted([block for block in rest if block not in always][: 4 - len(always)])
            assert chosen[0, token, head].tolist() == want + [-1] * (4 - len(want))

def test_parallel_varlen_decode():
    gates = torch.rand(1, 22, 8, 3, generator=torch.Generator().manual_seed(1)).unbind(-1)
    got = parallel_nsa(Q, K, V, *gates, LISTS, 3, SIZE, 5, cu_seqlens=EDGES)
    near = CAUSAL & (POSITION[:, None] - POSITION < 5)
    parts = [masked(Q[0], means(K), means(V), compressed(), 0.25), masked(Q[0], K[0], V[0], seen(LISTS), 0.25),
             masked(Q[0], K[0], V[0], near, 0.25)]
    close(got[0], sum(part[0] * gate[0, ..., None] for part, gate in zip(parts, gates, strict=True)))
"""
)

M3 = (
    MASKED
    + """
import pytest
from vllm.models.minimax_m3.common.ops.index_topk import (
    minimax_m3_index_decode, minimax_m3_index_score, minimax_m3_index_topk)
from vllm.models.minimax_m3.common.ops.sparse_attn import minimax_m3_sparse_attn, minimax_m3_sparse_attn_decode
from vllm.platforms import current_platform

G = torch.Generator().manual_seed(0)
LENS, EDGES = torch.tensor([300, 130]).int(), torch.tensor([0, 2, 4]).int()
TABLE = torch.tensor([[3, 0, 4], [1, 2, 2]]).int()
INDEX = torch.randn(5, 128, 16, generator=G)
Q = torch.randn(4, 2, 16, generator=G)
POSITION = torch.tensor([298, 299, 128, 129])

def scores():
    keys = INDEX[TABLE.repeat_interleave(2, 0)].flatten(1, 2)
    products = torch.einsum("thd,tkd->htk", Q, keys)
    products = products.masked_fill(torch.arange(384) > POSITION[:, None], -torch.inf)
    return products.unflatten(2, (3, 128)).amax(3)

def test_prefill_index_topk_correctness():
    assert current_platform.is_cuda() and torch.cuda.is_available()
    found = minimax_m3_index_score(Q, INDEX, TABLE, EDGES, LENS, LENS - 2, 2, 300, 2)
    close(found, scores().double())
    lists = minimax_m3_index_topk(found, EDGES, LENS - 2, 2, 2, 0, 1)
    assert lists.shape == (2, 4, 2)
    assert (lists.amax(2) == POSITION // 128).all()

def test_decode_index_topk_correctness():
    lists = minimax_m3_index_decode(Q, INDEX, TABLE, LENS, 300, 2, 0, 0, 2, 2, 2)
    assert torch.equal(lists, scores().topk(2, 2)[1].sort(2)[0].int())

CACHE = torch.randn(5, 2, 128, 64, generator=G)
HEADS = torch.randn(4, 4, 32, generator=G)
LISTS = torch.tensor([[[2, -1], [0, 1], [1, 9], [-1, -1]], [[0, 2], [2, 2], [0, -1], [1, 0]]]).int()

def want(cache=CACHE):
    parts = []
    for seq in (0, 1):
        rows, length = slice(2 * seq, 2 * seq + 2), int(LENS[seq])
        k, v = cache[TABLE[seq]].transpose(1, 2).flatten(0, 1)[:length].split(32, -1)
        named = (LISTS[:, rows, :, None] == torch.arange(length) // 128).any(2)
        mask = (named & (torch.arange(length) <= POSITION[rows, None])).repeat_interleave(2, 0)
        parts.append(masked(HEADS[rows], k, v, mask, 0.2)[0])
    return torch.cat(parts)

def test_prefill_sparse_attention_correctness():
    out = torch.empty_like(HEADS)
    minimax_m3_sparse_attn(HEADS, CACHE, LISTS, TABLE, EDGES, LENS, LENS - 2, 2, 2, 0.2, out)
    close(out, want())

def test_decode_sparse_attention_correctness():
    out = torch.empty_like(HEADS)
    minimax_m3_sparse_attn_decode(HEADS, CACHE, LISTS, TABLE, LENS, 2, 0.2, out, 2)
    close(out, want())

@pytest.mark.parametrize("per_token", [False, True])
def test_minimax_m3_sparse_decode_fp8_kv_scales(per_token):
    out, cache = torch.empty_like(HEADS), CACHE.to(torch.float8_e4m3fn)
    scales = [torch.full((2, 640), scale) if per_token else torch.tensor(scale) for scale in (0.5, 2.0)]
    minimax_m3_sparse_attn_decode(HEADS, cache, LISTS, TABLE, LENS, 2, 0.2, out, 2, *scales)
    close(out, want(cache.float() * torch.tensor([0.5, 2.0]).repeat_interleave(32)))
"""
)

QSA = (
    MASKED
    + """
from vllm.models.qwen4_exp.nvidia.ops import qsa, qsa_indexer

G = torch.Generator().manual_seed(0)
KEYS = torch.randn(4, 8, 1, 8, generator=G)
Q = torch.randn(4, 3, 8, generator=G)
TABLE = torch.tensor([[2, 0], [1, 3]])
POSITION = torch.tensor([20, 21, 30, 31])
SEEN = (POSITION + 1) // 4

def test_qsa_decode_selection_correctness(workspace_init):
    want = []
    for row in range(4):
        keys = KEYS[TABLE[row // 2]].flatten(0, 1)[: SEEN[row], 0]
        chosen = (Q[row] @ keys.T).relu().sum(0).topk(3)[1].sort()[0]
        want.append(chosen)
    for select, more in ((qsa_indexer.qsa_select_paged_decode, (12, 4, 2)),):
        out = torch.empty(4, 3, dtype=torch.int32)
        select(Q, KEYS, TABLE, SEEN, *more, out)
        assert torch.equal(out, torch.stack(want).int())
    edges = torch.tensor([0, 2, 4]).int()
    qsa_indexer.qsa_select_paged_prefill(Q, KEYS, TABLE, edges, SEEN, 12, 4, 2, out.fill_(-7), max_seq_len=32)
    assert torch.equal(out, torch.stack(want).int())

def test_qsa_sparse_paged_attention_correctness():
    blocks = torch.tensor([[0, 4], [-1, 2], [6, 1], [7, 0]]).int()
    lists = torch.empty(4, 12, dtype=torch.int32)
    qsa_indexer.expand_qsa_block_indices(blocks, POSITION, SEEN, 4, 8, lists)
    assert lists[0].tolist() == [0, 1, 2, 3, 16, 17, 18, 19, 20, -1, -1, 9]
    assert lists[3].tolist() == [28, 29, 30, 31, 0, 1, 2, 3, -1, -1, -1, 8]
    q, gate = torch.randn(2, 4, 4, 32, generator=G)
    cache = torch.randn(4, 16, 2, 64, generator=G)
    k, v = cache.split(32, -1)
    requests = torch.tensor([0, 0, 1, 1])
    got = qsa.qsa_sparse_paged_attention(q, k, v, lists, TABLE.int(), requests, True, output_gate=gate)
    parts = []
    for row in range(4):
        mask = torch.zeros(32, dtype=torch.bool).index_fill(0, lists[row, :-1][lists[row, :-1] >= 0].long(), True)
        rows = [each[TABLE[requests[row]]].flatten(0, 1) for each in (k, v)]
        parts.append(masked(q[row : row + 1], *rows, mask, 32**-0.5)[0])
    close(got, torch.cat(parts) * gate.sigmoid())
"""
)

PLATFORM = "import types\ncurrent_platform = types.SimpleNamespace()\n"
VLLM = {"vllm/platforms.py": PLATFORM, "vllm/triton_utils.py": ""}
FILES: Mapping[str, Mapping[str, str]] = {
    "fla": {
        "fla/ops/nsa/naive.py": "",
        "fla/ops/utils/pooling.py": "",
        "fla/ops/nsa/compression.py": ABSENT.format(name="parallel_nsa_compression"),
        "fla/ops/nsa/parallel.py": "".join(ABSENT.format(name=f"parallel_nsa{end}") for end in ("", "_fwd", "_topk")),
        "tests/ops/test_nsa.py": FLA,
    },
    "aiter": {"op_tests/triton_tests/attention/test_pa_decode.py": AITER},
    "minimax_m3": {
        **VLLM,
        "vllm/models/minimax_m3/common/ops/index_topk.py": "",
        "vllm/models/minimax_m3/common/ops/sparse_attn.py": "",
        "vllm/models/minimax_m3/common/sparse_attention.py": "",
        "tests/kernels/attention/test_minimax_m3.py": M3,
    },
    "qsa": {
        **VLLM,
        "vllm/models/qwen4_exp/common/qsa_cache.py": "",
        "vllm/models/qwen4_exp/nvidia/ops/qsa.py": "",
        "vllm/models/qwen4_exp/nvidia/ops/qsa_indexer.py": "",
        "vllm/v1/worker/utils.py": "",
        "tests/models/qwen4_exp/test_qsa_reference.py": QSA,
    },
}
PASSED = {"aiter": (2, 1), "fla": (5, 0), "minimax_m3": (5, 1), "qsa": (2, 0)}  # (passed, unsupported)


def outcome(suite: str, files: Mapping[str, str], checkout: Path) -> tuple[int, str]:
    """The exit code and the output of a recipe, run on a checkout with these files."""
    for name, text in files.items():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in list(path.parents)[: len(Path(name).parts) - 1]:
            (folder / "__init__.py").touch()
        path.write_text(text)
    paths = [str(ROOT), str(checkout), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    done = run_python("-m", "benchmarks.sparse_suites", suite, "--checkout", str(checkout), **variables)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("suite", PASSED)
def test_functions_in_the_place_of_kernels_are_their_definitions(suite: str, tmp_path: Path) -> None:
    code, said = outcome(suite, FILES[suite], tmp_path)
    passed, unsupported = PASSED[suite]
    assert f"| all | {passed} | {unsupported} | 0 | 0 |" in said, said
    assert code == 0


def test_a_wrong_result_fails(tmp_path: Path) -> None:
    wrong = "def test_parallel():\n    assert False\n\ndef test_other():\n    assert False\n"
    code, said = outcome("fla", {**FILES["fla"], "tests/ops/test_nsa.py": wrong}, tmp_path)
    assert code == 1
    assert "| all | 0 | 0 | 0 | 1 |" in said, said
    assert "test_nsa.py::test_parallel: " in said
