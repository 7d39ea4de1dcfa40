"""Structured output: which tokens the grammars of running requests allow in each step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from quire.errors import InvalidRequestError, QuireError
from quire.grammar.compilation import GrammarCompiler
from quire.grammar.interface import Grammar, GrammarBackend, failure_of, failure_when_followed
from quire.request import Request
from quire.step import NO_TOKEN, GrammarOutput, IntArray, SchedulerOutput

ANY_TOKEN = -1  # a word of a bitmask that allows all of its tokens


@dataclasses.dataclass(slots=True)
class _Followed:
    """A request's grammar; with an error it is no longer followed."""

    grammar: Grammar
    error: QuireError | None = None


class GrammarManager:
    """The grammars of all structured requests; each request follows a copy of its own.

    Args:
        backend: compiles grammars; None: there is none, and structured requests are refused.
        clock: seconds, for the time limit of compilations.
        max_cache_bytes: that compiled grammars may have together, which are kept for later requests.
        executor: runs the compilations; None: threads of its own.
    """

    def __init__(
        self,
        backend: GrammarBackend | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_cache_bytes: int = 2**26,
        executor: Executor | None = None,
    ) -> None:
        self._backend = backend
        self._compiler = None
        if backend is not None:
            self._compiler = GrammarCompiler(
                backend, clock=clock, max_cache_bytes=max_cache_bytes, executor=executor
            )
        self._outputs: dict[str, list[int]] = {}  # of requests whose grammar compiles: generated elsewhere
        self._followed: dict[str, _Followed] = {}

    def __contains__(self, request_id: object) -> bool:
        """Whether a request has a grammar, compiled or being compiled."""
        return request_id in self._followed or request_id in self._outputs

    @property
    def num_live(self) -> int:
        """Number of requests with a compiled grammar."""
        return len(self._followed)

    @property
    def num_compiling(self) -> int:
        """Number of requests that `take_compiled` has yet to report."""
        return len(self._outputs)

    # -- compilation ---------------------------------------------------------------------------------------

    def refuse_without_backend(self, request: Request) -> None:
        """Raise `InvalidRequestError` for a request that has a grammar if none can be compiled."""
        if self._compiler is None and request.sampling_params.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs is given, but the engine has no grammar backend; leave it out",
                param="structured_outputs",
            )

    def start(self, request: Request) -> None:
        """Begin to compile the grammar of a request that has one; `take_compiled` reports it.

        Raises:
            InvalidRequestError: there is no grammar backend.
        """
        self.refuse_without_backend(request)
        spec = request.sampling_params.structured_outputs
        assert spec is not None
        assert self._compiler is not None
        self._outputs[request.request_id] = request.output_token_ids.copy()
        self._compiler.start(request.request_id, spec, request.tenant)

    def take_compiled(self) -> list[tuple[str, QuireError | None]]:
        """Return (request id, error if there was one) of the compilations that ended since the last call.

        A request with an error no longer has a grammar.
        """
        if self._compiler is None:
            return []
        results = self._compiler.take_results()
        return [(request_id, self._begin(request_id, result)) for request_id, result in results.items()]

    def _begin(self, request_id: str, result: Grammar | QuireError) -> QuireError | None:
        """Give a request its copy of a grammar, advanced over its output so far; return the error, if any."""
        output_token_ids = self._outputs.pop(request_id)
        if isinstance(result, QuireError):
            return result
        try:
            self._followed[request_id] = _Followed(result.copy())
        except Exception as error:
            return failure_of(error)
        if output_token_ids and not self.accept(request_id, output_token_ids):
            return self._followed.pop(request_id).error
        return None

    def forget(self, request_id: str) -> None:
        """Release a request's grammar, also while it is being compiled; unknown ids are ignored."""
        self._followed.pop(request_id, None)
        if self._outputs.pop(request_id, None) is not None and self._compiler is not None:
            self._compiler.forget(request_id)

    def shutdown(self) -> None:
        """Release everything; results of running compilations are ignored."""
        if self._compiler is not None:
            self._compiler.shutdown()
        self._outputs.clear()
        self._followed.clear()

    # -- following grammars --------------------------------------------------------------------------------

    def accept(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Advance a request's grammar over the tokens that it was given; True if it has none.

        False if they are not allowed, or the grammar could not be followed any further; `error` says why.
        The request cannot go on then.
        """
        followed = self._followed.get(request_id)
        if followed is None:
            return True
        if followed.error is None:
            try:
                if followed.grammar.accept(token_ids):
                    return True
                followed.error = QuireError(
                    f"the tokens {list(token_ids)} do not follow the grammar of structured_outputs"
                )
            except Exception as error:
                followed.error = failure_when_followed(error)
        return False

    def error(self, request_id: str) -> QuireError | None:
        """Return why a request's grammar can no longer be followed; None if it can."""
        followed = self._followed.get(request_id)
        return None if followed is None else followed.error

    def valid_drafts(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Return the drafts up to the first that the request's grammar does not allow; all if it has none."""
        followed = self._followed.get(request_id)
        if followed is None:
            return list(token_ids)
        if followed.error is not None:
            return []
        try:
            return list(token_ids[: followed.grammar.num_valid(token_ids)])
        except Exception as error:
            followed.error = failure_when_followed(error)
            return []

    def bitmask(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Return which tokens the requests of a step may sample; None if none of them has a grammar.

        A grammar that can no longer be followed allows every token here; `accept` refuses every token.
        """
        followed = self._followed
        if not followed:
            return None
        samples = plan.samples
        rows = [row for row, id_ in enumerate(plan.request_ids) if id_ in followed and samples[row]]
        if not rows or self._backend is None:
            return None
        drafts = [
            [token for token in tokens if token != NO_TOKEN] for tokens in plan.draft_token_ids[rows].tolist()
        ]
        num_rows = np.array([len(tokens) + 1 for tokens in drafts], dtype=np.int32)
        bitmask = np.full(
            (int(num_rows.sum()), -(-self._backend.vocab_size // 32)), ANY_TOKEN, dtype=np.int32
        )
        request_ids = [plan.request_ids[row] for row in rows]
        first = 0
        for request_id, tokens in zip(request_ids, drafts, strict=True):
            _fill(bitmask[first : first + len(tokens) + 1], followed[request_id], tokens)
            first += len(tokens) + 1
        return GrammarOutput(request_ids, num_rows, bitmask)


def _fill(rows: IntArray, followed: _Followed, drafts: list[int]) -> None:
    """Write the masks of a request's positions, [drafts + 1, words]; all ones after a wrong draft."""
    num_accepted = 0
    try:
        if followed.error is None:
            followed.grammar.fill_bitmask(rows[0])
            for draft in drafts:
                if not followed.grammar.accept([draft]):
                    break
                num_accepted += 1
                followed.grammar.fill_bitmask(rows[num_accepted])
            followed.grammar.rollback(num_accepted)
    except Exception as error:
        followed.error = failure_when_followed(error)
        rows[:] = ANY_TOKEN
