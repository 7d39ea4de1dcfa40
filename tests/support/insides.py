"""What tests see and set inside objects that shows nowhere else: each private name is written once, here."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from engine_checks import core_of
from quire import LLM, AsyncLLM
from quire.engine.core import EngineCore
from quire.kv.blocks.block_hash import SequenceKeys, root_digest

# -- KV connector of an engine -----------------------------------------------------------------------------


def connector_of(engine: LLM | EngineCore) -> Any:
    """Return the connector of an engine in this process; None: it has none."""
    return (engine if isinstance(engine, EngineCore) else core_of(engine))._connector


def always_load(connector: Any) -> None:
    """Let no connector compute what it can load: which is faster depends on what else the machine does."""
    if connector is not None:
        costs_of(connector).prefers_loading = lambda *_: True


def costs_of(connector: Any) -> Any:
    return connector._costs


def tier_of(connector: Any) -> Any:
    return connector._tier


def opened(connector: Any) -> Any:
    """Return what the connector of a tier has for the cache that it was given."""
    return connector._opened


def copier_of(connector: Any) -> Any:
    return opened(connector).copier


def writer_of(connector: Any) -> Any:
    """Return the thread that writes to a tier."""
    return connector._writer


def check_no_buffer_leaks(connector: Any, num_buffers: int) -> None:
    pool = copier_of(connector).buffers
    assert len(pool._free) + pool._num_unmade == num_buffers


def places_in_memory(tier: Any) -> dict[bytes, int]:
    """Return where in memory a tier that caches another keeps blocks, by their keys."""
    return tier._places


def memory_of(tier: Any) -> Any:
    return tier._memory


def free_places(tier: Any) -> list[int]:
    return memory_of(tier)._free


def wait_until_written(engine: LLM | EngineCore) -> None:
    """Wait until all that the connector of a tier was to write has been written."""
    is_written = threading.Event()
    writer_of(connector_of(engine)).submit(is_written.set)
    assert is_written.wait(60)


def num_stored(engine: LLM, prompt: Iterable[int]) -> int:
    """Return how many blocks from the start of a prompt the tier has, once all is written."""
    wait_until_written(engine)
    keys = SequenceKeys(root_digest(), 16)
    keys.extend(np.array(prompt, dtype=np.int32))
    return tier_of(connector_of(engine)).residents.count_leading(keys[index] for index in range(len(keys)))


def peer_parts(engine: LLM | EngineCore) -> Any:
    """Return what the connector of an engine that shares KV with peers consists of."""
    return connector_of(engine)._parts


def lent_prompts(engine: LLM | EngineCore) -> Any:
    """Return the prompts that an engine lends, by their leases."""
    return peer_parts(engine).lent._lent


def known_peers_of(engine: LLM | EngineCore) -> Any:
    return peer_parts(engine).peers._peers


def check_nothing_is_shared(engine: LLM | EngineCore) -> None:
    """Check that an engine lends, borrows, reads and looks for nothing, and leases no block."""
    parts = peer_parts(engine)
    assert parts.loans.is_empty
    assert not len(parts.pulls)
    assert not parts.borrowed._borrowed
    assert not parts.prefixes._searches
    assert not lent_prompts(engine)
    core = engine if isinstance(engine, EngineCore) else core_of(engine)
    assert core.stats().num_leased_blocks == 0


def readers_of(peer: Any) -> Any:
    """Return the readers of pulls that are ready, and of those that wait for their turn."""
    return peer._ready_pulls, peer._awaited_pulls


def lookups_of(peer: Any) -> Any:
    """Return the lookups that a peer has not answered."""
    return peer._lookups


# -- processes ---------------------------------------------------------------------------------------------


def supervised(llm: AsyncLLM) -> Any:
    """Return the supervisor of an engine's process."""
    return llm._engine


def supervised_pid(llm: AsyncLLM) -> int:
    return supervised(llm)._process.pid
