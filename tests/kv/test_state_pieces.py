"""Which states a step leaves in checkpoints, and which of them a tier may copy."""

from __future__ import annotations

import dataclasses

import numpy as np
from connector_contract import BLOCK, PROMPT, plan_of, request_of
from test_tier_connector import Bench

from quire.kv.blocks.block_hash import SequenceKeys, root_digest
from quire.kv.blocks.state_pieces import HeldState, StatePiece, piece_keys, states_held
from quire.step import SchedulerOutput, StateCopies


class States:
    """Checkpoints of two pieces each."""

    num_pieces = 2

    def __init__(self) -> None:
        self.bytes_per_block = BLOCK * 8
        self.pieces = np.arange(40, dtype=np.uint8)[:, None].repeat(self.bytes_per_block, axis=1)

    def read_block(self, number: int, into: np.ndarray) -> None:
        into[:] = self.pieces[number]

    def write_block(self, number: int, content: np.ndarray) -> None:
        self.pieces[number] = content


def plan_with(computed: int, tokens: int, *, restored=(), saved=(), name: str = "first") -> SchedulerOutput:
    plan = plan_of(0, request_of(name, PROMPT), [3, 1, 4, 9], computed, tokens, new=True)
    pairs = [np.array(each, dtype=np.int32).reshape(-1, 2) for each in (restored, saved)]
    return dataclasses.replace(plan, state_copies=StateCopies(*pairs, np.array([tokens])))


def keys() -> SequenceKeys:
    keys = SequenceKeys(root_digest(), BLOCK)
    keys.extend(np.array(PROMPT, dtype=np.int32))
    return keys


def test_a_checkpoint_holds_what_was_restored_from_it_unless_the_step_overwrites_it():
    held = states_held(plan_with(4, 8, restored=[(5, 0)], saved=[(0, 7)]))
    assert list(held) == [HeldState("first", 4, 5), HeldState("first", 12, 7)]
    overwritten = states_held(plan_with(4, 8, restored=[(5, 0)], saved=[(0, 5)]))
    assert list(overwritten) == [HeldState("first", 12, 5)]
    assert not list(states_held(plan_of(0, None, [], 0, 0, new=False)))


def test_no_piece_has_the_key_of_another_or_of_a_block():
    blocks = [keys()[index] for index in range(3)]
    pieces = [piece for key in blocks for piece in piece_keys(key, 3)]
    assert len({key.digest for key in [*blocks, *pieces]}) == 12
    assert pieces[3].parent == blocks[1].digest
    assert [piece.parent for piece in pieces[4:6]] == [piece.digest for piece in pieces[3:5]]


def test_a_checkpoint_that_a_load_of_the_same_step_writes_to_is_not_stored():
    bench, states = Bench(), States()
    connector = bench.connector
    connector.register_states(states)
    connector.register_kv_caches((bench.engine.cache,))
    first, again = request_of("first", PROMPT), request_of("again", PROMPT)
    connector.request_arrived(first)
    connector.get_num_new_matched_tokens(first, 0)
    metadata = connector.build_connector_meta(plan_with(0, 12, saved=[(0, 6)]))
    stored = [filled.block for filled in metadata.stores]
    assert stored[3:] == [StatePiece(0, 12), StatePiece(0, 13)]
    connector.start_load_kv(metadata)
    connector.wait_for_save(frozenset())
    assert connector.get_num_new_matched_tokens(again, 0) == (12, True)
    for name, generation in (("kept", 1), ("filled", 2)):
        other = request_of(name, PROMPT)
        connector.get_num_new_matched_tokens(other, 0)
        bench.tier.residents.clear()
        bench.tier.residents.generation = generation
        if name == "filled":
            bench.store()
            connector.load_state(again, 9, 0)
            connector.update_state_after_alloc(again, np.array([[20, 21, 22]]), 12)
        plan = plan_with(12, 2, restored=[(9, 0)], name=name)
        pieces = [one for one in connector.build_connector_meta(plan).stores if type(one.block) is StatePiece]
        assert len(pieces) == (2 if name == "kept" else 0)


def test_a_load_fills_the_checkpoint_and_names_its_last_block_if_a_piece_fails():
    bench, states = Bench(), States()
    connector = bench.connector
    connector.register_states(states)
    connector.register_kv_caches((bench.engine.cache,))
    connector.get_num_new_matched_tokens(request_of("first", PROMPT), 0)
    connector.start_load_kv(connector.build_connector_meta(plan_with(0, 12, saved=[(0, 6)])))
    connector.wait_for_save(frozenset())
    read = bench.tier.read
    for checkpoint, fails in ((9, False), (10, True)):
        request = request_of(f"load {checkpoint}", PROMPT)
        assert connector.get_num_new_matched_tokens(request, 0) == (12, True)
        connector.load_state(request, checkpoint, 0)
        connector.update_state_after_alloc(request, np.array([[20, 21, 22]]), 12)
        lost = piece_keys(keys()[2], 2)[1]
        bench.tier.read = lambda key, into, fails=fails, lost=lost: (
            not (fails and key == lost) and read(key, into)
        )
        connector.start_load_kv(connector.build_connector_meta(plan_of(0, None, [], 0, 0, new=False)))
        assert connector.get_finished([])[1] == {request.request_id}
        assert connector.get_block_ids_with_load_errors() == ({22} if fails else set())
    assert states.pieces[18:20, -1].tolist() == [12, 13]
