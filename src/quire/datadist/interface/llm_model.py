"""A model whose requests move from a PROMPT to a DECODER."""

from __future__ import annotations

from typing import Any

from quire.datadist.argument_checks import U32, ArgumentChecks
from quire.datadist.caches.tensor import Tensor
from quire.datadist.interface.decoder_model import DecoderModel
from quire.datadist.interface.prompt_model import PromptModel
from quire.datadist.peers import LLMReq
from quire.datadist.status import LLMStatusCode, failure, invalid


class LLMModel:
    """A model added by `LLMDataDist.add_model`.

    Every method raises `LLMException`: LLM_ENGINE_FINALIZED after `finalize`, LLM_PARAM_INVALID on the wrong
    role, and its own errors.
    """

    def __init__(self, model_id: int, model: PromptModel | DecoderModel, *, takes_tensors: bool) -> None:
        self._model_id = model_id
        self._model = model
        self._takes_tensors = takes_tensors
        self._is_open = True

    @property
    def model_id(self) -> int:
        """Counts from 0 in the order of `add_model`; must be the same on both sides."""
        return self._model_id

    def predict(self, llm_req: LLMReq | list[LLMReq] | tuple[LLMReq, ...], inputs: Any, **kwargs: Any) -> Any:
        """Run the model, and return its runner's result.

        On a PROMPT, each request gets a slot of a new cache, which can be pulled as soon as this returns. On
        a DECODER, request i must have been merged into slot i. With paging, no slots are checked.

        Args:
            llm_req: requests by slot; `LLMReq()` is an idle slot.
            inputs: for the runner; with a default runner, a list or tuple of `Tensor`.
            kwargs: for the runner.

        Raises:
            LLMException: LLM_PARAM_INVALID (number or place of requests), LLM_REPEAT_REQUEST,
                LLM_PREFIX_NOT_EXIST, LLM_FEATURE_NOT_ENABLED (prefixes), LLM_SEQ_LEN_OVER_LIMIT,
                LLM_DEVICE_OUT_OF_MEMORY; and any error of the runner: then no key can be pulled.
        """
        requests = [llm_req] if isinstance(llm_req, LLMReq) else llm_req
        with ArgumentChecks() as check:
            checked = check.items("llm_req", requests, LLMReq)
            self._check_inputs(check, inputs)
        self._require_open()
        return self._model.predict(checked, inputs, kwargs)

    def pull_kv(self, llm_req: LLMReq) -> None:
        """Pull a request's slot into the staging slot, replacing its contents. On a DECODER.

        Raises:
            LLMException: as `KvCacheManager.pull_cache`; also LLM_PARAM_INVALID with paging.
        """
        with ArgumentChecks() as check:
            check.instance("llm_req", llm_req, LLMReq)
        self._decoder().pull(llm_req)

    def merge_kv(self, llm_req: LLMReq, batch_index: int, batch_id: int = 0) -> None:
        """Move the staged KV into slot `batch_index`. On a DECODER.

        Raises:
            LLMException: LLM_PARAM_INVALID (no such slot, or another batch than 0), LLM_KV_CACHE_NOT_EXIST
                (the request is not staged).
        """
        with ArgumentChecks() as check:
            check.instance("llm_req", llm_req, LLMReq)
            slot = check.integer("batch_index", batch_index, U32)
            batch = check.integer("batch_id", batch_id, U32)
        self._decoder().merge(llm_req, slot, batch)

    def pull_blocks(
        self,
        llm_req: LLMReq,
        prompt_blocks: list[int] | tuple[int, ...] = (),
        decoder_blocks: list[int] | tuple[int, ...] = (),
    ) -> None:
        """Pull blocks. The request's key is not consumed. On a DECODER, with paging.

        Args:
            llm_req: the request.
            prompt_blocks: of the PROMPT's model; empty: that model has slots, and the request's is spread.
            decoder_blocks: where they go, in order.

        Raises:
            LLMException: as `KvCacheManager.pull_blocks`; LLM_FEATURE_NOT_ENABLED without paging.
        """
        with ArgumentChecks() as check:
            check.instance("llm_req", llm_req, LLMReq)
            sources = check.indices("prompt_blocks", prompt_blocks)
            targets = check.indices("decoder_blocks", decoder_blocks)
        self._decoder().pull_blocks(llm_req, sources, targets)

    def preload_prompt_prefix(self, llm_req: LLMReq, inputs: Any, **kwargs: Any) -> None:
        """Compute a prefix, and keep it under `prefix_id` for requests that begin with it. On a PROMPT.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED, LLM_PARAM_INVALID (no prefix_id, or with paging),
                LLM_PREFIX_ALREADY_EXIST.
        """
        with ArgumentChecks() as check:
            check.instance("llm_req", llm_req, LLMReq)
            self._check_inputs(check, inputs)
        self._prompt().preload_prefix(llm_req, inputs, kwargs)

    def release_prompt_prefix(self, llm_req: LLMReq) -> None:
        """Release a prefix. On a PROMPT.

        Raises:
            LLMException: LLM_PREFIX_NOT_EXIST.
        """
        with ArgumentChecks() as check:
            check.instance("llm_req", llm_req, LLMReq)
        self._prompt().release_prefix(llm_req)

    def complete(self, llm_req: LLMReq) -> None:
        """Release a request on a DECODER; called by `LLMDataDist.complete_request`."""
        if isinstance(self._model, DecoderModel):
            self._model.complete(llm_req)

    def close(self) -> None:
        """Make all later calls fail; called by `LLMDataDist.finalize` when the caches are released."""
        self._is_open = False
        self._model.close()

    def _decoder(self) -> DecoderModel:
        self._require_open()
        if not isinstance(self._model, DecoderModel):
            raise invalid("this is for a DECODER, but the role is PROMPT")
        return self._model

    def _prompt(self) -> PromptModel:
        self._require_open()
        if not isinstance(self._model, PromptModel):
            raise invalid("this is for a PROMPT, but the role is DECODER")
        return self._model

    def _check_inputs(self, check: ArgumentChecks, inputs: Any) -> None:
        if self._takes_tensors:
            check.items("inputs", inputs, Tensor)

    def _require_open(self) -> None:
        if not self._is_open:
            raise failure(LLMStatusCode.LLM_ENGINE_FINALIZED, "finalized; call init and add_model again")
