"""Tenant limits: requests and tokens per minute, running sequences, and pending grammars."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.config import TenantConfig
from quire.errors import InvalidRequestError
from quire.server.wire.errors import ApiError

if TYPE_CHECKING:
    from quire.front.text.input_processor import ProcessedRequest
    from quire.request_output import RequestOutput

SECONDS = 60.0  # period of the limits
_PLACES = "max_running_seqs + max_queued_seqs"
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_running_seqs", _PLACES, "max_pending_grammars")
BUSY_RETRY = 1.0  # Retry-After in seconds when others of its requests must end first


class TokenBucket:
    """A limit per minute: a bucket of that size, which fills at a constant rate.

    Args:
        size: amount per minute; 0: no limit.
        clock: returns seconds.
    """

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self.size = size
        self._clock = clock
        self._level = float(size)
        self._time = clock()

    @property
    def level(self) -> float:
        """Current level of the bucket."""
        now = self._clock()
        self._level = min(self.size, self._level + (now - self._time) * self.size / SECONDS)
        self._time = now
        return self._level

    @property
    def left(self) -> int | None:
        """Amount that may be taken; None: no limit."""
        return max(0, math.floor(self.level)) if self.size else None

    def resize(self, size: int) -> None:
        """Change the limit; the level is kept, up to the new size."""
        self._level = float(size) if not self.size else min(size, self.level)
        self.size, self._time = size, self._clock()

    def seconds_until(self, amount: float) -> float:
        """Return the seconds until the level reaches `amount`, which must not exceed the size."""
        return max(0.0, amount - self.level) * SECONDS / self.size if self.size else 0.0

    def take(self, amount: float) -> None:
        """Take an amount out; has no effect without a limit."""
        if self.size:
            self._level = self.level - amount

    def put_back(self, amount: float) -> None:
        """Put back an unused amount."""
        if self.size:
            self._level = min(self.size, self.level + amount)


@dataclasses.dataclass(slots=True)
class _Admitted:
    """An admitted request: its reserved tokens, its prompt's tokens, and its sequences."""

    num_reserved: int
    num_prompt: int
    num_sequences: int
    num_generated: int = 0


class TenantUsage:
    """A tenant's current usage, and the limits of its configuration.

    Sequences beyond `max_running_seqs` wait here, in order of arrival. Every operation is O(1).

    Args:
        config: the tenant's configuration.
        clock: returns seconds.

    Attributes:
        num_refusals: number of refusals by limit.
    """

    def __init__(self, config: TenantConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_refusals = dict.fromkeys(_LIMITS, 0)
        self._config = config
        self._requests = TokenBucket(config.requests_per_minute, clock)
        self._tokens = TokenBucket(config.tokens_per_minute, clock)
        self._num_running = 0
        self._num_queued = 0
        self._num_grammars = 0
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @property
    def has_limits(self) -> bool:
        """Whether anything is limited."""
        config = self._config
        return bool(self.has_rates or config.max_running_seqs or config.max_pending_grammars)

    @property
    def has_rates(self) -> bool:
        """Whether there are limits per minute."""
        return bool(self._requests.size or self._tokens.size)

    @property
    def requests_left(self) -> int | None:
        """Rest of the requests per minute; None: no limit."""
        return self._requests.left

    @property
    def tokens_left(self) -> int | None:
        """Rest of the tokens per minute; None: no limit."""
        return self._tokens.left

    def configure(self, config: TenantConfig) -> None:
        """Replace the limits."""
        self._config = config
        self._requests.resize(config.requests_per_minute)
        self._tokens.resize(config.tokens_per_minute)
        self._start_waiting()

    def headers(self) -> dict[str, str]:
        """Return the limits per minute and what is left of them, as OpenAI's headers."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket.size:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.size)
                found[f"x-ratelimit-remaining-{name}"] = str(bucket.left)
                found[f"x-ratelimit-reset-{name}"] = _duration(bucket.seconds_until(bucket.size))
        return found

    @contextmanager
    def call(
        self, num_prompts: int, seqs_per_prompt: int, min_tokens: int, *, has_grammar: bool
    ) -> Iterator[TenantCall]:
        """Admit a call with all its sequences for the duration of the context.

        Args:
            num_prompts: number of prompts.
            seqs_per_prompt: number of sequences per prompt.
            min_tokens: minimum number of tokens that the call will reserve.
            has_grammar: whether its output is structured.

        Raises:
            ApiError: 429: a limit is reached.
            InvalidRequestError: the call can never fit a limit.
        """
        num_sequences = num_prompts * seqs_per_prompt
        self._refuse_places(num_sequences, seqs_per_prompt)
        if has_grammar:
            self._refuse_busy(
                "max_pending_grammars", self._num_grammars, 1, self._config.max_pending_grammars
            )
        self._refuse_rate("tokens_per_minute", self._tokens, min_tokens)
        self._refuse_rate("requests_per_minute", self._requests, num_sequences)
        self._requests.take(num_sequences)
        self._num_queued += num_sequences
        self._num_grammars += has_grammar
        call = TenantCall(self, num_sequences, has_grammar=has_grammar)
        try:
            yield call
        finally:
            call.end()

    def reserve_tokens(self, amount: int) -> None:
        """Take tokens for one request.

        Raises:
            ApiError, InvalidRequestError: as `call`.
        """
        self._refuse_rate("tokens_per_minute", self._tokens, amount)
        self._tokens.take(amount)

    def put_back_tokens(self, amount: int) -> None:
        """Put back a request's unused tokens."""
        self._tokens.put_back(amount)

    async def start(self, num_sequences: int) -> None:
        """Wait until these queued sequences may run, and count them as running."""
        if self._waiting or not self._has_room(num_sequences):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((num_sequences, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.end_running(num_sequences)
                    self._num_queued += num_sequences  # released by its call
                self._start_waiting()
                raise
        else:
            self._begin(num_sequences)

    def end_running(self, num_sequences: int) -> None:
        """Count sequences as ended, so that others may start."""
        self._num_running -= num_sequences
        self._start_waiting()

    def leave_queue(self, num_sequences: int) -> None:
        """Remove sequences that will not start."""
        self._num_queued -= num_sequences

    def end_grammar(self) -> None:
        """Count a call's grammar as compiled."""
        self._num_grammars -= 1

    def _begin(self, num_sequences: int) -> None:
        self._num_queued -= num_sequences
        self._num_running += num_sequences

    def _has_room(self, num_sequences: int) -> bool:
        most = self._config.max_running_seqs
        return not most or not self._num_running or self._num_running + num_sequences <= most

    def _start_waiting(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._has_room(self._waiting[0][0])):
            num_sequences, turn = self._waiting.popleft()
            if not turn.done():
                self._begin(num_sequences)
                turn.set_result(None)

    def _refuse_places(self, num_sequences: int, seqs_per_prompt: int) -> None:
        most_running, most_queued = self._config.max_running_seqs, self._config.max_queued_seqs
        if most_running and seqs_per_prompt > most_running:
            self.num_refusals["max_running_seqs"] += 1
            raise InvalidRequestError(
                f"a prompt has {seqs_per_prompt} sequences, and at most max_running_seqs {most_running} of "
                f"{self._whose} run at once; lower n or best_of",
                param="n",
            )
        if most_running and most_queued:
            held = self._num_running + self._num_queued
            most = most_running + most_queued
            self._refuse_never(_PLACES, num_sequences, most)
            self._refuse_busy(_PLACES, held, num_sequences, most)

    def _refuse_busy(self, knob: str, held: int, more: int, most: int) -> None:
        if most and held + more > most:
            self.num_refusals[knob] += 1
            raise self._refusal(f"{held} of {knob} {most} are in use and the call needs {more}", BUSY_RETRY)

    def _refuse_rate(self, knob: str, bucket: TokenBucket, amount: int) -> None:
        if not bucket.size:
            return
        self._refuse_never(knob, amount, bucket.size)
        if amount > bucket.level:
            self.num_refusals[knob] += 1
            left = f"{math.floor(max(0, bucket.level))} of {knob} {bucket.size} are left"
            raise self._refusal(f"{left} and the call needs {amount}", bucket.seconds_until(amount))

    def _refuse_never(self, knob: str, amount: int, most: int) -> None:
        if amount > most:
            self.num_refusals[knob] += 1
            raise InvalidRequestError(
                f"the call needs {amount}, and {knob} of {self._whose} is {most}; send smaller calls"
            )

    def _refusal(self, problem: str, retry_after: float) -> ApiError:
        return ApiError(
            429,
            f"{problem}; it is a limit of {self._whose} in the server's key file; try again later",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(max(1, math.ceil(retry_after)))},
        )

    @property
    def _whose(self) -> str:
        return f"the tenant {self._config.name!r}"


class TenantCall:
    """One call's share of its tenant's usage.

    Args:
        usage: the tenant's usage.
        num_sequences: number of queued sequences of all prompts.
        has_grammar: whether its grammar counts as pending.
    """

    def __init__(self, usage: TenantUsage, num_sequences: int, *, has_grammar: bool) -> None:
        self._usage = usage
        self._num_queued = num_sequences
        self._has_grammar = has_grammar
        self._admitted: dict[str, _Admitted] = {}

    async def admit(self, request: ProcessedRequest) -> None:
        """Reserve the tokens of a request's prompt and maximum output, and wait until it may run.

        Raises:
            ApiError, InvalidRequestError: as `TenantUsage.call`.
        """
        params = request.params
        num_sequences = max(params.num_sequences, params.beam_width)
        num_prompt = len(request.core_request.prompt_token_ids)
        assert params.max_tokens is not None
        num_reserved = num_prompt + params.max_tokens * num_sequences
        self._usage.reserve_tokens(num_reserved)
        try:
            await self._usage.start(num_sequences)
        except BaseException:
            self._usage.put_back_tokens(num_reserved)
            raise
        self._num_queued -= num_sequences
        self._admitted[request.request_id] = _Admitted(num_reserved, num_prompt, num_sequences)

    def note(self, request_id: str, output: RequestOutput) -> None:
        """Observe a request's output so far."""
        if self._has_grammar:
            self._has_grammar = False
            self._usage.end_grammar()
        admitted = self._admitted.get(request_id)
        if admitted is None:
            return
        lengths = [len(completion.token_ids) for completion in output.outputs]
        # Sequences that are not returned (best_of) are assumed to be as long.
        admitted.num_generated = math.ceil(sum(lengths) * admitted.num_sequences / max(1, len(lengths)))
        if output.finished:
            self._settle(self._admitted.pop(request_id))

    def end(self) -> None:
        """Release everything that the call still holds."""
        if self._has_grammar:
            self._has_grammar = False
            self._usage.end_grammar()
        self._usage.leave_queue(self._num_queued)
        self._num_queued = 0
        while self._admitted:
            self._settle(self._admitted.popitem()[1])

    def _settle(self, admitted: _Admitted) -> None:
        """Put back tokens reserved for output that was not generated; the prompt's are used up."""
        num_used = admitted.num_prompt + admitted.num_generated
        self._usage.put_back_tokens(max(0, admitted.num_reserved - num_used))
        self._usage.end_running(admitted.num_sequences)


def _duration(seconds: float) -> str:
    """Return a time in OpenAI's format, such as 20ms, 1s or 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
