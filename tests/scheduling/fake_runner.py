"""A model runner without a model, for tests: it believes nothing but the plans it is given.

It keeps the token that each place of each KV block was written for. Before it "computes" a token it checks
that the request's block table really holds the request's own history, so a wrong table, a block given to two
requests, or a false prefix hit is seen at once. The next token is a hash of the history: any error in the
scheduling changes the output.
"""

from __future__ import annotations

import hashlib

import numpy as np

from quire.step import NO_TOKEN, ModelRunnerOutput, SchedulerOutput

VOCAB = 50
NEVER_WRITTEN = -7


def next_token(history: list[int]) -> int:
    digest = hashlib.md5(str(history).encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB


def naive_generation(prompt: list[int], max_tokens: int, stop_ids: set[int]) -> list[int]:
    """What one request alone, without blocks or steps, generates."""
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token(prompt + output))
        if output[-1] in stop_ids:
            break
    return output


class FakeRunner:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv = np.full((num_blocks, block_size), NEVER_WRITTEN)
        self.tokens: dict[str, list[int]] = {}
        self.slot_of: dict[str, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.fail: set[str] = set()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._apply_changes(plan)
        sampled = []
        for row, request_id in enumerate(plan.request_ids):
            slot = int(plan.slots[row])
            assert self.slot_of[request_id] == slot
            start, count = int(plan.num_computed_tokens[row]), int(plan.num_tokens[row])
            history = self.tokens[request_id]
            assert count >= 1
            assert start + count <= len(history)
            self._write(slot, start, history[start : start + count])
            assert self._read(slot, start + count) == history[: start + count], request_id
            sampled.append(NO_TOKEN)
            if start + count == len(history):
                sampled[-1] = next_token(history)
                history.append(sampled[-1])
        errors = {request_id: "broken" for request_id in plan.request_ids if request_id in self.fail}
        return ModelRunnerOutput(plan.request_ids, np.array(sampled, np.int32).reshape(-1, 1), errors=errors)

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_req_ids:
            self.tokens.pop(request_id, None)
            self._forget_slot(request_id)
        for request_id in plan.preempted_req_ids:
            self._forget_slot(request_id)
        for new in plan.scheduled_new_reqs:
            assert new.request_id not in self.tokens
            self.tokens[new.request_id] = list(new.prompt_token_ids)
            self._open(new.request_id, new.slot, new.block_ids)
        cached = plan.scheduled_cached_reqs
        for resumed in cached.resumed:
            del self.tokens[resumed.request_id][resumed.num_tokens :]
            self._open(resumed.request_id, resumed.slot, resumed.block_ids)
        changes = (cached.slots.tolist(), cached.block_index.tolist(), cached.block_ids.tolist())
        for slot, index, block_id in zip(*changes, strict=True):
            assert index == len(self.tables[slot])
            self.tables[slot].append(block_id)

    def _open(self, request_id: str, slot: int, block_ids) -> None:
        assert slot not in self.tables, f"slot {slot} given to two requests"
        self.slot_of[request_id] = slot
        self.tables[slot] = block_ids.tolist()

    def _forget_slot(self, request_id: str) -> None:
        slot = self.slot_of.pop(request_id, None)
        if slot is not None:
            del self.tables[slot]

    def _write(self, slot: int, start: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, start):
            self.kv[self.tables[slot][position // self.block_size], position % self.block_size] = token

    def _read(self, slot: int, count: int) -> list[int]:
        return self.kv[self.tables[slot]].reshape(-1)[:count].tolist()
