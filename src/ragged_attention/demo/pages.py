"""The pages of the cache: how many sequences hold each page, and a directory of full pages that prompts can share."""

import hashlib
from collections.abc import Sequence

import numpy as np


def chained_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full page's tokens and, through `before`, of all tokens before them.

    Keys and values depend on all tokens before a token, so pages with equal tokens may still differ.
    """
    return hashlib.blake2b(before + np.asarray(tokens, "<i4").tobytes(), digest_size=16).digest()


class PageAllocator:
    """Reference counts, a free list, and a directory of full pages by content.

    A page without a holder keeps its content and its entry in the directory until it is reused. The page that has been
    free the longest is reused first. So a prompt may find pages of a sequence that has ended.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.hits = 0
        self._holders = [0] * num_pages
        self._free = dict.fromkeys(range(num_pages))  # in the order in which they became free
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self) -> int | None:
        """A page for new content, or None if every page is held."""
        if not self._free:
            return None
        page = next(iter(self._free))
        del self._free[page]
        if (digest := self._digest_of.pop(page, None)) is not None:
            del self._page_of[digest]
        self._holders[page] = 1
        return page

    def publish(self, page: int, digest: bytes) -> None:
        """Let later prompts find a page that is full. The directory lists only the first of several equal pages."""
        if not self._holders[page]:
            raise ValueError(f"expected a page that somebody holds, got page {page}")
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def share(self, digest: bytes) -> int | None:
        """The page with this content, which gets one more holder, or None if there is no such page."""
        page = self._page_of.get(digest)
        if page is None:
            return None
        self._free.pop(page, None)
        self._holders[page] += 1
        self.hits += 1
        return page

    def release(self, page: int) -> None:
        """Remove one holder of a page."""
        if not self._holders[page]:
            raise ValueError(f"expected a page that somebody holds, got page {page}")
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free[page] = None
