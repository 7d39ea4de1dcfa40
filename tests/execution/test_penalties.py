"""Counts of tokens on a device: those of the tokens before a row, whatever has become of what was chosen."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quire.execution.known_tokens import KnownTokens
from quire.execution.persistent_batch import PersistentBatch
from quire.execution.sampling import penalties
from quire.execution.sampling.penalties import Penalties
from quire.execution.sampling.table import SamplingTable
from quire.kernels.devices.device import HOST, array_to_device
from quire.kernels.sampling import seen_tokens
from quire.kernels.sampling.seen_tokens import SeenIds
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN, ChosenTokens, ForkData, NewRequestData

NUM_SLOTS, VOCAB_SIZE, LENGTH = 3, 11, 400
PENALIZED = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5)
GARBAGE = 10**6


class Requests:
    """Requests in slots, some of which have penalties; the token before a row may be the device's alone."""

    def __init__(self, seed: int, dtype: torch.dtype, *, is_on_host: bool = False) -> None:
        self.is_on_host = is_on_host  # which knows all tokens
        self.rng = np.random.default_rng(seed)
        self.table = SamplingTable(NUM_SLOTS, VOCAB_SIZE)
        max_model_len = 100 if dtype == torch.int16 else 10**6
        self.device = Penalties(self.table, NUM_SLOTS, VOCAB_SIZE, max_model_len, HOST, is_on_host=is_on_host)
        self.tokens: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
        self.written = np.zeros(NUM_SLOTS, dtype=np.int64)
        self.is_unknown = np.zeros(NUM_SLOTS, dtype=bool)
        for slot in range(NUM_SLOTS):
            self.enter(slot)

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(0, VOCAB_SIZE, count).tolist()

    def enter(self, slot: int) -> None:
        """A request takes a slot, new, resumed or forked: with some output, or none."""
        prompt = self.ids(int(self.rng.integers(1, 9)))
        self.tokens[slot] = prompt + self.ids(int(self.rng.integers(0, 5)))
        params = PENALIZED if self.rng.random() < 0.8 else SamplingParams(temperature=0.0)
        self.table.write(slot, params, num_prompt_tokens=len(prompt), eos_token_ids=())
        self.written[slot] += 1
        self.is_unknown[slot] = False

    def choose(self, slot: int) -> None:
        """The scheduler chooses another last token."""
        if len(self.tokens[slot]) > self.table.num_prompt_tokens[slot]:
            self.tokens[slot][-1] = self.ids(1)[0]
            self.written[slot] += 1
            self.is_unknown[slot] = False

    def discard(self, slot: int) -> None:
        """The last token was sampled in a step that is void."""
        if len(self.tokens[slot]) > self.table.num_prompt_tokens[slot]:
            self.tokens[slot].pop()
            self.is_unknown[slot] = False

    def tell(self, slot: int) -> None:
        """The host is told the last token."""
        self.is_unknown[slot] = False

    def step(self, slots: list[int]) -> None:
        """Choose tokens; check what the device has counted before."""
        rows = np.array(slots)
        positions = np.array([len(self.tokens[slot]) for slot in slots])
        token_ids = np.full((NUM_SLOTS, LENGTH), GARBAGE, dtype=np.int32)
        for slot in range(NUM_SLOTS):
            known = self.tokens[slot][: -1 if self.is_unknown[slot] else None]
            token_ids[slot, : len(known)] = known
        # Rows of drafts come behind that of their slot, whose tokens the host knows.
        drafts = {
            slot: self.ids(int(self.rng.integers(1, 4)))
            for slot in slots
            if not self.is_unknown[slot] and self.rng.random() < 0.4
        }
        for slot, ids in drafts.items():
            token_ids[slot, len(self.tokens[slot]) : len(self.tokens[slot]) + len(ids)] = ids
        counts = [1 + len(drafts.get(slot, [])) for slot in slots]
        first, rows = np.cumsum(counts) - counts, np.repeat(rows, counts)
        offset = np.arange(len(rows)) - np.repeat(first, counts)
        positions = np.repeat(positions, counts) + offset
        known_tokens = KnownTokens(token_ids, self.written[rows], self.is_unknown[rows])
        try:
            with self.fault():
                found = self.device.of_rows(rows, positions, known_tokens)
        except MemoryError:  # tried again once the host has been told all tokens
            for slot in slots:
                token_ids[slot, : len(self.tokens[slot])] = self.tokens[slot]
            found = self.device.of_rows(rows, positions, known_tokens)
        counted = self.table.is_penalized(rows)
        assert (found is not None) == counted.any()
        chosen = torch.tensor(self.ids(len(rows)))
        if found is not None and self.is_on_host:
            numbers: Any = found.numbers
            seen_ids = self.device.on_device(numbers, found.drafts).seen
            for row in first[counted[first]].tolist():
                self.check_ids(int(rows[row]), seen_ids[rows[row]])
            self.device.add(numbers, chosen)
        elif found is not None:
            numbers = torch.from_numpy(found.numbers)
            drafted = None if found.drafts is None else torch.from_numpy(found.drafts)
            of_rows = self.device.on_device(numbers, drafted)
            assert of_rows.seen_of_row.tolist() == np.where(counted, rows, -1).tolist()
            assert of_rows.frequency[counted].tolist() == [0.5] * int(counted.sum())
            for row in np.flatnonzero(counted).tolist():
                slot = int(rows[row])
                seen = of_rows.seen[slot].clone()
                if of_rows.drafts is not None:
                    ids = of_rows.drafts[row][of_rows.drafts[row] != NO_TOKEN]
                    seen.index_add_(0, ids, torch.ones_like(ids, dtype=seen.dtype))
                self.check(slot, seen, drafts.get(slot, [])[: offset[row]])
            self.device.add(numbers, chosen)
        for row, slot in zip(first.tolist(), slots, strict=True):
            num_accepted = int(self.rng.integers(0, len(drafts[slot]) + 1)) if slot in drafts else 0
            self.tokens[slot] += [*drafts.get(slot, [])[:num_accepted], int(chosen[row + num_accepted])]
            may_be_unknown = slot not in drafts and not self.is_on_host
            self.is_unknown[slot] = may_be_unknown and self.rng.random() < 0.6

    @contextlib.contextmanager
    def fault(self) -> Iterator[None]:
        """Memory runs out at some copy to the device, or never."""
        num_left = itertools.count(int(self.rng.integers(0, 30)), -1)

        def copy(array: Any, device: torch.device) -> torch.Tensor:
            if not next(num_left):
                raise MemoryError
            return array_to_device(array, device)

        with pytest.MonkeyPatch.context() as patch:
            for module in (penalties, seen_tokens):
                patch.setattr(module, "array_to_device", copy)
            yield

    def check(self, slot: int, counts: torch.Tensor, drafts: list[int]) -> None:
        split = int(self.table.num_prompt_tokens[slot])
        prompt, output = self.tokens[slot][:split], self.tokens[slot][split:] + drafts
        in_prompt = 1 << (14 if counts.dtype == torch.int16 else 30)
        expected = [output.count(token) + in_prompt * (token in prompt) for token in range(VOCAB_SIZE)]
        assert counts.tolist() == expected

    def check_ids(self, slot: int, seen: SeenIds) -> None:
        tokens, split = self.tokens[slot], int(self.table.num_prompt_tokens[slot])
        expected = {token: tokens[split:].count(token) for token in tokens}
        assert dict(zip(seen.ids.tolist(), seen.times.tolist(), strict=True)) == expected


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("seed", "dtype", "is_on_host"),
    [(3, torch.int16, True), (0, torch.int16, False), (1, torch.int32, False), (2, torch.int16, False)],
)
def test_what_was_chosen_before_a_row_is_counted(seed: int, dtype: torch.dtype, is_on_host: bool) -> None:
    requests = Requests(seed, dtype, is_on_host=is_on_host)
    events = requests.enter, requests.choose, requests.discard, requests.tell
    for _ in range(400):
        slots = requests.rng.permutation(NUM_SLOTS)[: requests.rng.integers(1, NUM_SLOTS + 1)].tolist()
        if max(len(tokens) for tokens in requests.tokens) > 60:
            requests.enter(int(np.argmax([len(tokens) for tokens in requests.tokens])))
        requests.step(slots)
        if requests.rng.random() < 0.4:
            events[requests.rng.integers(len(events))](int(requests.rng.integers(NUM_SLOTS)))


def test_a_row_without_a_token_counts_nothing() -> None:
    requests = Requests(0, torch.int32)
    requests.table.write(0, PENALIZED, num_prompt_tokens=1, eos_token_ids=())
    requests.tokens[0] = [3]
    known = KnownTokens(np.full((NUM_SLOTS, 9), 3, dtype=np.int32), np.array([5]), np.array([False]))
    found = requests.device.of_rows(np.array([0]), np.array([1]), known)
    assert found is not None
    numbers = torch.from_numpy(found.numbers)
    seen = requests.device.on_device(numbers).seen
    before = seen.clone()
    requests.device.add(numbers, torch.tensor([NO_TOKEN]))
    assert torch.equal(seen, before)


def test_other_tokens_than_those_sampled_are_noticed() -> None:
    """Forks, rows that another request takes, and tokens that the scheduler has chosen."""
    batch = PersistentBatch(max_num_seqs=2, max_model_len=16, block_size=4, num_blocks=[8])
    blocks, slots = np.zeros((1, 1), dtype=np.int32), np.array([0, 1])

    def admit(slot: int) -> None:
        ids = np.arange(3, dtype=np.int32)
        batch.admit(NewRequestData(str(slot), slot, ids, [5], PENALIZED, (), blocks, 0))

    seen = [batch.known_tokens(slots, slots).times_written]

    def changed() -> list[bool]:
        seen.append(batch.known_tokens(slots, slots).times_written)
        return (seen[-1] != seen[-2]).tolist()

    admit(0)
    admit(1)
    assert changed() == [True, True]
    batch.append(slots.astype(np.int32), np.array([[7], [8]], dtype=np.int32))
    both = np.array([True, True])
    unknown = batch.append_unknown(slots, both)
    batch.fill_in(unknown, np.array([[1], [2]], dtype=np.int32))
    assert changed() == [False, False]
    batch.append_unknown(slots, both)
    batch.choose_last_tokens(ChosenTokens(np.array([1], dtype=np.int32), np.array([4], dtype=np.int32)))
    assert changed() == [False, True]
    assert batch.slots_of_unknown(slots.astype(np.int32), batch.num_tokens - 1).tolist() == [0, -1]
    batch.fork([ForkData(1, 0, blocks, 4, 0)])
    assert changed() == [False, True]
    batch.finish("0")
    admit(0)
    assert changed() == [True, False]


def test_any_number_of_ids_is_kept() -> None:
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, 900, (2, 400), dtype=np.int32)
    seen = SeenIds(prompt, output[:10])
    for token_id in output[10:].tolist():
        seen.add(token_id)
    expected = {token: int((output == token).sum()) for token in [*prompt.tolist(), *output.tolist()]}
    assert dict(zip(seen.ids.tolist(), seen.times.tolist(), strict=True)) == expected
