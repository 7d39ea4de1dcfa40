"""Serve waiting requests in an order of your own: short prompts first.

python examples/custom_policy.py

An engine process finds the class by its dotted name: in this folder, run
`quire serve --policy custom_policy.ShortestPrompt`.
"""

from quire import LLM, SamplingParams
from quire.request import Request
from quire.scheduling.policies import QueueOrder


class ShortestPrompt(QueueOrder):
    """Short prompts first; 1,000 tokens weigh as much as one second of waiting, so that nobody starves."""

    def key(self, request: Request) -> tuple[float, ...]:
        """Return what waiting requests are sorted by, lowest first; the arrival number breaks ties."""
        return (request.queued_time + request.num_prompt_tokens / 1000, request.arrival)


def main() -> None:
    """Run prompts of different lengths two at a time and print them in the order of their first tokens."""
    prompts = ["word " * length for length in (300, 200, 5, 10)]
    with LLM("mini", policy=ShortestPrompt, max_num_seqs=2) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    outputs.sort(key=lambda output: output.metrics.time_to_first_token)
    for output in outputs:
        print(f"{len(output.prompt_token_ids)} prompt tokens")


if __name__ == "__main__":
    main()
