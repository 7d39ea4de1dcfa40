"""Input processing: validation, tokenization, and resolving of defaults."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.calls.tools import tool_of
from quire.dialogue.earlier_turns import text_of
from quire.dialogue.formats import call_format_of_template
from quire.dialogue.messages import template_messages
from quire.dialogue.reasoning.formats import ExpectedReasoning, expected_reasoning
from quire.engine.messages import EngineCoreRequest, EngineInfo
from quire.errors import ContextLengthError, InvalidRequestError, known_prompts
from quire.front.arguments import prompt_text_or_ids, require_chat
from quire.front.text.reasoning import ReasoningControl, params_with_reasoning
from quire.front.text.token_bounds import TokenBound
from quire.front.text.tokenized_prompt import TokenizedPrompt
from quire.front.text.truncation import MARGIN, Truncation, TruncationSide, truncation_of
from quire.models.text.template_messages import RenderedChat
from quire.pooling_params import PoolingParams
from quire.request_options import RequestOptions, require_text
from quire.sampling_params import MAX_LOGPROBS, ONE_TOKEN, SamplingParams
from quire.scheduling.beam_search import num_candidates

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK_64 = 2**64 - 1
_DEFAULT_OPTIONS = RequestOptions()
_PAIR_OPTIONS = ("add_special_tokens", "truncate_prompt_tokens")

PoolingTask = Literal["embed", "classify", "score"]

_KEPT_BAD_WORDS = 4  # cached token lists of bad words, at most 256 words each


@dataclasses.dataclass(slots=True, frozen=True)
class ProcessedRequest:
    """A request as the front knows it, and the message about it to the engine.

    `params` are the caller's, with all defaults resolved; those of `core_request` may ask for additional
    log-probabilities. `shown_token_ids` are special tokens that appear in the text. `reasoning` describes the
    reasoning that may precede the answer, where stop strings do not count.
    """

    request_id: str
    prompt: str | None
    params: SamplingParams
    core_request: EngineCoreRequest
    arrival_time: float  # seconds on this process's monotonic clock
    shown_token_ids: frozenset[int] = frozenset()
    reasoning: ExpectedReasoning | None = None


class InputProcessor:
    """Turns prompts and parameters into requests for one engine.

    Args:
        tokenizer: tokenizer of the engine's model.
        info: the engine's limits: maximum length and vocabulary. Replaced together with the engine.
    """

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self.info = info
        self._bound = TokenBound(tokenizer)
        self._serial = itertools.count()
        # All prompts of a call share their bad words, which may be much longer than a prompt.
        self._of_bad_words = functools.lru_cache(_KEPT_BAD_WORDS)(
            functools.partial(_sequences_of_bad_words, tokenizer)
        )

    def process(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        pooling_params: PoolingParams | None = None,
        /,
        *,
        prompt_text: str | None = None,
        tokenized: TokenizedPrompt | None = None,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: TruncationSide = "left",
        **options: Any,
    ) -> ProcessedRequest:
        """Validate and tokenize one request.

        Args:
            prompt: text, or token ids.
            params: as given by the caller.
            pooling_params: as for `process_pooling`; None: the request generates.
            prompt_text: text of a prompt given as token ids, for the output.
            tokenized: the tokens of a text by this tokenizer; None: unknown.
            add_special_tokens: whether to add the model's special tokens to a text.
            truncate_prompt_tokens: number of prompt tokens to keep; -1: as many as fit beside
                `max_tokens`; None: all.
            truncation_side: the side to cut off.
            options: `request_id` (None: generated); `shorten_output`, whether to lower a `max_tokens` beyond
                the model's maximum length; `arrival_time`, in `time.monotonic()` seconds, which sets the
                place in the engine's queue (None, or a time in the future: now); `flow`, see
                `EngineCoreRequest`; and fields of `RequestOptions`.

        Raises:
            InvalidRequestError: the request is invalid, or too long.
            ConfigError: there is no option of that name.
        """
        begun_at = time.monotonic()
        truncation = truncation_of(truncate_prompt_tokens, truncation_side, params, self.info)
        if isinstance(prompt, str):
            self._check_length(len(prompt) and 1)
            known = self._known_ids(tokenized, truncation)
            if known is None:
                token_ids, prompt_text = self._encode_prompt(prompt, truncation, add_special_tokens)
            else:
                require_text(prompt, "prompt")
                token_ids, prompt_text = known, prompt
        else:
            token_ids = self._checked_ids(prompt, truncation)
        return self._request(token_ids, prompt_text, params, begun_at, pooling_params, **options)

    def process_pooling(
        self,
        prompt: str | Sequence[int],
        params: PoolingParams,
        *,
        second_text: str | None = None,
        task: PoolingTask | None = None,
        prompt_name: str | None = None,
        **options: Any,
    ) -> ProcessedRequest:
        """Like `process`, for a prompt that becomes a row.

        Args:
            prompt: text, or token ids.
            params: as given by the caller.
            second_text: is scored together with the prompt, which is a text then; None: the prompt is alone.
            task: what the row is to be: an embedding, scores of labels, or the score of two texts; None: any.
            prompt_name: which of the model's prompts comes before the text, or is the instruction if the chat
                template joins two; empty: none; None: its default, unless the prompt is token ids.
            options: as for `process`.

        Raises:
            InvalidRequestError: the request is invalid, or too long, or the model makes other rows.
            ConfigError: there is no option of that name.
        """
        if task is not None:
            self._check_task(task)
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"pooling_params must be PoolingParams, not {type(params).__name__}", param="pooling_params"
            )
        before = ""
        if isinstance(prompt, str):
            before = self._prompt(prompt_name)
            prompt = before + prompt if prompt and second_text is None else prompt
        elif prompt_name:
            raise InvalidRequestError(
                f"prompt_name is {prompt_name!r:.80}, but the prompt is token ids, which are taken as they "
                "are; leave it out",
                param="prompt_name",
            )
        if second_text is None:
            return self.process(prompt, ONE_TOKEN, params, **options)
        begun_at = time.monotonic()
        pair_options = _taken(options, _PAIR_OPTIONS)
        token_ids, params = self._encode_pair(before, prompt, second_text, params, **pair_options)
        return self._request(token_ids, None, ONE_TOKEN, begun_at, params, **options)

    def _prompt(self, name: object) -> str:
        """Return what comes before a text; see `process_pooling`."""
        if name is None:
            name = self.info.prompt_name
        if name == "":
            return ""
        if not isinstance(name, str) or name not in self.info.prompts:
            raise InvalidRequestError(
                f"prompt_name is {name!r:.80}, and {self.info.model} has {known_prompts(self.info.prompts)}",
                param="prompt_name",
            )
        return self.info.prompts[name]

    def _check_task(self, task: PoolingTask) -> None:
        labels, model = self.info.labels, self.info.model
        if self.info.labels_tokens:
            raise InvalidRequestError(
                f"the model {model} scores {len(labels)} labels of each token; use LLM.encode, or /pooling",
                param="model",
            )
        if task == "embed" and labels:
            raise InvalidRequestError(
                f"the model {model} scores {len(labels)} labels and makes no embeddings; use LLM.classify or "
                "LLM.score, or a model that is made for embeddings",
                param="model",
            )
        if task != "embed" and self.info.makes_embeddings:
            raise InvalidRequestError(
                f"the model {model} makes embeddings and scores no labels; use LLM.embed, or a model whose "
                "config.json names an architecture ...ForSequenceClassification",
                param="model",
            )
        if task == "score" and len(labels) > 1:
            raise InvalidRequestError(
                f"the model {model} scores {len(labels)} labels, and a score is of one; use LLM.classify",
                param="model",
            )

    def _encode_pair(
        self,
        instruction: str,
        first: object,
        second: object,
        params: PoolingParams,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> tuple[list[int], PoolingParams]:
        """Return the tokens of two texts together, the second cut if it must be, and where that begins."""
        truncation = truncation_of(truncate_prompt_tokens, "right", ONE_TOKEN, self.info)
        limit = self.info.max_prompt_len if truncation is None else truncation.num_tokens
        for text in (first, second):
            require_text(text, "prompt", allow_empty=False)
        assert isinstance(first, str)
        assert isinstance(second, str)
        self._refuse_long(first)
        if truncation is None:
            self._refuse_long(second)
        else:
            second = self._bound.part_with(second, limit + MARGIN, from_end=False)
        most = None if truncation is None else limit
        if self._tokenizer.joins_pairs:
            token_ids, start = self._rendered_pair(instruction, first, second, most), None
        else:
            token_ids, start = self._joined_pair(instruction + first, second, most, add_special_tokens)
        self._check_length(len(token_ids))
        self._check_vocabulary(token_ids, "prompt")
        return token_ids, dataclasses.replace(params, second_text_at=start)

    def _joined_pair(
        self, first: str, second: str, most: int | None, add_special_tokens: bool
    ) -> tuple[list[int], int | None]:
        """Return the tokens of two texts as the tokenizer joins them, and where the second's type begins.

        The second is cut to leave `most` tokens; None: it is whole.
        """
        if self.info.scores_tokens:
            raise InvalidRequestError(
                f"the model {self.info.model} scores texts by the logits of tokens, and its chat template "
                "has no roles query and document; give one that has, by ChatTemplateConfig.chat_template",
                param="model",
            )
        encoding = self._tokenizer.tokenize(first, second, add_special_tokens=add_special_tokens)
        token_ids, types = list(encoding.ids), list(encoding.type_ids)
        if most is not None and len(token_ids) > most:
            of_second = [place for place, text in enumerate(encoding.sequence_ids) if text == 1]
            cut = _last_of(of_second, len(token_ids) - most)
            for tokens in (token_ids, types):
                del tokens[cut]
        return token_ids, types.index(1) if 1 in types else None

    def _rendered_pair(self, instruction: str, first: str, second: str, most: int | None) -> list[int]:
        """Return the tokens of two texts as the chat template joins them; see `_joined_pair`."""
        contents = {"system": instruction, "query": first, "document": second}
        messages = [{"role": role, "content": text} for role, text in contents.items() if text]
        chat = self._tokenizer.render_chat(messages)
        token_ids: list[int] = self._tokenizer.tokenize_chat(chat).ids
        if most is None or len(token_ids) <= most:
            return token_ids
        start, end = chat.given[-1] if chat.given else (0, 0)
        if chat.text[start:end].strip() != second.strip():
            raise InvalidRequestError(
                f"truncate_prompt_tokens asks for at most {most} tokens of {len(token_ids)}, but it "
                "is not known where the second text is: the chat template must put it last, by itself, and "
                "ChatTemplateConfig.special_tokens_in_content be off; send a shorter one",
                param="truncate_prompt_tokens",
            )
        head, kept, rest = (
            self._tokenizer.tokenize_chat(chat.part(*edges)).ids
            for edges in ((0, start), (0, end), (end, len(chat.text)))
        )
        cut = _last_of(range(len(head), len(kept)), len(kept) + len(rest) - most)
        return [*kept[: cut.start], *rest]

    def process_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        tokenized: TokenizedPrompt | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        truncate_prompt_tokens: int | None = None,
        truncation_side: TruncationSide = "left",
        marks: Iterable[str] = (),
        reasoning: ReasoningControl | None = None,
        call_format: ToolCallFormat | Literal["auto"] | None = "auto",
        **options: Any,
    ) -> ProcessedRequest:
        """Like `process`, for a conversation, which the chat template turns into a prompt.

        Args:
            messages: the conversation, in OpenAI's form.
            params: as given by the caller.
            tokenized: what the template and the tokenizer make of the conversation; None: unknown. Only the
                end of its text is known then.
            tools: tools that the model may call, as OpenAI's API describes them.
            chat_template_kwargs: variables for the chat template, such as enable_thinking.
            add_generation_prompt: whether the prompt ends with the header of the model's turn; None: unless
                the last message is continued.
            continue_final_message: whether the answer continues the last message.
            add_special_tokens: whether to add the model's special tokens; most templates write them already.
            truncate_prompt_tokens: as for `process`.
            truncation_side: as for `process`.
            marks: texts to show in the output even if they are special tokens.
            reasoning: how to control the model's reasoning; None: not at all.
            call_format: format of the model's tool calls; None: unknown; auto: from the chat template.
            options: as for `process`.

        Raises:
            InvalidRequestError: the conversation or its parameters are invalid, or the template refuses it.
        """
        begun_at = time.monotonic()
        limit = self.info.max_prompt_len
        require_chat(messages, tools, chat_template_kwargs)
        truncation = truncation_of(truncate_prompt_tokens, truncation_side, params, self.info)
        if truncation is None and len(messages) > limit:
            raise ContextLengthError(
                f"the conversation has {len(messages)} messages, and its prompt may have {limit} tokens "
                f"({self.info.length_limit}); send at most {limit} messages",
                param="prompt",
            )
        known = self._known_ids(tokenized, truncation)
        if known is None or tokenized is None:
            if call_format == "auto":
                call_format = call_format_of_template(self._tokenizer.chat_template_source or "")
            given = template_messages(messages, call_format)
            if truncation is None:
                self._check_conversation(given, limit)
            if add_generation_prompt is None:
                add_generation_prompt = not continue_final_message
            chat = self._tokenizer.render_chat(
                given,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=None if tools is None else [tool_of(tool).for_template() for tool in tools],
                variables=chat_template_kwargs,
            )
            token_ids, text = self._encode_prompt(chat, truncation, add_special_tokens)
        else:
            token_ids, text = known, tokenized.ending
        expected: ExpectedReasoning | None = None
        if reasoning is not None:
            expected = expected_reasoning(reasoning.format, text, reasoning.continued)
        if reasoning is not None and expected is not None:
            params = params_with_reasoning(params, reasoning, expected, self._tokenizer)
        processed = self._request(token_ids, text, params, begun_at, **options)
        found = map(self._tokenizer.added_token_id, marks)
        shown = frozenset([token_id for token_id in found if token_id is not None]) if marks else frozenset()
        if not shown and expected is None:
            return processed
        return dataclasses.replace(processed, shown_token_ids=shown, reasoning=expected)

    def _request(
        self,
        token_ids: list[int],
        prompt_text: str | None,
        params: SamplingParams,
        begun_at: float,
        pooling_params: PoolingParams | None = None,
        /,
        *,
        request_id: str | None = None,
        shorten_output: bool = False,
        arrival_time: float | None = None,
        flow: str = "",
        **options: Any,
    ) -> ProcessedRequest:
        """Return the request for a checked prompt; see `process` for the arguments."""
        if request_id is None:
            request_id = f"request-{os.urandom(8).hex()}"
        else:
            require_text(request_id, "request_id", allow_empty=False)
        serial = next(self._serial)
        if pooling_params is not None or self.info.pooling is not None:
            pooling_params, seed = self._resolved_pooling(pooling_params), 0
        else:
            params, seed = self._resolve(params, len(token_ids), shorten_output=shorten_output)
        num_sequences = params.num_sequences
        core_request = EngineCoreRequest(
            sequence_ids=[f"{request_id}#{serial}.{index}" for index in range(num_sequences)],
            seeds=[seed, *map(functools.partial(derived_seed, seed), range(1, num_sequences))],
            prompt_token_ids=token_ids,
            sampling_params=self._with_rankable_tokens(params),
            eos_token_ids=self._tokenizer.eos_token_ids,
            options=RequestOptions(**options) if options else _DEFAULT_OPTIONS,
            arrival_time=begun_at if arrival_time is None else _checked_time(arrival_time),
            flow=flow,
            pooling_params=pooling_params,
        )
        return ProcessedRequest(request_id, prompt_text, params, core_request, begun_at)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, which may be empty.

        Raises:
            InvalidRequestError: it is too long for a prompt, or not valid Unicode.
        """
        require_text(text, "prompt")
        return self._encode_prompt(text, None, add_special_tokens)[0] if text else []

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        self._check_vocabulary(token_ids, "tokens")
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _known_ids(
        self, tokenized: TokenizedPrompt | None, truncation: Truncation | None
    ) -> list[int] | None:
        """Return a prompt's known tokens, checked; None: its text is to be tokenized, also to be refused."""
        if tokenized is None or truncation is not None:
            return None
        if not 0 < tokenized.num_tokens <= self.info.max_prompt_len:
            return None
        token_ids = tokenized.token_ids()
        self._check_vocabulary(token_ids, "prompt")
        return token_ids

    def _checked_ids(self, prompt: Sequence[int], truncation: Truncation | None) -> list[int]:
        """Return a prompt's token ids, checked."""
        if isinstance(prompt, Sequence):
            if truncation is not None:
                prompt = truncation.part(prompt)
            self._check_length(len(prompt))
        token_ids = prompt_text_or_ids(prompt)
        assert isinstance(token_ids, list)
        self._check_vocabulary(token_ids, "prompt")
        return token_ids

    def _encode_prompt(
        self, prompt: str | RenderedChat, truncation: Truncation | None, add_special_tokens: bool
    ) -> tuple[list[int], str]:
        """Return the tokens of a prompt, and their text.

        A text that is much too long is cut or refused before it is tokenized.
        """
        if not isinstance(add_special_tokens, bool):
            raise InvalidRequestError(
                f"add_special_tokens is {add_special_tokens!r:.80}; it must be True or False",
                param="add_special_tokens",
            )
        chat = RenderedChat(prompt, ()) if isinstance(prompt, str) else prompt
        if truncation is not None:
            return self._encode_truncated(chat, truncation, add_special_tokens)
        text = chat.text
        self._refuse_long(text)
        encoding = self._tokenizer.tokenize_chat(chat, add_special_tokens=add_special_tokens)
        self._check_length(len(encoding))
        token_ids: list[int] = encoding.ids
        self._check_vocabulary(token_ids, "prompt")
        return token_ids, text

    def _refuse_long(self, text: str) -> None:
        limit = self.info.max_prompt_len
        if len(text) > limit and self._bound.min_num_tokens(text, limit) > limit:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, which are more than {limit} tokens; "
                f"{self._length_limit()}",
                param="prompt",
            )

    def _encode_truncated(
        self, chat: RenderedChat, truncation: Truncation, add_special_tokens: bool
    ) -> tuple[list[int], str]:
        text = chat.text
        from_end = truncation.side == "left"
        length = len(self._bound.part_with(text, truncation.num_tokens + MARGIN, from_end=from_end))
        part = chat.part(len(text) - length, len(text)) if from_end else chat.part(0, length)
        encoding = self._tokenizer.tokenize_chat(part, add_special_tokens=add_special_tokens)
        if len(encoding) <= truncation.num_tokens:
            token_ids: list[int] = encoding.ids
        else:
            token_ids, of_text = truncation.within_added(encoding)
            text = self._tokenizer.decode(token_ids[of_text], skip_special_tokens=False)
        self._check_length(len(token_ids))
        self._check_vocabulary(token_ids, "prompt")
        return token_ids, text

    def _check_conversation(self, messages: Sequence[Mapping[str, Any]], limit: int) -> None:
        """Refuse a conversation with too much text for `limit` tokens before it is rendered."""
        length = sum([len(text_of(message["content"])) for message in messages])
        most = self._bound.max_characters(limit) if length > limit else None
        if most is not None and length > most:
            raise ContextLengthError(
                f"the conversation has {length} characters; a prompt has at most {limit} tokens, which are "
                f"at most {most} characters ({self.info.length_limit})",
                param="prompt",
            )

    def _check_length(self, num_tokens: int) -> None:
        if not num_tokens:
            raise InvalidRequestError("the prompt is empty; it must have at least one token", param="prompt")
        if num_tokens > self.info.max_prompt_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens; {self._length_limit()}", param="prompt"
            )

    def _length_limit(self) -> str:
        beside = "with at least one output token, " if self.info.pooling is None else ""
        return f"{beside}the limit is {self.info.max_prompt_len} ({self.info.length_limit})"

    def _check_vocabulary(self, token_ids: Iterable[int], param: str) -> None:
        size = self.info.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise InvalidRequestError(
                    f"{param} contains token id {token_id}; the vocabulary has ids 0 to {size - 1}",
                    param=param,
                )

    def _resolved_pooling(self, params: PoolingParams | None) -> PoolingParams:
        """Return `params` with the model's own way of pooling; None: the request asks for tokens."""
        own, model = self.info.pooling, self.info.model
        if own is None:
            raise InvalidRequestError(
                f"the model {model} generates, and its prompts cannot be pooled; use LLM.generate, or a "
                "model that is made for embeddings",
                param="pooling_params",
            )
        if params is None:
            raise InvalidRequestError(
                f"the model {model} pools each prompt and cannot generate; use LLM.embed, or a model that "
                "generates",
                param="model",
            )
        if params.activation is not None and not self.info.labels:
            raise InvalidRequestError(
                f"activation is {params.activation}, but {model} scores no labels; leave it out",
                param="activation",
            )
        kind = params.pooling_type or own.pooling_type
        if kind != own.pooling_type and "all" in (kind, own.pooling_type):
            raise InvalidRequestError(
                f"pooling_type is {kind}, but {model} was trained for {own.pooling_type}; leave it out",
                param="pooling_type",
            )
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)
        return params.resolved(own)

    def _check_dimensions(self, dimensions: int) -> None:
        sizes, size = self.info.row_sizes, self.info.row_size
        if sizes is None and dimensions != size:
            raise InvalidRequestError(
                f"dimensions is {dimensions}, but the rows of {self.info.model} have {size} numbers and were "
                "not trained to be cut (its config.json names no matryoshka_dimensions); leave it out",
                param="dimensions",
            )
        if dimensions > size or (sizes and dimensions not in (*sizes, size)):
            possible = ", ".join(map(str, sizes or ())) or f"1 to {size}"
            raise InvalidRequestError(
                f"dimensions is {dimensions}; it must be one of {possible}", param="dimensions"
            )

    def _resolve(
        self, params: SamplingParams, prompt_length: int, *, shorten_output: bool
    ) -> tuple[SamplingParams, int]:
        """Return `params` with all defaults resolved, checked against the engine's limits, and the seed."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, not {type(params).__name__}",
                param="sampling_params",
            )
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if token_ids := getattr(params, name):
                self._check_vocabulary(token_ids, name)
        for sequence in params.bad_words_token_ids:
            self._check_vocabulary(sequence, "bad_words_token_ids")
        for name in ("stop", "bad_words"):
            for word in getattr(params, name):
                require_text(word, name)
        max_tokens = self._max_tokens(params, prompt_length, shorten_output=shorten_output)
        seed = int.from_bytes(os.urandom(8)) >> 1 if params.seed is None else params.seed
        params = params.with_checked(max_tokens=max_tokens, seed=seed)
        if params.bad_words:
            banned = dict.fromkeys((*params.bad_words_token_ids, *self._of_bad_words(params.bad_words)))
            params = dataclasses.replace(params, bad_words_token_ids=tuple(banned))
        return params, seed

    def _with_rankable_tokens(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the additional log-probabilities that ranking needs."""
        if params.beam_width:
            return dataclasses.replace(params, temperature=0.0, logprobs=self._num_candidates(params))
        if params.is_ranked and params.logprobs is None:
            return dataclasses.replace(params, logprobs=0)  # of the chosen tokens only
        return params

    def _num_candidates(self, params: SamplingParams) -> int:
        """Return how many of the most likely tokens a beam search needs at each position."""
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                raise InvalidRequestError(
                    f"{name} is {getattr(params, name)}; beam search returns only "
                    "each completion's cumulative_logprob: leave it out",
                    param=name,
                )
        needed = num_candidates(params, self._tokenizer.eos_token_ids)
        limit = min(MAX_LOGPROBS, self.info.vocab_size)
        if needed > limit:
            raise InvalidRequestError(
                f"beam_width is {params.beam_width} and {needed - params.beam_width} token ids end the "
                f"output, together {needed}; the limit is {limit}; lower beam_width, or give fewer "
                "stop_token_ids",
                param="beam_width",
            )
        return needed

    def _max_tokens(self, params: SamplingParams, prompt_length: int, *, shorten_output: bool) -> int:
        limit = self.info.max_model_len
        named = f"{limit} ({self.info.length_limit})" if self.info.cache_knob else f"max_model_len {limit}"
        room = limit - prompt_length
        if params.max_tokens is not None and params.max_tokens > room and not shorten_output:
            raise ContextLengthError(
                f"the prompt has {prompt_length} tokens and max_tokens is {params.max_tokens}, together "
                f"{prompt_length + params.max_tokens}; the limit is {named}, which leaves max_tokens {room}",
                param="max_tokens",
            )
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}; after a prompt of {prompt_length} tokens, {named} "
                f"leaves {room}",
                param="min_tokens",
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)


def _taken(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of these names, which are removed."""
    return {name: options.pop(name) for name in names if name in options}


def _last_of(places: Sequence[int], count: int) -> slice:
    """Return where the last tokens of the second of two texts are, of which `places` has all."""
    if len(places) < count:
        raise ContextLengthError(
            f"the first text alone leaves no room: {count} tokens must be cut, and the second text has only "
            f"{len(places)}; give a shorter first text, or a larger truncate_prompt_tokens",
            param="prompt",
        )
    return slice(places[-1] + 1 - count, places[-1] + 1)


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index`; the first has the request's.

    The others are successive outputs of SplitMix64 (Steele, Lea and Flood 2014) seeded with `seed`, without
    their lowest bit.
    """
    if index == 0:
        return seed
    mixed = (seed + index * _GOLDEN_GAMMA) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (mixed ^ (mixed >> 31)) >> 1


def _checked_time(arrival_time: object) -> float:
    if (
        isinstance(arrival_time, int | float)
        and not isinstance(arrival_time, bool)
        and math.isfinite(arrival_time)
    ):
        return float(arrival_time)
    raise InvalidRequestError(
        f"arrival_time is {arrival_time!r}; it must be a finite number, in seconds of time.monotonic()",
        param="arrival_time",
    )


def _sequences_of_bad_words(tokenizer: Tokenizer, words: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Return the token sequences of all bad words, both at the start of a word and within one."""
    spellings = (spelling for word in words for spelling in (word, f" {word}"))
    sequences = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    return [sequence for sequence in sequences if sequence]
