"""The logical allocator of pages, against a set of free pages."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.kv import KVLayerSpec, PagedAttentionCacheManager, PagedAttentionCacheMetaData
from unmutated import UNMUTATED


def make_manager(num_pages: int, page_size: int = 4) -> PagedAttentionCacheManager:
    metadata = PagedAttentionCacheMetaData.for_layers(
        [KVLayerSpec(1, 4, 4)], page_size=page_size, dtype="float32", num_pages=num_pages
    )
    return PagedAttentionCacheManager(metadata)


class Pages(RuleBasedStateMachine):
    """Each page has one owner at most, page 0 none."""

    @initialize(num_pages=st.integers(1, 12))
    def begin(self, num_pages: int) -> None:
        self.manager = make_manager(num_pages)
        self.free = set(range(1, num_pages))
        self.owned: list[list[int]] = []

    @rule(n=st.integers(-2, 8))
    def alloc(self, n: int) -> None:
        self.take(self.manager.alloc_hbm_pages(n), n)

    @rule(prompt_len=st.integers(-5, 30))
    def alloc_prefill(self, prompt_len: int) -> None:
        self.take(self.manager.alloc_prefill_hbm_pages(prompt_len), -(-prompt_len // 4))

    def take(self, pages: list[int], n: int) -> None:
        assert len(pages) == (n if 0 < n <= len(self.free) else 0)
        assert len(set(pages)) == len(pages)
        assert set(pages) <= self.free
        self.free -= set(pages)
        self.owned.append(pages)

    @rule(data=st.data(), dummies=st.integers(0, 2))
    def give_back(self, data: st.DataObject, dummies: int) -> None:
        if self.owned:
            pages = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
            self.manager.free_hbm_pages([0] * dummies + pages)
            self.free |= set(pages)

    @rule(data=st.data())
    def give_back_wrongly(self, data: st.DataObject) -> None:
        held = sorted(page for pages in self.owned for page in pages)
        wrong = data.draw(st.sampled_from([*sorted(self.free), -1, 99]))
        with pytest.raises(ValueError, match=f"page {wrong} is not handed out"):
            self.manager.free_hbm_pages([*held, wrong])
        if held:
            with pytest.raises(ValueError, match="name a page twice"):
                self.manager.free_hbm_pages([*held, held[0]])

    @invariant()
    def the_dummy_page_is_page_zero(self) -> None:
        assert (self.manager.current_page_index, self.manager.page_size) == (0, 4)


TestPages = Pages.TestCase
TestPages.settings = settings(backend=UNMUTATED, max_examples=60)


def test_all_pages_but_one_can_be_handed_out():
    manager = make_manager(6)
    assert sorted(manager.alloc_prefill_hbm_pages(20)) == [1, 2, 3, 4, 5]
    assert manager.alloc_hbm_pages(1) == []
    manager.free_hbm_pages([0, 3])
    assert manager.alloc_prefill_hbm_pages(5) == []
    assert manager.alloc_prefill_hbm_pages(4) == [3]


def test_a_cache_without_pages_has_no_dummy():
    with pytest.raises(ValueError, match="num_pages_per_layer is 0"):
        make_manager(0)
