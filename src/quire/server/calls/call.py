"""Base of all generation APIs: one call, answered whole or as a stream."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.calls.bodies import ConversationBody, GenerationBody
from quire.server.calls.conversation import Conversation
from quire.server.calls.logprobs import LogprobLimit, chat_logprobs
from quire.server.calls.outputs import PREPARED_AT_ONCE, CallOutputs, OutputHook, OutputStream
from quire.server.calls.request_start import REQUEST_START, arrival_time_of
from quire.server.calls.stream_progress import PROGRESS, StreamProgress, stream_so_far
from quire.server.context import context_of, leniency_of, request_id_of, tenant_of
from quire.server.metrics.request_timer import RequestTimer
from quire.server.sampling_defaults import QUIRES_OWN
from quire.server.wire.access_log import access_record_of
from quire.server.wire.answers import Answer, ChatLogprobs, json_response
from quire.server.wire.bodies import CONTINUATION
from quire.server.wire.errors import ApiError
from quire.server.wire.streaming import SERVER_SENT_EVENTS, event_stream, unless_disconnected

if TYPE_CHECKING:
    from quire.front.text.input_processor import ProcessedRequest


BodyT = TypeVar("BodyT", bound=GenerationBody)


class GenerationCall(abc.ABC, Generic[BodyT]):
    """One call: its parameters and its answer.

    Args:
        request: the HTTP request.
        body: its parsed body.

    Raises:
        ApiError: 404: another model is asked for; 403: the tenant may not do what it asks for.
        InvalidRequestError: parameters are out of range or contradict each other.
    """

    id_prefix: ClassVar[str]
    operation: ClassVar[str] = "chat"  # OpenTelemetry's name of it
    stream_type: ClassVar[str] = SERVER_SENT_EVENTS
    """Media type of a stream."""
    is_pooled: ClassVar[bool] = False
    """Whether prompts become rows."""

    def __init__(self, request: Request, body: BodyT) -> None:
        self._request = request
        self._body = body
        self._context = context_of(request).of_model(body.model)
        self._context.require_kind(is_pooled=self.is_pooled)
        self._begun_at = time.monotonic()
        self._request_id = request_id_of(request)
        self._so_far = stream_so_far(request)
        start = None if self._so_far is None else self._so_far.start
        self._created = int(time.time()) if start is None else start.created
        self._id = f"{self.id_prefix}-{self._request_id}" if start is None else start.answer_id
        self._tenant = tenant_of(request)
        self._leniency = leniency_of(request)
        self._preparing = asyncio.Semaphore(PREPARED_AT_ONCE)
        self._admit: Callable[[ProcessedRequest], Awaitable[None]] | None = None
        self._info = self._context.llm.info
        self._logprob_limit = LogprobLimit(
            self._context.config.max_logprobs_per_request,
            len(self._info.labels) if self._info.labels_tokens else 0,
        )
        self._options = body.request_options()
        if "kv_transfer_params" in self._options:
            self._tenant.require_kv_transfer("kv_transfer_params", "kv_transfer_params")
        self._leave_out_unread_options()
        defaults = self._context.sampling_defaults
        # Do not refuse a request for a default length that the client did not ask for.
        self._shortens = not self._context.config.strict or (
            "max_tokens" in defaults.fields and body.sampling_params(QUIRES_OWN).max_tokens is None
        )
        self._params = self._within_model(body.sampling_params(defaults))
        if start is not None:
            self._params = self._params.with_checked(seed=start.seed)
        self._places = asyncio.Semaphore(self._max_live)

    @functools.cached_property
    def _progress(self) -> StreamProgress | None:
        """Writes the stream's progress, if a router wants that and another server could continue it."""
        is_wanted = self._body.stream and PROGRESS in self._request.headers
        if not (is_wanted and self._is_continuable()):
            return None
        return StreamProgress(self._id, self._created)

    def _is_continuable(self) -> bool:
        """Whether another server makes the same events from the same tokens."""
        params = self._params
        is_one_sampling = not params.beam_width and params.num_sequences == params.n
        return is_one_sampling and params.prompt_logprobs is None and len(self._request_ids) == 1

    def _leave_out_unread_options(self) -> None:
        """Report options that the engine ignores.

        Raises:
            InvalidRequestError: the server is strict (a priority is then refused by the engine).
        """
        info, leniency = self._info, self._leniency
        if self._options.get("priority") and not info.reads_priority and not leniency.is_strict:
            del self._options["priority"]
            leniency.ignore("priority")
        if self._options.get("kv_transfer_params") and not info.reads_kv_transfer_params:
            if leniency.is_strict:
                raise InvalidRequestError(
                    "kv_transfer_params has no effect, since the engine has no KV connector that reads it; "
                    "start it with another --role or --kv-connector",
                    param="kv_transfer_params",
                )
            del self._options["kv_transfer_params"]
            leniency.ignore("kv_transfer_params")

    def _within_model(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with `max_tokens` shortened to the model's maximum, if the call allows that."""
        longest = self._info.max_model_len
        if not self._shortens or (params.max_tokens or 0) <= longest:
            return params
        return dataclasses.replace(params, max_tokens=longest)

    @functools.cached_property
    def _engine_id(self) -> str:
        """The call's id, unique across tenants."""
        is_new = self._so_far is None  # else the server may still have the request under the answer's id
        return self._tenant.engine_id(self._id if is_new else f"{self.id_prefix}-{self._request_id}")

    def _request_options(self) -> dict[str, Any]:
        """Return options of the engine's requests: the client's, and its tenant's."""
        options = self._tenant.request_options(self._options)
        if self._shortens:
            options["shorten_output"] = True
        started = self._request.headers.get(REQUEST_START)
        if started is not None and self._context.config.trust_request_start:
            options["arrival_time"] = arrival_time_of(started)
        if self._so_far is not None:
            if not (self._body.stream and self._is_continuable()):
                message = f"{CONTINUATION} is for streams that can be continued, of one prompt"
                raise InvalidRequestError(message, param=CONTINUATION)
            options["outputs_so_far"] = self._so_far.outputs
        return {**options, "flow": self._engine_id, "before_submit": self._before_submit}

    async def _before_submit(self, processed: ProcessedRequest) -> float | None:
        """Apply the limits of the call and its tenant to a request of the engine, and wait for its turn.

        All prompts are prepared first, so that a bad one is refused before much is computed. Returns when the
        call began if the request has waited for its turn, so that a full queue does not refuse it now.
        """
        self._preparing.release()
        self._logprob_limit.admit(processed)
        if self._progress is not None:
            self._progress.begin(processed)
        if self._admit is not None:
            await self._admit(processed)
        is_later = self._places.locked()
        await self._places.acquire()
        return self._begun_at if is_later else None

    @functools.cached_property
    def _request_ids(self) -> Sequence[str]:
        """The engine's request ids, one per prompt."""
        return [self._engine_id]

    @abc.abstractmethod
    def _streams(self) -> Sequence[OutputStream]:
        """Return the engine's outputs, one stream for each prompt."""

    @abc.abstractmethod
    def _fields(self) -> Sequence[Mapping[str, str]]:
        """Return, for each prompt, the body's names of parameters that have another name in the engine."""

    def _hooks(self) -> list[OutputHook]:
        """Return functions to call with each output before the answer is built."""
        return []

    async def response(self) -> Response:
        """Answer the call, whole or as a stream.

        Raises:
            ClientGoneError: the client left first.
            QuireError: the engine refused or failed the call.
        """
        receive = self._request.receive
        if self._body.stream:
            events, progress = self._events(), self._progress
            stream = await event_stream(
                receive,
                events if progress is None else progress.after(events),
                self._error_event,
                request_id=self._request_id,
                media_type=self.stream_type,
            )
            if progress is not None:
                stream.headers[PROGRESS] = "1"
            return stream
        answer = await unless_disconnected(receive, self.whole_answer())
        return json_response(answer)

    def _error_event(self, error: ApiError) -> bytes:
        """Return the last event of a failed stream."""
        return b"data: " + error.body() + b"\n\n"

    @contextlib.asynccontextmanager
    async def _outputs(self) -> AsyncIterator[CallOutputs]:
        """Run the call for the duration of the context, which yields its outputs.

        Raises:
            ApiError: 503: the server is draining; 429: a limit of the tenant is reached.
            InvalidRequestError: the call can never fit a limit of the tenant, or its id is in use.
        """
        context, hooks = self._context, self._hooks()
        with contextlib.ExitStack() as stack:
            if (tracing := context.tracing) is not None:
                span = tracing.begin(self.operation, self._request.headers, self._span_attributes())
                stack.push(lambda _, error, __: span.end(error))
                hooks.append(span.observe)
            if self._progress is not None:
                hooks.append(self._progress.note)
            if self._tenant.usage.has_limits:
                hooks.append(self._limit(stack))
            stack.enter_context(context.calls.serving(self._engine_id, self._request_ids))
            outputs = CallOutputs(
                self._streams(),
                fields=self._fields,
                observers=self._observers(stack),
                hooks=hooks,
                preparing=self._preparing,
                places=self._places,
                was_aborted=functools.partial(context.calls.was_aborted, self._engine_id),
            )
            async with outputs:
                yield outputs

    def _observers(self, stack: contextlib.ExitStack) -> list[OutputHook]:
        """Return functions that measure each output of the engine, until `stack` closes."""
        metrics, tenant, num_sequences = self._context.metrics, self._tenant.figures, self._params.n
        timers = [
            stack.enter_context(RequestTimer(metrics, tenant, num_sequences)) for _ in self._request_ids
        ]
        record = access_record_of(self._request.scope)
        measured: list[OutputHook] = [lambda index, output: timers[index].observe(output)]
        return measured if record is None else [*measured, record.observe]

    def _limit(self, stack: contextlib.ExitStack) -> OutputHook:
        """Apply the tenant's limits until `stack` closes; return a function that counts tokens."""
        params, request_ids = self._params, self._request_ids
        num_sequences = max(params.num_sequences, params.beam_width)
        call = stack.enter_context(
            self._tenant.usage.call(
                len(request_ids),
                num_sequences,
                len(request_ids) * self._min_tokens(num_sequences),
                has_grammar=params.structured_outputs is not None,
            )
        )
        self._admit = call.admit
        return lambda index, output: call.note(request_ids[index], output)

    def _span_attributes(self) -> dict[str, Any]:
        """Return the call's parameters, without the client's texts; None: not given."""
        params = self._params
        return {
            "gen_ai.request.model": self._body.model,
            "gen_ai.response.model": self._context.model_name,
            "gen_ai.response.id": self._id,
            "gen_ai.request.id": self._request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
            "quire.tenant": self._tenant.name or None,
        }

    def _min_tokens(self, num_sequences: int) -> int:
        """Return the minimum number of tokens of a prompt and all its output."""
        of_short_prompt = 1 + num_sequences * (self._params.max_tokens or 1)
        if self._context.config.strict:
            return of_short_prompt
        # The longest prompt leaves room for one token, and `max_tokens` is shortened to the room.
        return min(of_short_prompt, self._info.max_model_len - 1 + num_sequences)

    @property
    def _max_live(self) -> int:
        """Maximum number of the call's prompts in the engine: more than can run, so that no slot idles.

        More would delay the requests of others, which queue behind them.
        """
        num_sequences = max(self._params.num_sequences, self._params.beam_width)
        return max(1, 2 * self._context.llm.config.scheduler.max_num_seqs // num_sequences)

    async def _final_outputs(self) -> list[RequestOutput]:
        """Return the last output of each prompt."""
        final: dict[int, RequestOutput] = {}
        async with self._outputs() as outputs:
            async for prompt_index, output in outputs:
                final[prompt_index] = output
        return [final[index] for index in sorted(final)]

    @abc.abstractmethod
    async def whole_answer(self) -> Answer:
        """Return the complete answer."""

    @abc.abstractmethod
    def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer."""


class ConversationCall(GenerationCall[BodyT]):
    """A call for the next message of a conversation."""

    _conversation: Conversation
    prompt_field: ClassVar[str] = "messages"
    effort_field: ClassVar[str] = "reasoning_effort"
    other_fields: ClassVar[Mapping[str, str]] = {}
    """The body's names of more parameters that have another name in the engine."""
    _names_ids = False
    """Whether log-probabilities name tokens by their ids."""

    def _converse(self, body: ConversationBody, messages: list[dict[str, Any]]) -> None:
        """Begin the conversation, whose tools may add to the parameters.

        Raises:
            InvalidRequestError: the model cannot call tools, or not as it must.
        """
        self._conversation = Conversation(self._context, body, messages, self._params, self._id)
        self._params = self._conversation.params

    @property
    def _structure_field(self) -> str | None:
        """The field that gives the answer's structure; None: it has the engine's name."""
        return None

    def _streams(self) -> Sequence[OutputStream]:
        return [self._conversation.outputs(self._engine_id, self._request_options())]

    def _fields(self) -> Sequence[Mapping[str, str]]:
        fields = {"prompt": self.prompt_field, **self.other_fields}
        structure = "tools" if self._conversation.is_structured_by_tools else self._structure_field
        return [fields if structure is None else {**fields, "structured_outputs": structure}]

    @override
    def _hooks(self) -> list[OutputHook]:
        return [self._conversation.observe]

    async def _chat_logprobs(self, completion: CompletionOutput, first_token: int) -> ChatLogprobs | None:
        """Return the log-probabilities of the tokens from `first_token` on; None: not requested."""
        if completion.logprobs is None:
            return None
        tokenizer, count = self._context.llm.tokenizer, self._params.logprobs or 0
        return await chat_logprobs(tokenizer, completion, first_token, count, names_ids=self._names_ids)
