"""Plan every step with a scheduler of your own, which has what vLLM's and eSurge's interfaces ask for.

python examples/custom_scheduler.py

An engine process finds the class by its dotted name: in this folder, run
`quire serve --scheduler-cls custom_scheduler.OneByOne`.
"""

import dataclasses
from collections import deque

import numpy as np

from quire import LLM, SamplingParams
from quire.errors import InvalidRequestError
from quire.request import Request
from quire.scheduling import SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutput, EngineCoreOutputs
from quire.status import FinishReason
from quire.step import NO_TOKEN, CachedRequestData, ChosenTokens, NewRequestData, SchedulerOutput

NONE = np.empty(0, dtype=np.int32)


@dataclasses.dataclass
class Running:
    """A request in a slot: its KV blocks, its tokens so far, and how many of them are computed."""

    request: Request
    slot: int
    blocks: list[int]
    tokens: list[int]
    num_computed: int = 0


class OneByOne(SchedulerInterface):
    """First come, first served: whole prompts, and all the blocks that a request may need, when it starts."""

    reads_priority = False

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.free_blocks = list(range(self.num_blocks))
        self.free_slots = list(range(config.max_num_seqs))
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Running] = {}
        self.finished_ids: list[str] = []
        self.num_steps = 0

    def add_request(self, request):
        """Queue a request that fits into the cache."""
        fits_into_step = self.longest(request) <= self.config.max_num_batched_tokens
        if not fits_into_step or self.blocks_of(request) > self.num_blocks:
            raise InvalidRequestError("the request is too long for this scheduler")
        self.waiting.append(request)

    def longest(self, request):
        """Return the most tokens that a request can have."""
        return min(self.max_model_len, request.num_prompt_tokens + request.sampling_params.max_tokens)

    def blocks_of(self, request):
        """Return the KV blocks that a request may need."""
        return -(-self.longest(request) // self.config.block_size)

    def schedule(self, throttle_prefills=False):
        """Go on with what runs, one token each, and start what fits into this step and the cache."""
        budget = self.config.max_num_batched_tokens - len(self.running)
        started = []
        while self.waiting and self.free_slots and not throttle_prefills:
            request = self.waiting[0]
            num_blocks = self.blocks_of(request)
            if num_blocks > len(self.free_blocks) or request.num_tokens > budget:
                break
            budget -= request.num_tokens
            self.waiting.popleft()
            blocks = [self.free_blocks.pop() for _ in range(num_blocks)]
            row = Running(request, self.free_slots.pop(), blocks, request.all_token_ids)
            self.running[request.request_id] = row
            started.append(self.told(row))
        rows = list(self.running.values())
        finished, self.finished_ids = self.finished_ids, []
        self.num_steps += 1
        return SchedulerOutput(
            step=self.num_steps,
            request_ids=[row.request.request_id for row in rows],
            slots=numbers(row.slot for row in rows),
            num_tokens=numbers(len(row.tokens) - row.num_computed for row in rows),
            num_computed_tokens=numbers(row.num_computed for row in rows),
            num_known_tokens=numbers(len(row.tokens) for row in rows),
            draft_token_ids=np.empty((len(rows), 0), dtype=np.int32),
            finished_req_ids=finished,
            preempted_req_ids=[],
            scheduled_new_reqs=started,
            forks=[],
            scheduled_cached_reqs=CachedRequestData(NONE, NONE, NONE.reshape(1, 0), []),
            chosen_tokens=ChosenTokens(NONE, NONE),
            block_copies=np.empty((0, 2, 1), dtype=np.int32),
        )

    def told(self, row):
        """Return what the runner is told once about a request that starts."""
        request = row.request
        return NewRequestData(
            request.request_id,
            row.slot,
            request.prompt_array,
            request.output_token_ids,
            request.sampling_params,
            request.eos_token_ids,
            numbers(row.blocks).reshape(1, -1),
            row.num_computed,
        )

    def update_from_output(self, scheduler_output, model_runner_output):
        """Append the sampled tokens, and end the requests that are done; a failed step has errors instead."""
        outputs = []
        for index, request_id in enumerate(scheduler_output.request_ids):
            row = self.running.get(request_id)
            if row is None:
                continue  # it has been aborted while the step was computed
            if not model_runner_output.is_applied:
                self.end(request_id)
                error = {"finish_reason": FinishReason.ERROR, "error": model_runner_output.failure}
                outputs.append(EngineCoreOutput(request_id, [], **error))
                continue
            new = [int(token) for token in model_runner_output.sampled_token_ids[index] if token != NO_TOKEN]
            row.num_computed = len(row.tokens)
            row.tokens += new
            reason = None
            if row.tokens[-1] in self.stop_ids(row.request):
                reason = FinishReason.STOP
            elif len(row.tokens) >= self.longest(row.request):
                reason = FinishReason.LENGTH
            if reason is not None:
                self.end(request_id)
            outputs.append(EngineCoreOutput(request_id, new, finish_reason=reason))
        return {0: EngineCoreOutputs(outputs)}

    def stop_ids(self, request):
        """Return the tokens that end a request's output."""
        params = request.sampling_params
        return {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}

    def end(self, request_id):
        """Take a running request out of its slot; the next plan tells the runner."""
        row = self.running.pop(request_id)
        self.free_blocks += row.blocks
        self.free_slots.append(row.slot)
        self.finished_ids.append(request_id)

    def finish_requests(self, request_ids, finished_status):
        """End requests whose client is gone, or whose stop string has been found."""
        ended = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        self.waiting = deque(request for request in self.waiting if request.request_id not in ended)
        for request_id in ended & self.running.keys():
            self.end(request_id)

    def get_num_unfinished_requests(self):
        """Return how many requests wait or run."""
        return len(self.waiting) + len(self.running)

    def has_finished_requests(self):
        """Whether the runner has yet to be told of requests that have ended."""
        return bool(self.finished_ids)

    def get_request_counts(self):
        """Return how many requests run, and how many wait."""
        return len(self.running), len(self.waiting)

    def reset_prefix_cache(self):
        """There is no prefix cache, so that it is empty."""
        return True


def numbers(values):
    """Return numbers as the arrays of a plan have them."""
    return np.fromiter(values, dtype=np.int32)


def main() -> None:
    """Ask two questions under this scheduler."""
    with LLM("mini", scheduler_cls=OneByOne, num_kv_blocks=256, max_num_seqs=2) as llm:
        questions = ["What is 27 + 58?", "What is 31 + 16?"]
        conversations = [[{"role": "user", "content": question}] for question in questions]
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=32))
    for question, output in zip(questions, outputs, strict=True):
        print(f"{question} {output.outputs[0].text}")


if __name__ == "__main__":
    main()
