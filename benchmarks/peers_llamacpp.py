"""llama.cpp's side of the comparison with peers; `peers.py` starts it, `peers_worker.py` has the protocol.

Requests run as parallel sequences of one context, as in llama.cpp's server: each call of `llama_decode` has
the next token of every decoding sequence, and prompts fill the rest."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from peers_shapes import ModelShape
from peers_worker import serve
from peers_workload import KV_TOKENS, NUM_THREADS

BATCH_TOKENS = 2_048  # of one call; it computes 512 at once. Both are the server's defaults.


@dataclass(slots=True)
class Sequence:
    """A request: tokens to compute, and tokens generated."""

    number: int
    position: int  # of the first token to compute
    waiting: list[int]
    outputs: list[int] = field(default_factory=list)


class Batch:
    """llama.cpp's batch, refilled for each call."""

    def __init__(self) -> None:
        self.native = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        arrays = (self.native.token, self.native.pos, self.native.n_seq_id, self.native.logits)
        views = (np.ctypeslib.as_array(array, (BATCH_TOKENS,)) for array in arrays)
        self._tokens, self._positions, counts, self._wants_logits = views
        counts.fill(1)
        self.clear()

    def clear(self) -> None:
        """Remove all tokens."""
        self.native.n_tokens = 0

    @property
    def room(self) -> int:
        """Number of tokens that still fit."""
        return BATCH_TOKENS - int(self.native.n_tokens)

    def add(self, sequence: Sequence, limit: int) -> int | None:
        """Add up to `limit` tokens to compute; if all fit, return the row of the next token's logits."""
        tokens = sequence.waiting[:limit]
        first: int = self.native.n_tokens
        rows = slice(first, first + len(tokens))
        self._tokens[rows] = tokens
        self._positions[rows] = range(sequence.position, sequence.position + len(tokens))
        self._wants_logits[rows] = 0
        for row in range(rows.start, rows.stop):
            self.native.seq_id[row][0] = sequence.number
        self.native.n_tokens = rows.stop
        sequence.position += len(tokens)
        del sequence.waiting[: len(tokens)]
        if sequence.waiting:
            return None
        self._wants_logits[rows.stop - 1] = 1
        return rows.stop - 1


class LlamaCppEngine:
    """See `Engine`.

    The context is created for each workload, which is best for llama.cpp: as many sequences as requests, with
    their own cells unless they share a prefix.
    """

    def __init__(self, model: str, precision: str, shape: ModelShape) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            f"{model}/model.gguf".encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp could not load {model}/model.gguf")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = Batch()
        self._context: Any = None
        self._made_for: tuple[int, bool] | None = None
        self._prefix: list[int] = []

    def prepare(self, num_requests: int, prefix: list[int]) -> None:
        """See `Engine.prepare`. The prefix becomes a sequence after the requests' own."""
        self._make_context(num_requests, shares=bool(prefix))
        self._prefix = prefix
        llama_cpp.llama_memory_clear(self._memory, False)
        if prefix:
            self._run([Sequence(num_requests, 0, list(prefix))], 1)

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        """See `Engine.generate`."""
        shared = len(self._prefix)
        for number in range(len(prompts) if shared else 0):
            llama_cpp.llama_memory_seq_cp(self._memory, len(prompts), number, 0, shared)
        sequences = [Sequence(number, shared, prompt[shared:]) for number, prompt in enumerate(prompts)]
        self._run(sequences, output_tokens)
        return [sequence.outputs for sequence in sequences]

    def _make_context(self, num_requests: int, *, shares: bool) -> None:
        if self._made_for == (num_requests, shares):
            return
        if self._context:
            llama_cpp.llama_free(self._context)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = KV_TOKENS
        parameters.n_batch = BATCH_TOKENS
        parameters.n_seq_max = num_requests + shares
        parameters.n_threads = parameters.n_threads_batch = NUM_THREADS
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.kv_unified = shares
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise SystemExit(f"llama.cpp could not create a context of {num_requests} sequences")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._made_for = num_requests, shares

    def _run(self, sequences: list[Sequence], output_tokens: int) -> None:
        prompts, generating = deque(sequences), list[Sequence]()
        while prompts or generating:
            self._batch.clear()
            sampled = [(entry, self._batch.add(entry, 1)) for entry in generating]
            while prompts and self._batch.room:
                row = self._batch.add(prompts[0], self._batch.room)
                if row is not None:
                    sampled.append((prompts.popleft(), row))
            self._decode()
            for entry, row in sampled:
                token = int(self._logits(row).argmax())
                entry.outputs.append(token)
                entry.waiting.append(token)
            generating = [entry for entry, _ in sampled if len(entry.outputs) < output_tokens]

    def _decode(self) -> None:
        status = llama_cpp.llama_decode(self._context, self._batch.native)
        if status:
            raise SystemExit(f"llama_decode of {self._batch.native.n_tokens} tokens returned status {status}")

    def _logits(self, row: int | None) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, (self._vocab_size,))


if __name__ == "__main__":
    serve(LlamaCppEngine, ("llama_cpp_python",))
