"""Dynamo's `LLMEngine` over an `AsyncLLM`: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, WorkerUnavailable
from typing_extensions import override

from quire.cli.options import configs_of
from quire.config import DynamoConfig, EngineConfig, KVEventsConfig, ServerConfig
from quire.dynamo.translation import Chunk, Chunks, request_options, sampling_fields
from quire.engine.messages import ErrorInfo
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError, QuireError
from quire.front.async_llm import AsyncLLM
from quire.models.checkpoints.engine_files import resolve_files
from quire.request_output import RequestOutput
from quire.server.sampling_defaults import read_sampling_defaults

logger = logging.getLogger(__name__)

LOAD_PERIOD = 0.1
"""Seconds between reports of the engine's load."""

TOPIC = "kv-events"

_MODES = {
    "both": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
}

_NOT_HERE: Mapping[str, str] = {
    **{field.name: "the worker passes KV events on" for field in dataclasses.fields(KVEventsConfig)},
    "tokenizer": "Dynamo's front end has the model's own",
    "chat_template": "Dynamo's front end renders prompts; set custom_jinja_template",
}
"""Options of the engine that have no meaning in a worker of Dynamo, and why."""


class QuireEngine(LLMEngine):  # type: ignore[misc]
    """An engine as a worker of Dynamo, which calls its methods in the order that `BaseEngine` gives.

    Args:
        config: configuration of the engine; its KV events are published to the worker.
        served_model_name: the model's name in Dynamo's front end.
    """

    def __init__(self, config: EngineConfig, served_model_name: str) -> None:
        self._config = config
        self._name = served_model_name
        self._llm: AsyncLLM | None = None
        self._publisher: Any = None
        self._closing = contextlib.AsyncExitStack()
        self._request_ids: defaultdict[str, set[str]] = defaultdict(set)  # the engine's, by context
        self._numbers = itertools.count()
        self._has_ignored_priority = False

    @classmethod
    @override
    async def from_args(cls, argv: list[str] | None = None) -> tuple[QuireEngine, WorkerConfig]:
        """Return an engine and where it belongs in Dynamo, from options as `NAME=VALUE`.

        Raises:
            ConfigError: an option is unknown, has no meaning here, or has an invalid value.
            ModelNotFoundError: the model cannot be found.
        """
        config, dynamo = configs_of(
            _options(sys.argv[1:] if argv is None else argv),
            EngineConfig,
            DynamoConfig,
            defaults={"standby_engine": True},
        )
        name = dynamo.served_model_name or config.model
        path, config = resolve_files(config)
        worker = WorkerConfig(
            namespace=dynamo.namespace,
            component=dynamo.component or ("prefill" if config.role == "prefill" else "backend"),
            model_name=str(path),  # a name would be looked for on the hub
            served_model_name=name,
            discovery_backend=dynamo.discovery_backend,
            request_plane=dynamo.request_plane,
            event_plane=dynamo.event_plane,
            custom_jinja_template=dynamo.custom_jinja_template or None,
            tool_call_parser=dynamo.tool_call_parser or None,
            reasoning_parser=dynamo.reasoning_parser or None,
            disaggregation_mode=_MODES[config.role],
        )
        return cls(config, name), worker

    @override
    async def start(self, worker_id: int) -> Registration:
        directory = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="quire-dynamo-"))
        self._events = f"ipc://{directory}/kv-events"
        events = KVEventsConfig(kv_events_endpoint=self._events, kv_events_topic=TOPIC)
        llm = self._llm = AsyncLLM(dataclasses.replace(self._config, kv_events=events))
        self._closing.push_async_callback(llm.shutdown)
        info = await llm.wait_until_ready()
        self._defaults = read_sampling_defaults(ServerConfig(), llm.model_path)
        return Registration(
            model=str(llm.model_path),
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=info.block_size,
                total_kv_blocks=info.num_blocks,
                max_num_seqs=self._config.scheduler.max_num_seqs,
                max_num_batched_tokens=info.max_num_batched_tokens,
            ),
        )

    @override
    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[Chunk, None]:
        """Yield the tokens of a request, as they come.

        Raises:
            InvalidArgument: the request is malformed, or asks for what is not supported.
            EngineShutdown: the engine has ended; Dynamo may continue the request at another worker.
            WorkerUnavailable: too many requests wait.
            QuireError: the request failed.
        """
        if (llm := self._llm) is None:
            raise EngineShutdown("the worker has not been started, or is shut down")
        role = "both" if is_probe(request) else self._config.role
        request_id = f"{context.id()}-{next(self._numbers)}"
        self._request_ids[context.id()].add(request_id)
        chunks = Chunks(role)
        try:
            with _dynamo_errors():
                params = self._defaults.params(sampling_fields(request, role))
                token_ids = token_ids_to_list(request["token_ids"])
                options = request_options(request, role)
                if options.get("priority") and not llm.info.reads_priority:
                    del options["priority"]  # what Dynamo calls a hint; its router has read it
                    self._say_that_priority_is_ignored()
                outputs = llm.generate(token_ids, params, request_id=request_id, **options)
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        if self._llm is None and output.finished:
                            raise EngineDeadError("the worker is shut down; the request can go on at another")
                        for chunk in chunks.of(output):
                            yield chunk
                        _raise_failure(output)
        finally:
            remaining = self._request_ids[context.id()]
            remaining.discard(request_id)
            if not remaining:
                del self._request_ids[context.id()]

    @override
    async def abort(self, context: Any) -> None:
        if self._llm is not None:
            for request_id in self._request_ids.get(context.id(), ()):
                self._llm.abort(request_id)

    @override
    async def is_quiescent(self) -> bool:
        """Whether all KV that decode engines were to read has been read or given up."""
        if self._llm is None:
            return True
        try:
            return not (await self._llm.stats()).num_leased_blocks
        except EngineDeadError:
            return True

    @override
    async def cleanup(self) -> None:
        self._llm = None
        await self._closing.aclose()

    @override
    async def kv_event_sources(self) -> list[ZmqSource]:
        return [ZmqSource(self._events, TOPIC)]

    @override
    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    @override
    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    @override
    async def on_endpoint_ready(self, endpoint: Any) -> None:
        reporting = asyncio.create_task(self._report_load())
        self._closing.callback(reporting.cancel)

    @override
    async def health_check_payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=1)  # any token does
        return payload

    def _say_that_priority_is_ignored(self) -> None:
        if not self._has_ignored_priority:
            self._has_ignored_priority = True
            logger.warning(
                "requests have a priority, but the scheduler's policy is %r, which has none: it is ignored; "
                "start the worker with policy=priority or prefix_retention=priority",
                self._config.scheduler.policy,
            )

    async def _report_load(self) -> None:
        last = None
        while self._llm is not None:
            stats = self._llm.latest_stats
            if self._publisher is not None and stats is not None and stats is not last:
                last = stats
                queried = stats.prefix_queried_tokens
                snapshot = ComponentSnapshot(
                    kv_used_blocks=stats.num_blocks - stats.num_free_blocks,
                    kv_total_blocks=stats.num_blocks,
                    gpu_cache_usage=stats.kv_cache_usage,
                    dp_rank=0,
                    kv_cache_hit_rate=stats.prefix_hit_tokens / queried if queried else None,
                )
                self._publisher.publish(0, snapshot)
            await asyncio.sleep(LOAD_PERIOD)


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Return options by name from `NAME=VALUE`, with or without dashes in front."""
    options: dict[str, str] = {}
    for argument in argv:
        name, equals, value = argument.lstrip("-").partition("=")
        if not (name and equals):
            raise ConfigError(f"{argument!r:.80} is not of the form NAME=VALUE, such as model=mini")
        if (reason := _NOT_HERE.get(name.replace("-", "_"))) is not None:
            raise ConfigError(f"the option {name} cannot be set with Dynamo: {reason}; leave it out")
        if name in options:
            raise ConfigError(f"{name} is there twice; leave one of them out")
        options[name] = value
    return options


@contextlib.contextmanager
def _dynamo_errors() -> Iterator[None]:
    """Raise Dynamo's errors in place of Quire's, where it does something by them."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidArgument(str(error)) from error
    except EngineDeadError as error:
        raise EngineShutdown(str(error)) from error
    except QueueFullError as error:
        raise WorkerUnavailable(str(error)) from error


def _raise_failure(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.error is not None:
            kind = completion.error_type or QuireError.__name__
            raise ErrorInfo(kind, completion.error, completion.error_param).to_exception()
