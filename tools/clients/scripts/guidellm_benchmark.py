"""guidellm: a few requests one after another, in one piece and streamed, with a tool, and in two turns."""

import json
import tempfile
from pathlib import Path

from checks import (
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    TEMPLATE_TOKENS,
    TOKENIZER,
    URL,
    WEATHER,
    report,
    run_program,
    same,
    weather,
)

CHAT_TOKENS = INPUT_TOKENS + TEMPLATE_TOKENS


def benchmark(requests, *, stream=True, **data):
    """Let guidellm send requests; return what it says of them, and fail unless all were answered."""
    sizes = {"prompt_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        options = {
            "--backend": json.dumps({"kind": "openai_http", "target": URL, "stream": stream}),
            "--tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
            "--profile": "kind=synchronous",
            "--constraint": f"kind=max_requests,count={requests}",
            "--data": json.dumps({"kind": "synthetic_text", **sizes, **data}),
            "--output": f"kind=json,path={results}",
        }
        run_program("guidellm", "run", *(word for option in options.items() for word in option))
        [found] = json.loads(results.read_text())["benchmarks"]
    same([one["info"]["error"] for one in found["requests"]["errored"]], [])
    answered = found["requests"]["successful"]
    same(len(answered), requests)
    for one in answered:
        if not one["tool_calls"]:
            same(one["output_metrics"]["text_tokens"], OUTPUT_TOKENS)
    return answered


def text():
    for one in benchmark(5, stream=False):
        same(one["input_metrics"]["text_tokens"], CHAT_TOKENS)


def streaming():
    for one in benchmark(5):
        same(one["input_metrics"]["text_tokens"], CHAT_TOKENS)
        assert one["info"]["timings"]["token_iterations"] > 1, "the answer came in one piece"


def tools():
    offered = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
    call, _ = benchmark(2, tool_call_turns=1, tools=[offered])
    weather(call["tool_calls"][0]["function"]["arguments"])


def second_turn():
    sizes = [one["input_metrics"]["text_tokens"] for one in benchmark(2, turns=2)]
    same(min(sizes), CHAT_TOKENS)
    assert max(sizes) > 2 * CHAT_TOKENS, f"the first turn was not sent back: {sizes}"


report(text=text, streaming=streaming, tools=tools, second_turn=second_turn)
