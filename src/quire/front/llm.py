"""`LLM`: offline batches of prompts, by default in the caller's process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quire.config import BUILT_IN_MODEL
from quire.engine.messages import EngineInfo
from quire.front.arguments import (
    PromptForm,
    Tools,
    conversations_of,
    engine_config,
    one_for_each,
    prompts_of,
    text_pairs,
    tools_for_each,
)
from quire.front.batch import Batch, Output
from quire.front.kv_files import KVSaving, Prompt, restore_message
from quire.front.progress import batch_progress
from quire.front.session import Session
from quire.front.similarity import different_texts, pair_output
from quire.front.text.input_processor import InputProcessor, ProcessedRequest
from quire.front.text.output_processor import RequestState
from quire.pooling_params import PoolingParams
from quire.request_options import require_text
from quire.request_output import PoolingRequestOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.scheduling.outputs import SchedulerStats

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

Conversation = Sequence[dict[str, Any]]


class LLM:
    """A model and its engine, for offline batches.

    Calls from several threads, including `shutdown`, run one at a time; `AsyncLLM` runs requests together.

    Args:
        model: the built-in "mini" or "mini-embed", a local directory, a GGUF file, or a name on the Hugging
            Face hub.
        engine_process: run the engine in its own process. The constructor returns at once;
            `wait_until_ready`, or the first use, waits for it.
        on_load_progress: called with (bytes read, total bytes) while the weights load.
        **options: fields of `EngineConfig` and of its parts (`SchedulerConfig`, `SpeculationConfig`,
            `KVTierConfig` and so on); or a whole part, such as `scheduler=SchedulerConfig(...)`.

    Raises:
        ConfigError: an option is unknown (the message suggests the nearest one), or a value is invalid.
        ModelError: the model cannot be found, is malformed or is not supported.
    """

    def __init__(
        self,
        model: str = BUILT_IN_MODEL,
        *,
        engine_process: bool = False,
        on_load_progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        self.config = engine_config(model, options)
        self._session = Session(self.config, engine_process=engine_process, on_progress=on_load_progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    @property
    def info(self) -> EngineInfo:
        """Information about the engine; waits until it is ready."""
        return self.wait_until_ready()

    def wait_until_ready(self) -> EngineInfo:
        """Wait until the engine accepts requests.

        Raises:
            QuireError: the engine could not be built.
        """
        return self._session.wait_until_ready()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._session.tokenizer

    def generate(
        self,
        prompts: PromptForm | Sequence[PromptForm],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete prompts and return their outputs in the same order.

        A request that fails by itself, because its grammar is invalid, it timed out or a step failed, has
        finish reason "error" and an error message. Ctrl-C or any other exception aborts all requests; the
        engine stays usable.

        Args:
            prompts: one prompt or several; each is text, token ids, or `{"prompt": text}` or
                `{"prompt_token_ids": ids}`.
            sampling_params: for all prompts, or one for each; None: the defaults.
            progress: show a progress bar on standard error.
            use_tqdm: vLLM's name of `progress`, which it overrides.
            options: for all prompts: fields of `RequestOptions` (priority, cache_salt, tenant, timeout, …);
                add_special_tokens, whether to add the model's special tokens to a text (True); and
                truncate_prompt_tokens, the number of a prompt's tokens that are kept (-1: as many as fit
                beside max_tokens), with truncation_side, the side that is cut off ("left" or "right").

        Raises:
            InvalidRequestError: a prompt or its parameters are invalid; nothing was run.
            ConfigError: there is no option of that name.
            EngineDeadError: the engine has ended.
        """
        self._session.wait_until_ready()
        inputs = self._session.requests.inputs
        batch = prompts_of(prompts)
        params = one_for_each(batch, sampling_params, SamplingParams, "sampling_params")
        with self._session.turn:
            requests = [inputs.process(*request, **options) for request in zip(batch, params, strict=True)]
            return self._run(requests, RequestState.snapshot, progress=progress, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Tools | Sequence[Tools | None] | None = None,
        progress: bool = False,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Like `generate`, for one or several conversations, which the chat template turns into prompts.

        Args:
            messages: one conversation (a list of messages as in OpenAI's API) or several. The prompt is
                the same as a server's; content is text or text parts, which form no special
                tokens (unless special_tokens_in_content is set).
            sampling_params: as for `generate`.
            tools: tools that the model may call, as OpenAI's API describes them: for all conversations, or a
                list (or None) for each.
            progress: as for `generate`.
            use_tqdm: as for `generate`.
            options: as for `generate`, but add_special_tokens is False by default, as most templates write
                those tokens; and chat_template_kwargs, variables for the template;
                continue_final_message, whether the answer continues the last message (False); and
                add_generation_prompt, whether the prompt ends with the header of the model's message
                (unless the last message is continued).

        Raises:
            InvalidRequestError: a conversation or its parameters are invalid, or the template refuses it;
                nothing was run.
            ConfigError: there is no option of that name.
            EngineDeadError: the engine has ended.
        """
        self._session.wait_until_ready()
        inputs = self._session.requests.inputs
        batch = conversations_of(messages)
        params = one_for_each(batch, sampling_params, SamplingParams, "sampling_params")
        told = tools_for_each(batch, tools)
        with self._session.turn:
            requests = [
                inputs.process_chat(conversation, one, tools=known, **options)
                for conversation, one, known in zip(batch, params, told, strict=True)
            ]
            return self._run(requests, RequestState.snapshot, progress=progress, use_tqdm=use_tqdm)

    def encode(
        self,
        prompts: PromptForm | Sequence[PromptForm],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        progress: bool = False,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Make a row of each prompt, with a model that is made for that, and return them in the same order.

        A row depends on nothing but its prompt, whatever else the engine computes. A request that fails by
        itself has finish reason "error", as with `generate`.

        Args:
            prompts: as for `generate`; up to the model's maximum length, and if the model is not causal up to
                `max_num_batched_tokens`.
            pooling_params: for all prompts, or one for each; None: the model's own.
            progress, use_tqdm: as for `generate`.
            options: as for `generate`; truncate_prompt_tokens -1 keeps as many as fit; and prompt_name, which
                of the model's prompts comes before texts (empty: none; default: the model's own).

        Raises:
            InvalidRequestError: a prompt or its parameters are invalid, or the model generates; nothing was
                run.
            ConfigError: there is no option of that name.
            EngineDeadError: the engine has ended.
        """
        self._session.wait_until_ready()
        inputs = self._session.requests.inputs
        batch = prompts_of(prompts)
        params = one_for_each(batch, pooling_params, PoolingParams, "pooling_params")
        with self._session.turn:
            requests = [
                inputs.process_pooling(prompt, one, **options)
                for prompt, one in zip(batch, params, strict=True)
            ]
            return self._run(requests, RequestState.pooling_snapshot, progress=progress, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: PromptForm | Sequence[PromptForm],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Return the embeddings of texts: the rows that `encode` makes; arguments and errors as there."""
        return self.encode(prompts, pooling_params, task="embed", **options)

    def classify(
        self,
        prompts: PromptForm | Sequence[PromptForm],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Return the probabilities of the labels `info.labels` of each text.

        Arguments and errors are as for `encode`; `InvalidRequestError` also if the model has no labels.
        """
        return self.encode(prompts, pooling_params, task="classify", **options)

    def reward(
        self, prompts: PromptForm | Sequence[PromptForm], **options: Any
    ) -> list[PoolingRequestOutput]:
        """Return the rewards of texts: scores as the last layer has them; see `classify`."""
        return self.classify(prompts, PoolingParams(activation=False), **options)

    def score(
        self,
        texts_1: str | Sequence[str],
        texts_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        progress: bool = False,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Return how well texts go together, each pair a row of one number.

        A model of one label scores each pair. One that makes embeddings makes one of each text; the score is
        how alike two are, by the cosine or as the model says.

        Args:
            texts_1: a text, which all of `texts_2` are scored with, or one for each of them.
            texts_2: the others. The end of these is cut by `truncate_prompt_tokens`.
            pooling_params: how to score; None: the model's own.
            progress, use_tqdm, options: as for `encode`; prompt_name is that of `texts_1`.

        Raises:
            InvalidRequestError: there are not equally many texts, one is invalid, or the model scores
                no pairs.
            EngineDeadError: the engine has ended.
        """
        self._session.wait_until_ready()
        inputs = self._session.requests.inputs
        params = PoolingParams() if pooling_params is None else pooling_params
        pairs = text_pairs(texts_1=texts_1, texts_2=texts_2)
        run = functools.partial(
            self._run, snapshot=RequestState.pooling_snapshot, progress=progress, use_tqdm=use_tqdm
        )
        with self._session.turn:
            if inputs.info.makes_embeddings:
                return _similarities(inputs, pairs, params, run, **options)
            return run(
                [
                    inputs.process_pooling(first, params, second_text=second, task="score", **options)
                    for first, second in pairs
                ]
            )

    def stats(self) -> SchedulerStats:
        """Return the current state of the scheduler.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._session.stats()

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache and KV tier; while any block is in use, do nothing and return False.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._session.reset_prefix_cache()

    def save_kv(self, prompt: Prompt, path: str | Path, *, cache_salt: str = "") -> int:
        """Save the KV of a prompt's full blocks to a file, after computing what the KV tier lacks.

        Args:
            prompt: text, token ids, or a conversation (a list of messages), of at least one block of tokens.
            path: path of the file; replaced if it exists.
            cache_salt: cache salt of the requests that computed the KV.

        Returns:
            The number of tokens whose KV was saved.

        Raises:
            KVFileError: there is no KV tier, it is too small, the prompt fills no block, or the file cannot
                be written.
            InvalidRequestError: the prompt is invalid.
            EngineDeadError: the engine has ended.
        """
        self.wait_until_ready()
        saving = KVSaving(self._session.requests, prompt, path, cache_salt)
        while not saving.note(self._session.call(saving.message)):
            self.generate([saving.token_ids], saving.params, cache_salt=cache_salt)
        return saving.num_tokens

    def restore_kv(self, path: str | Path, *, cache_salt: str = "") -> list[int]:
        """Restore the KV of a prompt to the KV tier, where requests with this prefix find it.

        Args:
            path: path of a file that `save_kv` has written.
            cache_salt: cache salt of the requests that may use the KV.

        Returns:
            The token ids of the part of the prompt that has KV.

        Raises:
            KVFileError: the file cannot be read, is damaged, or its KV was computed with another model,
                dtype, block size or rope; or there is no KV tier, or it is too small.
            EngineDeadError: the engine has ended.
        """
        return self._session.call(restore_message(path, cache_salt)).token_ids

    def shutdown(self) -> None:
        """Shut the engine down; this object cannot be used afterwards."""
        self._session.close()

    def _run(
        self,
        requests: list[ProcessedRequest],
        snapshot: Callable[[RequestState], Output],
        *,
        progress: bool,
        use_tqdm: bool | None,
    ) -> list[Output]:
        batch = Batch(self._session.requests, requests, 2 * self.config.scheduler.max_num_seqs, snapshot)
        if not (progress if use_tqdm is None else use_tqdm):
            return batch.run(self._session.receive_outputs)
        with batch_progress(len(requests), shown=True) as report:

            def receive_outputs() -> None:
                self._session.receive_outputs()
                report(len(batch.results), batch.num_generated_tokens)

            outputs = batch.run(receive_outputs)
            report(len(outputs), batch.num_generated_tokens)
        return outputs


def _similarities(
    inputs: InputProcessor,
    pairs: Sequence[tuple[Any, Any]],
    params: PoolingParams,
    run: Callable[[list[ProcessedRequest]], list[PoolingRequestOutput]],
    *,
    prompt_name: str | None = None,
    **options: Any,
) -> list[PoolingRequestOutput]:
    """Return the scores of pairs of texts, of which each different one is embedded once."""
    for text in itertools.chain.from_iterable(pairs):
        require_text(text, "prompt", allow_empty=False)
    options = {"truncation_side": "right", **options}
    texts, numbers = different_texts(pairs)
    outputs = run(
        [
            inputs.process_pooling(
                text, params, task="embed", prompt_name=None if side else prompt_name, **options
            )
            for side, text in texts
        ]
    )
    return [pair_output(inputs.info.similarity, outputs[one], outputs[other]) for one, other in numbers]
