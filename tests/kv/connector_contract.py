"""What every KV connector must do: a class of tests to inherit from, and an engine of one number per token.

The engine keeps, for each place of each block, a number that stands for the KV of the token there and of all
before it. A connector that loads a wrong block, or saves one too early, is seen by the numbers.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod

import numpy as np

from quire.kv.connectors.interface import KVConnector
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.status import RequestStatus
from quire.step import CachedRequestData, ChosenTokens, NewRequestData, SchedulerOutput

BLOCK = 4
NUM_BLOCKS = 64
EMPTY = np.empty(0, dtype=np.int32)
STEPS_TO_WAIT = 20


class ArrayCache:
    """A KV cache: [blocks, block size] numbers."""

    def __init__(self) -> None:
        self.blocks = np.full((NUM_BLOCKS, BLOCK), -1.0)
        self.bytes_per_block = self.blocks[0].nbytes

    def read_block(self, block_id: int, into: np.ndarray) -> None:
        into[:] = self.blocks[block_id].view(np.uint8)

    def write_block(self, block_id: int, content: np.ndarray) -> None:
        self.blocks[block_id] = content.view(np.float64)


def request_of(name: str, tokens: list[int], **options) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=4), **options)


def kv_of(tokens: list[int]) -> np.ndarray:
    """The right KV: each number depends on all tokens up to its own."""
    return np.cumsum(np.array(tokens, dtype=np.float64) * np.arange(1, len(tokens) + 1))


class Engine:
    """Steps one connector; what is computed is written by `kv_of`, what is loaded is the connector's."""

    def __init__(self, connector: KVConnector) -> None:
        self.connector = connector
        self.cache = ArrayCache()
        connector.register_kv_caches([self.cache] if connector.by_group else self.cache)
        self.num_steps = 0
        self.failed: set[int] = set()

    def step(
        self,
        request: Request | None = None,
        block_ids=(),
        *,
        computed: int = 0,
        tokens: int = 0,
        new=True,
        failed_ids=(),
    ):
        """Compute `tokens` of one request, or nothing; return (sent, received)."""
        plan = plan_of(self.num_steps, request, block_ids, computed, tokens, new=new)
        self.num_steps += 1
        metadata = pickle.loads(pickle.dumps(self.connector.build_connector_meta(plan)))
        self.connector.start_load_kv(metadata)
        for layer in range(2):
            self.connector.wait_for_layer_load(layer)
            self.connector.save_kv_layer(layer, None, None)
        if request is not None:
            values = kv_of(request.prompt_token_ids)
            for position in range(computed, computed + tokens):
                self.cache.blocks[block_ids[position // BLOCK], position % BLOCK] = values[position]
        self.connector.wait_for_save(frozenset(failed_ids))
        sent, received = self.connector.get_finished(plan.finished_req_ids)
        self.failed |= self.connector.get_block_ids_with_load_errors()
        return sent, received

    def compute(self, request: Request, block_ids, *, chunk: int | None = None) -> None:
        """Compute a whole prompt, in chunks."""
        self.connector.get_num_new_matched_tokens(request, 0)
        self.begin_load(request, block_ids, 0)
        length = request.num_prompt_tokens
        chunk = chunk or length
        for start in range(0, length, chunk):
            self.step(request, block_ids, computed=start, tokens=min(chunk, length - start), new=start == 0)

    def finish(self, request: Request, block_ids=(), status=RequestStatus.FINISHED_STOPPED):
        request.status = status
        return self.connector.request_finished(request, self.as_told(block_ids))

    def begin_load(self, request: Request, block_ids, count: int) -> None:
        self.connector.update_state_after_alloc(request, self.as_told(block_ids), count)

    def as_told(self, block_ids):
        """Return blocks as the connector expects them; there is one cache group."""
        return np.array([block_ids], dtype=np.int32) if self.connector.by_group else block_ids

    def load(self, request: Request, block_ids, *, num_local: int = 0) -> int:
        """Ask for all that there is and load it, however it comes; return the number of tokens."""
        count, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
        self.begin_load(request, block_ids, count)
        if not is_async:
            self.step(request, block_ids, computed=num_local + count, tokens=1)
            return count
        for _ in range(STEPS_TO_WAIT):
            if request.request_id in self.step()[1]:
                return count
        raise AssertionError("the load never ended")

    def loaded(self, block_ids, count: int, *, start: int = 0) -> np.ndarray:
        return self.cache.blocks[list(block_ids)].reshape(-1)[start : start + count]


def plan_of(step: int, request, block_ids, computed: int, tokens: int, *, new: bool) -> SchedulerOutput:
    rows = 0 if request is None else 1
    requests = []
    if request is not None and new:
        table = np.array([block_ids], dtype=np.int32)
        params = request.sampling_params
        requests = [
            NewRequestData(request.request_id, 0, request.prompt_array, [], params, (), table, computed)
        ]
    return SchedulerOutput(
        step=step,
        request_ids=[request.request_id] if rows else [],
        slots=np.zeros(rows, dtype=np.int32),
        num_tokens=np.full(rows, tokens, dtype=np.int32),
        num_computed_tokens=np.full(rows, computed, dtype=np.int32),
        num_known_tokens=np.full(rows, request.num_tokens if rows else 0, dtype=np.int32),
        draft_token_ids=np.empty((rows, 0), dtype=np.int32),
        finished_req_ids=[],
        preempted_req_ids=[],
        scheduled_new_reqs=requests,
        scheduled_cached_reqs=CachedRequestData(EMPTY, EMPTY, EMPTY.reshape(1, 0), []),
        forks=[],
        chosen_tokens=ChosenTokens(EMPTY, EMPTY),
        block_copies=np.empty((0, 2, 1), dtype=np.int32),
    )


PROMPT = list(range(1, 15))  # three full blocks and two tokens


class ConnectorContract(ABC):
    """Inherit, and say how a connector is made."""

    @abstractmethod
    def make(self) -> KVConnector:
        """Return a new connector for blocks of `BLOCK` tokens, with nothing stored."""

    @abstractmethod
    def fail_next_load(self, connector: KVConnector) -> None:
        """Let the next load fail."""

    def with_prompt(self) -> Engine:
        """Return an engine whose connector has stored `PROMPT`."""
        engine = Engine(self.make())
        first = request_of("first", PROMPT)
        engine.compute(first, [3, 1, 4, 9])
        engine.finish(first, [3, 1, 4, 9])
        for _ in range(STEPS_TO_WAIT):
            engine.step()
        return engine

    def test_an_empty_store_has_nothing(self):
        engine = Engine(self.make())
        assert engine.connector.get_num_new_matched_tokens(request_of("a", PROMPT), 0) == (0, False)

    def test_what_was_computed_is_found_and_loaded(self):
        engine = self.with_prompt()
        blocks = [20, 21, 22, 23]
        assert engine.load(request_of("again", PROMPT), blocks) == 12
        assert engine.loaded(blocks, 12).tolist() == kv_of(PROMPT)[:12].tolist()
        assert not engine.failed

    def test_chunks_are_found_like_one_piece(self):
        engine = Engine(self.make())
        engine.compute(request_of("first", PROMPT), [3, 1, 4, 9], chunk=3)
        blocks = [20, 21, 22, 23]
        assert engine.load(request_of("again", PROMPT), blocks) == 12
        assert engine.loaded(blocks, 12).tolist() == kv_of(PROMPT)[:12].tolist()

    def test_only_what_is_missing_is_loaded(self):
        engine = self.with_prompt()
        blocks = [20, 21, 22, 23]
        engine.cache.blocks[20] = 0.5  # the engine's own, and none of the connector's business
        assert engine.load(request_of("again", PROMPT), blocks, num_local=BLOCK) == 8
        assert engine.loaded(blocks, 8, start=4).tolist() == kv_of(PROMPT)[4:12].tolist()
        assert (engine.cache.blocks[20] == 0.5).all()

    def test_what_a_failed_request_computed_is_not_found(self):
        engine = Engine(self.make())
        request = request_of("failed", PROMPT)
        blocks = [3, 1, 4, 9]
        engine.connector.get_num_new_matched_tokens(request, 0)
        engine.begin_load(request, blocks, 0)
        engine.step(request, blocks, tokens=BLOCK)
        engine.step(request, blocks, computed=BLOCK, tokens=10, new=False, failed_ids=["failed", "other"])
        engine.finish(request, blocks, RequestStatus.FINISHED_ERROR)
        count, _ = engine.connector.get_num_new_matched_tokens(request_of("again", PROMPT), 0)
        assert count == BLOCK, "what it computed in a step that did not fail"

    def test_what_turns_out_to_have_failed_is_not_found(self):
        engine = Engine(self.make())
        if not engine.connector.saves_before_tokens:
            return
        engine.connector.wait_for_save = lambda _: engine.connector.begin_save(lambda: frozenset({"failed"}))
        engine.compute(request_of("failed", PROMPT), [3, 1, 4, 9])
        assert engine.connector.get_num_new_matched_tokens(request_of("again", PROMPT), 0) == (0, False)
        engine.compute(request_of("other", PROMPT), [5, 6, 7, 8])
        count, _ = engine.connector.get_num_new_matched_tokens(request_of("third", PROMPT), 0)
        assert count == 12

    def test_the_last_token_is_never_offered(self):
        engine = self.with_prompt()
        count, _ = engine.connector.get_num_new_matched_tokens(request_of("again", PROMPT[:12]), 0)
        assert count == 8

    def test_only_the_common_prefix_is_offered(self):
        engine = self.with_prompt()
        other = [*PROMPT[:6], 99, *PROMPT[7:]]
        count, _ = engine.connector.get_num_new_matched_tokens(request_of("other", other), 0)
        assert count == 4

    def test_another_salt_finds_nothing(self):
        engine = self.with_prompt()
        request = request_of("again", PROMPT, cache_salt="tenant")
        assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)

    def test_asking_changes_nothing(self):
        engine = self.with_prompt()
        request = request_of("again", PROMPT)
        answers = {engine.connector.get_num_new_matched_tokens(request, local) for local in (0, 0, 4, 0)}
        assert {count for count, _ in answers} == {12, 8}
        before = engine.cache.blocks.copy()
        assert engine.step() == (frozenset(), frozenset())
        assert (engine.cache.blocks == before).all()

    def test_a_load_that_fails_ends_and_names_its_blocks(self):
        engine = self.with_prompt()
        self.fail_next_load(engine.connector)
        blocks = [20, 21, 22, 23]
        engine.load(request_of("again", PROMPT), blocks)
        assert engine.failed
        assert engine.failed <= {20, 21, 22}
        engine.failed.clear()
        engine.step()
        assert not engine.failed, "each failure is told once"

    def test_what_a_failed_load_led_to_is_not_stored(self):
        engine = self.with_prompt()
        self.fail_next_load(engine.connector)
        longer = [*PROMPT, 50, 51, 52, 53]
        request = request_of("longer", longer)
        blocks = [30, 31, 32, 33, 34]
        count, is_async = engine.connector.get_num_new_matched_tokens(request, 0)
        engine.begin_load(request, blocks, count)
        if is_async:
            return  # nothing is computed before the load has ended
        engine.step(request, blocks, computed=count, tokens=len(longer) - count)
        found, _ = engine.connector.get_num_new_matched_tokens(request_of("again", longer), 0)
        assert found == 12

    def test_after_a_failure_the_request_is_computed_and_found(self):
        engine = self.with_prompt()
        self.fail_next_load(engine.connector)
        blocks = [20, 21, 22, 23]
        request = request_of("again", PROMPT)
        engine.load(request, blocks)
        engine.step(request, blocks, computed=0, tokens=len(PROMPT))
        engine.finish(request, blocks)
        others = [40, 41, 42, 43]
        assert engine.load(request_of("third", PROMPT), others) == 12
        assert engine.loaded(others, 12).tolist() == kv_of(PROMPT)[:12].tolist()

    def test_a_cancelled_load_writes_nothing_more(self):
        engine = self.with_prompt()
        request = request_of("again", PROMPT)
        blocks = [20, 21, 22, 23]
        count, is_async = engine.connector.get_num_new_matched_tokens(request, 0)
        if not is_async:
            return  # it has ended before it could be cancelled
        engine.begin_load(request, blocks, count)
        engine.step()
        engine.connector.cancel_load("again")
        engine.finish(request, (), RequestStatus.FINISHED_ABORTED)
        engine.step()
        engine.cache.blocks[blocks] = 7.0
        for _ in range(STEPS_TO_WAIT):
            assert "again" not in engine.step()[1]
        assert (engine.cache.blocks[blocks] == 7.0).all()

    def test_a_load_may_be_cancelled_before_it_began_or_not_at_all(self):
        engine = self.with_prompt()
        engine.connector.cancel_load("nobody")
        request = request_of("again", PROMPT)
        count, _ = engine.connector.get_num_new_matched_tokens(request, 0)
        engine.begin_load(request, [20, 21, 22, 23], count)
        engine.connector.cancel_load("again")
        before = engine.cache.blocks.copy()
        for _ in range(STEPS_TO_WAIT):
            assert engine.step() == (frozenset(), frozenset())
        assert (engine.cache.blocks == before).all()

    def test_a_reset_forgets(self):
        engine = self.with_prompt()
        if engine.connector.reset():
            request = request_of("again", PROMPT)
            assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)

    def test_what_was_found_before_a_reset_is_not_loaded_after_it(self):
        engine = self.with_prompt()
        request = request_of("again", PROMPT)
        count, _ = engine.connector.get_num_new_matched_tokens(request, 0)
        engine.begin_load(request, [20, 21, 22, 23], count)
        if not engine.connector.reset():
            return
        received: set[str] = set()
        for _ in range(STEPS_TO_WAIT):
            received |= engine.step()[1]
        assert (engine.cache.blocks[[20, 21, 22]] == -1.0).all()
        assert engine.failed == {20, 21, 22}

    def test_who_never_got_blocks_holds_none(self):
        engine = self.with_prompt()
        request = request_of("aborted", PROMPT)
        engine.connector.get_num_new_matched_tokens(request, 0)
        assert engine.finish(request, (), RequestStatus.FINISHED_ABORTED)[0] is False
        assert "aborted" not in engine.connector.leases_renewed()

    def test_what_is_held_for_a_peer_is_let_go_of_once(self):
        engine = Engine(self.make())
        request = request_of("first", PROMPT)
        engine.compute(request, [3, 1, 4, 9])
        delays_free, params = engine.finish(request, [3, 1, 4, 9])
        sent = [request_id for _ in range(STEPS_TO_WAIT) for request_id in engine.step()[0]]
        assert sent == (["first"] if delays_free else [])
        assert params is None or delays_free
