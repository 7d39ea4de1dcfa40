"""A model runner without a model, for tests: it believes nothing but the plans it is given.

Its KV is, for each place of each block, a number that stands for the token there and all tokens before it.
Before it "computes" a token it checks that the request's block table really holds the request's own history,
so a wrong table, a block given to two requests, a false prefix hit, a wrong copy or a load of or into the
wrong block is seen at once. The next token is a hash of the history, and with cache eviction of what the
cache keeps of it: any error in the scheduling changes the output. Cache groups with a window have KV of their
own, of which only what is in the window is checked. A state, of a slot or a checkpoint, is the KV of the last
token before it, and is checked likewise.

It proposes drafts that are right with a fixed probability, obeys grammar bitmasks, and drives the worker side
of a KV connector over its own blocks.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
from eviction_rules import EvictionRules, Held

from quire.execution.failed_requests import FailedRequests, KnownErrors
from quire.kv.blocks.groups import NULL_BLOCK, WindowBlocks
from quire.step import (
    NO_TOKEN,
    GrammarOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
    PositionLogprobs,
    SchedulerOutput,
)

VOCAB = 50
NEVER_WRITTEN = -7
GARBAGE = VOCAB + 7  # sampled from KV that was not there, and KV that is wrong

# KV is that of the place before times `FACTOR`, plus the token and 1, in 64 bits.
FACTOR = 0x5851F42D4C957F2D
_MOST_TOKENS = 1 << 14
_POWERS = np.cumprod(np.full(_MOST_TOKENS, FACTOR, np.uint64))
_INVERSES = np.cumprod(np.full(_MOST_TOKENS, pow(FACTOR, -1, 1 << 64), np.uint64))


def kv_of(history: list[int]) -> np.ndarray:
    """Return the KV of a sequence from its first token on, [tokens]."""
    count = len(history)
    tokens = np.array(history, dtype=np.uint64) + np.uint64(1)
    return (np.cumsum(tokens * _INVERSES[:count]) * _POWERS[:count]).view(np.int64)


def scores(history: list[int] | Held) -> np.ndarray:
    """Made-up log-probabilities of the next token, [VOCAB]."""
    digest = hashlib.shake_128(str(history).encode()).digest(2 * VOCAB)
    logits = np.frombuffer(digest, dtype=np.uint16) / 8192.0
    return logits - np.log(np.exp(logits).sum())


def next_token(history: list[int] | Held, allowed: set[int] | None = None) -> int:
    return next(token for token in _by_score(tuple(history)) if allowed is None or token in allowed)


@functools.lru_cache(1 << 12)  # what a request says alone, the runner says again
def _by_score(history: tuple) -> list[int]:
    return np.argsort(-scores(list(history)), kind="stable").tolist()


def naive_generation(
    prompt: list[int], max_tokens: int, stop_ids: set[int], grammar=None, rules: EvictionRules | None = None
) -> list[int]:
    """What one request alone, without blocks or steps, generates."""
    output: list[int] = []
    held = list(enumerate(prompt))
    while len(output) < max_tokens:
        seen = prompt + output if rules is None else held
        output.append(next_token(seen, grammar(output) if grammar else None))
        if output[-1] in stop_ids:
            break
        if rules is not None:
            held = [*rules.kept(held), (len(prompt) + len(output) - 1, output[-1])]
    return output


class WindowStore:
    """The blocks of a group with a window, for a connector to read and write."""

    def __init__(self, kv: np.ndarray) -> None:
        self._kv = kv
        self.bytes_per_block = kv[0].nbytes

    def read_block(self, block_id: int, into: np.ndarray) -> None:
        assert block_id != NULL_BLOCK
        into[:] = self._kv[block_id].view(np.uint8)

    def write_block(self, block_id: int, content: np.ndarray) -> None:
        assert block_id != NULL_BLOCK
        self._kv[block_id] = content.view(self._kv.dtype)


class StateStore:
    """The checkpoints of states for a connector, in two pieces each, all numbers of which say the same."""

    num_pieces = 2

    def __init__(self, checkpoints: dict[int, list[int]], bytes_per_block: int) -> None:
        self.checkpoints = checkpoints
        self.bytes_per_block = bytes_per_block

    def read_block(self, number: int, into: np.ndarray) -> None:
        into.view(np.int64)[:] = self.checkpoints[number // 2][number % 2]

    def write_block(self, number: int, content: np.ndarray) -> None:
        [value] = set(content.view(np.int64).tolist())
        self.checkpoints.setdefault(number // 2, [NEVER_WRITTEN] * 2)[number % 2] = value


class FakeRunner:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        connector=None,
        seed: int = 0,
        rules: EvictionRules | None = None,
        windows: tuple[WindowBlocks, ...] = (),
        has_states: bool = False,
    ) -> None:
        self.windows = windows
        self.has_states = has_states
        self.states: dict[int, int] = {}  # by slot
        self.checkpoints: dict[int, list[int]] = {}
        self.block_size = block_size
        self.rules = rules  # of cache eviction
        self.num_evictions = 0
        self.positions: dict[int, list[int]] = {}  # what is in the cache of each slot, by place
        self.kv = np.full((num_blocks, block_size), NEVER_WRITTEN)  # of the group that keeps all tokens
        counts = [group.num_blocks for group in windows]
        self.window_kv = [np.full((count, block_size), NEVER_WRITTEN) for count in counts]
        self.tokens: dict[str, list[int]] = {}
        self.prompt_length: dict[str, int] = {}
        self.num_logprobs: dict[str, int] = {}
        self.slot_of: dict[str, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.window_tables: dict[int, list[list[int]]] = {}  # by slot, of each group with a window
        self.fail: set[str] = set()
        self.param_at_fault: str | None = None  # for those that fail
        self.bad_blocks: set[int] = set()  # whose load has failed, and that were not written since
        self.draft_accuracy = 0.7
        self.share_of_pauses = 0.2
        self.pauses: dict[str, int] = {}  # steps without drafts that are left of a request
        self.num_executed = 0
        self._random = np.random.default_rng(seed)
        self.connector = connector
        self.failed_requests = FailedRequests(block_size)
        if connector is not None:
            stores = self, *map(WindowStore, self.window_kv)
            if has_states:
                num_bytes = sum(store.bytes_per_block for store in stores)
                connector.register_states(StateStore(self.checkpoints, num_bytes))
            connector.register_kv_caches(stores if connector.by_group else self)

    # What a connector's worker side reads and writes.

    @property
    def bytes_per_block(self) -> int:
        return self.kv[0].nbytes

    def read_block(self, block_id: int, into: np.ndarray) -> None:
        into[:] = self.kv[block_id].view(np.uint8)

    def write_block(self, block_id: int, content: np.ndarray) -> None:
        self.kv[block_id] = content.view(self.kv.dtype)
        self.bad_blocks.discard(block_id)

    def execute(self, plan: SchedulerOutput, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        self.num_executed += 1
        self._apply_changes(plan)
        assert (plan.state_copies is not None) == self.has_states
        if self.connector is not None:
            self.failed_requests.begin(plan)
            self.connector.start_load_kv(plan.kv_connector_metadata)
        failed = self._failed_blocks()
        self.bad_blocks |= failed
        allowed = self._allowed_tokens(grammar)
        logprobs: dict[str, list[PositionLogprobs]] = {}
        sampled: list[list[int]] = []
        for row, request_id in enumerate(plan.request_ids):
            sampled.append(self._run_row(plan, row, allowed.get(request_id)))
            if sampled[-1] and self.num_logprobs.get(request_id):
                history = self.tokens[request_id][:-1]
                logprobs[request_id] = [self._logprobs(history, self.num_logprobs[request_id])]
        if plan.state_copies is not None:
            for slot, to in plan.state_copies.saved.tolist():
                self.checkpoints[to] = [self.states[slot]] * 2
        width = max([1, *map(len, sampled)])
        broken = [name for name in plan.request_ids if name in self.fail]
        padded = [row + [NO_TOKEN] * (width - len(row)) for row in sampled]
        return ModelRunnerOutput(
            plan.request_ids,
            np.array(padded, np.int32).reshape(-1, width),
            logprobs=logprobs,
            errors=dict.fromkeys(broken, "broken"),
            error_params={} if self.param_at_fault is None else dict.fromkeys(broken, self.param_at_fault),
            **self._drafts(plan, sampled),
            kv_connector_output=self.connector_output(plan, failed),
        )

    def _run_row(self, plan: SchedulerOutput, row: int, allowed) -> list[int]:
        request_id, slot = plan.request_ids[row], int(plan.slots[row])
        assert self.slot_of[request_id] == slot
        start, count = int(plan.num_computed_tokens[row]), int(plan.num_tokens[row])
        known = int(plan.num_known_tokens[row])
        history = self.tokens[request_id]
        assert self.prompt_length[request_id] <= known <= len(history)
        del history[known:]
        drafts = [token for token in plan.draft_token_ids[row].tolist() if token != NO_TOKEN]
        assert count >= 1
        assert start + count <= known + len(drafts)
        assert not drafts or start + count == known + len(drafts)
        positions = self.positions[slot]
        if self.rules is None:
            assert plan.evictions is None
            positions[:] = range(start)
        else:
            assert not drafts
            assert len(positions) == start - plan.evictions.num_evicted_tokens[row]
        kv = kv_of((history + drafts)[: start + count])
        if request_id in self.fail:
            self._write_garbage(slot, len(positions), count)
        else:
            self._write(slot, len(positions), kv[start:])
        positions += range(start, start + count)
        read = self._read(slot, len(positions))
        is_bad = not self.bad_blocks.isdisjoint(self.tables[slot][: -(-len(positions) // self.block_size)])
        is_bad |= (read == GARBAGE).any().item()
        if self.has_states:
            state = self.states.get(slot, NEVER_WRITTEN)
            is_bad |= bool(start) and state == GARBAGE
            assert is_bad or not start or state == kv[start - 1], "another sequence's state"
            taken_in = int(plan.state_copies.num_tokens[row])
            assert 1 <= taken_in <= count - len(drafts), "a state cannot give back a draft"
            self.states[slot] = GARBAGE if is_bad else kv[start + taken_in - 1]
        assert is_bad or (read == kv[positions]).all(), request_id
        self._check_windows(slot, start, kv, is_bad=is_bad)
        seen: list = history
        if self.rules is not None:
            held = [(position, history[position]) for position in positions]
            is_due = start + count >= self.prompt_length[request_id]
            self._evict(slot, held, int(plan.evictions.num_blocks[row]), is_due)
            seen = sorted(held)
            if is_bad:
                self.bad_blocks |= set(self.tables[slot][self.rules.start // self.block_size :])
        if start + count < known:
            return []
        if is_bad:  # the scheduler has been told, or is being told with this step
            history.append(GARBAGE)
            return [GARBAGE]
        emitted = []
        for place in range(len(drafts) + 1):
            emitted.append(next_token(seen, allowed[place] if allowed else None))
            history.append(emitted[-1])
            if place == len(drafts) or emitted[-1] != drafts[place]:
                break
        return emitted

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_req_ids:
            self.tokens.pop(request_id, None)
            self._forget_slot(request_id)
        for request_id in plan.preempted_req_ids:
            self._forget_slot(request_id)
        for new in plan.scheduled_new_reqs:
            self._forget_slot(new.request_id)
            self.tokens[new.request_id] = [*np.asarray(new.prompt_token_ids).tolist(), *new.output_token_ids]
            self.prompt_length[new.request_id] = len(new.prompt_token_ids)
            self.num_logprobs[new.request_id] = new.sampling_params.logprobs or 0
            self._open(new.request_id, new.slot, new.block_ids, new.num_computed_tokens)
        self._fork(plan)
        cached = plan.scheduled_cached_reqs
        for resumed in cached.resumed:
            del self.tokens[resumed.request_id][resumed.num_tokens :]
            self._open(resumed.request_id, resumed.slot, resumed.block_ids, resumed.num_computed_tokens)
        changes = (cached.slots.tolist(), cached.block_index.tolist())
        assert len(cached.block_ids) == 1 + len(self.windows)
        for number, (slot, index) in enumerate(zip(*changes, strict=True)):
            assert index == len(self.tables[slot])
            for table, block_ids in zip(self._tables_of(slot), cached.block_ids, strict=True):
                table.append(int(block_ids[number]))
        self._choose_last_tokens(plan)
        for group, kv in enumerate(self.window_kv, 1):
            for source, target in plan.block_copies[:, :, group].tolist():
                kv[target] = kv[source]
        for source, target in plan.block_copies[:, :, 0].tolist():
            self.kv[target] = self.kv[source]
            (self.bad_blocks.add if source in self.bad_blocks else self.bad_blocks.discard)(target)

    def _fork(self, plan: SchedulerOutput) -> None:
        name_of = {slot: name for name, slot in self.slot_of.items()}
        copies = {
            fork.slot: self.tokens[name_of[fork.parent_slot]][: fork.num_tokens - 1] for fork in plan.forks
        }
        for fork in plan.forks:
            self.tokens[name_of[fork.slot]] = [*copies[fork.slot], NEVER_WRITTEN]
            self._set_tables(fork.slot, fork.block_ids)
        if plan.state_copies is not None:
            self.states |= {fork.slot: self.states[fork.parent_slot] for fork in plan.forks}
            for one, to in plan.state_copies.restored.tolist():
                [self.states[to]] = set(self.checkpoints[one])

    def _choose_last_tokens(self, plan: SchedulerOutput) -> None:
        name_of = {slot: name for name, slot in self.slot_of.items()}
        known = dict(zip(plan.slots.tolist(), plan.num_known_tokens.tolist(), strict=True))
        chosen = plan.chosen_tokens
        for slot, token in zip(chosen.slots.tolist(), chosen.token_ids.tolist(), strict=True):
            history = self.tokens[name_of[slot]]
            assert slot not in known or known[slot] == len(history)
            history[-1] = token

    def _open(self, request_id: str, slot: int, block_ids, num_computed: int) -> None:
        assert slot not in self.tables, f"slot {slot} given to two requests"
        assert self.rules is None or num_computed <= self.rules.start, "shared behind the start area"
        self.slot_of[request_id] = slot
        self._set_tables(slot, block_ids)
        self.positions[slot] = list(range(num_computed))

    def _set_tables(self, slot: int, block_ids: np.ndarray) -> None:
        self.tables[slot], *self.window_tables[slot] = block_ids.tolist()
        assert len(self.window_tables[slot]) == len(self.windows)

    def _tables_of(self, slot: int) -> list[list[int]]:
        return [self.tables[slot], *self.window_tables[slot]]

    def _check_windows(self, slot: int, start: int, kv: np.ndarray, *, is_bad: bool) -> None:
        """Write what a row from `start` on computes to the groups with windows; check all that it sees."""
        for group, cache, table in zip(self.windows, self.window_kv, self.window_tables[slot], strict=True):
            assert len(table) == len(self.tables[slot])
            blocks = np.repeat(table, self.block_size)[: len(kv)]
            places = np.arange(len(kv)) % self.block_size
            assert (blocks[start:] != NULL_BLOCK).all()
            cache[blocks[start:], places[start:]] = kv[start:]
            seen = slice(max(start - group.window + 1, 0), None)
            assert (blocks[seen] != NULL_BLOCK).all()
            assert is_bad or (cache[blocks[seen], places[seen]] == kv[seen]).all()

    def _evict(self, slot: int, held: Held, num_blocks: int, is_due: bool) -> None:
        """Check how many blocks go, and fill the places of those that do, wherever they are in the table."""
        size, positions, table = self.block_size, self.positions[slot], self.tables[slot]
        assert num_blocks == (self.rules.num_going(len(positions)) if is_due else 0)
        if not num_blocks:
            return
        self.num_evictions += 1
        goes = self.rules.blocks_going([held[first : first + size] for first in range(0, len(held), size)])
        start = self.rules.start // size
        leaves = range(start, start + num_blocks)
        holes = [index for index in goes if index not in leaves]
        for index in leaves:
            if index not in goes:
                hole = holes.pop()
                self.kv[table[hole]] = self.kv[table[index]]
                positions[hole * size : (hole + 1) * size] = positions[index * size : (index + 1) * size]
        del table[start : start + num_blocks]
        del positions[start * size : (start + num_blocks) * size]

    def _forget_slot(self, request_id: str) -> None:
        slot = self.slot_of.pop(request_id, None)
        if slot is not None:
            del self.tables[slot], self.positions[slot], self.window_tables[slot]
            self.states.pop(slot, None)

    def _write(self, slot: int, start: int, kv: np.ndarray) -> None:
        size, table = self.block_size, self.tables[slot]
        for first in range(start // size * size, start + len(kv), size):
            begin, end = max(first, start), min(first + size, start + len(kv))
            self.kv[table[first // size], begin - first : end - first] = kv[begin - start : end - start]
            if begin == first:
                self.bad_blocks.discard(table[first // size])

    def _write_garbage(self, slot: int, start: int, count: int) -> None:
        self._write(slot, start, np.full(count, GARBAGE))

    def _read(self, slot: int, count: int) -> np.ndarray:
        return self.kv[self.tables[slot]].reshape(-1)[:count]

    def _logprobs(self, history: list[int], count: int) -> PositionLogprobs:
        values = scores(history)
        ids = np.argsort(-values, kind="stable")[:count].tolist()
        ids = [ids[0], *ids]
        return PositionLogprobs(ids, values[ids].tolist(), [1, *range(1, count + 1)])

    def _allowed_tokens(self, grammar: GrammarOutput | None) -> dict[str, list[set[int]]]:
        if grammar is None:
            return {}
        bits = np.unpackbits(grammar.bitmask.view(np.uint8), axis=1, bitorder="little")
        rows = [set(np.flatnonzero(row).tolist()) for row in bits]
        starts = np.cumsum(grammar.num_rows) - grammar.num_rows
        return {
            name: rows[start : start + count]
            for name, start, count in zip(
                grammar.request_ids, starts.tolist(), grammar.num_rows.tolist(), strict=True
            )
        }

    def _drafts(self, plan: SchedulerOutput, sampled: list[list[int]]) -> dict[str, Any]:
        """Propose drafts, and none for some rows, which are to have none for some steps."""
        for row, request_id in enumerate(plan.request_ids):
            if sampled[row] and self.pauses.get(request_id):
                self.pauses[request_id] -= 1
        if plan.num_drafts_wanted is None:
            return {}
        width = int(plan.num_drafts_wanted.max())
        drafts = np.full((len(sampled), width), NO_TOKEN, np.int32)
        for row, (tokens, most) in enumerate(zip(sampled, plan.num_drafts_wanted.tolist(), strict=True)):
            assert tokens or not most
            if most and self._random.random() < self.share_of_pauses:
                self.pauses[plan.request_ids[row]] = int(self._random.integers(4))
            if self.pauses.get(plan.request_ids[row]):
                continue
            history = list(self.tokens[plan.request_ids[row]])
            for column in range(int(self._random.integers(most + 1))):
                is_right = self._random.random() < self.draft_accuracy
                drafts[row, column] = next_token(history) if is_right else self._random.integers(VOCAB)
                history.append(int(drafts[row, column]))
        pauses = [self.pauses.get(request_id, 0) for request_id in plan.request_ids]
        return {"draft_token_ids": drafts, "num_steps_without_drafts": np.array(pauses, np.int32)}

    # -- the worker side of a connector ---------------------------------------------------------------------

    def _failed_blocks(self) -> frozenset[int]:
        return frozenset() if self.connector is None else self.connector.get_block_ids_with_load_errors()

    def _block_tables(self, plan: SchedulerOutput) -> np.ndarray:
        tables = [self.tables[slot] for slot in plan.slots.tolist()]
        width = max(map(len, tables), default=0)
        return np.array([table + [0] * (width - len(table)) for table in tables])

    def connector_output(self, plan: SchedulerOutput, failed: frozenset[int]) -> KVConnectorOutput | None:
        if self.connector is None:
            return None
        verdict = self.failed_requests.end(KnownErrors(self.fail), lambda: self._block_tables(plan))
        self.connector.wait_for_save(verdict.failed_ids())
        sent, received = self.connector.get_finished(plan.finished_req_ids)
        return KVConnectorOutput(sent, received, failed | self.connector.get_block_ids_with_load_errors())
