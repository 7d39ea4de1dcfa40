"""Which keys are seen, by the kernels' estimate and by the reference's, and which tiles attention visits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_harness import Sequences, run_paged
from test_triton_attention import TYPES, after_prompts
from triton_inputs import DEVICE

from pairwise import pairwise
from quire.kernels import bounds
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.sparse_prefill import KeySelection, selected_keys
from quire.kernels.bounds import TILE
from quire.kernels.triton.attention import items as attention_items
from quire.kernels.triton.attention import paged as attention
from quire.kernels.triton.attention.call import AttentionCall, SelectedKeys
from quire.kernels.triton.attention.plan import TileClass

LENGTHS, FIRST, ENDS = [420, 90, 214, 150], [350, 80, 192, 149], [410, 0, 214, 140]
"""What is computed at last begins amid a query block, and ends with keys that all see; some select none."""

Selected = list[tuple[AttentionCall, AttentionBatch, SelectedKeys | None]]
Visits = list[tuple[TileClass, Any, Any]]


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> Selected:
    """Returns what is selected, as it is."""
    found: Selected = []
    select_keys = attention.select_keys

    def noted(call: AttentionCall, batch: AttentionBatch) -> SelectedKeys | None:
        found.append((call, batch, select_keys(call, batch)))
        return found[-1][2]

    monkeypatch.setattr(attention, "select_keys", noted)
    return found


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Visits:
    """Returns lists of visits, as they are made."""
    found: Visits = []
    list_visits = attention.list_visits

    def noted(call: AttentionCall, tiles: TileClass) -> Any:
        found.append((tiles, *list_visits(call, tiles)))
        return found[-1][1:]

    monkeypatch.setattr(attention, "list_visits", noted)
    return found


def varied(lengths: list[int], *shape: int) -> Sequences:
    """Return sequences with keys some blocks of which matter more than others, to each head others."""
    sequences = Sequences.random(lengths, *shape)
    for index, keys in enumerate(sequences.key):
        sequences.query[index] += 0.3
        for start in range(0, len(keys), 64):
            for head in range(keys.shape[1]):
                keys[start : start + 64, head] += (start // 64 * 5 + head) % 4 / 4
    return sequences


def attend(
    sequences: Sequences, selection: dict[str, Any], *, kernel: Any = after_prompts, **options: Any
) -> list[torch.Tensor]:
    """Compute the last chunks of sequences and let them select; return their attention."""
    which = [LENGTHS.index(length) for length in sequences.lengths]
    first, ends = [FIRST[index] for index in which], np.array([ENDS[index] for index in which])

    def selecting(running: Any, done: Any, counts: Any) -> dict[str, Any]:
        return {"key_selection": KeySelection(ends, **selection) if done.any() else None}

    outputs = run_paged(sequences, kernel=kernel, first_chunks=first, sparse=selecting, **options)
    return [output[start:] for output, start in zip(outputs, first, strict=True)]


@pairwise(
    shape=[(3, 1, 24), (2, 2, 32), (5, 1, 16)],
    types=[TYPES[name] for name in ("float32", "bfloat16", "float16_over_int8")],
    sizes=[(64, 8), (64, 16), (128, 4)],
    threshold=[0.3, 0.6],
    softcap=[0.0, 1.5],
    block_size=[16, 7],
)
def test_the_reference_selects_the_same(
    shape: tuple[int, int, int],
    types: tuple[torch.dtype, torch.dtype],
    sizes: tuple[int, int],
    threshold: float,
    softcap: float,
    block_size: int,
    selected: Selected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "GPU_ESTIMATE_BYTES", 5000)  # a few query blocks at a time
    for computing in ("_attend", "_merge"):
        monkeypatch.setattr(attention, computing, lambda *_: None)
    seen_by_reference: list[torch.Tensor] = []

    def both(query: torch.Tensor, kv: Any, batch: AttentionBatch, **options: Any) -> torch.Tensor:
        if batch.key_selection is not None:
            names = "num_cached_tokens", "num_tokens", "block_tables"
            plan = {name: getattr(batch, name) for name in names}
            how = {"scale": options["scale"], "softcap": options["softcap"]}
            seen_by_reference.append(selected_keys(query, kv, batch.key_selection, **plan, **how))
        return after_prompts(query, kv, batch, **options)

    selection = {"threshold": threshold, "block_size": sizes[0], "stride": sizes[1]}
    attend(
        varied(LENGTHS, *shape),
        selection,
        kernel=both,
        dtype=types[0],
        kv_dtype=types[1],
        softcap=softcap,
        block_size=block_size,
    )
    [(_, _, found)], [expected] = selected, seen_by_reference
    assert found is not None
    places = np.concatenate([np.arange(start, end) for start, end in zip(FIRST, LENGTHS, strict=True)])
    blocks = found.block_of_token.tolist()
    num_left_out = 0
    for token, (block, place) in enumerate(zip(blocks, places.tolist(), strict=True)):
        seen = expected[token, :, : place // sizes[0] + 1]
        num_left_out += int((~seen).sum())
        of_token = seen if block < 0 else found.seen[block, :, : seen.shape[1]].cpu().bool()
        assert of_token.equal(seen)

    assert num_left_out > 0
    assert blocks.count(-1) > 15


@pytest.mark.parametrize("programs", [1, 1 << 40], ids=["whole", "divided"])
@pytest.mark.parametrize("shape", [(3, 1, 24), (4, 2, 32)], ids=str)
def test_tiles_that_no_row_sees_are_not_visited(
    shape: tuple[int, int, int],
    programs: int,
    selected: Selected,
    visits: Visits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the bits are those of a visit to each tile."""
    monkeypatch.setattr(attention_items, "PROGRAMS", programs)
    sequences, selection = varied(LENGTHS, *shape), {"threshold": 0.2, "block_size": 64, "stride": 8}
    outputs = attend(sequences, selection, dtype=torch.float16)
    [(call, _, found)] = selected
    assert found is not None
    group, num_skipped = call.heads.group, 0
    for tiles, listed, counts in visits:
        for number, item in enumerate(tiles.items.tolist()):
            token, num_tokens, first, end, start = (item[field] for field in (1, 2, 4, 5, 11))
            rows = [found.block_of_token[row].item() for row in range(token, token + num_tokens)]
            assert (start >= 0) == any(block >= 0 for block in rows)
            for kv_head in range(call.heads.num_kv_heads if start >= 0 else 0):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                wanted = [
                    tile
                    for tile in range(first, end)
                    if any(block < 0 or found.seen[block, heads, tile * TILE // 64].any() for block in rows)
                ]
                count = counts[kv_head, number].item()
                assert listed[kv_head, start : start + count].tolist() == wanted
                num_skipped += end - first - len(wanted)
    assert num_skipped > 3

    def all_tiles(call: AttentionCall, tiles: TileClass) -> Any:
        tiles.items[:, 11] = -1
        nothing = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
        return nothing, nothing

    monkeypatch.setattr(attention, "list_visits", all_tiles)
    for output, expected in zip(outputs, attend(sequences, selection, dtype=torch.float16), strict=True):
        assert torch.equal(output, expected)


def test_the_selection_and_its_bits_do_not_depend_on_company(selected: Selected) -> None:
    sequences, selection = varied(LENGTHS, 3, 1, 24), {"threshold": 0.6, "block_size": 64, "stride": 8}
    together = attend(sequences, selection, dtype=torch.bfloat16)
    for index in (0, 2):
        parts = (sequences.query[index], sequences.key[index], sequences.value[index])
        alone = Sequences(*([part] for part in parts))
        [output] = attend(alone, selection, dtype=torch.bfloat16)
        assert torch.equal(output, together[index])


def test_logits_that_are_no_numbers_leave_out_nothing(selected: Selected) -> None:
    sequences, selection = varied([420], 2, 1, 16), {"threshold": 0.3, "block_size": 64, "stride": 8}
    sequences.query[0][400] = float("nan")
    attend(sequences, selection, dtype=torch.float32)
    [(_, _, found)] = selected
    assert found is not None
    block = found.block_of_token[400 - FIRST[0]].item()
    assert found.seen[block, :, : 400 // 64 + 1].all()
    assert not found.seen[block - 1].all()


def test_steps_that_cannot_leave_out_keys_select_nothing(selected: Selected) -> None:
    sequences, selection = varied([90], 2, 1, 16), {"threshold": 0.3, "block_size": 64, "stride": 8}
    attend(sequences, selection, dtype=torch.float32)
    assert [found for _, _, found in selected] == [None]
