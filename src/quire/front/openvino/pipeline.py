"""`ContinuousBatchingPipeline`: OpenVINO GenAI's pipeline, advanced by the caller step by step."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.config import BUILT_IN_MODEL, SchedulerConfig, SpeculationConfig
from quire.errors import ConfigError, InvalidRequestError, nearest_name
from quire.front.arguments import TextOrTokenIds, engine_config, one_for_each, prompts_of
from quire.front.batch import Batch
from quire.front.interrupt import deferred_interrupt
from quire.front.openvino.chat_history import ChatHistory
from quire.front.openvino.generation_config import UNSET, GenerationConfig
from quire.front.openvino.generation_handle import GenerationHandle, score_of, status_of
from quire.front.openvino.results import (
    EncodedGenerationResult,
    GenerationFinishReason,
    GenerationResult,
    GenerationStatus,
    PerfMetrics,
    PipelineMetrics,
)
from quire.front.openvino.streaming import Stream, Streamer, StreamingStatus
from quire.front.openvino.tokenizer import Tokenizer
from quire.front.session import Session
from quire.front.text.input_processor import ProcessedRequest
from quire.front.text.output_processor import RequestState
from quire.models.checkpoints.hub import resolve_model
from quire.request_output import RequestOutput

logger = logging.getLogger(__name__)

DEVICES = ("CPU",)

Inputs = TextOrTokenIds | ChatHistory | Sequence[Mapping[str, Any]]
"""A text, token ids (also as a tensor), or a conversation."""

_ALWAYS_EMPTY = ("tokenizer_properties", "vision_encoder_properties")
_MAX_MEASURED_STEPS = 1000  # of which `avg_cache_usage` is the mean


class ContinuousBatchingPipeline:
    """A model and its engine in this process; `step` advances all requests.

    Calls from several threads run one at a time, those of `generate` one batch at a time.

    Args:
        models_path: "mini", a local directory, a GGUF file, or a name on the Hugging Face hub.
        scheduler_config: scheduling, and the size of the KV cache.
        device: "CPU".
        properties: other fields of `EngineConfig` and of its parts; and `prompt_lookup`, whether to draft
            tokens from the prompt (`SpeculationConfig`'s method ngram).
        more_properties: more of these, as keyword arguments.

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
        **more_properties: Any,
    ) -> None:
        started = time.monotonic()
        scheduler_config = SchedulerConfig() if scheduler_config is None else scheduler_config
        if not isinstance(scheduler_config, SchedulerConfig):
            raise ConfigError(
                f"scheduler_config must be SchedulerConfig, not {type(scheduler_config).__name__}; another "
                "tokenizer is given as properties={'tokenizer': directory}"
            )
        if device not in DEVICES:
            raise ConfigError(f"device is {device!r}; this version runs on: {', '.join(DEVICES)}")
        options = _engine_options({} if properties is None else properties, more_properties)
        config = engine_config(str(models_path), {**options, "device": "cpu", "scheduler": scheduler_config})
        self._model = config.model
        self._speculation = config.speculation
        self._max_live_sequences = 2 * config.scheduler.max_num_seqs
        self._session = Session(config)
        info = self._session.wait_until_ready()
        self._load_time = time.monotonic() - started
        self._metrics = PipelineMetrics(cache_size_in_bytes=info.kv_cache_bytes)
        self._cache_usages: deque[float] = deque(maxlen=_MAX_MEASURED_STEPS)
        self._conversation: list[dict[str, Any]] | None = None
        self._warned_of_draft_lengths = False

    def add_request(
        self,
        request_id: int,
        prompt: TextOrTokenIds | None = None,
        generation_config: GenerationConfig | None = None,
        **named: Any,
    ) -> GenerationHandle:
        """Queue a request, without applying the chat template to a text.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, or token ids; also accepted as `input_ids`.
            generation_config: None: the defaults.
            named: `input_ids`, in place of `prompt`.

        Raises:
            InvalidRequestError: the request is invalid, or too long.
            DuplicateRequestError: `request_id` is in use.
            QueueFullError: too many requests are waiting.
            ConfigError: fields of `generation_config` contradict each other.
        """
        [given] = _inputs_of(_given(prompt, named, ("input_ids",)))
        [config] = one_for_each([given], generation_config, GenerationConfig, "generation_config")
        live_requests = self._session.requests
        with self._session.turn:
            processed = self._prepare(request_id, given, config)
            with deferred_interrupt():  # may also receive outputs for other handles
                state = live_requests.submit(processed)
                live_requests.receive(0)
        if state.failure is not None:
            raise state.failure
        echoed = state.processed.core_request.prompt_token_ids if config.echo else []
        return GenerationHandle(state, self._discard, echoed, self._load_time)

    def step(self) -> None:
        """Run one step of the engine. Ctrl-C takes effect after the step."""
        live_requests = self._session.requests
        # Interrupted, an output might not reach its handle.
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
        prompts: Inputs | Sequence[Inputs] | None = None,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        streamer: Streamer | None = None,
        **named: Any,
    ) -> list[GenerationResult]:
        """Complete prompts and return their results in the same order.

        If the model has a chat template, a text is the user's message, unless `apply_chat_template` is off.
        Between `start_chat` and `finish_chat`, it is the user's next message, and is added to the
        conversation with its answer. A request that fails by itself has finish reason "error". Ctrl-C or any
        other exception aborts all requests; the pipeline stays usable.

        Args:
            prompts: one or several; each is text, token ids, or a conversation: a `ChatHistory` or a list of
                messages. Also accepted as `prompt`, `input_ids` or `histories`.
            generation_config: for all prompts, or one for each; None: the defaults.
            streamer: gets the output while it is generated, see `Streamer`; only for one prompt with one
                completion, without beam search.
            named: one of these names, in place of `prompts`.

        Returns:
            For each prompt a `GenerationResult`; an `EncodedGenerationResult` for token ids.

        Raises:
            InvalidRequestError: a prompt or its parameters are invalid; nothing was run.
            ConfigError: fields of a generation config contradict each other; nothing was run.
            EngineDeadError: the engine has ended.
        """
        batch = _inputs_of(_given(prompts, named, ("prompt", "input_ids", "histories")))
        configs = one_for_each(batch, generation_config, GenerationConfig, "generation_config")
        stream = Stream(streamer)
        self._check_batch(batch, configs, streamer)
        with self._session.turn:
            requests, times = [], []
            for request_id, given, config in zip(self._new_ids(len(batch)), batch, configs, strict=True):
                started = time.monotonic()
                requests.append(self._prepare(request_id, self._conversation_of(given, config), config))
                times.append(time.monotonic() - started)
            outputs = self._run(requests, stream)
            if self._conversation is not None and stream.status is not StreamingStatus.CANCEL:
                self._conversation += [
                    {"role": "user", "content": batch[0]},
                    {"role": "assistant", "content": outputs[0].outputs[0].text},
                ]
        return [
            self._result(*of_one, stream.status)
            for of_one in zip(batch, outputs, configs, times, strict=True)
        ]

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return Tokenizer(self._session.tokenizer)

    def get_config(self) -> GenerationConfig:
        """Return the model's own generation parameters, from `generation_config.json` and the tokenizer.

        Raises:
            ModelError: the file cannot be read.
            ConfigError: it asks for something that is not supported.
        """
        file = resolve_model(self._model, weights=False) / "generation_config.json"
        config = GenerationConfig(file) if file.is_file() else GenerationConfig()
        own = self._session.tokenizer.eos_token_ids
        if config.eos_token_id == -1 and own:
            config.eos_token_id = min(own)
            config.stop_token_ids = config.stop_token_ids.union(own)
        return config

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
        if streamer is not None and (
            len(batch) != 1 or configs[0].num_return_sequences != 1 or configs[0].is_beam_search()
        ):
            raise InvalidRequestError(
                f"a streamer takes one prompt and one completion without beam search, not {len(batch)} "
                f"prompts with {[config.num_return_sequences for config in configs]} completions and "
                f"{[config.num_beams for config in configs]} beams",
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

    def _conversation_of(self, given: Any, config: GenerationConfig) -> Any:
        """Return the conversation that ends with a text; anything else unchanged."""
        if isinstance(given, ChatHistory) and not (given and config.apply_chat_template):
            problem = "it needs the chat template, but apply_chat_template is off" if given else "it is empty"
            raise InvalidRequestError(f"a conversation cannot be completed: {problem}", param="prompts")
        if not isinstance(given, str):
            return given
        if self._conversation is not None:
            return ChatHistory([*self._conversation, {"role": "user", "content": given}])
        if config.apply_chat_template and self._session.tokenizer.has_chat_template:
            return ChatHistory([{"role": "user", "content": given}])
        return given

    def _prepare(
        self, request_id: int, given: TextOrTokenIds | ChatHistory, config: GenerationConfig
    ) -> ProcessedRequest:
        config.validate()
        self._check_drafts(config)
        inputs = self._session.requests.inputs
        eos_token_ids = self._session.tokenizer.eos_token_ids
        params = config.sampling_params(config.max_new_tokens, eos_token_ids)
        identity: dict[str, Any] = {"request_id": str(request_id)}
        if isinstance(given, ChatHistory):
            tools, variables = given.get_tools() or None, given.get_extra_context()
            processed = inputs.process_chat(
                given.get_messages(), params, tools=tools, chat_template_kwargs=variables, **identity
            )
        else:
            processed = inputs.process(given, params, **identity)
        if config.max_new_tokens != UNSET or config.max_length == UNSET:
            return processed
        token_ids = processed.core_request.prompt_token_ids
        max_tokens = config.max_length - len(token_ids)
        if max_tokens < 1:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens and max_length is {config.max_length}, "
                "which leaves none to generate; raise max_length, or set max_new_tokens",
                param="max_length",
            )
        params = config.sampling_params(max_tokens, eos_token_ids)
        return inputs.process(token_ids, params, prompt_text=processed.prompt, **identity)

    def _check_drafts(self, config: GenerationConfig) -> None:
        """Refuse drafts without prompt_lookup; warn if the pipeline's drafts differ from those asked for."""
        if not config.is_assisting_generation():
            return
        made = self._speculation
        if made.speculative_method == "none":
            raise ConfigError(
                f"num_assistant_tokens is {config.num_assistant_tokens}, but the pipeline makes no drafts; "
                'build it with properties={"prompt_lookup": True}, or leave num_assistant_tokens out'
            )
        lengths = (config.num_assistant_tokens, config.max_ngram_size or made.ngram_max)
        if lengths != (made.num_speculative_tokens, made.ngram_max) and not self._warned_of_draft_lengths:
            self._warned_of_draft_lengths = True
            logger.warning(
                "num_assistant_tokens is %s and max_ngram_size %s, but all requests of this pipeline use "
                "drafts of up to %s tokens from n-grams of up to %s; the output is the same. To change "
                "that, build it with the property speculation=SpeculationConfig(...)",
                config.num_assistant_tokens,
                config.max_ngram_size,
                made.num_speculative_tokens,
                made.ngram_max,
            )

    def _run(self, requests: list[ProcessedRequest], stream: Stream) -> list[RequestOutput]:
        live_requests = self._session.requests
        batch = Batch(live_requests, requests, self._max_live_sequences, RequestState.snapshot)

        def step_and_stream() -> None:
            self.step()
            for state in batch.live.values():
                if stream.push(state.completions[0]):
                    live_requests.abort(state.request_id)

        try:
            return batch.run(step_and_stream)
        finally:
            stream.end()

    def _result(
        self,
        given: Any,
        output: RequestOutput,
        config: GenerationConfig,
        tokenization_time: float,
        streaming: StreamingStatus,
    ) -> GenerationResult:
        reasons = [completion.finish_reason for completion in output.outputs]
        status = status_of(reasons)
        named_reasons = [GenerationFinishReason.of(reason) for reason in reasons]
        if status is GenerationStatus.STOP and streaming is StreamingStatus.CANCEL:
            status = GenerationStatus.CANCEL
        if status is GenerationStatus.STOP and streaming is StreamingStatus.TOOL_CALL_STOP:
            named_reasons = [GenerationFinishReason.TOOL_CALL]
        length_penalty = config.length_penalty if config.is_beam_search() else 0.0
        echoed = ""
        if config.echo:
            echoed = output.prompt or self._session.tokenizer.decode(output.prompt_token_ids)
        fields: dict[str, Any] = {
            "m_request_id": int(output.request_id),
            "texts": [echoed + completion.text for completion in output.outputs],
            "m_scores": [score_of(one, length_penalty) for one in output.outputs],
            "finish_reasons": named_reasons,
            "m_status": status,
            "perf_metrics": PerfMetrics.of(
                output.metrics,
                load_time=self._load_time,
                num_input_tokens=len(output.prompt_token_ids),
                tokenization_time=tokenization_time,
            ),
        }
        if isinstance(given, str | ChatHistory):
            return GenerationResult(**fields)
        prompt = output.prompt_token_ids if config.echo else []
        token_ids = [[*prompt, *completion.token_ids] for completion in output.outputs]
        return EncodedGenerationResult(**fields, token_ids=token_ids)

    def _measure(self) -> None:
        """Update the metrics after a step."""
        stats = self._session.stats()
        usage = 100 * stats.kv_cache_usage
        self._cache_usages.append(usage)
        self._metrics = PipelineMetrics(
            requests=stats.num_running + stats.num_waiting,
            scheduled_requests=stats.num_running,
            cache_usage=usage,
            max_cache_usage=max(self._metrics.max_cache_usage, usage),
            avg_cache_usage=statistics.fmean(self._cache_usages),
            cache_size_in_bytes=self._metrics.cache_size_in_bytes,
        )


def _engine_options(properties: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `engine_config` that the pipeline's properties set.

    Raises:
        ConfigError: one has its own argument.
    """
    if not isinstance(properties, Mapping):
        raise ConfigError(f"properties must be a dictionary, not {type(properties).__name__}")
    given = {**properties, **more}
    fields = {name: value for name, value in given.items() if value or name not in _ALWAYS_EMPTY}
    if fields.pop("prompt_lookup", False):
        if "speculation" in fields:
            raise ConfigError("properties contain prompt_lookup and speculation; give one of them")
        fields["speculation"] = SpeculationConfig(speculative_method="ngram")
    of_scheduler = [field.name for field in dataclasses.fields(SchedulerConfig)]
    for name in fields:
        if name in ("model", "device", "scheduler"):
            raise ConfigError(f"properties contain {name!r}, which has its own argument")
        if name in of_scheduler:
            raise ConfigError(f"properties contain {name!r}, which is a field of scheduler_config")
    return fields


def _given(value: Any, named: Mapping[str, Any], other_names: Sequence[str]) -> Any:
    """Return an argument that may have been given by another name.

    Raises:
        InvalidRequestError: it was given twice or not at all, or there is no argument of a name.
    """
    for name in named:
        if name in ("images", "videos", "videos_metadata"):
            raise InvalidRequestError(f"{name}: images and videos are not supported", param=name)
        if name not in other_names:
            raise InvalidRequestError(
                f"there is no argument {name!r}; {nearest_name(name, other_names)}", param=name
            )
    given = [one for one in (value, *named.values()) if one is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"{len(given)} prompts arguments are given; give one, by its position or as one of "
            f"{', '.join(other_names)}",
            param="prompts",
        )
    return given[0]


def _inputs_of(given: Any) -> list[Any]:
    """Return the caller's prompts as a list, each a text, token ids or a `ChatHistory`.

    Raises:
        InvalidRequestError: it is none of these.
    """
    one = _input_of(given)
    if isinstance(one, ChatHistory):
        return [one]
    return [_input_of(each) for each in prompts_of(one)]


def _input_of(given: Any) -> Any:
    """Return a conversation as a `ChatHistory`, a tensor [n] or [1, n] as a list, others unchanged."""
    if isinstance(given, list | tuple) and given and isinstance(given[0], Mapping) and "role" in given[0]:
        return ChatHistory(given)
    tensor: Any = given if hasattr(given, "tolist") else getattr(given, "data", None)
    if not hasattr(tensor, "tolist") or not hasattr(tensor, "reshape"):
        return given
    shape = tuple(tensor.shape)
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1):
        raise InvalidRequestError(
            f"a tensor of token ids has the shape {list(shape)}; it must be [n] or [1, n]: give one tensor "
            "for each prompt",
            param="prompts",
        )
    return tensor.reshape(-1).tolist()
