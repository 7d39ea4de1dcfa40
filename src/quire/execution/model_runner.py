"""Running one step: the ragged batch of prefill chunks and decodes through the model, and the next tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from quire.execution.arrays import Int64Array
from quire.execution.logprobs import position_logprobs
from quire.execution.persistent_batch import InconsistentPlanError, PersistentBatch, RunnerRequest
from quire.execution.sampler import Sampler, SamplerOutput, nonfinite_error
from quire.kernels.batch import AttentionBatch
from quire.kv.tensors import KVCacheTensors
from quire.models.decoder import Decoder
from quire.step import NO_TOKEN, ModelRunnerOutput, PositionLogprobs, SchedulerOutput

_PROMPT_LOGITS_ELEMENTS = 1 << 23  # 32 MiB of float32 at a time


class ModelRunner:
    """Executes the steps that the scheduler plans.

    Sampled tokens are appended at once; the scheduler ends a request by naming it in `finished_req_ids`.

    Args:
        model: the decoder.
        kv_cache: where keys and values live; may hold garbage.
        max_num_seqs: number of slots.
        max_model_len: most tokens of a request, prompt and output.
        block_size: tokens per KV block.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCacheTensors,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._vocab_size = model.config.vocab_size
        self._sampler = Sampler(max_num_seqs, self._vocab_size)
        self._batch = PersistentBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=kv_cache.num_blocks,
        )

    @property
    def num_requests(self) -> int:
        """Requests that hold memory here, running or preempted."""
        return len(self._batch)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and return its tokens; `sampled_token_ids` is [R, 1].

        Raises:
            InconsistentPlanError: the plan contradicts what the runner knows.
        """
        self._apply_changes(output)
        sampled_token_ids = np.full((len(output.slots), 1), NO_TOKEN, dtype=np.int32)
        result = ModelRunnerOutput(output.request_ids, sampled_token_ids)
        if len(output.slots):
            self._batch.check(output)
            hidden = self._forward(output)
            self._batch.note_computed(output)
            self._report_prompt_logprobs(output, hidden, result)
            self._sample(output, hidden, result)
        return result

    def _apply_changes(self, output: SchedulerOutput) -> None:
        """Bring the rows up to date; rows are left before they are entered."""
        for request_id in output.preempted_req_ids:
            self._sampler.table.clear(self._batch.preempt(request_id))
        for request_id in output.finished_req_ids:
            slot = self._batch.finish(request_id)
            if slot is not None:
                self._sampler.table.clear(slot)
        for new in output.scheduled_new_reqs:
            self._write_sampling(self._batch.admit(new))
        for resumed in output.scheduled_cached_reqs.resumed:
            self._write_sampling(self._batch.resume(resumed))
        self._batch.extend_block_tables(output.scheduled_cached_reqs)

    def _write_sampling(self, request: RunnerRequest) -> None:
        self._sampler.table.write(
            request.slot,
            request.sampling_params,
            prompt_token_ids=self._batch.token_ids[request.slot, : request.num_prompt_tokens],
            eos_token_ids=request.eos_token_ids,
        )

    def _forward(self, output: SchedulerOutput) -> torch.Tensor:
        """Return the last hidden state of every scheduled token, [T, hidden], and write its KV."""
        batch = AttentionBatch.build(
            output.num_computed_tokens,
            output.num_tokens,
            self._batch.block_tables(output.slots),
            self._block_size,
        )
        rows = np.repeat(output.slots, output.num_tokens)
        token_ids = self._batch.token_ids[rows, batch.positions.numpy()].astype(np.int64)
        return self._model.forward(torch.from_numpy(token_ids), self._kv_cache, batch)

    # -- next tokens ---------------------------------------------------------------------------------------

    def _sample(self, output: SchedulerOutput, hidden: torch.Tensor, result: ModelRunnerOutput) -> None:
        rows = np.flatnonzero(self._batch.catches_up(output))
        if not rows.size:
            return
        slots = output.slots[rows].astype(np.int64)
        last = (np.cumsum(output.num_tokens) - 1)[rows]
        sampled = self._sampler.sample(
            self._model.logits(hidden[torch.from_numpy(last)]),
            slots,
            self._batch.num_tokens[slots],
            self._batch.token_ids,
        )
        sound = sampled.token_ids != NO_TOKEN
        self._batch.append(slots[sound], sampled.token_ids[sound])
        result.sampled_token_ids[rows, 0] = sampled.token_ids
        _name_rows(sampled, [output.request_ids[row] for row in rows.tolist()], result)

    # -- prompt log-probabilities --------------------------------------------------------------------------

    def _report_prompt_logprobs(
        self, output: SchedulerOutput, hidden: torch.Tensor, result: ModelRunnerOutput
    ) -> None:
        """Report, for requests that ask, the prompt tokens that follow the positions of this step's chunk."""
        asked_end = self._batch.prompt_logprobs_end[output.slots]
        first_rows = np.cumsum(output.num_tokens) - output.num_tokens
        for row in np.flatnonzero(asked_end).tolist():
            request = self._batch.running(int(output.slots[row]))
            chunk_start = int(output.num_computed_tokens[row])
            start = request.num_prompt_logprobs_reported
            end = min(chunk_start + int(output.num_tokens[row]), int(asked_end[row]))
            if start < chunk_start:
                raise InconsistentPlanError(
                    f"request {request.request_id!r} asks for prompt_logprobs but is scheduled from token "
                    f"{chunk_start}, with {start} positions reported: its prompt must not come from a cache"
                )
            if start >= end:
                continue
            offset = int(first_rows[row]) - chunk_start
            error = self._report_positions(request, hidden[start + offset : end + offset], result)
            if error is not None:
                result.errors[request.request_id] = error

    def _report_positions(
        self, request: RunnerRequest, hidden: torch.Tensor, result: ModelRunnerOutput
    ) -> str | None:
        """Report the tokens that follow the positions of `hidden` [N, hidden]; return an error or None."""
        start = request.num_prompt_logprobs_reported
        next_ids = self._batch.token_ids[request.slot, start + 1 : start + 1 + len(hidden)].astype(np.int64)
        count = request.sampling_params.prompt_logprobs or 0
        reported: list[PositionLogprobs] = []
        for rows in _pieces(len(hidden), max(1, _PROMPT_LOGITS_ELEMENTS // self._vocab_size)):
            logits = self._model.logits(hidden[rows]).cpu().numpy()
            maxima = logits.max(axis=1)
            unsound = np.flatnonzero(~np.isfinite(maxima))
            if unsound.size:
                return nonfinite_error(maxima[unsound[0]])
            wanted: Int64Array = np.full(len(logits), count, dtype=np.int64)
            reported += position_logprobs(logits, next_ids[rows], wanted)
        result.prompt_logprobs[request.request_id] = reported
        request.num_prompt_logprobs_reported += len(reported)
        self._batch.prompt_logprobs_end[request.slot] = request.prompt_logprobs_end
        return None


def _pieces(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _name_rows(sampled: SamplerOutput, request_ids: list[str], result: ModelRunnerOutput) -> None:
    """Put what the sampler says of rows into `result`, by request id."""
    for row, logprobs in sampled.logprobs.items():
        result.logprobs[request_ids[row]] = [logprobs]
    for row, error in sampled.errors.items():
        result.errors[request_ids[row]] = error
