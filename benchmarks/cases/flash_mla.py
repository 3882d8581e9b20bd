"""The case lists of FlashMLA's own tests, regenerated from their parameters; no framework is needed to read them.

The lists of September 2025 are `e0-decode` (319 cases) and `e0-prefill` (34). The lists of April 2026 are `e2-dense`
(2352), `e2-sparse` (4748) and `e2-prefill` (617). The lists of late September 2026 are `e4-sparse` (1590) and
`e4-prefill` (316), and `e4-sparse` draws some features of a case at random. `mha` (32), dense multi-head attention, is
equal in all releases. Inputs and the oracle are in `benchmarks.cases.flash_mla_data`.
"""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any, ClassVar, Self

D_V = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """The top-k lists of a decode case that select keys of one of its caches."""

    s_k: int
    topk: int
    page_size: int
    lengths: bool = False  # whether lists have lengths (`topk_length`)
    fp4: bool = False  # whether this cache is fp4 (the main cache is then fp8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(abc.ABC):
    """One call of a FlashMLA function."""

    OPERATION: ClassVar[str]  # our operation that computes this function
    kind: str = "correctness"
    seed: int = 0

    @property
    @abc.abstractmethod
    def group(self) -> str:
        """The name of the summary row in which the case is counted."""

    def scaled_down(self, *, heads: int | None = None, max_tokens: int | None = None) -> Self:
        """The case with at most `heads` query heads (a multiple of its KV heads) and about `max_tokens` tokens.

        The tokens are the positions of the caches or the keys that the queries list, whichever are more. A decode first
        halves its batch, down to 2 sequences, then its lengths, down to 20, together with its top-k, down to 64. Its
        page sizes and query tokens per sequence do not change. A prefill first halves its query tokens, down to 16,
        then its keys, down to 32, together with its top-k, down to 64. Dense multi-head attention halves the lengths of
        queries and keys together, down to 20, and scales its KV heads with the query heads.
        """
        case = self if heads is None else self._with_heads(heads)
        return case if max_tokens is None else case._shortened(max_tokens)

    @abc.abstractmethod
    def _with_heads(self, most: int) -> Self: ...

    @abc.abstractmethod
    def _shortened(self, most: int) -> Self: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase(Case):
    """One call of `flash_mla_with_kvcache`. It is dense if there is no top-k."""

    OPERATION: ClassVar[str] = "mla_decode"

    form: str  # "e0", "e2" or "e4": the release that defines the data rules and the form of the call
    b: int
    s_q: int
    s_k: int
    h_q: int = 128
    h_kv: int = 1
    d_qk: int = 576
    page_size: int = 64
    varlen: bool = False
    causal: bool = False
    zero_lens: bool = False
    topk: int | None = None
    topk_lens: bool = False
    all_invalid: bool = False
    sinks: bool = False
    extra: Lists | None = None
    fp8: bool | None = None  # whether the cache is fp8; by default only in sparse cases, as in FlashMLA
    layout: str | None = None  # byte layout of the cache; None is the format's default

    @property
    def group(self) -> str:
        return f"{self.form} {'sparse' if self.lists else 'dense'} decode, {self.kind}"

    @property
    def quantized(self) -> bool:
        return self.topk is not None if self.fp8 is None else self.fp8

    @property
    def lists(self) -> tuple[Lists, ...]:
        """The lists of a sparse case, one entry per cache. A dense case has none."""
        if self.topk is None:
            return ()
        main = Lists(s_k=self.s_k, topk=self.topk, page_size=self.page_size, lengths=self.topk_lens)
        return (main,) if self.extra is None else (main, self.extra)

    def _with_heads(self, most: int) -> Self:
        return dataclasses.replace(self, h_q=min(self.h_q, max(most // self.h_kv, 1) * self.h_kv))

    def _shortened(self, most: int) -> Self:
        b, sizes = self.b, [(lists.s_k, lists.topk) for lists in self.lists] or [(self.s_k, 0)]

        def tokens() -> int:
            held, listed = map(sum, zip(*sizes, strict=True))
            return b * max(held, self.s_q * listed)

        while tokens() > most and b > 2:
            b = max(b // 2, 2)
        while tokens() > most and sizes != (shorter := [(_half(s_k, 20), _half(topk, 64)) for s_k, topk in sizes]):
            sizes = shorter
        (s_k, topk), *others = sizes
        extra = self.extra and dataclasses.replace(self.extra, s_k=others[0][0], topk=others[0][1])
        return dataclasses.replace(self, b=b, s_k=s_k, topk=self.topk and topk, extra=extra)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCase(Case):
    """One call of `flash_mla_sparse_fwd`."""

    OPERATION: ClassVar[str] = "sparse_mla_prefill"

    form: str
    s_q: int
    s_kv: int
    topk: int
    h_q: int = 128
    d_qk: int = 576
    sinks: bool = False
    topk_lens: bool = False
    all_invalid: bool = False  # some queries list no valid key
    amplified: bool = False  # some keys are scaled by up to 256

    @property
    def group(self) -> str:
        return f"{self.form} prefill, {self.kind}"

    def _with_heads(self, most: int) -> Self:
        return dataclasses.replace(self, h_q=min(self.h_q, max(most, 1)))

    def _shortened(self, most: int) -> Self:
        s_q, s_kv, topk = self.s_q, self.s_kv, self.topk
        while max(s_kv, s_q * topk) > most and s_q > 16:
            s_q = max(s_q // 2, 16)
        while max(s_kv, s_q * topk) > most and (s_kv, topk) != (shorter := (_half(s_kv, 32), _half(topk, 64))):
            s_kv, topk = shorter
        return dataclasses.replace(self, s_q=s_q, s_kv=s_kv, topk=topk)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MhaCase(Case):
    """One call of `flash_attn_varlen_func` and of its gradient."""

    OPERATION: ClassVar[str] = "varlen_attention"

    b: int = 2
    s_q: int
    s_k: int
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    varlen: bool = False
    causal: bool = False

    @property
    def group(self) -> str:
        return f"multi-head attention, {self.kind}"

    def _with_heads(self, most: int) -> Self:
        if self.h_q <= most:
            return self
        h_kv = max(most * self.h_kv // self.h_q, 1)
        return dataclasses.replace(self, h_q=max(most // h_kv, 1) * h_kv, h_kv=h_kv)

    def _shortened(self, most: int) -> Self:
        s_q, s_k = self.s_q, self.s_k
        while self.b * s_k > most and s_k > 20:
            s_q, s_k = _half(s_q, 20), _half(s_k, 20)
        return dataclasses.replace(self, s_q=s_q, s_k=s_k)


def _half(length: int, least: int) -> int:
    return max(length // 2, least) if length > least else length


SHAPES = (
    (128, 128), (256, 256), (512, 512), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256),
    (114, 384),
)  # fmt: skip
LONG = (4096, 8192, 16384, 32768)
BOTH = (False, True)


def e0_decode() -> Iterator[DecodeCase]:
    """The cases of September 2025, `tests/test_flash_mla_decoding.py`: dense in bfloat16, sparse in fp8."""
    modes: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"topk": 128}, {"topk": 2048})
    for b, s_q, s_k, varlen, mode in itertools.product((1, 2, 6, 64), (1, 2, 4), (20, 140, 4096), BOTH, modes):
        yield DecodeCase(form="e0", b=b, s_q=s_q, s_k=s_k, varlen=varlen, **mode)
    corner: dict[str, Any] = {"form": "e0", "kind": "corner", "b": 128, "s_q": 2, "s_k": 4096, "varlen": True}
    for topk in (128, 2048, 4096):
        yield DecodeCase(**corner, topk=topk, all_invalid=True)
    for mode in modes:
        yield DecodeCase(**corner, zero_lens=True, **mode)
    for mode, s_q, s_k in itertools.product((*modes[:2], modes[3]), (1, 2), LONG):
        yield DecodeCase(form="e0", kind="performance", b=128, s_q=s_q, s_k=s_k, varlen=True, **mode)


def e0_prefill() -> Iterator[PrefillCase]:
    """The cases of September 2025, `tests/test_flash_mla_prefill.py`."""
    for (s_kv, topk), s_q in itertools.product(SHAPES, (1, 62)):
        yield PrefillCase(form="e0", s_q=s_q, s_kv=s_kv, topk=topk)
    for (s_kv, topk), s_q in itertools.product(((32, 2048), (64, 8192)), (1, 1024)):
        yield PrefillCase(form="e0", kind="corner", s_q=s_q, s_kv=s_kv, topk=topk)
    for s_kv in (4096, 8192, 16384, 32768, 49152, 65536, 81920, 98304, 114688, 131072):
        yield PrefillCase(form="e0", kind="performance", s_q=4096, s_kv=s_kv, topk=2048)


def e2_dense() -> Iterator[DecodeCase]:
    """The cases of April 2026, `tests/test_flash_mla_dense_decoding.py`."""
    heads = [(h_q, h_kv) for h_q in (1, 3, 9, 63, 64, 126, 128) for h_kv in (1, 2, 3, 8) if h_q % h_kv == 0]
    for b, s_q, s_k, (h_q, h_kv), varlen, causal in itertools.product(
        (1, 2, 6, 64), (1, 2, 4), (20, 140, 4096), heads, BOTH, BOTH
    ):
        yield DecodeCase(form="e2", b=b, s_q=s_q, s_k=s_k, h_q=h_q, h_kv=h_kv, varlen=varlen, causal=causal)
    for (h_q, h_kv), causal in itertools.product(heads, BOTH):
        yield DecodeCase(
            form="e2", kind="corner", b=128, s_q=2, s_k=4096, h_q=h_q, h_kv=h_kv, varlen=True, zero_lens=True,
            causal=causal,
        )  # fmt: skip
    for causal, s_q, s_k in itertools.product(BOTH, (1, 2), LONG):
        yield DecodeCase(form="e2", kind="performance", b=128, s_q=s_q, s_k=s_k, varlen=True, causal=causal)


SPARSE_SHAPES = (
    (512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2), (1024, 576, 61), (2046, 2048, 2), (2046, 2048, 64),
    (2046, 2048, 576),
)  # fmt: skip
SPARSE_CORNERS = ((512, 64, 61), (650, 576, 53))


def _sparse_models() -> Iterator[tuple[dict[str, Any], bool, bool]]:
    """Yield (fields for width, lengths and heads; whether an extra cache exists; whether its lists have lengths)."""
    for d_qk in (576, 512):
        for extra in BOTH if d_qk == 512 else (False,):
            for extra_lens, lens in itertools.product(BOTH if extra else (False,), BOTH if d_qk == 512 else (False,)):
                for h_q in (64, 128):
                    yield {"form": "e2", "d_qk": d_qk, "h_q": h_q, "topk_lens": lens}, extra, extra_lens


def _sparse_batches(
    shapes: Sequence[tuple[int, int, int]], model: dict[str, Any], extra: bool, extra_lens: bool
) -> Iterator[dict[str, Any]]:
    """Yield the fields for caches and batch. Only batches of 74 also have equal lengths, if no list has a length."""
    second_caches: list[Lists | None] = [None]
    if extra:
        second_caches = [Lists(s_k=s_k, topk=topk, page_size=page, lengths=extra_lens) for s_k, topk, page in shapes]
    for (s_k, topk, page), second, b in itertools.product(shapes, second_caches, (4, 74, 321)):
        for varlen in (True, False) if b == 74 and not model["topk_lens"] and not extra_lens else (True,):
            batch = {"s_k": s_k, "topk": topk, "page_size": page, "extra": second, "b": b, "varlen": varlen}
            yield model | batch


def _sparse_performance() -> Iterator[dict[str, Any]]:
    for b in (2, 64, 74, 128):
        yield {"b": b, "s_k": 32768, "topk": 2048}
    for h_q, topk, page_size, lengths in (
        (64, 512, 64, False), (128, 1024, 64, False), (64, 1024, 2, True), (128, 1024, 2, True)
    ):  # fmt: skip
        extra = Lists(s_k=16384, topk=topk, page_size=page_size, lengths=lengths)
        for b in (2, 64, 74, 128, 148, 256):
            yield {"b": b, "s_k": 16384, "topk": 128, "page_size": 256, "h_q": h_q, "d_qk": 512, "extra": extra}
    for h_q, d_qk in itertools.product((64, 128), (512, 576)):
        yield {"b": 148, "s_k": 32768, "topk": 16384, "h_q": h_q, "d_qk": d_qk}


def e2_sparse() -> Iterator[DecodeCase]:
    """The cases of April 2026, `tests/test_flash_mla_sparse_decoding.py`. Each case has its own seed."""
    seeds = itertools.count()
    for model, extra, extra_lens in _sparse_models():
        for batch, s_q in itertools.product(_sparse_batches(SPARSE_SHAPES, model, extra, extra_lens), (1, 3)):
            yield DecodeCase(**batch, s_q=s_q, sinks=True, seed=next(seeds))
    for model, extra, extra_lens in _sparse_models():
        for batch in _sparse_batches(SPARSE_CORNERS, model, extra, extra_lens):
            for all_invalid, zero_lens, sinks in itertools.product((True, False), repeat=3):
                if all_invalid or zero_lens or sinks:
                    yield DecodeCase(
                        **batch, kind="corner", s_q=3, all_invalid=all_invalid, zero_lens=zero_lens, sinks=sinks,
                        seed=next(seeds),
                    )  # fmt: skip
    for batch in _sparse_performance():
        yield DecodeCase(form="e2", kind="performance", s_q=2, varlen=True, sinks=True, **batch, seed=next(seeds))


def e2_prefill() -> Iterator[PrefillCase]:
    """The cases of April 2026, `tests/test_flash_mla_sparse_prefill.py`. Each case has its own seed."""
    seeds = itertools.count()
    models = tuple(itertools.product((576, 512), (128, 64)))
    for (d_qk, h_q), (s_kv, topk), s_q in itertools.product(models, SHAPES, (1, 62, 213)):
        yield PrefillCase(form="e2", s_q=s_q, s_kv=s_kv, topk=topk, h_q=h_q, d_qk=d_qk, seed=next(seeds))
    # The fourth factor stands for a feature that these tests never use. It repeats every case with another seed.
    for (d_qk, h_q), (s_kv, topk), s_q, _, sinks, lens in itertools.product(
        models, SHAPES[3:], (62, 213), BOTH, BOTH, BOTH
    ):
        yield PrefillCase(
            form="e2", kind="features", s_q=s_q, s_kv=s_kv, topk=topk, h_q=h_q, d_qk=d_qk, sinks=sinks,
            topk_lens=lens, seed=next(seeds),
        )  # fmt: skip
    invalid = ((1, 128, 128), (1, 256, 256), (1234, 4321, 4096), (4096, 2048, 2048))
    empty = ((1, 32, 2048), (1024, 32, 2048), (1, 64, 8192), (1024, 64, 8192))
    for d_qk, h_q in models:
        for s_q, s_kv, topk in (*invalid, *empty, (70000, 256, 256)):
            hard = (s_q, s_kv, topk) in invalid
            yield PrefillCase(
                form="e2", kind="corner", s_q=s_q, s_kv=s_kv, topk=topk, h_q=h_q, d_qk=d_qk, sinks=hard,
                topk_lens=hard, all_invalid=hard, seed=next(seeds),
            )  # fmt: skip
    for d_qk, h_q, topk, lengths in (
        (576, 128, 2048, (8192, 32768, 65536, 98304, 131072)),
        (512, 64, 512, (8192, 32768, 49152, 65536)),
        (512, 128, 1024, (8192, 32768, 49152, 65536)),
    ):
        for s_kv in lengths:
            yield PrefillCase(
                form="e2", kind="performance", s_q=4096, s_kv=s_kv, topk=topk, h_q=h_q, d_qk=d_qk, sinks=True,
                seed=next(seeds),
            )  # fmt: skip


E4_SHAPES = (
    (512, 64, 5), (512, 64, 69), (1024, 576, 2), (1024, 576, 61), (2046, 2048, 1), (2046, 2048, 64), (2046, 2048, 576),
)  # fmt: skip
E4_SECONDS = (
    (512, 64, 5), (512, 64, 69), (1024, 576, 2), (1024, 576, 123), (2046, 2048, 1), (2046, 2048, 576),
)  # fmt: skip
# (whether a second cache exists, whether it is fp4)
E4_CACHES = ((False, False), (True, False), (True, True))


def _e4_batches(
    shapes: Sequence[tuple[int, int, int]], second_caches: Sequence[Lists | None], batches: Sequence[int], lens: bool
) -> Iterator[dict[str, Any]]:
    """Yield the fields for caches and batch. Only batches of 74 also have equal lengths, if no list has a length."""
    for (s_k, topk, page), second, b in itertools.product(shapes, second_caches, batches):
        has_lengths = lens or (second is not None and second.lengths)
        for varlen in (True, False) if b == 74 and not has_lengths else (True,):
            yield {
                "form": "e4", "d_qk": 512, "s_k": s_k, "topk": topk, "page_size": page, "extra": second, "b": b,
                "varlen": varlen, "topk_lens": lens,
            }  # fmt: skip


def e4_sparse() -> Iterator[DecodeCase]:
    """The cases of late September 2026, `tests/test-sparse-decode.py`.

    A random draw decides whether lists have lengths, for each choice of caches and number of heads.
    """
    seeds, random = itertools.count(), Random(0)
    corners: list[DecodeCase] = []
    for (second, fp4), h_q in itertools.product(E4_CACHES, (64, 128)):
        lens, extra_lens = random.random() < 0.5, second and random.random() < 2 / 3

        def lists(
            shapes: Sequence[tuple[int, int, int]], lengths: bool = extra_lens, fp4: bool = fp4
        ) -> list[Lists | None]:
            return [Lists(s_k=s_k, topk=topk, page_size=page, lengths=lengths, fp4=fp4) for s_k, topk, page in shapes]

        second_caches = lists(E4_SECONDS) if second else [None]
        for batch, s_q in itertools.product(_e4_batches(E4_SHAPES, second_caches, (4, 74, 321), lens), (1, 3)):
            yield DecodeCase(**batch, h_q=h_q, s_q=s_q, sinks=random.random() < 0.5, seed=next(seeds))
        second_caches = lists(SPARSE_CORNERS) if second else [None]
        for batch in _e4_batches(SPARSE_CORNERS, second_caches, (1, 74, 321), lens):
            corners += [
                DecodeCase(**batch, kind="corner", h_q=h_q, s_q=3, all_invalid=invalid, zero_lens=zero, sinks=sinks)
                for invalid, zero, sinks in itertools.product((True, False), repeat=3)
                if invalid or zero or sinks
            ]
    yield from (dataclasses.replace(case, seed=next(seeds)) for case in corners)
    common: dict[str, Any] = {"form": "e4", "d_qk": 512, "topk": 128}
    for fp4 in BOTH:
        partial = Lists(s_k=512, topk=100, page_size=64, fp4=fp4)
        yield DecodeCase(**common, kind="corner", b=4, s_q=3, s_k=512, varlen=True, extra=partial, seed=next(seeds))
    for fp4, h_q, b in itertools.product(BOTH, (64, 128), (64, 128, 256, 512)):
        extra = Lists(s_k=2048, topk=512, page_size=64, fp4=fp4)
        yield DecodeCase(
            **common, kind="performance", b=b, h_q=h_q, s_q=4, s_k=256, page_size=256, varlen=True, extra=extra,
            seed=next(seeds),
        )  # fmt: skip
    for h_q, fp4 in itertools.product((64, 128), BOTH):
        extra = Lists(s_k=4096, topk=512, page_size=64, fp4=fp4)
        yield DecodeCase(**common, kind="performance", b=1, h_q=h_q, s_q=4096, s_k=4096, extra=extra, seed=next(seeds))


def e4_prefill() -> Iterator[PrefillCase]:
    """The cases of late September 2026, `tests/test-sparse-prefill.py`. Each case has its own seed."""
    seeds, heads = itertools.count(), (128, 64)
    for h_q, (s_kv, topk), s_q in itertools.product(heads, SHAPES, (1, 62, 213)):
        yield PrefillCase(form="e4", s_q=s_q, s_kv=s_kv, topk=topk, h_q=h_q, d_qk=512, seed=next(seeds))
    for h_q, (s_kv, topk), s_q, sinks, lens, amplified in itertools.product(
        heads, SHAPES[3:], (62, 213), BOTH, BOTH, BOTH
    ):
        yield PrefillCase(
            form="e4", kind="features", s_q=s_q, s_kv=s_kv, topk=topk, h_q=h_q, d_qk=512, sinks=sinks, topk_lens=lens,
            amplified=amplified, seed=next(seeds),
        )  # fmt: skip
    hard: dict[str, Any] = {"form": "e4", "kind": "corner", "d_qk": 512, "sinks": True, "topk_lens": True}
    invalid = ((1, 128, 128), (1, 256, 256), (1234, 4321, 4096), (4096, 2048, 2048))
    for h_q, (s_q, s_kv, topk), amplified in itertools.product(heads, invalid, BOTH):
        yield PrefillCase(
            **hard, s_q=s_q, s_kv=s_kv, topk=topk, h_q=h_q, all_invalid=True, amplified=amplified, seed=next(seeds)
        )
    empty = ((1, 32, 2048), (1024, 32, 2048), (1, 64, 8192), (1024, 64, 8192), (70000, 256, 256))
    for h_q, (s_q, s_kv, topk) in itertools.product(heads, empty):
        yield PrefillCase(**hard, s_q=s_q, s_kv=s_kv, topk=topk, h_q=h_q, seed=next(seeds))
    for h_q, s_kv in itertools.product((64, 128), (4096, 8192, 32768)):
        yield PrefillCase(
            form="e4", kind="performance", s_q=4096, s_kv=s_kv, topk=640, h_q=h_q, d_qk=512, sinks=True,
            seed=next(seeds),
        )  # fmt: skip


def mha() -> Iterator[MhaCase]:
    """The cases of `tests/test_fmha_sm100.py`, but with gradients for grouped heads too."""
    heads, widths = ((128, 128), (32, 4)), ((128, 128), (192, 128))
    for s, varlen, (h_q, h_kv), (d_qk, d_v), causal in itertools.product((4096, 8192), BOTH, heads, widths, BOTH):
        yield MhaCase(s_q=s, s_k=s, h_q=h_q, h_kv=h_kv, d_qk=d_qk, d_v=d_v, varlen=varlen, causal=causal)


LISTS: dict[str, tuple[Callable[[], Iterator[Case]], ...]] = {
    "e0": (e0_decode, e0_prefill),
    "e2-dense": (e2_dense,),
    "e2-sparse": (e2_sparse,),
    "e2-prefill": (e2_prefill,),
    "e4-sparse": (e4_sparse,),
    "e4-prefill": (e4_prefill,),
    "mha": (mha,),
}
LISTS["all"] = tuple(itertools.chain.from_iterable(LISTS.values()))


def cases_of(name: str) -> list[Case]:
    """All cases of an entry of `LISTS`."""
    return [case for cases in LISTS[name] for case in cases()]


def covering(cases: Iterable[Case]) -> list[Case]:
    """A small subset of the cases. Any two parameter values that occur together in a case do so in the subset too."""
    open_pairs: dict[Case, set[Any]] = {case: _pairs(case) for case in cases}
    subset = []
    while open_pairs:
        best = max(open_pairs, key=lambda case: len(open_pairs[case]))
        covered = open_pairs.pop(best)
        subset.append(best)
        for pairs in open_pairs.values():
            pairs -= covered
        open_pairs = {case: pairs for case, pairs in open_pairs.items() if pairs}
    return subset


def _pairs(case: Case) -> set[Any]:
    values = {field.name: getattr(case, field.name) for field in dataclasses.fields(case) if field.name != "seed"}
    if extra := values.pop("extra", None):
        values |= {f"extra {name}": value for name, value in dataclasses.asdict(extra).items()}
    return set(itertools.combinations(values.items(), 2))
