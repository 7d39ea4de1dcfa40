"""Random requests of every kind, each with what must come out of it whatever happens around it."""

from __future__ import annotations

import dataclasses

from fake_grammar import END, KINDS, allowed_at, parse
from fake_runner import VOCAB, naive_generation
from mixed_world import MAX_MODEL_LEN, Chooser, World
from naive_beams import naive_beam_search

from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.status import FinishReason
from quire.structured_outputs import StructuredOutputsParams

STOP_ID = 3
# Prompts are made of few pieces, so that they share prefixes and repeat blocks in other contexts.
PIECES = [[1] * 4, [2] * 4, [1, 2, 3, 4, 5, 6, 7, 8], list(range(16)), [9]]


@dataclasses.dataclass
class Expected:
    """A live request, and what its sequences must say; only beam search has several."""

    request: Request
    outputs: dict[str, list[int]]  # by sequence id
    reasons: dict[str, FinishReason]
    got: dict[str, list[int]]
    has_run: bool = False
    may_break: bool = False  # the runner has been told to fail it

    @property
    def is_beam_search(self) -> bool:
        return self.request.sampling_params.beam_width > 0

    @property
    def grammar_kind(self) -> str:
        spec = self.request.sampling_params.structured_outputs
        return parse(spec)[0] if spec else ""

    def deadline(self, kind: str, default: float) -> float | None:
        own = getattr(self.request, kind)
        seconds = default if own is None else own
        return self.request.arrival_time + seconds if seconds else None


def draw_request(choose: Chooser, world: World, request_id: str) -> Request:
    """Return one request; which kind it is, is part of the draw."""
    prompt = [token for _ in range(choose.integer(0, 5)) for token in choose.among(PIECES)]
    kind = choose.among(["plain"] * 5 + ["grammar", "beams", "continued"])
    max_tokens = choose.integer(1, 30)
    stops = (STOP_ID,) if choose.chance(40) else ()
    options: dict = {}
    if kind == "beams":
        max_tokens = min(max_tokens, 8)
        params = _beam_params(choose, max_tokens, stops)
        options["beam_sequence_ids"] = tuple(f"{request_id}.{number}" for number in range(params.n))
    elif kind == "grammar":
        params = _structured_params(choose, max_tokens)
        options["eos_token_ids"] = (END,)
    else:
        logprobs = 0 if choose.chance(10) else None
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, prompt_logprobs=logprobs)
    request = Request(request_id, prompt, params, **options, **_draw_options(choose, world))
    if kind == "continued" and prompt:
        request.output_token_ids = _part_of_output(choose, request, world)
    return request


def draw_siblings(choose: Chooser, world: World, request_ids: list[str]) -> list[Request]:
    """Return completions of one prompt; all but the first share its computed prompt."""
    prompt = [token for _ in range(choose.integer(1, 4)) for token in choose.among(PIECES)]
    options = _draw_options(choose, world)
    leader_id = request_ids[0]
    has_grammar = choose.chance(10)
    siblings = []
    for request_id in request_ids:
        max_tokens = choose.integer(1, 20)
        params = _structured_params(choose, max_tokens) if has_grammar else _plain_params(max_tokens)
        eos = (END,) if has_grammar else ()
        leader = None if request_id == leader_id else leader_id
        siblings.append(
            Request(request_id, prompt, params, eos_token_ids=eos, shares_prompt_with=leader, **options)
        )
    return siblings


def draw_burst(choose: Chooser, world: World, request_ids: list[str]) -> list[Request]:
    """Return requests whose prompts begin alike, with what is hardly cached."""
    shared = [choose.integer(0, VOCAB - 1) for _ in range(choose.among([4, 8, 16, 20]))]
    options = _draw_options(choose, world)
    return [
        Request(
            request_id,
            [*shared, *[choose.integer(0, 9) for _ in range(choose.integer(0, 3))]],
            _plain_params(choose.integer(1, 20)),
            **options,
        )
        for request_id in request_ids
    ]


def expected_of(request: Request, world: World) -> Expected:
    """Generate the request by itself."""
    params, prompt = request.sampling_params, request.prompt_token_ids
    most = min(params.max_tokens, MAX_MODEL_LEN - len(prompt))
    if params.beam_width:
        found = naive_beam_search(prompt, params, most, set(params.stop_token_ids))
        hypotheses = dict(zip(request.beam_sequence_ids, found, strict=True))
        outputs = {name: hypothesis.output for name, hypothesis in hypotheses.items()}
        stopped = {name: hypothesis.is_stopped for name, hypothesis in hypotheses.items()}
    else:
        ending = {*params.stop_token_ids, *request.eos_token_ids}
        output = _naive_output(request, most, ending, world)
        stopped = {request.request_id: output[-1] in ending}
        outputs = {request.request_id: output[len(request.output_token_ids) :]}
    reasons = {
        name: FinishReason.STOP if is_stop else FinishReason.LENGTH for name, is_stop in stopped.items()
    }
    return Expected(request, outputs, reasons, {name: [] for name in outputs})


def _naive_output(request: Request, most: int, ending: set[int], world: World) -> list[int]:
    spec = request.sampling_params.structured_outputs
    grammar = None
    if spec is not None:
        _, key, length = parse(spec)
        grammar = lambda output: allowed_at(key, length, len(output))  # noqa: E731
    return naive_generation(request.prompt_token_ids, most, ending, grammar, world.runner.rules)


def _part_of_output(choose: Chooser, request: Request, world: World) -> list[int]:
    """Return the start of the output, as if it had been generated by an engine that is gone."""
    params = request.sampling_params
    most = min(params.max_tokens, MAX_MODEL_LEN - len(request.prompt_token_ids))
    if most < 1:
        return []
    output = _naive_output(request, most, set(params.stop_token_ids), world)
    return output[: choose.integer(0, len(output) - 1)]


def _draw_options(choose: Chooser, world: World) -> dict:
    options: dict = {
        "cache_salt": "other" if choose.chance(15) else "",
        "client_index": choose.integer(0, 1),
        "tenant": choose.among(["", "a", "b"]),
        "flow": choose.among(["", "", "large", "other"]),
    }
    if world.config.policy == "priority":
        options["priority"] = choose.integer(0, 2)
    if choose.chance(15):
        options["timeout"] = float(choose.among([0, 1, 10]))
    if choose.chance(15):
        options["queue_timeout"] = float(choose.among([0, 1, 10]))
    if choose.chance(15):
        options["pin_prefix"] = float(choose.among([1, 50]))
    return options


def _plain_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def _structured_params(choose: Chooser, max_tokens: int) -> SamplingParams:
    kind = KINDS[choose.integer(0, 3)] if choose.chance(40) else "good"
    length = choose.among([0, 1, 4, 12])
    spec = StructuredOutputsParams(regex=f"{kind}-{choose.integer(0, 2)}-{length}")
    return SamplingParams(max_tokens=max_tokens, structured_outputs=spec)


def _beam_params(choose: Chooser, max_tokens: int, stops: tuple[int, ...]) -> SamplingParams:
    width = choose.among([2, 3, 4])
    groups = choose.among([group for group in (1, 2, 3, 4) if width % group == 0])
    return SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=(*stops, 7, 11) if stops else (),
        beam_width=width,
        num_beam_groups=groups,
        diversity_penalty=choose.among([0.0, 0.5]) if groups > 1 else 0.0,
        length_penalty=choose.among([1.0, 0.0, 2.0]),
        stop_criteria=choose.among(["early", "heuristic", "never"]),
        n=choose.integer(1, width),
        logprobs=width + (3 if stops else 0),
    )
