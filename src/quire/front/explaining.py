"""What live requests do or wait for, as their engine says."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence

from quire.engine.messages import Explain, Reply, ToEngine
from quire.front.live_requests import LiveRequests


class Explaining:
    """Asks an engine about requests.

    Args:
        requests: the engine's live requests.
        call: sends the engine a call, and returns its reply.
    """

    def __init__(
        self, requests: LiveRequests, call: Callable[[Callable[[int], ToEngine]], Awaitable[Reply]]
    ) -> None:
        self._requests = requests
        self._call = call

    async def explain(self, groups: Sequence[Sequence[str]], limit: int | None) -> list[list[str]]:
        """Return the sentences of each group of requests, see `AsyncLLM.explain_all`."""
        wanted = (one for group in groups for one in self._sequence_ids(group)[:limit])
        asked = list(dict.fromkeys(wanted))
        texts: dict[str, str] = {}
        while rest := asked[len(texts) :]:
            reply = await self._call(functools.partial(Explain, sequence_ids=rest))
            texts.update(zip(rest, reply.texts, strict=False))
        return [self._sentences(group, texts, limit) for group in groups]

    def _sequence_ids(self, group: Sequence[str]) -> list[str]:
        return [one for request_id in group for one in self._requests.queued_sequence_ids(request_id)]

    def _sentences(self, group: Sequence[str], texts: Mapping[str, str], limit: int | None) -> list[str]:
        states = [state for request_id in group for state in self._states(request_id, texts)]
        sentences = [state for state in states if state is not None][:limit]
        num_left_out = len(states) - len(sentences)
        return sentences + [f"left out: {num_left_out} other completions"] * bool(num_left_out)

    def _states(self, request_id: str, texts: Mapping[str, str]) -> Sequence[str | None]:
        """Return what each completion does that has not ended meanwhile; None: that was not asked."""
        if sequence_ids := self._requests.queued_sequence_ids(request_id):
            return [texts.get(sequence_id) for sequence_id in sequence_ids]
        return self._requests.reasons_to_wait(request_id)
