"""aiperf: a few requests in one piece, streamed by each API, and two conversations of two turns."""

import json
import os
import tempfile
from pathlib import Path

from checks import (
    INPUT_TOKENS,
    MODEL,
    OUTPUT_TOKENS,
    TEMPLATE_TOKENS,
    TOKENIZER,
    URL,
    report,
    run_program,
    same,
)

os.environ.pop("HF_HUB_OFFLINE", None)  # with it, aiperf looks for tokenizers in the hub's cache only
LOAD = f"--isl {INPUT_TOKENS} --osl {OUTPUT_TOKENS} --extra-inputs ignore_eos:true --concurrency 2 --ui none"
CHAT_TOKENS = INPUT_TOKENS + TEMPLATE_TOKENS


def profile(api, *options, requests=5):
    """Let aiperf send requests; return what it measured, and fail unless all were answered."""
    target = ["--url", URL, "--model", MODEL, "--tokenizer", str(TOKENIZER), "--endpoint-type", api]
    with tempfile.TemporaryDirectory() as folder:
        run_program("aiperf", "profile", *target, *LOAD.split(), *options, "--artifact-dir", folder)
        [results] = Path(folder).rglob("profile_export_aiperf.json")
        found = json.loads(results.read_text())
    same(found["error_summary"], [])
    same(found["request_count"]["avg"], requests)
    return found


def counted(found, prompt_tokens):
    """Fail unless the server counted, for each request, as many tokens as were sent and wanted."""
    for side, expected in (("prompt", prompt_tokens), ("completion", OUTPUT_TOKENS)):
        usage = found[f"usage_{side}_tokens"]
        same([usage["min"], usage["max"]], [expected, expected])


def text():
    counted(profile("chat", "--request-count", "5"), CHAT_TOKENS)


def streaming():
    # Of the streams of responses, aiperf reads the usage only if the model ends them.
    for api, prompt_tokens in (("chat", CHAT_TOKENS), ("completions", INPUT_TOKENS), ("responses", None)):
        found = profile(api, "--request-count", "5", "--streaming")
        assert found["inter_token_latency"]["max"] > 0, "the answers came in one piece"
        if prompt_tokens is not None:
            counted(found, prompt_tokens)


def second_turn():
    turns = "--conversation-num 2 --conversation-turn-mean 2 --conversation-turn-stddev 0"
    found = profile("chat", *turns.split(), requests=4)
    same(found["usage_prompt_tokens"]["min"], CHAT_TOKENS)
    assert found["usage_prompt_tokens"]["max"] > 2 * CHAT_TOKENS, "the first turn was not sent back"


report(text=text, streaming=streaming, second_turn=second_turn)
