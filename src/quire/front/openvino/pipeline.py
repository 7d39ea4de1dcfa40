"""`ContinuousBatchingPipeline`: OpenVINO GenAI's pipeline, which the caller advances step by step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import BUILT_IN_MODEL, EngineConfig, SchedulerConfig, refuse_unknown_names
from quire.errors import ConfigError, InvalidRequestError
from quire.front.arguments import TextOrTokenIds, one_for_each, prompts_of
from quire.front.batch import Batch
from quire.front.input_processor import ProcessedRequest
from quire.front.interrupt import deferred_interrupt
from quire.front.openvino.generation_config import GenerationConfig
from quire.front.openvino.generation_handle import (
    GenerationHandle,
    GenerationResult,
    status_of,
)
from quire.front.output_processor import RequestState
from quire.front.session import Session
from quire.request_output import RequestOutput

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer

DEVICES = ("CPU",)

Streamer = Callable[[str], bool | None]
"""Called with each new piece of text; if it returns a true value, generation stops."""


@dataclasses.dataclass(slots=True, frozen=True)
class PipelineMetrics:
    """State of the pipeline after the last step; cache usage is in percent of the KV blocks."""

    requests: int = 0
    scheduled_requests: int = 0
    cache_usage: float = 0.0
    max_cache_usage: float = 0.0
    avg_cache_usage: float = 0.0
    cache_size_in_bytes: int = 0


class ContinuousBatchingPipeline:
    """A model and its engine in this process; `step` advances all requests.

    Calls from several threads run one after the other, of `generate` one batch after the other.

    Args:
        models_path: "mini", a local directory, a GGUF file, or a name on the Hugging Face hub.
        scheduler_config: scheduling, and the size of the KV cache.
        device: "CPU".
        properties: other fields of `EngineConfig`, by name.

    Raises:
        ConfigError: the device or a property is unknown, or a value is invalid.
        ModelError: the model cannot be found, is malformed or is not supported.
    """

    def __init__(
        self,
        models_path: str | Path = BUILT_IN_MODEL,
        scheduler_config: SchedulerConfig | None = None,
        device: str = "CPU",
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        if device not in DEVICES:
            raise ConfigError(f"device is {device!r}; this version runs on: {', '.join(DEVICES)}")
        properties = {} if properties is None else properties
        refuse_unknown_names(EngineConfig, properties)
        for name in ("model", "device", "scheduler"):
            if name in properties:
                raise ConfigError(f"properties contain {name!r}, which has its own argument")
        config = EngineConfig(
            model=str(models_path),
            device="cpu",
            scheduler=scheduler_config or SchedulerConfig(),
            **properties,
        )
        self._scheduler_config = config.scheduler
        self._session = Session(config)
        info = self._session.wait_until_ready()
        self._metrics = PipelineMetrics(cache_size_in_bytes=info.kv_cache_bytes)
        self._num_steps = 0
        self._conversation: list[dict[str, Any]] | None = None

    def add_request(
        self, request_id: int, prompt: TextOrTokenIds, generation_config: GenerationConfig | None = None
    ) -> GenerationHandle:
        """Queue a request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, or token ids.
            generation_config: None: the defaults.

        Raises:
            InvalidRequestError: the request is invalid, or too long.
            DuplicateRequestError: `request_id` is in use.
            QueueFullError: too many requests are waiting.
            ConfigError: fields of `generation_config` contradict each other.
        """
        config = GenerationConfig() if generation_config is None else generation_config
        live_requests = self._session.requests
        with self._session.turn:
            processed = self._prepare(request_id, prompt, config)
            with deferred_interrupt():  # may also receive outputs for other handles
                state = live_requests.submit(processed)
                live_requests.receive(0)
        if state.failure is not None:
            raise state.failure
        echoed = state.processed.core_request.prompt_token_ids if config.echo else []
        return GenerationHandle(state, self._discard, echoed)

    def step(self) -> None:
        """Run one step of the engine. Ctrl-C takes effect after the step."""
        live_requests = self._session.requests
        # An output that does not reach its handle would be lost.
        with self._session.turn, deferred_interrupt():
            live_requests.receive(0)
            live_requests.receive(None)
            live_requests.raise_failure()
            self._measure()

    def has_non_finished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return len(self._session.requests.outputs) > 0

    def generate(
        self,
        prompts: TextOrTokenIds | Sequence[TextOrTokenIds],
        generation_configs: GenerationConfig | Sequence[GenerationConfig] | None = None,
        streamer: Streamer | None = None,
    ) -> list[GenerationResult]:
        """Complete prompts and return their results in the same order.

        Between `start_chat` and `finish_chat`, the prompt is the user's next turn, and is added to the
        conversation with its answer. A request that fails by itself has finish reason "error". Ctrl-C or any
        other exception aborts all requests; the pipeline stays usable.

        Args:
            prompts: one or several; each is text, or token ids.
            generation_configs: for all prompts, or one for each; None: the defaults.
            streamer: called with new text; only for one prompt with one completion. It ends the request if it
                returns a true value.

        Raises:
            InvalidRequestError: a prompt or its parameters are invalid; nothing was run.
            ConfigError: fields of a generation config contradict each other; nothing was run.
            EngineDeadError: the engine has ended.
        """
        batch = prompts_of(prompts)
        configs = one_for_each(batch, generation_configs, GenerationConfig, "generation_configs")
        self._check_batch(batch, configs, streamer)
        with self._session.turn:
            requests = [
                self._prepare_any(request_id, prompt, config)
                for request_id, prompt, config in zip(self._new_ids(len(batch)), batch, configs, strict=True)
            ]
            outputs = self._run(requests, streamer)
            if self._conversation is not None:
                self._conversation += [
                    {"role": "user", "content": batch[0]},
                    {"role": "assistant", "content": outputs[0].outputs[0].text},
                ]
        return [_result(self.get_tokenizer(), *pair) for pair in zip(outputs, configs, strict=True)]

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._session.tokenizer

    def get_config(self) -> SchedulerConfig:
        """Return a copy of the scheduler's configuration."""
        return dataclasses.replace(self._scheduler_config)

    def get_metrics(self) -> PipelineMetrics:
        """Return the state after the last step."""
        return self._metrics

    def start_chat(self, system_message: str = "") -> None:
        """Start a conversation: `generate` then takes one prompt at a time and sees all earlier turns."""
        self._conversation = [{"role": "system", "content": system_message}] if system_message else []

    def finish_chat(self) -> None:
        """End the conversation and discard its turns."""
        self._conversation = None

    def _discard(self, state: RequestState) -> None:
        with self._session.turn:
            self._session.requests.discard(state)

    def _check_batch(
        self, batch: list[Any], configs: list[GenerationConfig], streamer: Streamer | None
    ) -> None:
        if streamer is not None and (len(batch) != 1 or configs[0].num_return_sequences != 1):
            raise InvalidRequestError(
                f"a streamer takes one prompt and one completion, not {len(batch)} prompts with "
                f"{[config.num_return_sequences for config in configs]} completions",
                param="streamer",
            )
        if self._conversation is not None and (len(batch) != 1 or not isinstance(batch[0], str)):
            raise InvalidRequestError(
                f"between start_chat and finish_chat, generate takes one text, not {len(batch)} prompts "
                f"of {sorted({type(prompt).__name__ for prompt in batch})}",
                param="prompts",
            )

    def _new_ids(self, count: int) -> list[int]:
        """Return unused request ids."""
        live = self._session.requests.outputs
        unused = (number for number in itertools.count() if str(number) not in live)
        return list(itertools.islice(unused, count))

    def _prepare_any(
        self, request_id: int, prompt: TextOrTokenIds, config: GenerationConfig
    ) -> ProcessedRequest:
        """Prepare a prompt, or the next turn of the conversation."""
        if self._conversation is None:
            return self._prepare(request_id, prompt, config)
        messages = [*self._conversation, {"role": "user", "content": prompt}]
        text = self.get_tokenizer().apply_chat_template(messages)
        token_ids = self.get_tokenizer().encode(text, add_special_tokens=False)
        return self._prepare_tokens(request_id, token_ids, text, config)

    def _prepare(self, request_id: int, prompt: TextOrTokenIds, config: GenerationConfig) -> ProcessedRequest:
        if not isinstance(prompt, str):
            return self._prepare_tokens(request_id, prompt, None, config)
        token_ids = self.get_tokenizer().encode(prompt) if prompt else []
        return self._prepare_tokens(request_id, token_ids, prompt, config)

    def _prepare_tokens(
        self, request_id: int, token_ids: Sequence[int], text: str | None, config: GenerationConfig
    ) -> ProcessedRequest:
        config.validate()
        max_tokens = config.max_new_tokens
        if max_tokens is None and config.max_length is not None:
            max_tokens = config.max_length - len(token_ids)
            if max_tokens < 1:
                raise InvalidRequestError(
                    f"the prompt has {len(token_ids)} tokens and max_length is {config.max_length}, "
                    "which leaves none to generate; raise max_length, or set max_new_tokens",
                    param="max_length",
                )
        params = config.sampling_params(max_tokens)
        return self._session.requests.prepare(token_ids, params, request_id=str(request_id), prompt_text=text)

    def _run(self, requests: list[ProcessedRequest], streamer: Streamer | None) -> list[RequestOutput]:
        live_requests = self._session.requests
        batch = Batch(live_requests, requests, 2 * self._scheduler_config.max_num_seqs)
        num_streamed = 0

        def step_and_stream() -> None:
            nonlocal num_streamed, streamer
            self.step()
            for state in batch.live.values() if streamer is not None else ():
                text = state.completions[0].text
                if len(text) > num_streamed and streamer is not None and streamer(text[num_streamed:]):
                    live_requests.abort(state.request_id)
                    streamer = None  # stop immediately: withheld text is not streamed either
                num_streamed = len(text)

        return batch.run(step_and_stream)

    def _measure(self) -> None:
        """Update the metrics after a step."""
        stats = self._session.stats()
        usage = 100 * stats.kv_cache_usage
        self._num_steps += 1
        before = self._metrics
        self._metrics = dataclasses.replace(
            before,
            requests=stats.num_running + stats.num_waiting,
            scheduled_requests=stats.num_running,
            cache_usage=usage,
            max_cache_usage=max(before.max_cache_usage, usage),
            avg_cache_usage=before.avg_cache_usage + (usage - before.avg_cache_usage) / self._num_steps,
        )


def _result(tokenizer: Tokenizer, output: RequestOutput, config: GenerationConfig) -> GenerationResult:
    echoed = ""
    if config.echo:
        echoed = output.prompt or tokenizer.decode(output.prompt_token_ids)
    reasons = [completion.finish_reason for completion in output.outputs]
    return GenerationResult(
        request_id=int(output.request_id),
        texts=[echoed + completion.text for completion in output.outputs],
        scores=[one.cumulative_logprob or 0.0 for one in output.outputs],
        finish_reasons=reasons,
        status=status_of(reasons),
    )
