"""Two engines that share the KV of prompts: what one has computed, the other loads.

python examples/custom_connector.py

A connector is given by its dotted name. The server takes it too: in this folder, run
`quire serve --kv-connector custom_connector.SharedConnector`.
"""

from quire import LLM, SamplingParams
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.tier import BlockTier, MemoryTier

CAPACITY = 1 << 30  # bytes
shared_tiers: dict[int, BlockTier] = {}  # by the size of their blocks


def shared_tier(bytes_per_block: int) -> BlockTier:
    """Return this process's tier for blocks of a size; all engines have the same model."""
    if bytes_per_block not in shared_tiers:
        shared_tiers[bytes_per_block] = MemoryTier(CAPACITY, bytes_per_block, min_uses=1)
    return shared_tiers[bytes_per_block]


class SharedConnector(TierConnector):
    """A `TierConnector` to a tier of our own. To write a connector from scratch, inherit `KVConnector`.

    Replace `MemoryTier` by a `BlockTier` of yours to keep blocks wherever you like.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, shared_tier)


def main() -> None:
    """Continue the same conversation with two engines, one after the other."""
    conversation = [
        {"role": "user", "content": "What is continuous batching?"},
        {"role": "assistant", "content": "Letting requests join and leave the batch at every step."},
        {"role": "user", "content": "What is a KV block?"},
    ]
    for engine in ("first", "second"):
        with LLM("mini", kv_connector="custom_connector.SharedConnector") as llm:
            [output] = llm.chat(conversation, SamplingParams(temperature=0))
            num_loaded, num_prompt = llm.stats().num_loaded_tokens, len(output.prompt_token_ids)
        print(f"{engine} engine: loaded {num_loaded} of {num_prompt} prompt tokens")
        print(f"  {output.outputs[0].text}")


if __name__ == "__main__":
    main()
