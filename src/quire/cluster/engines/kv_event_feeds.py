"""Follows the KV events of all engines that publish them."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Mapping
from urllib.parse import urlsplit

import zmq.asyncio

from quire.cluster.engines.kv_event_feed import EventSource, KVEventFeed
from quire.cluster.engines.registry import Engine
from quire.cluster.prefixes.block_index import BlockIndex
from quire.config import RouterConfig
from quire.models.text.tokenizer import Tokenizer
from quire.server.wire.answers import EngineDescription

logger = logging.getLogger(__name__)

BLOCK_SIZES = range(1, 1 << 16)
"""Accepted numbers of tokens per block."""


class KVEventFeeds:
    """Follows the KV events of engines that publish them, each in a task of its own.

    Args:
        config: configuration of the router.
        tokenizers: the router's, by their fingerprints; only engines with one of them are followed.
    """

    def __init__(self, config: RouterConfig, tokenizers: Mapping[str, Tokenizer]) -> None:
        self._config = config
        self._prompt_digests = {name: tokenizer.digest for name, tokenizer in tokenizers.items()}
        self._index = BlockIndex(config.max_cached_blocks)
        self._context = zmq.asyncio.Context()
        self._feeds: dict[Engine, tuple[EventSource, asyncio.Task[None]]] = {}
        self._refused: weakref.WeakSet[Engine] = weakref.WeakSet()

    async def follow(self, engine: Engine, description: EngineDescription | None) -> None:
        """Follow an engine that is up, if possible; starts over if the engine has failed meanwhile.

        Args:
            engine: the engine.
            description: how it describes itself; None: it does not.
        """
        source = self._source(engine, description)
        events = None if source is None or description is None else description.kv_events
        engine.takes_prompts = events is not None and events.prompts == self._prompt_digests.get(
            events.tokenizer
        )
        following = self._feeds.get(engine)
        if following is not None and following[0] == source:
            return
        await self.unfollow(engine)
        if source is not None:
            feed = KVEventFeed(
                engine,
                source,
                self._context,
                self._index,
                interval=self._config.health_interval,
                timeout=self._config.connect_timeout,
            )
            self._feeds[engine] = source, asyncio.create_task(feed.run())

    async def unfollow(self, engine: Engine) -> None:
        """Stop following an engine, and forget its blocks."""
        if (following := self._feeds.pop(engine, None)) is not None:
            following[1].cancel()
            await asyncio.gather(following[1], return_exceptions=True)

    async def close(self) -> None:
        """Stop following all engines."""
        for engine in list(self._feeds):
            await self.unfollow(engine)
        self._context.destroy(linger=0)

    def _source(self, engine: Engine, description: EngineDescription | None) -> EventSource | None:
        events = None if description is None else description.kv_events
        if description is None or events is None:
            return None
        if events.tokenizer not in self._prompt_digests or description.block_size not in BLOCK_SIZES:
            if engine not in self._refused:
                logger.warning(
                    "the KV events of %s are not followed: its tokenizer is none of the router's, or "
                    "its block size of %d tokens is not valid",
                    engine.url,
                    description.block_size,
                )
            self._refused.add(engine)
            return None
        host = urlsplit(engine.url).hostname
        assert host is not None  # checked by `engine_url`
        return EventSource(
            host, events.port, events.replay_port, description.block_size, events.tokenizer, engine.id
        )
