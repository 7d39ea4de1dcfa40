"""A program for OpenVINO GenAI's pipeline: batches, cache eviction, prompt lookup and structured output.

python examples/openvino_genai.py
"""

import json

from quire import (
    AggregationMode,
    CacheEvictionConfig,
    ChatHistory,
    ContinuousBatchingPipeline,
    GenerationConfig,
    GenerationStatus,
    SchedulerConfig,
    StreamingStatus,
    StructuredOutputConfig,
)

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 198}, "even": {"type": "boolean"}},
    "required": ["sum", "even"],
    "additionalProperties": False,
}


def scheduler_config() -> SchedulerConfig:
    """Return the configuration of all pipelines here."""
    config = SchedulerConfig()
    config.num_kv_blocks = 256
    config.max_num_batched_tokens = 256
    return config


def show_requests(pipe: ContinuousBatchingPipeline) -> None:
    """Add requests while others run, and read their tokens step by step."""
    config = GenerationConfig(max_new_tokens=40)
    tokenizer = pipe.get_tokenizer()
    handles = {}
    for request_id, question in enumerate(("What is a KV block?", "What is 27 + 58?")):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], True)
        ids = tokenizer.encode(prompt, add_special_tokens=False).input_ids
        handles[question] = pipe.add_request(request_id, ids, config)
        pipe.step()  # the first one runs when the second one comes
    texts = dict.fromkeys(handles, "")
    most_requests = 0
    while pipe.has_non_finished_requests():
        pipe.step()
        most_requests = max(most_requests, pipe.get_metrics().requests)
        for question, handle in handles.items():
            if handle.can_read():
                texts[question] += tokenizer.decode(handle.read()[0].generated_ids)
    for question, handle in handles.items():
        assert handle.get_status() == GenerationStatus.FINISHED
        print(f"{question} {texts[question]}")
    print(f"at most {most_requests} requests at a time")


def show_streaming(pipe: ContinuousBatchingPipeline) -> None:
    """Complete a conversation, and stop as soon as the first sentence has ended."""
    history = ChatHistory()
    history.append({"role": "user", "content": "What is continuous batching?"})
    pieces = []

    def streamer(piece: str) -> StreamingStatus:
        pieces.append(piece)
        return StreamingStatus.STOP if "." in piece else StreamingStatus.RUNNING

    [result] = pipe.generate([history], [GenerationConfig(max_new_tokens=60)], streamer)
    print("".join(pieces), f"({result.m_status.name}, {len(pieces)} pieces)")


def show_structured_output(pipe: ContinuousBatchingPipeline) -> None:
    """Constrain an answer to a JSON schema."""
    config = GenerationConfig(max_new_tokens=64)
    config.structured_output_config = StructuredOutputConfig(json_schema=json.dumps(SCHEMA))
    [result] = pipe.generate(["What is 27 + 58?"], [config])
    print(json.dumps(json.loads(result.m_generation_ids[0])))


def show_cache_eviction() -> None:
    """Hold a long output to 128 tokens of KV."""
    config = scheduler_config()
    config.enable_prefix_caching = False
    config.use_cache_eviction = True
    config.cache_eviction_config = CacheEvictionConfig(32, 32, 128, AggregationMode.NORM_SUM)
    config.cache_eviction_config.apply_rotation = True
    pipe = ContinuousBatchingPipeline("mini", config, "CPU", {})
    generation_config = GenerationConfig(max_new_tokens=300, ignore_eos=True)
    [result] = pipe.generate(["Tell me about caches."], [generation_config])
    num_tokens = result.perf_metrics.get_num_input_tokens() + result.perf_metrics.get_num_generated_tokens()
    held = round(pipe.get_metrics().max_cache_usage / 100 * config.num_kv_blocks)
    print(f"{num_tokens} tokens in at most {held} blocks of {config.block_size}")


def show_prompt_lookup(pipe: ContinuousBatchingPipeline) -> None:
    """Answer a question as before, with drafts out of the prompt."""
    question = "What is a KV block?"
    [expected] = pipe.generate([question], [GenerationConfig(max_new_tokens=40)])
    drafting = ContinuousBatchingPipeline("mini", scheduler_config(), "CPU", {"prompt_lookup": True})
    config = GenerationConfig(max_new_tokens=40, num_assistant_tokens=4, max_ngram_size=4)
    [result] = drafting.generate([question], [config])
    print("the same answer with prompt lookup:", result.m_generation_ids == expected.m_generation_ids)


def main() -> None:
    """Show one after the other."""
    pipe = ContinuousBatchingPipeline("mini", scheduler_config(), "CPU", {})
    show_requests(pipe)
    show_streaming(pipe)
    show_structured_output(pipe)
    show_cache_eviction()
    show_prompt_lookup(pipe)


if __name__ == "__main__":
    main()
