"""One version of Quire that measures when it is asked to: a process of `gpu_versions.py`.

`python gpu_versions_worker.py SRC TASK` writes a line of JSON when its engine is ready, and one for each line
with a number of requests that it reads.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from source_finder import SourceFinder


def main() -> None:
    """Answer until standard input ends."""
    source, task = sys.argv[1], json.loads(sys.argv[2])
    sys.meta_path.insert(0, SourceFinder(source))
    answer(**task)


def answer(
    *, model: str, num_layers: int, most_requests: int, context: int, num_steps: int, is_tiny: bool
) -> None:
    """Start an engine, and measure."""
    from gpu_engine import WARM_STEPS, captured_steps, decode_seconds, prompts, replay_seconds
    from gpu_models import model_without_files

    from quire import LLM, SamplingParams

    changes = {"num_hidden_layers": num_layers} if num_layers else {}
    blocks = most_requests * -(-(context + 2 * (num_steps + WARM_STEPS)) // 16)
    options: dict[str, Any] = {"max_num_seqs": most_requests, "num_kv_blocks": blocks, "block_size": 16}
    options |= {"device": "cpu"} if is_tiny else {"device": "cuda"}
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True, logprobs=1)
    with (
        model_without_files(model, is_tiny=is_tiny, **changes) as directory,
        captured_steps() as replays,
        LLM(directory, dtype="bfloat16", max_model_len=2 * context + num_steps, **options) as llm,
    ):
        for count in (1, most_requests):
            decode_seconds(llm, count, context, num_steps)  # has steps captured
        _write(True)
        for line in sys.stdin:
            count = int(line)
            seconds = decode_seconds(llm, count, context, num_steps)
            outputs = llm.generate(prompts(count, context, llm.info.vocab_size), params)
            found = [output.outputs[0] for output in outputs]
            bits = hash(tuple((*one.token_ids, one.cumulative_logprob) for one in found))
            _write({"step": seconds, "captured": replay_seconds(replays, count), "bits": bits})


def _write(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
