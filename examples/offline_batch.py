"""Answer a batch of prompts in this process.

python examples/offline_batch.py
"""

from quire import LLM, SamplingParams

QUESTIONS = [
    "What is a KV block?",
    "What is continuous batching?",
    "What is 27 + 58?",
    "What is 31 + 16?",
]


def main() -> None:
    """Answer all questions at once and print them in order."""
    # `mini` ships with Quire; a directory with a checkpoint or a name on the Hugging Face hub works as well.
    with LLM("mini") as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        # Temperature 0 is greedy: the same question gets the same answer, whatever else is in the batch.
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        completion = output.outputs[0]
        # A request that fails does not stop the others: it has the finish reason "error".
        print(f"{question}\n  {completion.error or completion.text}")


if __name__ == "__main__":
    main()
