"""Keep the KV of prompts in files, so that a restarted engine loads a prompt instead of computing it.

python examples/custom_connector.py

A connector is given by its dotted name. The server takes it too: in this folder, run
`KV_DIRECTORY=/var/tmp/kv quire serve --kv-connector custom_connector.DiskConnector`.
"""

import os
import tempfile
from pathlib import Path

import torch

from quire import LLM, SamplingParams
from quire.kv.block_hash import BlockKey
from quire.kv.memory_connector import MemoryConnector


class BlockFiles:
    """One file for each block of `block_size` tokens; what `MemoryConnector` asks of its store.

    Keys do not name the model: every model needs a directory of its own.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.generation = 0  # counts calls of clear(): loads planned before one are not served after it

    def __contains__(self, key: BlockKey) -> bool:
        return self._file(key).exists()

    def get(self, key: BlockKey) -> torch.Tensor | None:
        """Return keys and values of a block, all layers, or None if they are not stored."""
        return torch.load(self._file(key)) if key in self else None

    def put(self, key: BlockKey, content: torch.Tensor) -> None:
        """Store a block; a file appears whole or not at all."""
        unfinished = self._file(key).with_suffix(".unfinished")
        torch.save(content, unfinished)
        unfinished.rename(self._file(key))

    def clear(self) -> None:
        """Forget everything, as is needed when the weights change."""
        self.generation += 1
        for file in self.directory.iterdir():
            file.unlink()

    def _file(self, key: BlockKey) -> Path:
        # The key's digest stands for the block's tokens and all before them.
        return self.directory / f"{key.digest.hex()}.pt"


class DiskConnector(MemoryConnector):
    """`MemoryConnector` with files for a store. To write a connector from scratch, inherit `KVConnector`."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        # The engine passes the block size and nothing else, so settings come from the environment.
        self.store = BlockFiles(Path(os.environ["KV_DIRECTORY"]))


def main() -> None:
    """Continue the same conversation with two engines, one after the other."""
    conversation = [
        {"role": "user", "content": "What is continuous batching?"},
        {"role": "assistant", "content": "Letting requests join and leave the batch at every step."},
        {"role": "user", "content": "What is a KV block?"},
    ]
    with tempfile.TemporaryDirectory() as directory:
        os.environ["KV_DIRECTORY"] = directory
        for engine in ("first", "second"):
            with LLM("mini", kv_connector="custom_connector.DiskConnector") as llm:
                [output] = llm.chat(conversation, SamplingParams(temperature=0))
                num_loaded, num_prompt = llm.stats().num_loaded_tokens, len(output.prompt_token_ids)
            print(f"{engine} engine: loaded {num_loaded} of {num_prompt} prompt tokens")
            print(f"  {output.outputs[0].text}")


if __name__ == "__main__":
    main()
