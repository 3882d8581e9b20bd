"""The demo: its page allocator, its scheduler with a model that only remembers tokens, and its command."""

import dataclasses
import functools
import io
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ragged_attention import demo
from ragged_attention.demo import command
from ragged_attention.demo.check import check
from ragged_attention.demo.engine import STOP, Batch, Engine, Limits, Sequence
from ragged_attention.demo.mla import LatentAttention
from ragged_attention.demo.model import KINDS, load_weights
from ragged_attention.demo.pages import PageAllocator, chained_digest
from ragged_attention.demo.prompts import PROMPTS
from ragged_attention.demo.view import View, readable
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported
from tests.processes import printed

ROOT = Path(__file__).resolve().parent.parent


def test_pages_are_taken_shared_and_freed():
    pages = PageAllocator(2)
    first, second = pages.take(), pages.take()
    assert {first, second} == {0, 1}
    assert pages.take() is None
    digest = chained_digest(b"", [1, 2, 3])
    assert pages.share(digest) is None
    pages.publish(0, digest)
    assert pages.share(digest) == 0
    assert pages.holders(0) == 2
    pages.release(0)
    assert pages.num_free == 0
    pages.release(0)
    assert (pages.num_free, pages.num_used) == (1, 1)


def test_a_freed_page_is_found_until_it_is_given_out_again():
    pages = PageAllocator(1)
    page = pages.take()
    assert page == 0
    pages.publish(page, b"content")
    pages.release(page)
    assert pages.share(b"content") == page
    pages.release(page)
    assert pages.take() == page
    assert pages.share(b"content") is None


def test_a_digest_depends_on_all_that_comes_before():
    assert chained_digest(b"", [1, 2]) == chained_digest(b"", [1, 2])
    assert chained_digest(chained_digest(b"", [0, 0]), [1, 2]) != chained_digest(b"", [1, 2])


def test_only_held_pages_can_be_released_or_published():
    pages = PageAllocator(1)
    with pytest.raises(ValueError, match="expected a page that somebody holds, got page 0"):
        pages.release(0)
    with pytest.raises(ValueError, match="expected a page that somebody holds, got page 0"):
        pages.publish(0, b"content")


ACTIONS = st.tuples(st.sampled_from(("take", "share", "publish", "release")), st.integers(0, 99), st.integers(0, 5))


@given(st.integers(1, 5), st.lists(ACTIONS, max_size=60))
def test_pages_agree_with_a_list_of_holders(num_pages, actions):
    """After any series of actions, reference counts match the holders, and a shared page has the requested content."""
    pages = PageAllocator(num_pages)
    held: list[int] = []
    content: dict[int, bytes] = {}
    for action, pick, name in actions:
        digest = bytes([name])
        if action == "take":
            page = pages.take()
            assert (page is None) == (len(set(held)) == num_pages)
            if page is not None:
                assert page not in held
                content.pop(page, None)
                held.append(page)
        elif action == "share":
            page = pages.share(digest)
            assert (page is None) == (digest not in content.values())
            if page is not None:
                assert content[page] == digest
                held.append(page)
        elif held:
            page = held[pick % len(held)]
            if action == "release":
                held.remove(page)
                pages.release(page)
            else:
                pages.publish(page, digest)
                if digest not in content.values():
                    content.setdefault(page, digest)
        assert [pages.holders(page) for page in range(num_pages)] == [Counter(held)[p] for p in range(num_pages)]
        assert pages.num_used == len(set(held))
        assert pages.num_used + pages.num_free == num_pages


def following(history: list[int]) -> int:
    """The next token after a history. It depends on all tokens of the history, and is sometimes STOP."""
    mixed = sum((place + 1) * token for place, token in enumerate(history))
    return STOP if mixed % 13 == 0 else 97 + mixed % 3


def context(before: int, token: int) -> int:
    """A hash of a token and of `before`, the previous token's hash. It stands for the token's keys and values."""
    return hash((before, token))


@dataclasses.dataclass
class Memory:
    """A model that stores tokens and their contexts in pages and reads each history back through the page tables."""

    limits: Limits

    def __post_init__(self) -> None:
        shape = (self.limits.num_pages, self.limits.page_size)
        self.tokens, self.contexts = np.full(shape, -1), np.zeros(shape, np.int64)

    def step(self, batch: Batch) -> np.ndarray:
        count = int(batch.num_seqs[0])
        assert 0 < count <= self.limits.max_num_seqs
        assert batch.tokens.shape == batch.positions.shape == (self.limits.max_tokens,)
        for seq in range(count):
            self._write(batch, seq)
        logits = np.zeros((self.limits.max_num_seqs, 256), np.float32)
        for seq in range(count):
            logits[seq, following(self._history(batch, seq))] = 1
            assert batch.last_rows[seq] == batch.cu_q_lens[seq + 1] - 1
        return logits

    def _write(self, batch: Batch, seq: int) -> None:
        start, stop = batch.cu_q_lens[seq : seq + 2]
        assert stop > start
        positions = batch.positions[start:stop]
        assert positions.tolist() == list(range(batch.kv_lens[seq] - (stop - start), batch.kv_lens[seq]))
        for token, position in zip(batch.tokens[start:stop], positions, strict=True):
            page, offset = self._slot(batch, seq, position)
            assert (batch.page_indices == page).sum() == 1, "a shared page is written"
            before = self.contexts[self._slot(batch, seq, position - 1)] if position else 0
            self.tokens[page, offset] = token
            self.contexts[page, offset] = context(int(before), int(token))

    def _history(self, batch: Batch, seq: int) -> list[int]:
        slots = [self._slot(batch, seq, position) for position in range(batch.kv_lens[seq])]
        before = 0
        for slot in slots:
            before = context(before, int(self.tokens[slot]))
            assert self.contexts[slot] == before, "a page follows tokens that it was not computed after"
        return [int(self.tokens[slot]) for slot in slots]

    def _slot(self, batch: Batch, seq: int, position: int) -> tuple[int, int]:
        page = int(batch.page_indices[seq, position // self.limits.page_size])
        assert page >= 0
        return page, position % self.limits.page_size


def alone(prompt: bytes, max_new_tokens: int) -> list[int]:
    """The tokens that a sequence must have at the end, whatever other sequences are served with it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(following(tokens))
        if tokens[-1] == STOP:
            break
    return tokens


def serve(engine: Engine, arrivals: list[tuple[int, Sequence]]):
    reports = []
    for clock in range(10_000):
        for arrives, sequence in arrivals:
            if arrives == clock:
                engine.submit(sequence)
        if engine.busy:
            reports.append(engine.step())
        elif all(arrives <= clock for arrives, _ in arrivals):
            return reports
    raise AssertionError("the engine does not come to an end")


LIMITS = st.builds(
    Limits,
    max_tokens=st.integers(5, 12),
    max_num_seqs=st.integers(1, 5),
    num_pages=st.integers(10, 24),
    page_size=st.integers(1, 4),
    pages_per_seq=st.just(20),
)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 12), st.text("ab", min_size=1, max_size=6), st.integers(1, 4)), min_size=1, max_size=8
)


@given(LIMITS, REQUESTS, st.booleans())
def test_the_engine_serves_each_sequence_as_if_it_were_alone(limits, requests, common):
    """Each sequence gets the tokens that it has alone, and all pages are returned at the end.

    The runs have chunks, mixed steps, shared prefixes and preempted pages.
    """
    beginning = "abba" * common
    arrivals = [
        (arrives, Sequence(number, f"{beginning}{text}".encode()[: limits.max_len - new], new))
        for number, (arrives, text, new) in enumerate(requests)
    ]
    engine = Engine(Memory(limits), limits)
    reports = serve(engine, arrivals)
    for _, sequence in arrivals:
        assert sequence.tokens == alone(sequence.prompt, sequence.max_new_tokens)
        assert len(sequence.logits) == len(sequence.new_tokens)
        assert sequence.finished
    assert engine.pages.num_used == 0
    for report in reports:
        assert report.running <= limits.max_num_seqs
        assert 0 < report.prefill_tokens + report.decode_tokens <= limits.max_tokens


def test_a_common_prefix_is_computed_once():
    limits = Limits(max_tokens=16, max_num_seqs=4, num_pages=32, page_size=4, pages_per_seq=8)
    engine = Engine(Memory(limits), limits)
    first, second = (Sequence(number, b"abababababab" + end, 3) for number, end in enumerate((b"a", b"bb")))
    reports = serve(engine, [(0, first), (1, second)])
    assert [report.shared_hits for report in reports[:2]] == [0, 3]
    assert reports[0].prefill_tokens == 13
    # A mixed step prefills only the tokens that the second sequence does not share.
    assert (reports[1].prefill_tokens, reports[1].decode_tokens) == (2, 1)


def test_without_free_pages_sequences_wait_and_lose_theirs_but_all_end():
    limits = Limits(max_tokens=8, max_num_seqs=4, num_pages=6, page_size=2, pages_per_seq=6)
    engine = Engine(Memory(limits), limits)
    sequences = [Sequence(number, prompt, 6) for number, prompt in enumerate((b"ab", b"ba", b"bb", b"aabb"))]
    reports = serve(engine, [(0, sequence) for sequence in sequences])
    assert max(report.waiting for report in reports) > 0
    assert sum(report.preempted for report in reports) > 0
    assert all(sequence.tokens == alone(sequence.prompt, 6) for sequence in sequences)


def test_what_can_never_be_served_is_refused():
    engine = Engine(Memory(Limits()), Limits())
    with pytest.raises(
        InvalidInput, match="expected prompt and new tokens to be at most max_len=256 together, got 257"
    ):
        engine.submit(Sequence(0, b"a" * 200, 57))
    with pytest.raises(InvalidInput, match="expected prompt 3 to have at least one byte, got none"):
        engine.submit(Sequence(3, b"", 1))
    with pytest.raises(InvalidInput, match="expected max_tokens >= max_num_seqs=8, got 5"):
        Limits(max_tokens=5)


def numbers(pattern: str, output: str) -> list[int]:
    """The numbers that a pattern captures from the output."""
    found = re.search(pattern, output)
    assert found, output
    return [int(number) for number in found.groups()]


EQUAL = r"(\d+) of (\d+) tokens equal those of full attention"


def run_demo(capsys, *arguments: str) -> tuple[int, str]:
    code = demo.main([*arguments])
    return code, capsys.readouterr().out


BACKENDS = [("torch", "eager"), ("torch", "reference"), ("jax", "xla"), ("jax", "reference")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("framework", "backend"), BACKENDS)
def test_the_demo_serves_what_full_attention_gives(framework, backend, kind, capsys):
    pytest.importorskip(framework)
    arguments = ("--framework", framework, "--backend", backend, "--device", "cpu", "--max-new-tokens", "3")
    code, output = run_demo(capsys, "--model", kind, *arguments)
    assert code == 0, output
    right, of = numbers(EQUAL, output)
    assert right == of > 2 * len(PROMPTS)
    assert "\x1b" not in output
    assert re.search(rf"^ +0 +16 +0 +\d+ +\d+ +\d+/\d+ +0 +0 +{backend}$", output, re.MULTILINE)
    for prompt in PROMPTS:
        assert readable(prompt.text.encode()) in output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_triton_kernels_run_in_the_interpreter_without_being_asked_to(framework, kind):
    pytest.importorskip(framework)
    pytest.importorskip("triton")
    arguments = ["--framework", framework, "--backend", "triton", "--device", "cpu", "--max-new-tokens", "2"]
    output = printed("-m", "tests.programs.short_demo", "--model", kind, *arguments)
    assert "4 of 4 tokens equal" in output
    assert re.search(r"^ +0 +16 +0 .* triton$", output, re.MULTILINE)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_grow_prefixes_are_shared_and_steps_are_mixed(kind, capsys):
    pytest.importorskip("torch")
    code, output = run_demo(capsys, "--model", kind, "--framework", "torch", "--device", "cpu")
    assert code == 0, output
    assert numbers(r"(\d+) pages shared", output)[0] >= 12
    growth = [len(line) for line in output.splitlines() if line.startswith("#0 ")]
    assert len(growth) >= 3
    assert growth == sorted(growth)
    steps = re.findall(r"^ +\d+ +(\d+) +(\d+) .* numba$", output, re.MULTILINE)
    assert any(int(prefill) and int(decode) for prefill, decode in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_kernel_is_found_out(kind, capsys, monkeypatch):
    module, operation = pytest.importorskip("ragged_attention.torch"), KINDS[kind].operation
    monkeypatch.setattr(module, operation, functools.partial(getattr(module, operation), sliding_window=16))
    arguments = ("--model", kind, "--framework", "torch", "--device", "cpu", "--max-new-tokens", "8")
    code, output = run_demo(capsys, *arguments)
    assert code == 1
    right, of = numbers(EQUAL, output)
    assert right < of
    assert re.search(r"#\d+ new token \d+: served b'.*', full attention b'.*', ahead by", output)


def test_rounding_to_8_bits_changes_logits_but_no_token(capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(LatentAttention, "rounded", lambda transformer, rows, kv_scale: rows)
    arguments = ("--model", "mla", "--framework", "torch", "--device", "cpu", "--max-new-tokens", "8")
    code, output = run_demo(capsys, *arguments)
    assert code == 0
    found = re.search(r"largest difference of a logit (\S+);", output)
    assert found
    assert float(found[1]) > 0.1


def test_the_verdict_counts_and_measures():
    class Full:
        def full(self, tokens):
            logits = np.zeros((*tokens.shape, 256), np.float32)
            logits[0, 1, 98] = 1.0
            logits[0, 2, 99] = 0.25
            return logits

    sequence = Sequence(7, b"ab", 2)
    sequence.tokens += [98, 97]
    sequence.logits = [np.zeros(256, np.float32), np.zeros(256, np.float32)]
    verdict = check(Full(), [sequence])
    assert (verdict.num_tokens, verdict.agrees) == (2, False)
    (wrong,) = verdict.mismatches
    assert (wrong.sequence, wrong.index, wrong.served, wrong.expected, wrong.margin) == (7, 1, 97, 99, 0.25)
    assert (verdict.largest_difference, verdict.closest_choice) == (1.0, 0.25)


def test_on_a_terminal_the_texts_grow_in_place():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=60, color_system="standard")
    limits = Limits()
    engine = Engine(Memory(limits), limits)
    sequence = Sequence(0, b"ab" * 50, 3)
    engine.submit(sequence)
    with View(console, "title", limits.num_pages, "eager") as view:
        while engine.busy:
            view.step(0, engine.step(), [sequence])
    output = stream.getvalue()
    assert "\x1b[" in output
    assert "done" in output
    assert all(len(re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line)) <= 80 for line in output.splitlines())


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_small_and_complete(kind):
    assert (ROOT / "src" / "ragged_attention" / "demo" / KINDS[kind].file).stat().st_size <= 1_100_000
    weights = load_weights(kind)
    assert weights["embed"].shape[0] == 256
    assert all(np.isfinite(value).all() and value.dtype == np.float32 for value in weights.values())


def test_the_first_model_has_grouped_queries_and_the_second_caches_little():
    weights = load_weights("gqa")
    assert weights["q"].shape[2] > weights["k"].shape[2]
    weights = load_weights("mla")
    num_layers, _, width = weights["latent"].shape
    assert width < weights["k"].shape[2] * weights["k"].shape[3]  # less than the keys of all heads together
    assert weights["kv_scale"].shape == (num_layers,)
    assert set(np.frexp(weights["kv_scale"])[0]) == {0.5}  # powers of two, exact in half precision


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_script_writes_such_weights(kind, tmp_path, capsys):
    pytest.importorskip("torch")
    script = runpy.run_path(str(ROOT / "examples" / "train_demo.py"))
    out = tmp_path / "weights.npz"
    arguments = ["--model", kind, "--steps", "2", "--batch", "2", "--length", "32", "--out", str(out)]
    assert script["main"](arguments) == 0
    with np.load(out) as stored:
        assert {name: stored[name].shape for name in stored.files} == {
            name: value.shape for name, value in load_weights(kind).items()
        }
    assert "loss" in capsys.readouterr().out


def test_mistakes_are_named(monkeypatch, capsys):
    pytest.importorskip("torch")
    with pytest.raises(SystemExit):
        demo.main(["--max-new-tokens", "0"])
    assert "argument --max-new-tokens: expected a whole number >= 1, got '0'" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="expected prompt and new tokens to be at most max_len=256 together"):
        demo.main(["--framework", "torch", "--device", "cpu", "--max-new-tokens", "250"])
    with pytest.raises(InvalidInput, match=r"expected backend to be one of auto, triton, .*, got 'nobody'"):
        demo.main(["--framework", "torch", "--backend", "nobody"])
    with pytest.raises(InvalidInput, match="expected device to be one that torch has here, got 'abacus': "):
        demo.main(["--framework", "torch", "--device", "abacus"])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", command)
    with pytest.raises(Unsupported, match="expected TRITON_INTERPRET=1 before triton is imported, got it imported"):
        demo.main(["--framework", "torch", "--device", "cpu", "--backend", "triton"])


def test_a_device_that_jax_lacks_is_named():
    pytest.importorskip("jax")
    with pytest.raises(InvalidInput, match="expected device to be one that jax has here, got 'abacus': "):
        demo.main(["--framework", "jax", "--device", "abacus"])


def test_the_framework_is_the_one_installed(monkeypatch):
    installed = {"jax"}
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: name if name in installed else None)
    assert command.chosen_framework(None) == "jax"
    assert command.chosen_framework("jax") == "jax"
    with pytest.raises(BackendMissing, match=r"torch is not installed: run pip install '\.\[torch\]' in a checkout"):
        command.chosen_framework("torch")
    installed.clear()
    with pytest.raises(BackendMissing, match=r"torch or jax, and neither is installed: .*\[torch\]"):
        command.chosen_framework(None)
    installed.update(("torch", "jax"))
    assert command.chosen_framework(None) == "torch"


# ---- checkpoints of transformers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_a_checkpoint_is_served_and_checked(family, tmp_path, capsys):
    pytest.importorskip("transformers")
    arguments = ["--model", str(tmp_path / "tiny"), "--max-new-tokens", "4"]
    assert demo.main([*arguments, "--make-tiny", family]) == 0
    out = capsys.readouterr().out
    assert f"a random {family} of two layers, written to {tmp_path}" in out.replace("\n", "")
    assert "48 of 48 tokens are those of transformers' eager attention" in out
    assert demo.main(arguments) == 0  # runs again from the written checkpoint
    with pytest.raises(InvalidInput, match="expected an empty folder for the new checkpoint, got"):
        demo.main([*arguments, "--make-tiny", family])


@pytest.mark.filterwarnings("ignore")
def test_tokens_of_another_attention_are_noticed(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    from ragged_attention.integrations.transformers import _continuous

    right = _continuous.ragged_paged_attention
    monkeypatch.setattr(_continuous, "ragged_paged_attention", lambda *args, **known: 1.5 * right(*args, **known))
    arguments = ["--model", str(tmp_path / "tiny"), "--make-tiny", "qwen3", "--max-new-tokens", "4"]
    assert demo.main(arguments) == 1
    assert "48 of 48 tokens" not in capsys.readouterr().out


def test_checkpoints_that_cannot_be_served(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    with pytest.raises(InvalidInput, match=r"expected a folder with a checkpoint of transformers, got .* without"):
        demo.main(["--model", str(tmp_path)])
    with pytest.raises(InvalidInput, match=r"expected a folder as --model with --make-tiny, .*, got mla"):
        demo.main(["--make-tiny", "qwen3", "--model", "mla"])
    with pytest.raises(InvalidInput, match="expected --framework torch with a checkpoint, got jax"):
        demo.main(["--model", str(tmp_path), "--framework", "jax"])
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendMissing, match=r"torch is not installed: run pip install '\.\[transformers\]'"):
        demo.main(["--model", str(tmp_path)])
