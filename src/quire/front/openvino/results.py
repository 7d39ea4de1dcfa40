"""Results of `ContinuousBatchingPipeline`, under OpenVINO GenAI's names."""

from __future__ import annotations

import dataclasses
import enum
import statistics
from typing import Any, NamedTuple

from quire.config import Choice
from quire.request_output import RequestMetrics
from quire.status import FinishReason


class Named(Choice):
    """A choice whose text is its name, such as GenerationStatus.STOP."""

    __str__ = enum.Enum.__str__


class GenerationStatus(Named):
    """Status of a request of the pipeline."""

    RUNNING = "running"
    FINISHED = "finished"
    IGNORED = "ignored"  # it failed; see `GenerationOutput.error` or the log
    CANCEL = "cancel"  # ended by `GenerationHandle.cancel` or a streamer
    STOP = "stop"  # ended by `GenerationHandle.stop` or a streamer


class GenerationFinishReason(Named):
    """Why a completion ended."""

    NONE = "none"  # it has not
    STOP = "stop"  # end of sequence, a stop string or token, or it was stopped
    LENGTH = "length"
    TOOL_CALL = "tool_call"  # it was stopped for a tool call
    ERROR = "error"  # not in OpenVINO GenAI

    @classmethod
    def of(cls, reason: FinishReason | None) -> GenerationFinishReason:
        """Convert the engine's reason; None: there is none yet."""
        if reason is None:
            return cls.NONE
        return cls.STOP if reason is FinishReason.ABORT else cls(reason.value)


class MeanStdPair(NamedTuple):
    """Mean and standard deviation; -1 both if nothing was measured."""

    mean: float
    std: float


class SummaryStats(NamedTuple):
    """Mean, standard deviation, minimum and maximum; -1 all if nothing was measured."""

    mean: float
    std: float
    min: float
    max: float

    def as_tuple(self) -> tuple[float, ...]:
        """Return the four numbers."""
        return tuple(self)


@dataclasses.dataclass(slots=True)
class RawPerfMetrics:
    """Measurements of each request, in microseconds; an empty list is not measured.

    `tokenization_durations` include the chat template. `m_durations` are times per token after the first,
    and `m_batch_sizes` numbers of generated tokens.
    """

    generate_durations: list[float] = dataclasses.field(default_factory=list)
    tokenization_durations: list[float] = dataclasses.field(default_factory=list)
    detokenization_durations: list[float] = dataclasses.field(default_factory=list)
    chat_template_durations: list[float] = dataclasses.field(default_factory=list)
    m_times_to_first_token: list[float] = dataclasses.field(default_factory=list)
    m_new_token_times: list[float] = dataclasses.field(default_factory=list)
    token_infer_durations: list[float] = dataclasses.field(default_factory=list)
    m_batch_sizes: list[int] = dataclasses.field(default_factory=list)
    m_durations: list[float] = dataclasses.field(default_factory=list)
    inference_durations: list[float] = dataclasses.field(default_factory=list)
    grammar_compile_times: list[float] = dataclasses.field(default_factory=list)
    sampling_durations: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class PerfMetrics:
    """Times and token counts of one request, or of several added up.

    The getters return milliseconds (per token: tpot, ipot), means with standard deviations over the requests.

    Attributes:
        load_time: load time of the model, in milliseconds.
        num_input_tokens: number of tokens of the prompts.
        raw_metrics: the measurements.
    """

    load_time: float = 0.0
    num_input_tokens: int = 0
    raw_metrics: RawPerfMetrics = dataclasses.field(default_factory=RawPerfMetrics)

    @classmethod
    def of(
        cls,
        metrics: RequestMetrics | None,
        *,
        load_time: float,
        num_input_tokens: int,
        tokenization_time: float | None = None,
    ) -> PerfMetrics:
        """Return those of one request.

        Args:
            metrics: metrics of the request; None: it runs.
            load_time: load time of the model, in seconds.
            num_input_tokens: number of tokens of the prompt.
            tokenization_time: in seconds; None: it was not measured.
        """
        raw = RawPerfMetrics()
        if tokenization_time is not None:
            raw.tokenization_durations = [tokenization_time * 1e6]
        if metrics is not None:
            raw.generate_durations = [metrics.total_time * 1e6]
            raw.m_times_to_first_token = [metrics.time_to_first_token * 1e6]
            raw.m_batch_sizes = [metrics.num_output_tokens]
            if metrics.num_output_tokens > 1:
                decoding = metrics.total_time - metrics.time_to_first_token
                raw.m_durations = [decoding / (metrics.num_output_tokens - 1) * 1e6]
        return cls(load_time * 1e3, num_input_tokens, raw)

    def __add__(self, other: PerfMetrics) -> PerfMetrics:
        names = [field.name for field in dataclasses.fields(RawPerfMetrics)]
        both = {name: getattr(self.raw_metrics, name) + getattr(other.raw_metrics, name) for name in names}
        num_input_tokens = self.num_input_tokens + other.num_input_tokens
        return PerfMetrics(self.load_time, num_input_tokens, RawPerfMetrics(**both))

    def get_load_time(self) -> float:
        """Return how long the model took to load."""
        return self.load_time

    def get_num_input_tokens(self) -> int:
        """Return the number of tokens of the prompts."""
        return self.num_input_tokens

    def get_num_generated_tokens(self) -> int:
        """Return the number of generated tokens."""
        return sum(self.raw_metrics.m_batch_sizes)

    def get_ttft(self) -> MeanStdPair:
        """Return the time to the first token."""
        return _milliseconds(self.raw_metrics.m_times_to_first_token)

    def get_tpot(self) -> MeanStdPair:
        """Return the time per token after the first."""
        return _milliseconds(self.raw_metrics.m_durations)

    def get_ipot(self) -> MeanStdPair:
        """Return the model's time per token; it is not measured."""
        return _milliseconds(self.raw_metrics.token_infer_durations)

    def get_throughput(self) -> MeanStdPair:
        """Return the tokens per second after the first token."""
        mean, std = self.get_tpot()
        return MeanStdPair(1e3 / mean, std * 1e3 / mean**2) if mean > 0 else MeanStdPair(-1.0, -1.0)

    def get_generate_duration(self) -> MeanStdPair:
        """Return the time from the arrival of a request to its end."""
        return _milliseconds(self.raw_metrics.generate_durations)

    def get_inference_duration(self) -> MeanStdPair:
        """Return the model's time; it is not measured."""
        return _milliseconds(self.raw_metrics.inference_durations)

    def get_sampling_duration(self) -> MeanStdPair:
        """Return the sampler's time; it is not measured."""
        return _milliseconds(self.raw_metrics.sampling_durations)

    def get_tokenization_duration(self) -> MeanStdPair:
        """Return the time to tokenize a prompt, including the chat template."""
        return _milliseconds(self.raw_metrics.tokenization_durations)

    def get_detokenization_duration(self) -> MeanStdPair:
        """Return the time to detokenize; it is not measured."""
        return _milliseconds(self.raw_metrics.detokenization_durations)

    def get_chat_template_duration(self) -> MeanStdPair:
        """Return the chat template's time; it is measured with the tokenization."""
        return _milliseconds(self.raw_metrics.chat_template_durations)

    def get_grammar_compiler_init_times(self) -> dict[str, float]:
        """Return the start time of each grammar compiler; it is not measured."""
        return {}

    def get_grammar_compile_time(self) -> SummaryStats:
        """Return the time to compile grammars; it is not measured."""
        times = self.raw_metrics.grammar_compile_times or [-1e3]
        return SummaryStats(*_milliseconds(times), min(times) / 1e3, max(times) / 1e3)


def _milliseconds(durations: list[float]) -> MeanStdPair:
    """Return mean and standard deviation of microseconds, in milliseconds."""
    if not durations:
        return MeanStdPair(-1.0, -1.0)
    return MeanStdPair(statistics.fmean(durations) / 1e3, statistics.pstdev(durations) / 1e3)


@dataclasses.dataclass(slots=True)
class GenerationOutput:
    """Generated tokens of one completion.

    `generated_log_probs` is empty unless `GenerationConfig.logprobs` is set. `score` is the sum of the
    log-probabilities of all tokens so far, in nats. Hypotheses of a beam search always have one, divided by
    length ^ `length_penalty`.
    """

    generated_ids: list[int]
    generated_log_probs: list[float]
    score: float
    finish_reason: GenerationFinishReason
    error: str | None = None


@dataclasses.dataclass(slots=True)
class GenerationResult:
    """Result of `ContinuousBatchingPipeline.generate` for one text; lists have an item per completion.

    `texts`, `scores`, `status` and `request_id` are shorter names of what OpenVINO GenAI calls
    `m_generation_ids`, `m_scores`, `m_status` and `m_request_id`. Scores are as in
    `GenerationOutput`, 0 if unknown. `extended_perf_metrics`, those of a draft model, are None.
    """

    m_request_id: int = 0
    texts: list[str] = dataclasses.field(default_factory=list)
    m_scores: list[float] = dataclasses.field(default_factory=list)
    finish_reasons: list[GenerationFinishReason] = dataclasses.field(default_factory=list)
    m_status: GenerationStatus = GenerationStatus.RUNNING
    perf_metrics: PerfMetrics = dataclasses.field(default_factory=PerfMetrics)
    extended_perf_metrics: None = None

    @property
    def request_id(self) -> int:
        """Number of the request."""
        return self.m_request_id

    @property
    def scores(self) -> list[float]:
        """Scores of the completions."""
        return self.m_scores

    @property
    def status(self) -> GenerationStatus:
        """Status of the request."""
        return self.m_status

    @property
    def m_generation_ids(self) -> list[Any]:
        """Texts of the completions, despite the name."""
        return self.texts

    @m_generation_ids.setter
    def m_generation_ids(self, texts: list[Any]) -> None:
        self.texts = texts

    def get_generation_ids(self) -> list[str]:
        """Return the texts of the completions."""
        return self.texts


@dataclasses.dataclass(slots=True)
class EncodedGenerationResult(GenerationResult):
    """Result for a prompt of token ids: `m_generation_ids` has the token ids of each completion."""

    token_ids: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def m_generation_ids(self) -> list[Any]:
        """Token ids of the completions."""
        return self.token_ids

    @m_generation_ids.setter
    def m_generation_ids(self, token_ids: list[Any]) -> None:
        self.token_ids = token_ids


@dataclasses.dataclass(slots=True, frozen=True)
class PipelineMetrics:
    """State of the pipeline after the last step; cache usage is in percent of the KV blocks.

    `avg_cache_usage` is the mean of the last 1,000 steps; `la_peak_pool_blocks`, for models with linear
    attention, is 0.
    """

    requests: int = 0
    scheduled_requests: int = 0
    cache_usage: float = 0.0
    max_cache_usage: float = 0.0
    avg_cache_usage: float = 0.0
    cache_size_in_bytes: int = 0
    la_peak_pool_blocks: int = 0

    @property
    def kv_cache_size_in_bytes(self) -> int:
        """Alias of `cache_size_in_bytes`."""
        return self.cache_size_in_bytes
