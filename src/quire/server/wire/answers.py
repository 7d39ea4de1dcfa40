"""Bodies of responses, in OpenAI's shapes: msgspec structs, fast to encode, also the source of the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from quire.config import EngineRole

encode = msgspec.json.Encoder().encode

EndReason = Literal["stop", "length"]
ChatEndReason = Literal["stop", "length", "tool_calls"]

EntryT = TypeVar("EntryT")


class PromptTokensDetails(Struct, frozen=True):
    """Number of prompt tokens from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    """Number of output tokens before the end of reasoning."""

    reasoning_tokens: int


class TokenUsage(Struct, frozen=True, kw_only=True):
    """Token counts of one call, over all prompts and choices; reasoning details only if known."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(Struct, kw_only=True):
    """A candidate for a prompt's token: log-probability (nats), rank (1 is likeliest), text."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Candidates by id, for each token of a prompt; null for the first token."""


class CompletionLogprobs(Struct, kw_only=True):
    """Log-probabilities (nats) in the form of /v1/completions: parallel lists, one entry per token.

    `text_offset` counts characters from the start of the choice's text. The entries of an echoed prompt's
    first token are null.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    """One text of /v1/completions; in a stream, a new piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: EndReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """Answer of /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    kv_transfer_params: Mapping[str, Any] | UnsetType = UNSET


class TopLogprob(Struct, kw_only=True):
    """A candidate for a token.

    Joined, the `bytes` of a text's tokens are the text in UTF-8. Where they are part of a character, `token`
    shows them escaped, such as `\\xf0\\x9f`.
    """

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    """The chosen token, and the likeliest ones at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Log-probabilities (nats) in the form of /v1/chat/completions."""

    content: list[TokenLogprob]
    refusal: None = None


class TopTokenId(Struct, kw_only=True):
    """A candidate for a token, by id; `token` is `token_id:N`, and the likeliest candidate has rank 1."""

    token: str
    token_id: int
    logprob: float
    rank: int
    bytes: None = None


class TokenIdLogprob(TopTokenId, kw_only=True):
    """The chosen token, and the likeliest ones at its position."""

    top_logprobs: list[TopTokenId]


class TokenIdLogprobs(Struct, kw_only=True):
    """Log-probabilities (nats) in the form of /inference/v1/generate."""

    content: list[TokenIdLogprob]


class GeneratedTokensChoice(Struct, kw_only=True):
    """The tokens of one completion; in a stream, the new ones."""

    index: int
    token_ids: list[int]
    logprobs: TokenIdLogprobs | None = None
    finish_reason: EndReason | None = None


class GeneratedTokens(Struct, kw_only=True):
    """Answer of /inference/v1/generate."""

    request_id: str
    model: str
    created: int
    choices: list[GeneratedTokensChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


class GeneratedTokensEvent(Struct, kw_only=True):
    """Each event of its stream."""

    request_id: str
    choices: list[GeneratedTokensChoice]
    usage: TokenUsage | None = None
    kv_transfer_params: Mapping[str, Any] | UnsetType = UNSET


class RenderedRequest(Struct, kw_only=True):
    """A request as /inference/v1/generate takes it: a prompt's tokens, and the parameters that were given."""

    request_id: str
    token_ids: list[int]
    sampling_params: Mapping[str, Any]
    model: str
    stream: bool = False
    stream_options: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    features: None = None


class FunctionCall(Struct, kw_only=True):
    """A called function; the arguments are JSON as the model wrote it, perhaps invalid."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A call of one of the request's tools."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Struct, kw_only=True):
    """The model's message; `content` is null if there is only reasoning or tool calls.

    `reasoning` is the newer name of `reasoning_content`; both are set if there is reasoning.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One message of /v1/chat/completions."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatEndReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TokenUsage
    kv_transfer_params: Mapping[str, Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CalledFunctionDelta(Struct, kw_only=True):
    """The new part of a streamed call: first the name, then pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, kw_only=True):
    """Part of a streamed call; only the first has `id`, `type` and the function's name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunctionDelta


class ChatDelta(Struct, kw_only=True):
    """The new part of a streamed message: role, then reasoning, content or calls; empty at the end."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """One message's part of a streamed event."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatEndReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, kw_only=True):
    """Each event of a streamed /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    kv_transfer_params: Mapping[str, Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Embedding(Struct, kw_only=True):
    """The embedding of one text: numbers, or float32 in little-endian bytes, in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class PoolingUsage(Struct, frozen=True, kw_only=True):
    """Token counts of one call, over all texts."""

    prompt_tokens: int
    total_tokens: int


class RowList(Struct, Generic[EntryT], kw_only=True):
    """An answer with an entry for each row that prompts became, in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EntryT]
    usage: PoolingUsage


class PooledRow(Struct, kw_only=True):
    """The row of one input of /pooling, as an embedding's, or the rows of its tokens."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float | list[float]] | str


class PooledRows(RowList[PooledRow], kw_only=True):
    """Answer of /pooling."""


class Classification(Struct, kw_only=True):
    """The likeliest label of one text, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(RowList[Classification], kw_only=True):
    """Answer of /v1/classify."""


class PairScore(Struct, kw_only=True):
    """How well two texts go together."""

    object: Literal["score"] = "score"
    index: int
    score: float


class PairScores(RowList[PairScore], kw_only=True):
    """Answer of /v1/score."""


class RankedText(Struct, kw_only=True):
    """The text of a document."""

    text: str


class RankedDocument(Struct, kw_only=True):
    """A document by its place in the request, and how well it goes with the query."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class RankedDocuments(Struct, kw_only=True):
    """Answer of /v1/rerank, the best document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage


class EmbeddingList(RowList[Embedding], kw_only=True):
    """Answer of /v1/embeddings."""


LATEST = ":latest"
"""Tag that Ollama's clients add to the names of models without one."""


class ModelCard(Struct, kw_only=True):
    """A served model; `max_model_len` (in tokens, prompt and output together) and `task` are additions.

    Other engines, whose cards a router reads, do not say the task.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    task: Literal["generate", "embed", "classify"] = "generate"


class ModelList(Struct, kw_only=True):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ServedCall(Struct, kw_only=True):
    """A live call, with what each unfinished completion is doing or waiting for."""

    id: str
    object: Literal["request"] = "request"
    state: list[str]


class ServedCallList(Struct, kw_only=True):
    """Answer of /v1/requests, the oldest first; `has_more`: the list was truncated."""

    object: Literal["list"] = "list"
    data: list[ServedCall]
    has_more: bool


class AbortedCall(Struct, kw_only=True):
    """Answer of DELETE /v1/requests/{id}."""

    id: str
    object: Literal["request"] = "request"
    aborted: Literal[True] = True


class ReleasedKV(Struct, kw_only=True):
    """Answer of DELETE /v1/kv_transfers/{transfer_id}."""

    id: str
    object: Literal["kv_transfer"] = "kv_transfer"
    released: Literal[True] = True


class ResetPrefixCache(Struct, kw_only=True):
    """Answer of /reset_prefix_cache."""

    reset: Literal[True] = True


class PauseStatus(Struct, kw_only=True, omit_defaults=True):
    """Answer of /pause, /resume and /is_paused."""

    is_paused: bool
    is_cache_cleared: bool | None = None


class SleepStatus(Struct, kw_only=True):
    """Answer of /sleep, /wake_up and /is_sleeping."""

    is_sleeping: bool


class Health(Struct, kw_only=True):
    """Answer of /health; `reason` explains a status other than ok."""

    status: Literal["ok", "draining", "unavailable"]
    reason: str | None = None


class KVTransferAddress(Struct, kw_only=True):
    """Where other engines read the KV of prompts: an IPv4 address and a TCP port."""

    host: str
    port: int


class KVEventSource(Struct, kw_only=True):
    """How to find out which prompts an engine has cached.

    KV events are published and replayed on two TCP ports of the engine's host. `tokenizer` is a fingerprint,
    to be compared before computing the digests of a prompt's blocks. `prompts` is a digest of all that makes
    prompts, to be compared before sending a prompt's tokens; null if the server has other formats of tool
    calls or reasoning than the chat template tells.
    """

    port: int
    replay_port: int
    tokenizer: str
    prompts: str | None = None


class EngineDescription(Struct, kw_only=True):
    """Answer of /engine; lengths are in tokens.

    `models` has the served model under each of its names, of which `model` is the first. `kv_transfer` is
    null if the engine lends no KV, `kv_events` if it does not publish and replay them. A server of several
    models has them all in `models`; the engines behind the first, each with its own, are in `others`.
    """

    role: EngineRole
    model: str
    block_size: int
    max_model_len: int
    kv_transfer: KVTransferAddress | None
    kv_events: KVEventSource | None = None
    models: list[ModelCard] = []
    others: list[EngineDescription] | UnsetType = UNSET


class Tokens(Struct, kw_only=True):
    """Answer of /tokenize; `token_strs` are the tokens as the vocabulary spells them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(Struct, kw_only=True):
    """Answer of /detokenize."""

    prompt: str


class AddedToken(Struct, kw_only=True):
    """A token added to the vocabulary; special tokens are left out of texts."""

    content: str
    special: bool


class TokenizerInfo(Struct, kw_only=True):
    """Answer of /tokenizer_info, as in `tokenizer_config.json`; `tokenizer_class` is transformers'."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    model_max_length: int
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    added_tokens_decoder: dict[str, AddedToken]
    chat_template: str | None


class Version(Struct, kw_only=True):
    """Answer of /version."""

    version: str


class WorldSize(Struct, kw_only=True):
    """Answer of /get_world_size."""

    world_size: int


class ErrorDetail(Struct, kw_only=True):
    """An error: `param` is the request field at fault, `code` a machine-readable reason."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, kw_only=True):
    """Body of every error response."""

    error: ErrorDetail


Answer = Struct | Sequence[Any]
"""A complete answer, before it is encoded as JSON."""


def json_response(payload: Answer, status: int = 200) -> Response:
    """Return a JSON response with this payload."""
    return Response(encode(payload), status, media_type="application/json")


def sse_event(payload: Any) -> bytes:
    """Return one server-sent event with `payload` as JSON."""
    return b"data: " + encode(payload) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
