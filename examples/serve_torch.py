"""A serving engine for torch in one file. It compares its tokens with those of plain attention without a cache.

    python examples/serve_torch.py

The engine has continuous batching, chunked prefill, shared pages, an fp8 KV cache and tree speculation. Each step is
one ragged batch of prompt chunks and draft trees, with one attention call per layer. The model is tiny and random.
"""

import argparse

import torch
import torch.nn.functional as F

from ragged_attention.torch import ragged_paged_attention

VOCABULARY, LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 32, 2, 128, 8, 2, 16
PAGE_SIZE, NUM_PAGES, MAX_SEQS = 8, 40, 4
CHUNK, BRANCHES = 12, 2  # most rows of a sequence per step, with drafts; guesses per token
FP8, KV_SCALE = torch.float8_e4m3fn, 2.0**-5  # a cached value is its code times KV_SCALE


def rope(x, positions):
    """Rotary embedding of x [T, heads, HEAD_DIM] at positions [T]."""
    angles = (positions[:, None] * 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))[:, None]
    low, high = x.chunk(2, -1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)


def next_tokens(weights, tokens, positions, attend):
    """The most likely token after each row [T]. Only `attend(layer, q, k, v)` relates rows to each other."""
    x = weights["embed"][tokens]
    for layer in range(LAYERS):
        q, k, v = ((F.rms_norm(x, (WIDTH,)) @ weights[name][layer]).unflatten(-1, (-1, HEAD_DIM)) for name in "qkv")
        x = x + attend(layer, rope(q, positions), rope(k, positions), v).flatten(1) @ weights["out"][layer]
        x = x + F.silu(F.rms_norm(x, (WIDTH,)) @ weights["up"][layer]) @ weights["down"][layer]
    return (F.rms_norm(x, (WIDTH,)) @ weights["embed"].T).argmax(-1)


class Request:
    def __init__(self, prompt, max_new_tokens):
        self.prompt, self.tokens, self.max_len = prompt, list(prompt), len(prompt) + max_new_tokens
        self.cached, self.pages = 0, torch.tensor([])  # cached tokens; pages for all tokens


class Engine:
    def __init__(self, weights, requests):
        self.weights, self.waiting, self.running = weights, list(requests), []
        self.kv_pages = torch.zeros(LAYERS, NUM_PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM).to(FP8)
        self.holders = torch.zeros(NUM_PAGES, dtype=torch.int32)  # reference counts
        self.page_of, self.followers = {}, {}  # full pages by their prefixes; the draft model's next tokens
        self.steps = self.shared = self.accepted = 0

    def admit(self):
        """Start requests while enough pages are free for their tokens and drafts. Full pages of a prefix are shared."""
        while self.waiting and len(self.running) < MAX_SEQS:
            request, shared = self.waiting[0], []
            for end in range(PAGE_SIZE, len(request.prompt), PAGE_SIZE):  # the prompt's last token is always computed
                if (page := self.page_of.get(tuple(request.prompt[:end]))) is None:
                    break
                shared.append(page)
            missing = -(-(request.max_len + CHUNK) // PAGE_SIZE) - len(shared)
            if missing > len(free := (self.holders == 0).nonzero()[:, 0]):
                return
            request.pages = torch.cat((torch.tensor(shared, dtype=free.dtype), free[:missing]))
            self.holders[request.pages] += 1
            request.cached, self.shared = len(shared) * PAGE_SIZE, self.shared + len(shared)
            self.running.append(self.waiting.pop(0))

    def rows_of(self, request):
        """A request's next tokens, then a tree of drafts. Also, for each of these rows, the path that leads to it."""
        tokens = request.tokens[request.cached : request.cached + CHUNK]
        paths, row = [list(range(end + 1)) for end in range(len(tokens))], len(request.tokens) - request.cached - 1
        while row < len(tokens):  # from the last token on, level by level: guess what follows each row
            for guess in self.followers.get(tokens[row], [])[: CHUNK - len(tokens)]:
                paths.append([*paths[row], len(tokens)])
                tokens.append(guess)
            row += 1
        return tokens, paths

    def step(self):
        self.admit()
        chunks = [self.rows_of(request) for request in self.running]
        tokens = torch.tensor([token for tokens, _ in chunks for token in tokens])
        draft_mask = torch.tensor([[row in path for row in range(CHUNK)] for _, paths in chunks for path in paths])
        starts, counts = torch.tensor([[r.cached, len(c[0])] for r, c in zip(self.running, chunks, strict=True)]).T
        positions = starts.repeat_interleave(counts) + draft_mask.sum(1) - 1  # by depth in the tree
        page_indices = torch.nn.utils.rnn.pad_sequence([request.pages for request in self.running], True, -1).int()
        tables = (starts + counts).int(), page_indices, F.pad(counts.cumsum(0), (1, 0)).int()
        options = {"draft_mask": draft_mask, "k_scale": KV_SCALE, "v_scale": KV_SCALE}

        def attend(layer, q, k, v):  # K and V are written from position `cached` on, in the order of the rows
            return ragged_paged_attention(q, self.kv_pages[layer], *tables, new_kv=(k, v), **options)[0]

        choices = next_tokens(self.weights, tokens, positions, attend).split(counts.tolist())
        for request, chunk, chosen in zip(list(self.running), chunks, choices, strict=True):
            self.accept(request, *chunk, chosen.tolist())
        self.steps += 1

    def accept(self, request, tokens, paths, choices):
        """Follow the model's choices from the last token down the tree, and keep the rows on this path."""
        path, hits = paths[min(CHUNK, len(request.tokens) - request.cached) - 1], True
        while hits and request.cached + len(path) == len(request.tokens) < request.max_len:
            last, choice = request.tokens[-1], choices[path[-1]]
            self.followers[last] = [choice, *(old for old in self.followers.get(last, []) if old != choice)][:BRANCHES]
            request.tokens.append(choice)
            hits = [row for row, token in enumerate(tokens) if token == choice and paths[row][:-1] == path]
            path, self.accepted = path + hits, self.accepted + len(hits)
        positions = request.cached + torch.tensor([path, list(range(len(path)))])
        source, target = request.pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        rows = self.kv_pages.flatten(1, 2).view(torch.uint8)
        rows[:, target] = rows[:, source]  # in all layers: close the gaps of rejected branches
        request.cached += len(path)
        for end in range(PAGE_SIZE, request.cached + 1, PAGE_SIZE):  # full pages, which are not written again
            self.page_of.setdefault(tuple(request.tokens[:end]), int(request.pages[end // PAGE_SIZE - 1]))
        if len(request.tokens) == request.max_len:
            self.running.remove(request)
            self.holders[request.pages] -= 1
            self.page_of = {prefix: page for prefix, page in self.page_of.items() if self.holders[page]}


def plain_attention(layer, q, k, v):
    """Torch's attention of a whole sequence, over K and V rounded to fp8."""
    k, v = ((x / KV_SCALE).clamp(-448, 448).to(FP8).float() * KV_SCALE for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def main(seed=0):
    torch.manual_seed(seed)
    sizes = {"q": WIDTH, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "out": WIDTH, "up": WIDTH, "down": WIDTH}
    weights = {name: torch.randn(LAYERS, WIDTH, size) * 2.5 * WIDTH**-0.5 for name, size in sizes.items()}
    weights["embed"] = torch.randn(VOCABULARY, WIDTH)
    systems = torch.randint(VOCABULARY, (2, 20)).tolist()  # two beginnings that many prompts share
    requests = [Request(systems[i % 2] + torch.randint(VOCABULARY, (3 + 5 * i % 23,)).tolist(), 24) for i in range(9)]
    engine, num_equal = Engine(weights, requests), 0
    while engine.waiting or engine.running:
        engine.step()
    for request in requests:  # check without a cache: each new token recomputes all earlier ones
        tokens = torch.tensor(request.prompt)
        while len(tokens) < request.max_len:
            tokens = torch.cat((tokens, next_tokens(weights, tokens, torch.arange(len(tokens)), plain_attention)[-1:]))
        num_equal += request.tokens == tokens.tolist()
    print(f"requests: {len(requests)}, steps: {engine.steps}, shared pages: {engine.shared}, drafts: {engine.accepted}")
    print(f"tokens as of plain attention: {num_equal} of {len(requests)} requests")
    return int(num_equal < len(requests))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    raise SystemExit(main())
