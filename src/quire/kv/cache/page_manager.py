"""Handing out the pages of a cache that no scheduler manages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kv.blocks.block_pool import BlockPool
from quire.kv.cache.metadata import PagedAttentionCacheMetaData


class PagedAttentionCacheManager:
    """Says which pages are free, and gives each to one owner at a time; knows nothing of their contents.

    Page 0 is the dummy page: it is never handed out, so that tables can name it where they hold nothing.

    Args:
        metadata: metadata of the cache.

    Raises:
        ValueError: the cache has no page.
    """

    def __init__(self, metadata: PagedAttentionCacheMetaData) -> None:
        if not metadata.num_pages_per_layer:
            raise ValueError("num_pages_per_layer is 0; one page is needed as the dummy page")
        self._page_size = metadata.page_size
        self._pool = BlockPool(metadata.num_pages_per_layer, metadata.page_size)
        self._dummy_page = int(self._pool.allocate(1)[0])

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def current_page_index(self) -> int:
        """The dummy page, 0."""
        return self._dummy_page

    def alloc_prefill_hbm_pages(self, prompt_len: int) -> list[int]:
        """Return pages for a prompt of `prompt_len` tokens; none if it is empty or too few pages are free."""
        return self.alloc_hbm_pages(-(-prompt_len // self._page_size))

    def alloc_hbm_pages(self, n: int) -> list[int]:
        """Return `n` pages; none if `n` is not positive or too few are free."""
        if not 0 < n <= self._pool.num_free:
            return []
        pages: list[int] = self._pool.allocate(n).tolist()
        return pages

    def free_hbm_pages(self, pages: Sequence[int]) -> None:
        """Take pages back; the dummy page is ignored.

        Raises:
            ValueError: a page is named twice or is not handed out; none is taken back.
        """
        owned = np.array([page for page in pages if page != self._dummy_page], dtype=np.int32)
        is_held = (owned >= 0) & (owned < self._pool.num_blocks)
        is_held[is_held] = self._pool.reference_counts(owned[is_held]) > 0
        if not is_held.all():
            raise ValueError(
                f"page {owned[is_held.argmin()]} is not handed out; the cache has pages 0 to "
                f"{self._pool.num_blocks - 1}"
            )
        if len(np.unique(owned)) < len(owned):
            raise ValueError(f"pages {owned.tolist()} name a page twice")
        self._pool.release(owned)
