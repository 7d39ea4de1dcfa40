"""All messages between front and engine, encoded as msgpack by `msgspec`.

If the engine runs in the caller's process, the same messages are passed as objects, without encoding.
"""

from __future__ import annotations

import functools
import math
import signal
from pathlib import Path

import msgspec

from quire import errors
from quire.config import EngineConfig, EngineRole, SchedulerConfig
from quire.errors import ConfigError, InvalidRequestError, QueueFullError, QuireError
from quire.limits import limits_of
from quire.pooling_params import PoolingParams
from quire.request_options import RequestOptions
from quire.sampling_params import SamplingParams
from quire.scheduling.interface import PauseState
from quire.scheduling.outputs import EngineCoreOutput, SchedulerStats

STACKS_SIGNAL = signal.SIGUSR1
"""Has the engine process write the stacks of its threads to its log."""


class ErrorInfo(msgspec.Struct, array_like=True, gc=False):
    """An exception that can be sent to another process; `kind` is the name of its class."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float = 1.0

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Describe any `error`."""
        param, retry_after = getattr(error, "param", None), getattr(error, "retry_after", None)
        return cls(
            kind=type(error).__name__,
            message=_message_of(error),
            param=param if isinstance(param, str) else None,
            retry_after=float(retry_after) if isinstance(retry_after, (int, float)) else 1.0,
        )

    def to_exception(self) -> QuireError:
        """Return the same `QuireError`; for any other class, a plain `QuireError` that names the class."""
        known = getattr(errors, self.kind, None)
        if not (isinstance(known, type) and issubclass(known, QuireError)):
            return QuireError(f"{self.kind}: {self.message}")
        if issubclass(known, InvalidRequestError):
            return known(self.message, param=self.param)
        if issubclass(known, QueueFullError):
            return known(self.message, retry_after=self.retry_after)
        return known(self.message)


def _message_of(error: BaseException) -> str:
    """Return what `error` says, as text that can be sent: without lone surrogates."""
    try:
        message = str(error) or repr(error)
    except Exception as failure:
        message = f"its message cannot be shown: {type(failure).__name__}"
    return message.encode(errors="backslashreplace").decode()


class EngineInfo(msgspec.Struct, frozen=True, dict=True):
    """Information about a ready engine: lengths in tokens, sizes in bytes, times in seconds.

    `num_blocks` counts the KV blocks that keep all tokens; `kv_cache_bytes` include those of sliding windows.
    `kv_transfer_address` is where peers read the KV of prompts, IPv4 address and port; None: it lends none.
    `kv_events_ports` are the TCP ports of KV events, live and replayed; None: they do not have one each. The
    front fills them in.
    `reads_priority`: whether any policy does; if none does, requests with a priority are refused.
    `reads_kv_transfer_params`: whether a KV connector may; if none does, they have no effect.
    `device`: a readable name of what the model runs on.
    `cache_knob`: the field that makes the KV cache too small for sequences as long as the model's maximum;
    empty: none does.
    `pooling`: how the model makes a row of a prompt if the request does not say; None: it generates.
    `row_size`: numbers of such a row; `row_sizes`: to how many it may be cut; `labels`: whose scores they
    are; see `ModelConfig`. `scores_tokens`: the scores are made of logits of tokens.
    `prompts`: by name, what may come before texts that become rows; `prompt_name`: which does if the request
    does not say; empty: none. `similarity`: how its rows are compared.
    `max_num_batched_tokens`: the most tokens of a step.
    """

    model: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    dtype: str
    load_seconds: float
    role: EngineRole = "both"
    kv_transfer_address: tuple[str, int] | None = None
    kv_events_ports: tuple[int, int] | None = None
    reads_priority: bool = True
    reads_kv_transfer_params: bool = True
    device: str = "cpu"
    cache_knob: str = ""
    pooling: PoolingParams | None = None
    row_size: int = 0
    row_sizes: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    scores_tokens: bool = False
    prompts: dict[str, str] = {}
    prompt_name: str = ""
    similarity: str = "cosine"
    max_num_batched_tokens: int = 0

    @functools.cached_property
    def max_prompt_len(self) -> int:
        """Maximum length of a prompt in tokens: one token is left for output, if there is any."""
        return self.max_model_len - (self.pooling is None)

    @functools.cached_property
    def longest_prompt(self) -> int:
        """Characters of the longest of `prompts`."""
        return max(map(len, self.prompts.values()), default=0)

    @property
    def makes_embeddings(self) -> bool:
        """Whether prompts become embeddings."""
        return self.pooling is not None and not self.labels

    @property
    def labels_tokens(self) -> bool:
        """Whether each token of a prompt gets scores of its own."""
        return self.pooling is not None and self.pooling.pooling_type == "all"

    @property
    def length_limit(self) -> str:
        """What limits prompt and output together, in words, with the knob to turn."""
        if self.cache_knob:
            size = f"{self.num_blocks} x {self.block_size} tokens"
            return f"the KV cache of {size} holds no longer sequence; raise {self.cache_knob}"
        return f"max_model_len is {self.max_model_len}"


class EngineStart(msgspec.Struct):
    """The start message of an engine process, which reads it from standard input as a line of JSON.

    `module_path` is the front's module search path, so that custom classes are found. `num_blocks_before` is
    the number of KV blocks of the engine that this one replaces; 0: it replaces none.
    """

    config: EngineConfig
    model_path: str
    module_path: list[str]
    num_blocks_before: int = 0


# From the front to the engine.


class EngineCoreRequest(msgspec.Struct, tag=1, array_like=True, gc=False):
    """A prompt and the `n` sequences that continue it, queued all or none.

    Sequences are in the order of the completions; their ids are unique for the lifetime of the engine.
    `sampling_params` is resolved: `max_tokens` and the bad words' token ids are filled in.
    `resumed_outputs` has the tokens that each sequence has generated in an engine that has died, and from
    which it continues; None: the request is new. `was_accepted`: that engine was this front's, so the request
    is not refused for a full queue. `arrival_time` is when the request came, in seconds on the
    system's monotonic clock; infinity: when the engine gets it. `flow` names what it is a part of, such as a
    call with many prompts, which takes turns with others; empty: its sequences are a flow of their own.
    `pooling_params` is resolved, too, see `Request`; None: the sequences generate.
    """

    sequence_ids: list[str]
    seeds: list[int]
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    options: RequestOptions = RequestOptions()
    resumed_outputs: list[list[int]] | None = None
    arrival_time: float = math.inf
    flow: str = ""
    pooling_params: PoolingParams | None = None
    was_accepted: bool = False

    @property
    def queued_sequence_ids(self) -> list[str]:
        """Ids of the sequences in the scheduler: a beam search is one until its hypotheses are complete."""
        return self.sequence_ids[:1] if self.sampling_params.beam_width else self.sequence_ids


class AbortRequests(msgspec.Struct, tag=2, array_like=True, gc=False):
    """Abort these sequences; each that has not ended has a last output with finish reason "abort"."""

    sequence_ids: list[str]


class StopRequests(msgspec.Struct, tag=3, array_like=True, gc=False):
    """End these sequences, in whose text the front has found a stop string; they have no last output."""

    sequence_ids: list[str]


class GetStats(msgspec.Struct, tag=4, array_like=True, gc=False):
    """Request for `SchedulerStats`, returned in a `Reply`."""

    call_id: int


class ResetPrefixCache(msgspec.Struct, tag=5, array_like=True, gc=False):
    """Clear the prefix cache; the `Reply` says whether it was cleared."""

    call_id: int


class Shutdown(msgspec.Struct, tag=6, array_like=True, gc=False):
    """Abort all requests, send their last outputs, and end."""


class Explain(msgspec.Struct, tag=7, array_like=True, gc=False):
    """Request for what these sequences are doing or waiting for.

    The `Reply` has a text for each of the first of them, and at least one: those for which there was time.
    """

    call_id: int
    sequence_ids: list[str]


class SaveKV(msgspec.Struct, tag=8, array_like=True, gc=False):
    """Save a prompt's KV to a file.

    The `Reply` says in `done` whether that was done. If not, the KV tier has only the first `num_tokens` yet:
    it stores the others when the prompt is computed.
    """

    call_id: int
    path: str
    token_ids: list[int]
    cache_salt: str = ""


class RestoreKV(msgspec.Struct, tag=9, array_like=True, gc=False):
    """Restore a prompt's KV from a file; the `Reply` has the prompt's `token_ids`."""

    call_id: int
    path: str
    cache_salt: str = ""


class Acknowledge(msgspec.Struct, tag=10, array_like=True, gc=False):
    """The front has processed messages of this many bytes, see `OutputWindow`."""

    num_bytes: int


class SetPauseState(msgspec.Struct, tag=11, array_like=True, gc=False):
    """Say which requests may run; the `Reply` comes when no step can run otherwise any more."""

    call_id: int
    pause_state: PauseState


class ReleaseKV(msgspec.Struct, tag=12, array_like=True, gc=False):
    """No peer is going to read what is lent under this transfer id, now or later."""

    transfer_id: str


ToEngine = (
    EngineCoreRequest
    | AbortRequests
    | StopRequests
    | GetStats
    | ResetPrefixCache
    | Shutdown
    | Explain
    | SaveKV
    | RestoreKV
    | Acknowledge
    | SetPauseState
    | ReleaseKV
)


# From the engine to the front.


class Starting(msgspec.Struct, tag=1, array_like=True, gc=False):
    """The engine process is connected; its socket files are no longer needed."""


class LoadProgress(msgspec.Struct, tag=2, array_like=True, gc=False):
    """Weights read so far, in bytes."""

    done: int
    total: int


class Ready(msgspec.Struct, tag=3, array_like=True):
    """The engine accepts requests."""

    info: EngineInfo


class StartupFailed(msgspec.Struct, tag=4, array_like=True, gc=False):
    """The engine could not be built; its process ends."""

    error: ErrorInfo


class StepOutputs(msgspec.Struct, tag=5, array_like=True, gc=False):
    """The outputs of one step; also a heartbeat."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None


class RequestRefused(msgspec.Struct, tag=6, array_like=True, gc=False):
    """None of these sequences was queued."""

    sequence_ids: list[str]
    error: ErrorInfo


class Reply(msgspec.Struct, tag=7, array_like=True, gc=False):
    """The reply to the call with the same id."""

    call_id: int
    stats: SchedulerStats | None = None
    done: bool = True
    texts: list[str] = []
    num_tokens: int = 0
    token_ids: list[int] = []
    error: ErrorInfo | None = None


class EngineFailed(msgspec.Struct, tag=8, array_like=True, gc=False):
    """The engine cannot continue; its process ends."""

    reason: str


class KVEvents(msgspec.Struct, tag=9, array_like=True, gc=False):
    """The KV events of one step, encoded: the front publishes them, across all engines that it starts."""

    events: msgspec.Raw


FromEngine = (
    Starting
    | LoadProgress
    | Ready
    | StartupFailed
    | StepOutputs
    | RequestRefused
    | Reply
    | EngineFailed
    | KVEvents
)

_CALLS = (GetStats, ResetPrefixCache, Explain, SaveKV, RestoreKV, SetPauseState)
_CALL_TAGS = {call.__struct_config__.tag for call in _CALLS}

encode = msgspec.msgpack.Encoder().encode
_decode_to_engine = msgspec.msgpack.Decoder(ToEngine)
_decode_from_engine = msgspec.msgpack.Decoder(FromEngine)


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    """Decode a message from the front."""
    message: ToEngine = _decode_to_engine.decode(data)
    return message


def refusal_of(data: bytes, error: msgspec.DecodeError) -> RequestRefused | Reply:
    """Return the answer to a message from the front that cannot be decoded.

    Raises:
        DecodeError: it cannot be seen whom the message concerns.
    """
    why = ErrorInfo(InvalidRequestError.__name__, f"the engine cannot read this request: {error}")
    match msgspec.msgpack.decode(data):
        case [EngineCoreRequest.__struct_config__.tag, sequence_ids, *_]:
            return RequestRefused(msgspec.convert(sequence_ids, list[str]), why)
        case [tag, int(call_id), *_] if tag in _CALL_TAGS:
            return Reply(call_id, done=False, error=why)
    raise error


def decode_from_engine(data: bytes | memoryview) -> FromEngine:
    """Decode a message from the engine."""
    message: FromEngine = _decode_from_engine.decode(data)
    return message


def input_address(directory: Path) -> str:
    """Return the address to which the front sends, in the private directory of the sockets."""
    return f"ipc://{directory}/in"


def output_address(directory: Path) -> str:
    """Return the address to which the engine sends, in the private directory of the sockets."""
    return f"ipc://{directory}/out"


def encode_start(start: EngineStart) -> bytes:
    """Return `start` as one line.

    Raises:
        ConfigError: the configuration contains a policy object, which cannot be sent to another process.
    """
    for name, limits in limits_of(SchedulerConfig).items():
        choice = getattr(start.config.scheduler, name)
        if limits.takes_dotted_names and not isinstance(choice, str):
            raise ConfigError(
                f"SchedulerConfig.{name} is {choice!r}, but the engine runs in its own process, to "
                "which only names can be sent; give the dotted name of a class that it can import"
            )
    return msgspec.json.encode(start) + b"\n"


def decode_start(line: bytes) -> EngineStart:
    """Decode the result of `encode_start`."""
    return msgspec.json.decode(line, type=EngineStart)
