"""Mutants of our own Pallas kernels, each with one planted fault that the suite must catch.

As a script, `python -m tests.pallas_mutants NAME <arguments of testing.tpu_interpreter>` runs checks on one of them.
"""

import dataclasses
import importlib
import importlib.util
import sys
from pathlib import Path

PACKAGE = "ragged_attention.kernels_pallas"
SOURCES = Path(__file__).parent.parent / "kernels_pallas"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A planted fault: all occurrences of `original` in a Pallas module become `faulty`. One of `checks` must fail."""

    module: str
    original: str
    faulty: str
    mode: str
    checks: tuple[str, ...]

    def source(self) -> str:
        text = (SOURCES / f"{self.module}.py").read_text()
        if self.original not in text:
            raise ValueError(f"expected kernels_pallas/{self.module}.py to have the text {self.original!r}")
        return text.replace(self.original, self.faulty)


RAGGED, PAGED, RAGGED_LATENT = "corner: attention, ", "corner: paged decode, ", "corner: ragged latents, "
CHUNK, LATENT, WRITE = "corner: chunked prefill, ", "corner: latent decode, dense, ", "corner: write, "
LATENT_WRITE = "corner: write latents, "
LOGITS, SELECTION = "corner: indexer logits, ", "corner: indexer selection, "
MUTANTS = {
    "pages are not waited for": Mutant(
        "_ragged_kernel", "            copy.wait()\n", "            del copy\n", "on_wait", (f"{RAGGED}speculative",)
    ),
    "both buffers have one semaphore": Mutant(
        "_ragged_kernel", "refs.kv_arrived.at[slot, which]", "refs.kv_arrived.at[0, which]", "on_wait",
        (f"{RAGGED}decode of a long sequence",),
    ),
    "the window is one key wider": Mutant(
        "_ragged_kernel", "key > query - plan.window", "key >= query - plan.window", "eager", (f"{RAGGED}window of 1",)
    ),
    "the tail is not masked": Mutant(
        "_ragged_kernel", "seen = key < span.kv_len", "seen = key >= 0", "eager", (f"{RAGGED}not causal",)
    ),
    "page indices are not clamped": Mutant(
        "_ragged_kernel", "jnp.clip(page, 0, plan.num_pages - 1)", "page", "eager", (f"{RAGGED}invalid page indices",)
    ),
    "pages with heads first are not waited for": Mutant(
        "_heads_first", ").wait()", ")", "eager", (f"{PAGED}lengths of every kind",)
    ),
    "unseen keys of a decode are not masked": Mutant(
        "paged_attention", "s = jnp.where(seen, s, -jnp.inf)", "s = s", "eager", (f"{PAGED}lengths of every kind",)
    ),
    "the window of a chunk is one key wider": Mutant(
        "prefill_attention", "column > query - plan.window", "column >= query - plan.window", "eager",
        (f"{CHUNK}window",),
    ),
    "both buffers of latents have one semaphore": Mutant(
        "_latent", "arrived.at[slot]", "arrived.at[0]", "on_wait", (f"{LATENT}a long sequence",)
    ),
    "a latent that is not seen weighs": Mutant(
        "_latent", "logits = jnp.where(seen, logits, -jnp.inf)", "logits = logits", "eager", (f"{LATENT}causal",),
    ),
    "a job stores the rows of others": Mutant(
        "_latent", "own = (token >= span.begin) & (token < span.end)", "own = token >= 0", "eager",
        (f"{RAGGED_LATENT}speculative",),
    ),
    "the window of latents is one key wider": Mutant(
        "_latent", "key > position - plan.window", "key >= position - plan.window", "eager",
        (f"{RAGGED_LATENT}window of 1",),
    ),
    "what comes before the window is not made zeros": Mutant(
        "_latent", "(offset >= low) & (offset < high)", "(offset < high)", "eager",
        (f"{RAGGED_LATENT}window in a long sequence",),
    ),
    "the next block of keys is fetched into the one in use": Mutant(
        "_indexer", "start(next_lists, 1 - slot)", "start(next_lists, slot)", "on_wait",
        (f"{LOGITS}decode of a long sequence",),
    ),
    "keys on pages that do not exist are seen": Mutant(
        "_indexer", "padded(pieces.known[rows.seq])[:, None]", "True", "eager", (f"{LOGITS}invalid page indices",)
    ),
    "a query sees one key more": Mutant(
        "_indexer", "(ends[seq][:, None] - index) + 1, 0)", "(ends[seq][:, None] - index) + 2, 0)", "eager",
        (f"{LOGITS}more queries than keys",),
    ),
    "the first of equal logits is chosen": Mutant(
        "top_k_indices", "remaining >= wanted", "remaining > wanted", "eager", (f"{SELECTION}all equal",)
    ),
    "written groups of rows lose their neighbours": Mutant(
        "write_mla_cache", "(words & kept[some]) | new[some]", "new[some]", "eager",
        (f"{LATENT_WRITE}fp8_v32, float32",),
    ),
    "groups of rows are changed before they are there": Mutant(
        "write_mla_cache", "in_powers_of_2(count, block, wait)",
        "in_powers_of_2(count, block, (lambda _, size: None) if fetching else wait)", "on_wait",
        (f"{LATENT_WRITE}fp8_v32, float32",),
    ),
    "written rows are not waited for": Mutant(
        "write_kv_pages", "semaphores.at[i]).wait()", "semaphores.at[i])", "on_wait", (f"{WRITE}by slots: int8",)
    ),
}  # fmt: skip


def plant(mutant: Mutant) -> None:
    """Install the faulty module in place of the correct one; call this before anything imports that module."""
    name = f"{PACKAGE}.{mutant.module}"
    package = importlib.import_module(PACKAGE)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(mutant.source(), f"{mutant.module}.py", "exec"), vars(module))
    setattr(package, mutant.module, module)


if __name__ == "__main__":
    from ragged_attention.testing import environment, tpu_interpreter

    environment.prepare("cpu")
    plant(MUTANTS[sys.argv[1]])
    sys.exit(tpu_interpreter.main(sys.argv[2:]))
