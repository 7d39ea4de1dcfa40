"""Compute prompts in one process and answers in another: LLMDataDist with a model runner of your own.

python examples/prefill_decode_slots.py

The DECODER starts the PROMPT as a second process. It pulls the KV of each request that the PROMPT has
computed, merges it into a free slot of its batch, and computes the next token of all slots at once. KV goes
from cache to cache; prompts and their first tokens go through a pipe, one line of JSON each.
"""

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from quire.datadist import (
    DataType,
    KvCache,
    KvCacheManager,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMModel,
    LLMReq,
    LLMRole,
    LLMStatusCode,
    ModelConfig,
    ModelRunner,
)
from quire.kernels.attention.batch import AttentionBatch
from quire.kv import PagedAttentionCache, PagedAttentionCacheMetaData, PagedAttentionCacheView
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.hub import resolve_model
from quire.models.checkpoints.loading import load_decoder
from quire.models.checkpoints.tokenizers.reading import read_tokenizer
from quire.models.decoder import Decoder

QUESTIONS = [
    "What is continuous batching?",
    "What is 27 + 58?",
    "I have read about blocks, pages, slots and tables, and now I am lost. What is a KV block?",
    "What is 31 + 16?",
]
MAX_NEW_TOKENS = 48
NUM_SLOTS = 2  # requests that the DECODER computes at once
SLOT_TOKENS = 256  # tokens that a slot has room for, prompt and answer
PROMPT_ID, DECODER_ID = 1, 2

MODEL_PATH = resolve_model("mini")
MODEL = read_model_config(MODEL_PATH)
TOKENIZER = read_tokenizer(MODEL_PATH)


@dataclasses.dataclass
class Request:
    """A question, and its answer so far."""

    req_id: int
    question: str
    answer: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        chat = [{"role": "user", "content": self.question}]
        text = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True)
        self.prompt = TOKENIZER.encode(text, add_special_tokens=False)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return len(self.answer) == MAX_NEW_TOKENS or self.answer[-1] in TOKENIZER.eos_token_ids

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the cache: all but the last."""
        return len(self.prompt) + len(self.answer) - 1

    @property
    def llm_req(self) -> LLMReq:
        """What LLMDataDist calls it."""
        return LLMReq(self.req_id, len(self.prompt), PROMPT_ID, DECODER_ID)

    def show(self, place: str) -> None:
        """Print question and answer."""
        print(f"{place}: {self.question}")
        print(f"  {TOKENIZER.decode(self.answer)}")
        print(f"  {self.answer}")


def next_tokens(
    decoder: Decoder,
    kv_cache: PagedAttentionCache,
    token_ids: Sequence[list[int]],
    *,
    num_computed: Sequence[int],
    block_tables: Sequence[list[int]],
) -> list[int]:
    """Compute tokens of some sequences, and return the most likely token after them, one for each sequence.

    Keys and values of the `num_computed` tokens before them are in the cache, and theirs are written to it.
    """
    counts = np.array([len(ids) for ids in token_ids])
    tables = np.array(list(itertools.zip_longest(*block_tables, fillvalue=0))).T
    batch = AttentionBatch.build(np.array(num_computed), counts, tables, kv_cache.block_size)
    hidden = decoder.forward(torch.tensor(list(itertools.chain(*token_ids))), kv_cache.views, batch)
    last_rows = torch.from_numpy(counts.cumsum() - 1)
    return decoder.logits(hidden[last_rows]).argmax(dim=1).tolist()


class SlotRunner(ModelRunner):
    """Runs the model on caches that LLMDataDist allocates.

    They have two tensors for each layer, keys and values: [slots, KV heads, tokens, head size].
    """

    def __init__(self, manager: KvCacheManager) -> None:
        self.decoder = load_decoder(MODEL_PATH, MODEL)
        self.manager = manager
        self.steps_cache: PagedAttentionCache | None = None  # on a DECODER

    def on_cache_allocated(self, kv_cache: KvCache) -> None:
        """Prepare the cache of a DECODER once for all steps; a PROMPT has a new one for each prediction."""
        self.steps_cache = self.paged(kv_cache)

    def on_cache_deallocated(self, kv_cache: KvCache) -> None:
        """Let go of the memory."""
        self.steps_cache = None

    def run_model(
        self, kv_cache: KvCache, input_tensors: list[list[int]], **kwargs: list[int]
    ) -> dict[int, int]:
        """Compute the tokens that each slot is given, none in an idle one; return the next ones by slot."""
        busy = [slot for slot, token_ids in enumerate(input_tensors) if token_ids]
        tokens = next_tokens(
            self.decoder,
            self.steps_cache or self.paged(kv_cache),
            [input_tensors[slot] for slot in busy],
            num_computed=[kwargs["num_computed"][slot] for slot in busy],
            block_tables=[[slot] for slot in busy],
        )
        return dict(zip(busy, tokens, strict=True))

    def paged(self, kv_cache: KvCache) -> PagedAttentionCache:
        """Return the same memory as kernels take it: each slot is one large block."""
        desc = kv_cache.cache_desc
        tensors = [
            self.manager.get_cache_tensors(kv_cache, index)[0].torch() for index in range(desc.num_tensors)
        ]
        pages = [tensor.transpose(0, 1) for tensor in tensors]  # [KV heads, blocks, tokens, head size]
        metadata = PagedAttentionCacheMetaData.for_layers(
            MODEL.kv_layers, page_size=SLOT_TOKENS, dtype=pages[0].dtype, num_pages=desc.batch_size
        )
        views = [
            PagedAttentionCacheView(metadata, layer, keys, values)
            for layer, (keys, values) in enumerate(zip(pages[::2], pages[1::2], strict=True))
        ]
        return PagedAttentionCache(views)


def start(role: LLMRole, cluster_id: int) -> LLMDataDist:
    """Return one side; a PROMPT listens on any free port."""
    config = LLMConfig()
    config.device_id = 0
    config.sync_kv_timeout = 10_000  # milliseconds
    config.ge_options = {"quire.device": "cpu"}
    if role is LLMRole.PROMPT:
        config.listen_ip_info = "127.0.0.1:0"
    dist = LLMDataDist(role, cluster_id)
    dist.init(config.generate_options())
    return dist


def link(dist: LLMDataDist, port: int) -> None:
    """Link a DECODER to the PROMPT."""
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PROMPT_ID
    peer.append_remote_ip_info("127.0.0.1", port)
    status, _ = dist.link_clusters([peer], timeout=10_000)
    if status is not LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"cannot link to port {port}: {status}")


def add_model(dist: LLMDataDist, num_slots: int) -> LLMModel:
    """Add the model, to be computed on caches of so many slots."""
    config = ModelConfig()
    num_tensors = 2 * MODEL.num_layers
    spec = MODEL.kv_specs[0]  # all layers are alike
    config.kv_shapes = [f"{num_slots},{spec.num_kv_heads},{SLOT_TOKENS},{spec.key_head_dim}"] * num_tensors
    config.kv_dtypes = [DataType.DT_BF16] * num_tensors
    config.kv_seq_len_dim_index = 2
    return dist.add_model(config.generate_options(), SlotRunner(dist.kv_cache_manager))


def serve_prompts() -> None:
    """Be the PROMPT: compute the prompts that are read, and write the first token of each answer."""
    dist = start(LLMRole.PROMPT, PROMPT_ID)
    model = add_model(dist, num_slots=1)
    print(dist.listen_port, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        request = LLMReq(message["req_id"], len(message["prompt"]), PROMPT_ID, DECODER_ID)
        tokens = model.predict(request, [message["prompt"]], num_computed=[0])
        print(tokens[0], flush=True)  # only now, because from now on the KV can be pulled
    dist.finalize()


def prefilled(requests: list[Request], prompt: subprocess.Popen[str]) -> Iterator[Request]:
    """Send all requests to the PROMPT, and yield each with its first token.

    The PROMPT works ahead while others are decoded. What nobody has pulled yet takes memory there: with many
    requests, send a few at a time.
    """
    for request in requests:
        message = {"req_id": request.req_id, "prompt": request.prompt}
        print(json.dumps(message), file=prompt.stdin, flush=True)
    for request in requests:
        request.answer.append(json.loads(prompt.stdout.readline()))
        yield request


def decoded(dist: LLMDataDist, model: LLMModel, waiting: Iterator[Request]) -> Iterator[tuple[int, Request]]:
    """Complete the answers, and yield each with its slot, which the next request gets."""
    running: dict[int, Request] = {}  # by slot
    while True:
        for slot in range(NUM_SLOTS):
            if slot not in running and (request := next(waiting, None)):
                model.pull_kv(request.llm_req)
                model.merge_kv(request.llm_req, slot)
                running[slot] = request
        if not running:
            return
        decode_step(model, {slot: request for slot, request in running.items() if not request.is_finished})
        for slot, request in list(running.items()):
            if request.is_finished:
                dist.complete_request(request.llm_req)
                yield slot, running.pop(slot)


def decode_step(model: LLMModel, by_slot: dict[int, Request]) -> None:
    """Add a token to each answer; the other slots sit this step out."""
    if not by_slot:
        return
    names = [by_slot[slot].llm_req if slot in by_slot else LLMReq() for slot in range(NUM_SLOTS)]
    inputs = [by_slot[slot].answer[-1:] if slot in by_slot else [] for slot in range(NUM_SLOTS)]
    computed = [by_slot[slot].num_computed if slot in by_slot else 0 for slot in range(NUM_SLOTS)]
    for slot, token in model.predict(names, inputs, num_computed=computed).items():
        by_slot[slot].answer.append(token)


def main() -> None:
    """Be the DECODER: print the answers in the order in which they are complete."""
    command = [sys.executable, __file__, "prompt"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as prompt:
        dist = start(LLMRole.DECODER, DECODER_ID)
        model = add_model(dist, NUM_SLOTS)
        link(dist, json.loads(prompt.stdout.readline()))
        requests = [Request(req_id, question) for req_id, question in enumerate(QUESTIONS)]
        for slot, request in decoded(dist, model, prefilled(requests, prompt)):
            request.show(f"slot {slot}")
        dist.finalize()


if __name__ == "__main__":
    serve_prompts() if "prompt" in sys.argv else main()
