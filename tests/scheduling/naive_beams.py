"""Beam search in the most literal way: whole outputs in lists, the whole vocabulary at every beam."""

from __future__ import annotations

from typing import NamedTuple

from fake_runner import VOCAB, scores


class Beam(NamedTuple):
    output: list[int]
    ranking: float  # log-probability less diversity penalties
    logprob: float


class Finished(NamedTuple):
    score: float
    output: list[int]
    logprob: float
    is_stopped: bool


def naive_beam_search(prompt: list[int], params, max_tokens: int, ending_ids: set[int]) -> list[Finished]:
    """Return the `params.n` best hypotheses, the best first."""
    size = params.beam_width // params.num_beam_groups
    groups = [[Beam([], 0.0, 0.0)] for _ in range(params.num_beam_groups)]
    finished: list[list[Finished]] = [[] for _ in groups]
    for num_tokens in range(1, max_tokens + 1):
        taken: list[int] = []
        for number, beams in enumerate(groups):
            if not beams:
                continue
            best = _continuations(prompt, beams, params, taken)
            is_last = num_tokens == max_tokens
            going_on = [] if is_last else [one for one in best if one.output[-1] not in ending_ids][:size]
            for one in best[:size]:
                if is_last or one.output[-1] in ending_ids:
                    score = one.ranking / num_tokens**params.length_penalty
                    hypothesis = Finished(score, one.output, one.logprob, one.output[-1] in ending_ids)
                    finished[number] = sorted([*finished[number], hypothesis], key=lambda f: -f.score)[:size]
            taken += [one.output[-1] for one in going_on or best[:size]]
            done = _is_done(going_on, finished[number], params, size, num_tokens, max_tokens)
            groups[number] = [] if done else going_on
    everything = [hypothesis for group in finished for hypothesis in group]
    return sorted(everything, key=lambda f: -f.score)[: params.n]


def _continuations(prompt: list[int], beams: list[Beam], params, taken: list[int]) -> list[Beam]:
    found = []
    for beam in beams:
        values = scores(prompt + beam.output)
        for token in sorted(range(VOCAB), key=lambda t: -values[t]):
            penalty = params.diversity_penalty * taken.count(token)
            ranking = beam.ranking + float(values[token]) - penalty
            found.append(Beam([*beam.output, token], ranking, beam.logprob + float(values[token])))
    return sorted(found, key=lambda one: -one.ranking)


def _is_done(going_on, finished, params, size, num_tokens, max_tokens) -> bool:
    if not going_on or len(finished) < size:
        return not going_on
    if params.stop_criteria == "early":
        return True
    to_the_end = params.stop_criteria == "never" and params.length_penalty > 0
    length = max_tokens if to_the_end else num_tokens
    return finished[-1].score >= going_on[0].ranking / length**params.length_penalty
