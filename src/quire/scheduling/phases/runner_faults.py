"""What a model runner returned, checked against the plan: a fault becomes an error, never a silent wait."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from quire.scheduling.accounts.running_slots import RunningSlots
from quire.step import NO_TOKEN, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

NO_SAMPLE = (
    "the model runner returned no token, or row, for this request, although all of its tokens were computed"
)


def checked(
    planned: SchedulerOutput, computed: ModelRunnerOutput, running: RunningSlots
) -> ModelRunnerOutput:
    """Return what a step computed, with an error for each of its requests that it leaves without an answer.

    An output whose rows are not those of the plan is that of a failed step.
    """
    malformed = _malformed_part(planned, computed)
    if malformed:
        return ModelRunnerOutput.failed(planned, f"the model runner returned {malformed}")
    if computed.request_ids is not planned.request_ids and computed.request_ids != planned.request_ids:
        return _failed(planned, computed, f"requests {computed.request_ids}, planned {planned.request_ids}")
    if len(computed.sampled_token_ids) != len(planned.slots):
        rows = f"{len(computed.sampled_token_ids)} rows of tokens for {len(planned.slots)} requests"
        return _failed(planned, computed, rows)
    missing = _missing_samples(planned, computed, running) if computed.is_applied else {}
    return dataclasses.replace(computed, errors=missing | computed.errors) if missing else computed


def _malformed_part(planned: SchedulerOutput, computed: object) -> str:
    """Return which part of an output has a wrong type or shape; empty: none."""
    if not isinstance(computed, ModelRunnerOutput):
        return f"{type(computed).__name__}, not ModelRunnerOutput"
    for name in ("sampled_token_ids", "draft_token_ids"):
        tokens = getattr(computed, name)
        if name == "draft_token_ids" and tokens is None:
            continue
        if not (isinstance(tokens, np.ndarray) and tokens.ndim == 2 and tokens.dtype.kind == "i"):
            return f"{name} that are not an array [R, tokens] of integers: {tokens!r:.100}"
    drafts = computed.draft_token_ids
    if drafts is not None and len(drafts) != len(computed.sampled_token_ids):
        return f"{len(drafts)} rows of drafts for {len(computed.sampled_token_ids)} requests"
    pauses, shape = computed.num_steps_without_drafts, (len(computed.sampled_token_ids),)
    if pauses is not None and not _are_counts(pauses, shape):
        return (
            f"num_steps_without_drafts that are no numbers of steps for {shape[0]} requests: {pauses!r:.100}"
        )
    for name in ("logprobs", "prompt_logprobs", "pooled", "errors", "error_params"):
        if not isinstance(getattr(computed, name), dict):
            return f"{name} that are {type(getattr(computed, name)).__name__}, not dict"
    return ""


def _are_counts(found: object, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(found, np.ndarray)
        and found.shape == shape
        and found.dtype.kind == "i"
        and (found >= 0).all().item()
    )


def without_past_errors(
    planned: SchedulerOutput, computed: ModelRunnerOutput, running: RunningSlots
) -> ModelRunnerOutput:
    """Drop the errors of requests that have left their slot: their ids may have been reused."""
    if not computed.errors:
        return computed
    is_there = running.occupied[planned.slots].tolist()
    there = {request_id for request_id, there in zip(planned.request_ids, is_there, strict=True) if there}
    return dataclasses.replace(
        computed, errors={name: error for name, error in computed.errors.items() if name in there}
    )


def _failed(planned: SchedulerOutput, computed: ModelRunnerOutput, what: str) -> ModelRunnerOutput:
    failed = ModelRunnerOutput.failed(
        planned, f"the model runner returned another step than was planned: {what}"
    )
    return dataclasses.replace(failed, kv_connector_output=computed.kv_connector_output)


def valid_connector_output(output: object, num_blocks: int) -> KVConnectorOutput:
    """Return the connector's report without entries that name no request or block."""
    if not isinstance(output, KVConnectorOutput):
        logger.error("the KV connector has reported %s, not KVConnectorOutput", type(output).__name__)
        return KVConnectorOutput()
    return KVConnectorOutput(
        _valid(output.finished_sending, "finished_sending", _is_name),
        _valid(output.finished_receiving, "finished_receiving", _is_name),
        frozenset(
            map(
                int,
                _valid(output.failed_block_ids, "failed_block_ids", lambda one: _is_block(one, num_blocks)),
            )
        ),
    )


def _valid(found: object, what: str, is_valid: Callable[[object], bool]) -> frozenset[Any]:
    """Return those of the items that are valid; none if they cannot even be read."""
    try:
        items = list(found) if isinstance(found, Iterable) and not isinstance(found, str) else [found]
        valid = [item for item in items if is_valid(item)]
    except Exception:
        logger.exception("what the KV connector has reported as %s cannot be read", what)
        return frozenset()
    if len(valid) < len(items):
        logger.error("the KV connector has reported as %s what names no request or block", what)
    return frozenset(valid)


def _is_name(item: object) -> bool:
    return isinstance(item, str)


def _is_block(item: object, num_blocks: int) -> bool:
    return isinstance(item, (int, np.integer)) and 0 <= int(item) < num_blocks


def _missing_samples(
    planned: SchedulerOutput, computed: ModelRunnerOutput, running: RunningSlots
) -> dict[str, str]:
    """Return the error of each request that was to sample and did not."""
    samples = planned.samples
    lacks = samples & (computed.sampled_token_ids[:, 0] == NO_TOKEN)
    missing = [
        name
        for row in lacks.nonzero()[0].tolist()
        if (name := planned.request_ids[row]) not in computed.pooled
    ]
    for row in (samples & running.is_beam[planned.slots]).nonzero()[0].tolist():
        if planned.request_ids[row] not in computed.logprobs:
            missing.append(planned.request_ids[row])
    return dict.fromkeys(missing, NO_SAMPLE)
