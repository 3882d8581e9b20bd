"""Named batches of decodes of long sequences, for kernels that support nothing else.

Most other named batches have features that a partial kernel declines. The batches here have no such features. There is
one batch for each dtype and layout of pages, so that a kernel for a single dtype and layout is tested too.
"""

import functools
from collections.abc import Callable

import numpy as np

from ragged_attention.testing import formats
from ragged_attention.testing.paged.specs import Batch, Spec, split

LENS = ((1, 1043), (1, 277), (1, 37))  # the last pages are partial
STEEP = 0.45  # the largest number added to a key's elements; it changes logits by about 5.7 over a sequence


def trending(dtype: str, combined: bool) -> Batch:
    """Decodes whose logits grow from the first key to the last. In the second sequence, they fall.

    So the largest logit of a long sequence is in its last or first block of keys. A kernel that does not rescale its
    sums to a new maximum has wrong results if its blocks have fewer keys than the longest sequence.
    """
    batch = Spec(
        lens=LENS, page_size=16, num_kv_heads=2, group=4, head_dim=64, dtype=dtype, combined=combined, seed=1
    ).build()
    batch = batch.change(q=np.abs(batch.q))
    k = split(batch.kv_pages)[0]  # a view, so the pages change with it
    for seq in range(len(LENS)):
        trend = np.linspace(-STEEP, STEEP, batch.kv_len(seq))[:: -1 if seq == 1 else 1]
        place = np.divmod(batch.slots(seq), batch.page_size)
        k[place] = formats.rounded(k[place] + trend[:, None, None], dtype)
    return batch


DECODES: dict[str, Callable[[], Batch]] = {
    f"decodes of long sequences, growing and falling logits, {dtype}, {layout}": functools.partial(
        trending, dtype, layout == "combined pages"
    )
    for dtype in ("float32", "bfloat16", "float16")
    for layout in ("combined pages", "a pair of pages")
}
