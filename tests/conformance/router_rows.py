"""What routers, sidecars and trainers that were made for vLLM need of an engine, in their words."""

from __future__ import annotations

ROWS: dict[str, list[str]] = {
    "KV events (vLLM 0.33; llm-d, Dynamo, Ray)": [
        "events are maps with a type",
        "blocks are unsigned 64-bit numbers, chained by parents",
        "topic kv@POD@MODEL",
        "sequence numbers from 0, 8 bytes, big-endian",
        "medium, lora_id, lora_name",
        "extra_keys with the salt, and a null first parent",
        "replay in four frames, ended by -1",
        "PUB binds or connects",
        "data-parallel rank",
        "AllBlocksCleared first",
    ],
    "P/D (llm-d's sidecar, Ray's prefill-decode proxy)": [
        "kv_transfer_params with nulls",
        "x-prefiller-host-port",
    ],
    "Metrics (llm-d's endpoint picker)": [
        "vllm:num_requests_waiting, vllm:num_requests_running, vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:lora_requests_info",
    ],
    "Tokens in and out (llm-d, TRL, SkyRL, prime-rl)": [
        "/v1/completions/render, /v1/chat/completions/render",
        "/inference/v1/generate",
        "return_tokens_as_token_ids",
        "/get_world_size",
    ],
}

ELSEWHERE: dict[str, str] = {
    "PUB binds or connects": "test_kv_events.py::test_many_engines_publish_to_one_subscriber",
    "data-parallel rank": "test_kv_events.py::test_replicas_of_one_address_have_ports_of_their_own",
}

NOT_YET: dict[str, str] = {}
