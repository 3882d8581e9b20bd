"""Continuous batching in miniature: sequences join and leave between steps, and every step is one ragged batch.

A sequence has its tokens, and a count of the tokens whose keys and values are cached. A step computes some tokens of
each running sequence. If they include the last token, a new token is appended. So the engine treats a chunk of a
prompt, a decode, and the recomputation of a preempted sequence in the same way.
"""

import dataclasses
from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ragged_attention.demo.pages import PageAllocator, chained_digest
from ragged_attention.errors import InvalidInput

STOP = ord("\n")

Int32 = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The fixed sizes of a step. Since they are fixed, functions are compiled for only one shape."""

    max_tokens: int = 16
    max_num_seqs: int = 8
    num_pages: int = 40
    page_size: int = 16
    pages_per_seq: int = 16

    def __post_init__(self) -> None:
        # With this limit, decodes alone cannot use up a step, and the oldest sequence always advances.
        if self.max_tokens < self.max_num_seqs:
            raise InvalidInput(f"expected max_tokens >= max_num_seqs={self.max_num_seqs}, got {self.max_tokens}")

    @property
    def max_len(self) -> int:
        """The maximum number of tokens per sequence."""
        return min(self.pages_per_seq, self.num_pages) * self.page_size


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's input, padded to the limits. Unused page indices are -1."""

    tokens: Int32  # [T]
    positions: Int32  # [T]
    last_rows: Int32  # [S] the row of each sequence's last token
    kv_lens: Int32  # [S]
    page_indices: Int32  # [S, M]
    cu_q_lens: Int32  # [S + 1]
    num_seqs: Int32  # [1]

    @classmethod
    def empty(cls, limits: Limits) -> "Batch":
        tokens, seqs = limits.max_tokens, limits.max_num_seqs
        return cls(
            tokens=np.zeros(tokens, np.int32), positions=np.zeros(tokens, np.int32),
            last_rows=np.zeros(seqs, np.int32), kv_lens=np.zeros(seqs, np.int32),
            page_indices=np.full((seqs, limits.pages_per_seq), -1, np.int32),
            cu_q_lens=np.zeros(seqs + 1, np.int32), num_seqs=np.zeros(1, np.int32),
        )  # fmt: skip


class Model(Protocol):
    """A model of a framework, with its paged cache."""

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Write the batch's keys and values, attend, and return the logits of each sequence's last token [S, V]."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens, and its part of the cache."""

    number: int
    prompt: bytes
    max_new_tokens: int
    tokens: list[int] = dataclasses.field(init=False)
    computed: int = 0  # the number of its tokens in the cache
    pages: list[int] = dataclasses.field(default_factory=list)
    digests: list[bytes] = dataclasses.field(default_factory=list)  # one per full page
    logits: list[NDArray[np.float32]] = dataclasses.field(default_factory=list)  # one array [V] per new token

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and len(self.tokens) > len(self.prompt)

    @property
    def finished(self) -> bool:
        new = self.new_tokens
        return len(new) == self.max_new_tokens or new[-1:] == [STOP]


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """The counts of one step."""

    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    pages_used: int
    shared_hits: int  # pages that new sequences share instead of computing them
    preempted: int


class Engine:
    """Admits, schedules and advances sequences. Decoding is greedy, so that every token can be checked."""

    def __init__(self, model: Model, limits: Limits) -> None:
        self.model = model
        self.limits = limits
        self.pages = PageAllocator(limits.num_pages)
        self.running: list[Sequence] = []  # the oldest first
        self.waiting: deque[Sequence] = deque()
        self._preempted = 0

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def expect_servable(self, sequence: Sequence) -> None:
        """Raise `InvalidInput` for a sequence that is too long or has no prompt."""
        if not sequence.prompt:
            raise InvalidInput(f"expected prompt {sequence.number} to have at least one byte, got none")
        if (longest := len(sequence.prompt) + sequence.max_new_tokens) > (max_len := self.limits.max_len):
            raise InvalidInput(f"expected prompt and new tokens to be at most {max_len=} together, got {longest}")

    def submit(self, sequence: Sequence) -> None:
        self.expect_servable(sequence)
        self.waiting.append(sequence)

    def step(self) -> StepReport:
        """Schedule, run the model once, and append a new token to each sequence whose last token was computed."""
        hits, self._preempted = self.pages.hits, 0
        chunks = self._schedule()
        decodes = sum(sequence.decoding for sequence in chunks)
        report = StepReport(
            prefill_tokens=sum(chunks.values()) - decodes, decode_tokens=decodes, running=len(self.running),
            waiting=len(self.waiting), pages_used=self.pages.num_used, shared_hits=self.pages.hits - hits,
            preempted=self._preempted,
        )  # fmt: skip
        logits = self.model.step(self._batch(chunks))
        for (sequence, length), scores in zip(chunks.items(), logits, strict=False):
            self._advance(sequence, length, scores)
        return report

    def _schedule(self) -> dict[Sequence, int]:
        """This step's number of tokens for each sequence: decodes first, then started prompts, then new sequences."""
        chunks: dict[Sequence, int] = {}
        for sequence in sorted(self.running, key=lambda sequence: not sequence.decoding):
            length = min(self.limits.max_tokens - sum(chunks.values()), sequence.pending)
            if length and sequence in self.running and self._make_space(sequence, length, chunks):
                chunks[sequence] = length
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            budget = self.limits.max_tokens - sum(chunks.values())
            if not budget or self._preempted or not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            chunks[sequence] = min(budget, sequence.pending)
            self._grow(sequence, chunks[sequence])
        return chunks

    def _admit(self, sequence: Sequence) -> bool:
        """Share cached pages with a waiting sequence; False if there are too few free pages for its other tokens."""
        size = self.limits.page_size
        for _ in range((len(sequence.tokens) - 1) // size):  # the last token is always computed, for its logits
            digest = self._next_digest(sequence)
            if (page := self.pages.share(digest)) is None:
                break
            sequence.pages.append(page)
            sequence.digests.append(digest)
        sequence.computed = len(sequence.pages) * size
        if -(-len(sequence.tokens) // size) - len(sequence.pages) <= self.pages.num_free:
            return True
        self.pages.hits -= len(sequence.pages)  # hits count only once the sequence is admitted
        self._release(sequence)
        return False

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Take the pages that `length` more tokens need; False if there are too few."""
        while len(sequence.pages) * self.limits.page_size < sequence.computed + length:
            if (page := self.pages.take()) is None:
                return False
            sequence.pages.append(page)
        return True

    def _make_space(self, sequence: Sequence, length: int, chunks: dict[Sequence, int]) -> bool:
        """Take the pages, preempting the youngest sequences if necessary; False if `sequence` itself was preempted."""
        while not self._grow(sequence, length):
            youngest = self.running.pop()
            self._release(youngest)
            self.waiting.appendleft(youngest)
            self._preempted += 1
            chunks.pop(youngest, None)
            if youngest is sequence:
                return False
        return True

    def _release(self, sequence: Sequence) -> None:
        for page in reversed(sequence.pages):  # so that a prefix's end is reused before its beginning
            self.pages.release(page)
        sequence.pages.clear()
        sequence.digests.clear()
        sequence.computed = 0

    def _batch(self, chunks: dict[Sequence, int]) -> Batch:
        batch = Batch.empty(self.limits)
        row = 0
        for index, (sequence, length) in enumerate(chunks.items()):
            end = sequence.computed + length
            batch.tokens[row : row + length] = sequence.tokens[sequence.computed : end]
            batch.positions[row : row + length] = np.arange(sequence.computed, end)
            batch.page_indices[index, : len(sequence.pages)] = sequence.pages
            batch.kv_lens[index] = end
            row += length
            batch.cu_q_lens[index + 1 :] = row
            batch.last_rows[index] = row - 1
        batch.num_seqs[0] = len(chunks)
        return batch

    def _advance(self, sequence: Sequence, length: int, scores: NDArray[np.float32]) -> None:
        sequence.computed += length
        self._publish(sequence)
        if sequence.pending:
            return
        sequence.tokens.append(int(scores.argmax()))
        sequence.logits.append(scores)
        if sequence.finished:
            self.running.remove(sequence)
            self._release(sequence)

    def _publish(self, sequence: Sequence) -> None:
        for page in sequence.pages[len(sequence.digests) : sequence.computed // self.limits.page_size]:
            sequence.digests.append(self._next_digest(sequence))
            self.pages.publish(page, sequence.digests[-1])

    def _next_digest(self, sequence: Sequence) -> bytes:
        """The digest of the sequence's first page without a digest."""
        digests, size = sequence.digests, self.limits.page_size
        start = len(digests) * size
        return chained_digest(digests[-1] if digests else b"", sequence.tokens[start : start + size])
