"""The engines behind the router, and the choice between them."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from quire.cluster.prefixes.block_index import EngineBlocks
from quire.cluster.prefixes.memory import ChunksInFlight, PrefixMemory
from quire.cluster.prompts import Prompt
from quire.server.wire.answers import LATEST, EngineDescription, KVTransferAddress, ModelCard

REQUEST_WEIGHT = 512
"""Bytes of a waiting prompt that weigh as much as one running request."""

NEW_WEIGHT = 4
"""How much more a byte that a prompt adds weighs than one that waits: its KV takes the place of others'."""

MAX_ENGINES = 256

NOT_CHECKED = "it has not been checked yet"

_ids = itertools.count(1)


class Role(enum.StrEnum):
    """Role of an engine: prefill, decode, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


DECODERS = frozenset({Role.DECODE, Role.BOTH})
PREFILLERS = frozenset({Role.PREFILL})


class EngineState(enum.StrEnum):
    """Whether an engine gets requests."""

    UP = "up"
    DOWN = "down"
    DRAINING = "draining"


class Engine:
    """One engine: its address, state and load.

    Args:
        url: URL without a trailing slash.
        role: prefill, decode or both.
        key: API key that this engine alone is sent, in place of any other; empty: none.
    """

    def __init__(self, url: str, role: Role, key: str = "") -> None:
        self.url = url
        self.role = role
        self.key = key
        self.is_draining = False
        self.has_been_up = False
        self.failure: str | None = NOT_CHECKED
        self.id = next(_ids)  # a new one after each failure, which may lose the cache
        self.models: dict[str, ModelCard] | None = None  # by name without `LATEST`; None: it does not say
        self._kv_addresses: dict[str, KVTransferAddress | None] = {}  # where peers read its KV, by model
        self.blocks: EngineBlocks | None = None  # cached blocks; None: its KV events are not followed
        self.takes_prompts = False  # whether it makes the same tokens of prompts as the router
        self.in_flight = ChunksInFlight()
        self.num_requests = 0
        self.num_waiting_bytes = 0  # of prompts not answered yet
        self.turn = 0  # order of the last choice
        self.doubted = asyncio.Event()  # requests a health check
        self.is_lost = False  # nothing is heard of it any more
        self._on_loss: set[Callable[[float], None]] = set()

    @property
    def state(self) -> EngineState:
        """Whether the engine gets requests."""
        if self.failure is not None:
            return EngineState.DOWN
        return EngineState.DRAINING if self.is_draining else EngineState.UP

    @property
    def described_state(self) -> str:
        """The state in words, with the reason if it is down."""
        return f"down ({self.failure})" if self.state is EngineState.DOWN else self.state.value

    def cost(self, num_bytes: int) -> int:
        """Return what a prompt with `num_bytes` to compute here costs it and other requests, in bytes.

        Waiting prompts and running requests delay it; computing it delays each request that is here.
        """
        per_byte = NEW_WEIGHT + self.num_requests
        return self.num_waiting_bytes + REQUEST_WEIGHT * self.num_requests + per_byte * num_bytes

    def serves(self, model: str) -> bool:
        """Whether the engine serves a model, or may do so; an empty name is that of any model."""
        return not model or self.models is None or model.removesuffix(LATEST) in self.models

    def kv_address(self, model: str) -> KVTransferAddress | None:
        """Return where peers read the KV of a model; None: nowhere, or the engine does not say."""
        addresses = self._kv_addresses
        return addresses.get(model.removesuffix(LATEST), addresses.get(""))

    def note(self, description: EngineDescription | None) -> None:
        """Note which models the engine says that it serves, if any, and where their KV is."""
        self._kv_addresses = {}
        if description is None:
            return
        self.models = {card.id.removesuffix(LATEST): card for card in description.models} or None
        self._kv_addresses[""] = description.kv_transfer
        for other in description.others or ():
            names = [card.id.removesuffix(LATEST) for card in other.models]
            self._kv_addresses |= dict.fromkeys(names, other.kv_transfer)

    def mark_down(self, reason: str) -> None:
        """Send no requests until a health check succeeds."""
        if self.failure is None:
            self.id = next(_ids)
        self.failure = reason

    def mark_up(self) -> None:
        """Send requests again."""
        self.has_been_up = True
        self.failure = None
        self.is_lost = False

    def doubt(self, reason: str) -> None:
        """Send no requests until a health check, which is now due, succeeds."""
        self.mark_down(reason)
        self.doubted.set()

    def lose(self, since: float) -> None:
        """Give up the answers of which nothing has come since then, on the event loop's clock."""
        self.is_lost = True
        for give_up in list(self._on_loss):
            give_up(since)

    @contextlib.contextmanager
    def calling_on_loss(self, give_up: Callable[[float], None]) -> Iterator[None]:
        """Have `lose` call a function for the duration of the context."""
        self._on_loss.add(give_up)
        try:
            yield
        finally:
            self._on_loss.remove(give_up)

    @contextlib.contextmanager
    def serving(self, num_bytes: int) -> Iterator[ServedRequest]:
        """Count a request with `num_bytes` prompt bytes to compute for the duration of the context."""
        served = ServedRequest(self, num_bytes)
        try:
            yield served
        finally:
            served.end()


class ServedRequest:
    """A request's part of an engine's load."""

    def __init__(self, engine: Engine, num_bytes: int) -> None:
        self._engine = engine
        self._num_bytes = num_bytes
        engine.num_requests += 1
        engine.num_waiting_bytes += num_bytes

    def answered(self) -> None:
        """Note that the answer has begun, so the prompt has been computed."""
        self._engine.num_waiting_bytes -= self._num_bytes
        self._num_bytes = 0

    def end(self) -> None:
        """Stop counting the request."""
        self.answered()
        self._engine.num_requests -= 1


class PrefixSource(enum.StrEnum):
    """How a cached prefix is known: from KV events, or from the texts that the engine was sent."""

    EVENTS = "events"
    TEXT = "text"


class CachedPrefix(NamedTuple):
    """How many bytes of a prompt an engine has cached, and how that is known."""

    num_bytes: int
    source: PrefixSource


class Engines:
    """All engines by their URL.

    Args:
        memory: remembers the prompts that engines have been sent.
        models: names of models that are served even while no known engine has them.
    """

    def __init__(self, memory: PrefixMemory, models: Collection[str] = ()) -> None:
        self.by_url: dict[str, Engine] = {}
        self.models = models
        self._memory = memory
        self._turns = itertools.count(1)

    def of(self, roles: Collection[Role], model: str = "") -> list[Engine]:
        """Return the engines with one of these roles that serve a model, usable or not."""
        return [one for one in self.by_url.values() if one.role in roles and one.serves(model)]

    def is_one_expected(self, model: str) -> bool:
        """Whether an engine that generates with a model may be up soon, as one has been or should be."""
        is_declared = model in self.models if model else bool(self.models)
        engines = self.of(DECODERS, model)
        return is_declared or any(one.has_been_up and not one.is_draining for one in engines)

    def model_cards(self) -> list[ModelCard]:
        """Return the models of engines that generate, by what these say, each name once and in order."""
        cards = {name: card for engine in self.of(DECODERS) for name, card in (engine.models or {}).items()}
        return [cards[name] for name in sorted(cards)]

    def choose(
        self, roles: Collection[Role], prompt: Prompt, *, excluded: Collection[Engine] = ()
    ) -> Engine | None:
        """Return the engine with its model where a prompt costs least; None if no engine is usable."""
        usable = [
            engine
            for engine in self.of(roles, prompt.model)
            if engine.state is EngineState.UP and engine not in excluded
        ]
        if not usable:
            return None
        cached = self._cached_prefixes(prompt, usable)
        size = len(prompt.content)
        return min(usable, key=lambda one: (one.cost(size - cached[one].num_bytes), one.turn))

    def cached_prefix(self, prompt: Prompt, engine: Engine) -> CachedPrefix:
        """Return how much of a prompt an engine has cached."""
        return self._cached_prefixes(prompt, [engine])[engine]

    def num_new_bytes(self, prompt: Prompt, engine: Engine) -> int:
        """Return how many bytes of a prompt an engine has not cached."""
        return len(prompt.content) - self.cached_prefix(prompt, engine).num_bytes

    @contextlib.contextmanager
    def serving(self, engine: Engine, prompt: Prompt, *, is_computed: bool) -> Iterator[ServedRequest]:
        """Count a request for an engine for the duration of the context, and remember its prompt.

        Args:
            engine: the engine that serves it.
            prompt: the request's prompt.
            is_computed: whether the engine computes the prompt rather than loading its KV.
        """
        engine.turn = next(self._turns)
        num_bytes = self.num_new_bytes(prompt, engine) if is_computed else 0
        self._memory.note(prompt.chunk_keys, engine.id)
        if prompt.cached is not None and engine.blocks is not None:
            prompt.cached.use(engine.blocks)
        engine.in_flight.begin(prompt.chunk_keys)
        try:
            with engine.serving(num_bytes) as served:
                yield served
        finally:
            engine.in_flight.end(prompt.chunk_keys)

    def _cached_prefixes(self, prompt: Prompt, engines: Sequence[Engine]) -> dict[Engine, CachedPrefix]:
        by_text = self._memory.matched_bytes(prompt.chunk_keys, [engine.id for engine in engines])
        return {
            engine: _by_events(prompt, engine) or CachedPrefix(by_text[engine.id], PrefixSource.TEXT)
            for engine in engines
        }


def _by_events(prompt: Prompt, engine: Engine) -> CachedPrefix | None:
    """Return the prefix cached (by events) or being computed; None if events are not followed."""
    if prompt.cached is None or engine.blocks is None:
        return None
    num_bytes = prompt.cached.num_bytes.get(engine.blocks)
    if num_bytes is None:
        return None
    return CachedPrefix(
        max(num_bytes, engine.in_flight.matched_bytes(prompt.chunk_keys)), PrefixSource.EVENTS
    )
