"""Stream the answers of two conversations that run at the same time.

python examples/streaming_chat.py
"""

import asyncio

from quire import AsyncLLM, EngineConfig, SamplingParams

CONVERSATIONS = {
    "Ada": ["What is a KV block?", "What is 27 + 58?"],
    "Bob": ["What is continuous batching?"],
}


async def converse(llm: AsyncLLM, name: str, questions: list[str]) -> None:
    """Ask one question after the other, each with the turns before it."""
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = ""
        # Each output holds the whole text so far, so a slow reader can skip some and miss nothing.
        async for output in llm.chat(messages, SamplingParams(temperature=0, max_tokens=64)):
            text = output.outputs[0].text
            if new := text[len(answer) :]:
                print(f"{name}: {new!r}", flush=True)
            answer = text
        # The next turn begins with this one; the prefix cache spares computing it again.
        messages.append({"role": "assistant", "content": answer})


async def main() -> None:
    """Run all conversations on one engine, which has a process of its own."""
    llm = AsyncLLM(EngineConfig(model="mini"))
    try:
        await asyncio.gather(*(converse(llm, name, questions) for name, questions in CONVERSATIONS.items()))
    finally:
        await llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
