"""Writing to a layer's pages through page tables, against a dictionary of (page, offset)."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kv import (
    Int8PageQuantizer,
    KVLayerSpec,
    PagedAttentionCache,
    PagedAttentionCacheMetaData,
    PagedAttentionCacheView,
    PagedAttentionMetadata,
)

NOTHING = 10**7
HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8


def make_view(num_pages: int = 12, page_size: int = 4, dtype: str = "float32") -> PagedAttentionCacheView:
    layers = [KVLayerSpec(1, 4, 4), KVLayerSpec(HEADS, KEY_DIM, VALUE_DIM)]
    metadata = PagedAttentionCacheMetaData.for_layers(
        layers, page_size=page_size, dtype=dtype, num_pages=num_pages
    )
    cache = PagedAttentionCache.init_cache(None, metadata)
    cache.tensor.zero_()
    return cache.views[1]


def states(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(num_tokens, HEADS, KEY_DIM, generator=generator)
    return key, torch.randn(num_tokens, HEADS, VALUE_DIM, generator=generator)


@dataclasses.dataclass
class Step:
    """Chunks (start, length) of prompts and positions of generated tokens; None: padding."""

    page_size: int
    prompts: list[tuple[int, int]]
    generated: list[int | None]
    padding: list[int]  # rows of padding before each prompt's chunk, and after the last
    tables: list[list[int]]

    def metadata(self) -> PagedAttentionMetadata:
        positions: list[int] = []
        for pad, (start, length) in zip(self.padding, [*self.prompts, (0, 0)], strict=True):
            positions += [NOTHING] * pad + list(range(start, start + length))
        width = max(map(len, self.tables), default=1)
        tables = [[*table, *[NOTHING] * (width - len(table))] for table in self.tables]
        split = len(self.prompts)
        return PagedAttentionMetadata(
            [length for _, length in self.prompts],
            positions,
            np.array(tables[:split]).reshape(split, width),
            [NOTHING if position is None else position for position in self.generated],
            np.array(tables[split:]).reshape(len(self.generated), width),
        )

    def places(self) -> list[tuple[int, int] | None]:
        """Return page and offset of each row, None for padding."""
        found: list[tuple[int, int] | None] = []
        for pad, (start, length), table in zip(
            self.padding, [*self.prompts, (0, 0)], [*self.tables[: len(self.prompts)], []], strict=True
        ):
            found += [None] * pad
            found += [(table[p // self.page_size], p % self.page_size) for p in range(start, start + length)]
        for position, table in zip(self.generated, self.tables[len(self.prompts) :], strict=True):
            place = (
                position
                if position is None
                else (table[position // self.page_size], position % self.page_size)
            )
            found.append(place)
        return found


@st.composite
def steps(draw: st.DrawFn) -> Step:
    page_size = draw(st.integers(1, 5))
    prompts = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), max_size=3))
    generated = draw(st.lists(st.none() | st.integers(0, 11), max_size=3))
    padding = draw(st.lists(st.integers(0, 2), min_size=len(prompts) + 1, max_size=len(prompts) + 1))
    ends = [start + length for start, length in prompts] + [0 if at is None else at + 1 for at in generated]
    needed = [-(-end // page_size) for end in ends]
    pages = draw(st.permutations(range(1, 1 + sum(needed))))
    tables = [list(pages[sum(needed[:i]) : sum(needed[: i + 1])]) for i in range(len(needed))]
    return Step(page_size, prompts, generated, padding, tables)


def naive(view: PagedAttentionCacheView, step: Step, key: torch.Tensor, value: torch.Tensor) -> None:
    """Check every place of the view: what a row was written to, and zero elsewhere."""
    places = step.places()
    assert len(places) == len(key)
    for pages, rows in ((view.key_pages, key), (view.value_pages, value)):
        expected = torch.zeros_like(pages)
        for place, row in zip(places, rows, strict=True):
            if place is not None:
                expected[:, place[0], place[1]] = row
        assert torch.equal(pages, expected)


@given(step=steps())
def test_a_ragged_step_goes_where_the_tables_say(step: Step):
    metadata = step.metadata()
    key, value = states(len(step.places()))
    num_pages = 1 + sum(map(len, step.tables))
    whole, halves = make_view(num_pages, step.page_size), make_view(num_pages, step.page_size)
    assert whole.concatenate_to_cache(key, value, metadata) is whole
    naive(whole, step, key, value)
    split = metadata.prefill_rows().num_rows
    assert halves.write_prefill_to_cache(key[:split], value[:split], metadata) is halves
    assert halves.write_generate_to_cache(key[split:], value[split:], metadata) is halves
    naive(halves, step, key, value)


@pytest.mark.parametrize("owner", ["positions that go on", "zeros"])
@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("length", [0, 1, 11, 12, 16])
def test_what_follows_a_prompts_length_is_padding(length: int, first: int, owner: str):
    view = make_view(page_size=4)
    key, value = states(16)
    positions = np.arange(first, first + 16)
    if owner == "zeros":
        positions[length:] = 0
    table = [5, 2, 7, 3, 6, *[0] * 3]
    step = PagedAttentionMetadata.init_empty().replace(
        prefill_length=length, prefill_pos=positions, prefill_page_table=table
    )
    view.write_prefill_to_cache(key, value, step)
    computed = [(first, length)] if length else []
    tables = [table] * len(computed)
    naive(view, Step(4, computed, [], [0] * (1 + len(computed)), tables), key[:length], value[:length])


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 5)), min_size=2, max_size=4
    )
)
def test_each_of_several_prompts_may_have_padding(prompts: list[tuple[int, int, int]]):
    positions: list[int] = []
    rows: list[int] = []
    for first, length, padding in prompts:
        rows += range(len(positions), len(positions) + length)
        positions += [*range(first, first + length + padding), NOTHING]
    lengths = [length for _, length, _ in prompts]
    step = PagedAttentionMetadata.init_empty().replace(
        prefill_length=lengths, prefill_pos=positions, prefill_page_table=[[1]] * len(prompts)
    )
    if any(before[0] + before[1] + before[2] == after[0] for before, after in itertools.pairwise(prompts)):
        with pytest.raises(ValueError, match="each prompt must have one run"):
            step.prefill_rows()
        return
    found = step.prefill_rows()
    assert found.rows.tolist() == rows
    assert found.num_tokens.tolist() == [length for length in lengths if length]
    assert found.num_computed_tokens.tolist() == [first for first, length, _ in prompts if length]


def test_a_prompt_then_its_continuation():
    view = make_view(page_size=4)
    key, value = states(7)
    table = [5, 2]
    nothing = PagedAttentionMetadata.init_empty()
    first = nothing.replace(prefill_length=5, prefill_pos=range(5), prefill_page_table=table)
    view.concatenate_to_cache(key[:5], value[:5], first)
    for position in (5, 6):
        step = nothing.replace(generate_pos=position, generate_page_table=table)
        view.write_generate_to_cache(key[position : position + 1], value[position : position + 1], step)
    naive(view, Step(4, [(0, 7)], [], [0, 0], [table]), key, value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_numbers_are_rounded_to_the_type_of_the_pages(dtype: str):
    view = make_view(dtype=dtype)
    key, value = states(3)
    metadata = PagedAttentionMetadata([3], [2, 3, 4], [[7, 1]], [], [])
    view.concatenate_to_cache(key, value, metadata)
    if dtype == "int8":
        numbers, scales = Int8PageQuantizer().quantize(key)
        assert torch.equal(view.key_pages[:, 1, 0], numbers[2])
        assert torch.equal(view.key_scales[:, 1, 0], scales[2])
        read = view.quantizer.dequantize(view.key_pages, view.key_scales)
        torch.testing.assert_close(read[:, 1, 0], key[2], atol=0.02, rtol=0)
    else:
        assert torch.equal(view.key_pages[:, 7, 2:], key[:2].transpose(0, 1).to(getattr(torch, dtype)))
        assert torch.equal(view.value_pages[:, 1, 0], value[2].to(getattr(torch, dtype)))


def test_an_empty_step_writes_nothing():
    view = make_view()
    view.concatenate_to_cache(*states(0), PagedAttentionMetadata.init_empty())
    assert not view.key_pages.any()


WRONG = {
    "prefill_length is [6], 6 tokens together, and prefill_pos has the positions of 5": {
        "prefill_length": [6]
    },
    "prefill_length is [1, 1], and the 5 positions of prefill_pos are 1 runs, of [5]": {
        "prefill_length": [1, 1],
        "prefill_page_table": [[5], [2]],
    },
    "prefill_pos is 9 at token 2": {"prefill_pos": [0, 1, 9, 3, 4]},
    "prefill_pos is -1 at token 0": {"prefill_pos": [-1, 0, 1, 2, 3]},
    "prefill_page_table has no page for position 4 of sequence 0": {"prefill_page_table": [[5]]},
    "prefill_page_table has no page for position 0 of sequence 0": {"prefill_page_table": [[12, 3]]},
    "prefill_page_table has 2 rows, and prefill_length has 1": {"prefill_page_table": [[5, 3], [1, 2]]},
    "generate_page_table has no page for position 8 of sequence 1": {"generate_page_table": [[1, 6], [7, 8]]},
    "generate_page_table has no page for position 0 of sequence 0": {
        "generate_page_table": [[-1, 6, 6], [0, 0, 0]]
    },
    "generate_page_table has 1 rows, and generate_pos has 2": {"generate_page_table": [[1, 2, 3]]},
    "generate_pos is -2": {"generate_pos": [-2, 9]},
}


@pytest.mark.parametrize("message", WRONG)
def test_tables_that_cannot_be_are_refused_and_nothing_is_written(message: str):
    good = PagedAttentionMetadata([5], range(5), [[5, 2]], [3, 9], [[1, 6, 6], [7, 8, 4]])
    view = make_view()
    with pytest.raises(ValueError, match=re.escape(message)):
        view.concatenate_to_cache(*states(7), good.replace(**WRONG[message]))
    assert not view.key_pages.any()
    view.concatenate_to_cache(*states(7), good)
    assert view.key_pages[:, 4, 1].any()


def test_states_of_another_shape_are_refused():
    view = make_view()
    key, value = states(6)
    metadata = PagedAttentionMetadata([5], range(5), [[5, 2]], [], [])
    for wrong_key, wrong_value, message in (
        (key, value, r"key is \[6, 2, 4\]; .* ask for \[5, 2, 4\]"),
        (key[:5], value[:5, :1], r"value is \[5, 1, 8\]; .* ask for \[5, 2, 8\]"),
        (value[:5], value[:5], r"key is \[5, 2, 8\]"),
    ):
        for write in (view.concatenate_to_cache, view.write_prefill_to_cache):
            with pytest.raises(ValueError, match=message):
                write(wrong_key, wrong_value, metadata)
    with pytest.raises(ValueError, match=r"ask for \[0, 2, 4\]"):
        view.write_generate_to_cache(key, value, metadata)
    assert not view.key_pages.any()


def test_the_empty_state_is_the_sentinel_everywhere():
    data = PagedAttentionMetadata.init_empty().to_dict()
    assert data == dict.fromkeys(
        ["prefill_length", "prefill_pos", "prefill_page_table", "generate_pos", "generate_page_table"], 10**7
    )


def test_tables_are_written_down_and_read_back():
    made = PagedAttentionMetadata([5], torch.arange(5), [[5, 2]], np.array([3, NOTHING]), [[1, 6], [7, 8]])
    for one in (made, PagedAttentionMetadata.init_empty()):
        assert PagedAttentionMetadata.from_dict(one.to_dict()) == one
        assert PagedAttentionMetadata.from_json(one.to_json()) == one
    assert made != PagedAttentionMetadata.init_empty()
    assert made.replace(prefill_length=[4]) != made
    with pytest.raises(ValueError, match=r"prefill_pos is float64 \[2\]; it must be whole numbers"):
        made.replace(prefill_pos=[0.5, 1.0])
    with pytest.raises(ValueError, match=r"generate_pos has 4294967297; .* at most 2147483647"):
        made.replace(generate_pos=[2**32 + 1])
    with pytest.raises(ValueError, match=r"generate_pos is int64 \[1, 1\]; .* at most 1 dimension$"):
        made.replace(generate_pos=[[1]])
    with pytest.raises(ValueError, match="has no 'prefill_positions'"):
        PagedAttentionMetadata.from_dict({"prefill_positions": 3})
