"""A stand-in for AsyncLLM: one token per character, answers from the seed, faults on demand."""

import asyncio
import dataclasses
import threading
import time
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

from quire.config import EngineConfig
from quire.dialogue.earlier_turns import text_of
from quire.errors import (
    ContextLengthError,
    DuplicateRequestError,
    EngineAsleepError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestQuarantinedError,
)
from quire.front.process.resumption import RecoveryStats
from quire.request_options import RequestOptions
from quire.request_output import CompletionOutput, Logprob, RequestOutput
from quire.scheduling.outputs import SchedulerStats
from quire.status import FinishReason

REPLY = "the quick brown fox jumps over the lazy dog."
MAX_MODEL_LEN = 256
VOCAB_SIZE = 0x110000
BOS, EOS = 0, 1
OPTION_NAMES = {field.name for field in dataclasses.fields(RequestOptions)}
SPECIAL_TEXT = {BOS: "<bos>", EOS: "<eos>"}


class FakeTokenizer:
    special_token_ids = frozenset(SPECIAL_TEXT)
    vocab_size = VOCAB_SIZE
    fingerprint = "characters"
    digest = "digest of characters"
    chat_template_source = None

    @property
    def token_bytes(self):
        return SimpleNamespace(
            of=lambda token_id: self.token_text(token_id).encode(),
            byte_token=lambda token_id: None,
            is_byte_level=False,
            has_byte_tokens=False,
            anchor=([], ""),
        )

    def token_text(self, token_id):
        is_character = token_id < VOCAB_SIZE and not 0xD800 <= token_id < 0xE000  # surrogates are none
        return SPECIAL_TEXT.get(token_id) or (chr(token_id) if is_character else "\ufffd")

    special_tokens = MappingProxyType({"bos_token": "<bos>", "eos_token": "<eos>"})
    added_tokens = MappingProxyType({text: token_id for token_id, text in SPECIAL_TEXT.items()})

    def token_name(self, token_id):
        return self.token_text(token_id).replace(" ", "_")

    def token_starts(self, text, token_ids):
        return None

    def decode(self, ids, *, skip_special_tokens=True):
        kept = [i for i in ids if not (skip_special_tokens and i in SPECIAL_TEXT)]
        return "".join(self.token_text(i) for i in kept)


def logprobs_of(token_id, count):
    """Chosen token at rank 1 with -0.25, then the following code points at -1.0, -2.0, ..."""
    entries = {token_id: Logprob(-0.25, 1, FakeTokenizer().token_text(token_id))}
    for rank in range(2, count + 1):
        other = token_id + rank - 1
        entries[other] = Logprob(1.0 - rank, rank, FakeTokenizer().token_text(other))
    return entries


@dataclasses.dataclass
class Seen:
    prompt: object
    params: object
    request_id: str
    options: dict[str, object]


class FakeLLM:
    """Prompts that begin with a fault's name cause it: hold, queue, die, fail, late, crash, cut, empty."""

    def __init__(self):
        self.config = EngineConfig()
        self.model_path = Path("no-model")
        self.tokenizer = FakeTokenizer()
        self.info = SimpleNamespace(
            model="fake", max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, num_blocks=64, block_size=16,
            dtype="float32", load_seconds=0.1, role="prefill", kv_transfer_address=("10.0.0.1", 7000),
            kv_events_ports=None, reads_priority=True, reads_kv_transfer_params=True,
            pooling=None,
            labels=(),
            labels_tokens=False,
        )  # fmt: skip
        self.seen = []
        self.live = set()
        self.aborted = set()
        self.released = []  # transfer ids
        self.aborts = asyncio.Queue()
        self.abort_seen = threading.Event()
        self.held = asyncio.Event()
        self.held_seen = threading.Event()
        self.dead = None
        self.paused = self.asleep = None  # the mode
        self.is_silent = False
        self.connector_stats = None
        self.graphs = None
        self.kv_transfer_params = None  # that a connector returns
        self.stop_reason = None  # of all completions
        self.queue_time = 0.0  # seconds, of all requests, as far as they take so long
        self._arrivals = {}
        self._stop_events = {}

    def chat(self, messages, sampling_params, *, request_id=None, call_format="auto", **options):
        if messages[-1]["role"] == "system":
            raise InvalidRequestError("the template wants a user message last", param="messages")
        text = text_of(messages[-1].get("content"))
        return self.generate(text, sampling_params, request_id=request_id, **options)

    async def tokenize_chat(self, messages, **options):
        return [BOS, *map(ord, text_of(messages[-1].get("content")))]

    async def prepare(self, prompt, sampling_params, *, request_id=None, **options):
        if self.dead:
            raise EngineDeadError(self.dead)
        ids = [BOS, *map(ord, prompt)] if isinstance(prompt, str) else list(prompt)
        self._check(prompt, ids, request_id)
        given = {name: options[name] for name in OPTION_NAMES & options.keys()}
        core_request = SimpleNamespace(prompt_token_ids=ids, options=RequestOptions(**given))
        return SimpleNamespace(
            request_id=request_id, params=sampling_params, core_request=core_request, reasoning=None
        )

    async def prepare_chat(self, messages, sampling_params, *, call_format="auto", **options):
        return await self.prepare(text_of(messages[-1].get("content")), sampling_params, **options)

    async def tokenize(self, text, *, add_special_tokens=True):
        if len(text) >= MAX_MODEL_LEN:
            raise ContextLengthError(f"the prompt has {len(text)} tokens", param="prompt")
        return [BOS] * add_special_tokens + list(map(ord, text))

    async def detokenize(self, token_ids):
        if token_ids and max(token_ids) >= VOCAB_SIZE:
            raise InvalidRequestError("a token id is beyond the vocabulary", param="tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def generate(
        self,
        prompt,
        sampling_params,
        *,
        request_id=None,
        before_submit=None,
        flow="",
        **options,
    ):
        if self.dead:
            raise EngineDeadError(self.dead)
        ids = [BOS, *map(ord, prompt)] if isinstance(prompt, str) else list(prompt)
        self._check(prompt, ids, request_id)
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        if text.startswith("queue"):
            raise QueueFullError("8 requests wait; the limit is 8 (max_num_queued_reqs)", retry_after=2.3)
        if text.startswith("crash"):
            raise RuntimeError("secret detail")
        if before_submit is not None:
            params = sampling_params
            if options.get("shorten_output") and params.max_tokens is not None:
                room = MAX_MODEL_LEN - len(ids)
                params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
            core_request = SimpleNamespace(
                prompt_token_ids=ids,
                sampling_params=params,
                sequence_ids=[None] * sampling_params.num_sequences,
            )
            await before_submit(
                SimpleNamespace(request_id=request_id, params=params, core_request=core_request)
            )
        self.seen.append(Seen(prompt, sampling_params, request_id, options))
        self.live.add(request_id)
        self._arrivals[request_id] = time.monotonic()
        stop = self._stop_events[request_id] = asyncio.Event()
        finished = False
        try:
            async for output in self._outputs(text, ids, sampling_params, request_id, stop):
                finished = output.finished
                yield output
        finally:
            self.live.discard(request_id)
            if not finished:
                self.aborted.add(request_id)
                self.abort_seen.set()

    def _check(self, prompt, ids, request_id):
        if not prompt:
            raise InvalidRequestError("the prompt is empty; it must have at least 1 token", param="prompt")
        if max(ids) >= VOCAB_SIZE:
            raise InvalidRequestError(f"token id {max(ids)} is beyond the vocabulary", param="prompt")
        if len(ids) >= MAX_MODEL_LEN:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens; max_model_len is {MAX_MODEL_LEN}", param="prompt"
            )
        if request_id in self.live:
            raise DuplicateRequestError(f"request id {request_id!r} is in use", param="request_id")

    async def _outputs(self, text, ids, params, request_id, stop):
        if text.startswith("empty"):
            return
        sequences = [self._tokens(params, index) for index in range(params.n)]
        if text.startswith("late"):  # its reader comes when it has failed already
            yield self._output(text, ids, params, request_id, sequences, 5, FinishReason.ERROR)
            return
        for step in range(1, max(len(tokens) for tokens, _ in sequences) + 1):
            await asyncio.sleep(0)
            if step == 4 and text.startswith("hold"):
                self.held.set()
                self.held_seen.set()
                await stop.wait()
                yield self._output(text, ids, params, request_id, sequences, 3, FinishReason.ABORT)
                return
            if step == 3 and text.startswith("die"):
                self.dead = "the engine process ended with signal 9"
                raise EngineDeadError(self.dead)
            if text.startswith("poison"):
                raise RequestQuarantinedError("2 engines have died while they had this request")
            if step == 3 and text.startswith("fail"):
                yield self._output(text, ids, params, request_id, sequences, 2, FinishReason.ERROR)
                return
            if step == 3 and text.startswith("cut"):
                return
            yield self._output(text, ids, params, request_id, sequences, step, None)

    def _tokens(self, params, index):
        turn = ((params.seed or 0) + index) % len(REPLY)
        reply = REPLY[turn:] + REPLY[:turn]
        limit = MAX_MODEL_LEN if params.max_tokens is None else params.max_tokens
        reason = FinishReason.STOP if limit > len(reply) else FinishReason.LENGTH
        text, tokens = reply[:limit], [ord(c) for c in reply[:limit]]
        for stop in params.stop:
            at = text.find(stop)
            if at >= 0:
                tokens = tokens[: at + len(stop)]
                text = text[: at + len(stop) if params.include_stop_str_in_output else at]
                reason = FinishReason.STOP
        return tokens, (text, reason)

    def _output(self, text, ids, params, request_id, sequences, step, forced):
        outputs = []
        for index, (tokens, (full_text, reason)) in enumerate(sequences):
            done = step >= len(tokens)
            shown = tokens[:step]
            logprobs = None
            if params.logprobs is not None:
                logprobs = [logprobs_of(token, params.logprobs) for token in shown]
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=full_text if done else full_text[: max(0, step - 1)],  # one character held back
                    token_ids=shown,
                    logprobs=logprobs,
                    finish_reason=forced or (reason if done else None),
                    stop_reason=self.stop_reason if done else None,
                    error="a NaN in the logits" if forced is FinishReason.ERROR else None,
                )
            )
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(logprobs_of(i, params.prompt_logprobs) for i in ids[1:])]
        finished = all(output.finished for output in outputs)
        return RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            outputs=outputs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=min(len(ids), 4),
            first_scheduled_time=self._arrivals[request_id] + self.queue_time,
            finished=finished,
            kv_transfer_params=self.kv_transfer_params if finished else None,
        )

    def abort(self, request_id):
        if event := self._stop_events.get(request_id):
            event.set()

    def release_kv(self, transfer_id):
        self.released.append(transfer_id)

    async def reset_prefix_cache(self):
        self.check_health()
        return not self.live

    async def pause_generation(self, mode, *, clear_cache):
        self.check_health()
        self.paused = mode
        return clear_cache

    async def resume_generation(self):
        self.paused = None

    async def is_paused(self):
        return self.paused is not None

    async def sleep(self, mode):
        if mode == "wait" and self.paused:
            raise InvalidRequestError("paused", param="mode")
        self.asleep = mode

    async def wake_up(self):
        self.asleep = None

    async def is_sleeping(self):
        return self.asleep is not None

    async def stats(self):
        return SchedulerStats(
            num_running=len(self.live), num_waiting=2, num_blocks=64, num_free_blocks=48, num_steps=7,
            num_preemptions=1, prefix_queried_tokens=100, prefix_hit_tokens=40, num_draft_tokens=20,
            num_accepted_tokens=9, num_timeouts=3, num_loaded_tokens=64, num_failed_loads=2,
            num_leased_blocks=5, num_awaiting=1, kv_connector=self.connector_stats, num_idle_blocks=32,
            prefix_evicted_blocks=6, graphs=self.graphs,
        )  # fmt: skip

    async def explain_all(self, groups, limit):
        self.check_health()
        if self.is_silent:
            await asyncio.Event().wait()
        self.explain_limit = limit
        return [[f"running: {one}" for one in group if one in self.live] for group in groups]

    @property
    def latest_stats(self):
        return None

    @property
    def recovery_stats(self):
        return RecoveryStats(1, 2, 3, 4)

    async def wait_for_crash_loop(self):
        await asyncio.Event().wait()

    def check_health(self):
        if self.dead:
            raise EngineDeadError(self.dead)
        if self.asleep:
            raise EngineAsleepError("asleep; wake it")

    async def shutdown(self, drain_timeout=0.0):
        self.dead = "shut down"
