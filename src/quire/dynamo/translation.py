"""Requests and answers of Dynamo's workers, in Quire's words; needs no Dynamo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from quire.config import EngineRole
from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, RequestOutput
from quire.status import FinishReason
from quire.structured_outputs import STRUCTURE_KINDS, StructuredOutputsParams

Chunk = dict[str, Any]
"""A `GenerateChunk` of Dynamo."""

_SAMPLING_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
    "seed",
)
_STOP_FIELDS = ("max_tokens", "min_tokens", "ignore_eos")

# What Dynamo's front end does itself, and values that ask for nothing.
_SAMPLING_IGNORED: Mapping[str, Any] = {
    "n": (1,),  # Dynamo takes the end of one completion for that of all
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "include_stop_str_in_output": (True, False),
}
_STRUCTURE_IGNORED: Mapping[str, Any] = {"backend": ("auto", "llguidance")}
_REQUEST_REFUSED = (
    "multi_modal_data",
    "mm_processor_kwargs",
    "encoder_result",
    "prompt_embeds",
    "bootstrap_info",
    "batch_token_ids",
)

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "cancelled"}


def sampling_fields(request: Mapping[str, Any], role: EngineRole) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a request gives; of a prompt that is only computed, few.

    Raises:
        InvalidRequestError: the request asks for what is not supported, or is malformed.
    """
    for name in _REQUEST_REFUSED:
        if request.get(name):
            raise _unsupported(name, request[name])
    if (passed_on := _given(request, "extra_args").get("sampling_options")) is not None:
        raise _unsupported("extra_args.sampling_options", passed_on)
    sampling = _given(request, "sampling_options")
    fields = {name: sampling.pop(name) for name in _SAMPLING_FIELDS if name in sampling}
    if (top_k := sampling.pop("top_k", None)) is not None:
        fields["top_k"] = 0 if top_k == -1 else top_k
    if (structure := sampling.pop("guided_decoding", None)) is not None:
        fields["structured_outputs"] = _structured_outputs(structure)
    _refuse_rest("sampling_options", sampling, _SAMPLING_IGNORED)
    stop = _given(request, "stop_conditions")
    stop.pop("stop", None)  # the front end looks for them in the text, and then stops the request
    fields |= {name: stop.pop(name) for name in _STOP_FIELDS if name in stop}
    stop_ids = _token_ids(stop, "stop_token_ids") + _token_ids(stop, "stop_token_ids_visible")
    eos_ids = _token_ids(stop, "stop_token_ids_hidden")  # what the model's files say
    fields["stop_token_ids"] = stop_ids if fields.get("ignore_eos") else stop_ids + eos_ids
    _refuse_rest("stop_conditions", stop, {})
    output = _given(request, "output_options")
    if (logprobs := output.get("logprobs")) is not None:
        fields["logprobs"] = logprobs
    if output.get("prompt_logprobs") is not None:
        raise _unsupported("output_options.prompt_logprobs", output["prompt_logprobs"])
    if role != "prefill":
        return fields
    left_out = ("min_tokens", "logprobs", "structured_outputs")
    return {name: value for name, value in fields.items() if name not in left_out} | {"max_tokens": 1}


def request_options(request: Mapping[str, Any], role: EngineRole) -> dict[str, Any]:
    """Return the other options of a request: those of `RequestOptions`.

    Raises:
        InvalidRequestError: the request asks for what is not supported, or is malformed.
    """
    routing = _given(request, "routing")
    if routing.get("lora_name"):
        raise _unsupported("routing.lora_name", routing["lora_name"])
    options: dict[str, Any] = {}
    if (priority := routing.get("priority")) is not None:
        if not isinstance(priority, int):
            raise InvalidRequestError(
                f"routing.priority is {priority!r:.80}; it must be a whole number", param="routing.priority"
            )
        options["priority"] = -priority  # in Dynamo, higher is served first
    if salt := routing.get("cache_salt"):
        options["cache_salt"] = salt
    if role == "prefill":
        options["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
    elif (computed := request.get("prefill_result")) is not None:
        handed_over = _mapping("prefill_result", computed).get("disaggregated_params") or {}
        params = _mapping("prefill_result.disaggregated_params", handed_over).get("kv_transfer_params")
        options["kv_transfer_params"] = params
    return options


class Chunks:
    """Makes chunks, each with what is new since the last, of the cumulative outputs of a request.

    Args:
        role: the engine's.
    """

    def __init__(self, role: EngineRole) -> None:
        self._role = role
        self._num_sent: defaultdict[int, int] = defaultdict(int)
        self._ended: set[int] = set()

    def of(self, output: RequestOutput) -> Iterator[Chunk]:
        """Yield the chunks of an output: none for what is not new, or for a completion that has failed."""
        for completion in output.outputs:
            if completion.index in self._ended or completion.finish_reason is FinishReason.ERROR:
                continue
            chunk = self._chunk(completion)
            if completion.finish_reason is not None:
                self._ended.add(completion.index)
                chunk["finish_reason"] = _FINISH_REASONS[completion.finish_reason]
                if output.finished:
                    chunk["completion_usage"] = _usage(output)
                if self._role == "prefill":
                    params = output.kv_transfer_params
                    chunk["disaggregated_params"] = {"kv_transfer_params": params and dict(params)}
            elif not chunk["token_ids"]:
                continue
            yield chunk

    def _chunk(self, completion: CompletionOutput) -> Chunk:
        first = self._num_sent[completion.index]
        token_ids = list(completion.token_ids[first:])
        self._num_sent[completion.index] += len(token_ids)
        chunk: Chunk = {"token_ids": token_ids, "index": completion.index}
        if completion.logprobs is not None and token_ids:
            candidates = completion.logprobs[first:]
            chunk["log_probs"] = [
                found[token].logprob for token, found in zip(token_ids, candidates, strict=True)
            ]
            chunk["top_logprobs"] = [
                [
                    {"rank": one.rank, "token_id": token, "token": one.decoded_token, "logprob": one.logprob}
                    for token, one in found.items()
                ]
                for found in candidates
            ]
        return chunk


def _usage(output: RequestOutput) -> dict[str, Any]:
    prompt = len(output.prompt_token_ids)
    completion = sum(len(one.token_ids) for one in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _structured_outputs(given: Any) -> StructuredOutputsParams:
    fields = {
        name: value
        for name, value in _mapping("sampling_options.guided_decoding", given).items()
        if value is not None
    }
    structure = {name: fields.pop(name) for name in STRUCTURE_KINDS if name in fields}
    _refuse_rest("sampling_options.guided_decoding", fields, _STRUCTURE_IGNORED)
    return StructuredOutputsParams(**structure)


def _given(request: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the fields of a group that are not null."""
    fields = _mapping(group, request.get(group) or {})
    return {name: value for name, value in fields.items() if value is not None}


def _token_ids(stop: dict[str, Any], name: str) -> list[Any]:
    """Take the token ids of that name out of `stop`; `SamplingParams` checks them."""
    given = stop.pop(name, [])
    if not isinstance(given, list):
        name = f"stop_conditions.{name}"
        raise InvalidRequestError(f"{name} is {given!r:.80}; it must be a list", param=name)
    return given


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} is {value!r:.80}; it must be an object", param=name)
    return value


def _refuse_rest(group: str, rest: Mapping[str, Any], ignored: Mapping[str, Any]) -> None:
    for name, value in rest.items():
        if value not in ignored.get(name, ()):
            raise _unsupported(f"{group}.{name}", value)


def _unsupported(name: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {value!r:.80}, which is not supported; leave it out", param=name)
