"""Beam search: which continuations of a prompt go on, which have ended, and when nothing better can come.

Pure bookkeeping of one request, apart from slots and blocks. The scoring and the three stop criteria are
those of Hugging Face transformers 5 (`GenerationMixin._beam_search`): the score of a hypothesis is its
cumulative log-probability divided by length ** length_penalty, where the length counts output tokens with
the one that ended it. Groups follow diverse beam search (Vijayakumar et al. 2018, "Diverse Beam Search")
with Hamming diversity: they search one after the other, and a token that beams of earlier groups go on with
in the same step costs `diversity_penalty` for each such beam. As in transformers and OpenVINO GenAI these
costs stay part of the score by which a group ranks its beams; the log-probability itself is kept beside it.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.sampling_params import SamplingParams
from quire.status import FinishReason
from quire.step import PositionLogprobs

FIRST_PLACE = 0
"""Where the prompt's own continuation runs until the first step has landed."""


def num_candidates(params: SamplingParams, eos_token_ids: Sequence[int]) -> int:
    """Return how many of the likeliest next tokens of each beam make the search exact.

    A beam can lose at most its ending tokens and the tokens of beams in earlier groups; what is left must
    still hold as many tokens as the group has beams.
    """
    return params.beam_width + len(ending_token_ids(params, eos_token_ids))


def ending_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """Return the token ids that end a hypothesis."""
    return frozenset((*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids))


class BeamCandidates(NamedTuple):
    """The likeliest next tokens of one beam, in falling order, and their log-probabilities in nats."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]

    @classmethod
    def of(cls, position: PositionLogprobs) -> BeamCandidates:
        """Return the likeliest tokens at a position; the token that was chosen there does not matter."""
        return cls(position.token_ids[1:], position.logprobs[1:])


class Continuation(NamedTuple):
    """The beam in `place` goes on from the tokens of the beam that was in `parent`, with one more token.

    `place == parent` for one continuation of each parent that has any.
    """

    place: int
    parent: int
    token_id: int


@dataclasses.dataclass(slots=True, frozen=True)
class BeamStep:
    """What a step did to the beams: those that go on, by place, and the places that are now empty."""

    continuations: list[Continuation]
    emptied_places: list[int]

    @property
    def ends_search(self) -> bool:
        """Whether nothing goes on."""
        return not self.continuations


class Hypothesis(NamedTuple):
    """A finished continuation of the prompt; `token_ids` end with the token that ended it, if one did."""

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: FinishReason
    stop_reason: int | None


class _Path(NamedTuple):
    """An output token and those before it, shared by all beams that go on from them."""

    token_id: int
    before: _Path | None

    def token_ids(self) -> list[int]:
        """Return the tokens, first to last."""
        reversed_ids = []
        node: _Path | None = self
        while node is not None:
            reversed_ids.append(node.token_id)
            node = node.before
        return reversed_ids[::-1]


@dataclasses.dataclass(slots=True)
class _Beam:
    """A continuation of the prompt: where it runs, its tokens, and the sums that rank it."""

    place: int
    path: _Path | None
    logprob: float  # nats
    ranking: float  # the same less the diversity penalties


class _Rules(NamedTuple):
    """What all groups of a search have in common."""

    group_size: int
    max_tokens: int
    min_tokens: int
    ending_ids: frozenset[int]
    diversity_penalty: float
    length_penalty: float
    stop_criteria: str

    def score(self, ranking: float, num_tokens: int) -> float:
        """Return the score of a hypothesis of `num_tokens` tokens."""
        return ranking / math.pow(num_tokens, self.length_penalty)

    def best_possible(self, ranking: float, num_tokens: int) -> float:
        """Return the best score that a beam of `num_tokens` tokens is taken to be able to reach."""
        to_the_end = self.stop_criteria == "never" and self.length_penalty > 0
        return self.score(ranking, self.max_tokens if to_the_end else num_tokens)


class _Extension(NamedTuple):
    """One more token for a beam; `ranking` and `logprob` are those of the beam it would become."""

    token_id: int
    ranking: float
    logprob: float
    parent: _Beam

    def beam(self) -> _Beam:
        """Return the longer beam, in its parent's place."""
        path = _Path(self.token_id, self.parent.path)
        return _Beam(self.parent.place, path, self.logprob, self.ranking)


class _Group:
    """Beams that compete with each other, and the best hypotheses they have come to."""

    def __init__(self, rules: _Rules) -> None:
        self.beams = [_Beam(FIRST_PLACE, None, 0.0, 0.0)]
        self.finished: list[tuple[float, _Beam]] = []  # (score, beam), best first, at most group_size
        self._rules = rules

    def advance(
        self, num_tokens: int, candidates: Mapping[int, BeamCandidates], taken: Counter[int]
    ) -> list[int]:
        """Replace the beams by their best continuations, each in its parent's place; return their tokens.

        Only an end among the best `group_size` candidates counts as a hypothesis: the rest are there so
        that as many beams as before can go on.

        Args:
            num_tokens: of each beam's output, with the token to come.
            candidates: by place.
            taken: how many beams of earlier groups took a token in this step.
        """
        rules = self._rules
        ranked = self._ranked(num_tokens, candidates, taken)
        best = ranked[: rules.group_size]
        if num_tokens == rules.max_tokens:
            ended, going_on = best, []
        else:
            ended = [one for one in best if one.token_id in rules.ending_ids]
            going_on = [one for one in ranked if one.token_id not in rules.ending_ids][: rules.group_size]
        for one in ended:
            self._finish(one.beam(), num_tokens)
        is_decided = self._is_decided(going_on, num_tokens)
        self.beams = [] if is_decided else [one.beam() for one in going_on]
        return [one.token_id for one in going_on or best]

    def _ranked(
        self, num_tokens: int, candidates: Mapping[int, BeamCandidates], taken: Counter[int]
    ) -> list[_Extension]:
        """Return all that may follow, the best first."""
        rules = self._rules
        forbidden = rules.ending_ids if num_tokens <= rules.min_tokens else frozenset[int]()
        possible = [
            _Extension(
                token_id,
                ranking=beam.ranking + logprob - rules.diversity_penalty * taken[token_id],
                logprob=beam.logprob + logprob,
                parent=beam,
            )
            for beam in self.beams
            for token_id, logprob in zip(*candidates[beam.place], strict=True)
            if token_id not in forbidden and logprob > -math.inf
        ]
        return sorted(possible, key=operator.attrgetter("ranking"), reverse=True)

    def _finish(self, beam: _Beam, num_tokens: int) -> None:
        """Keep a hypothesis if it is among the best."""
        self.finished.append((self._rules.score(beam.ranking, num_tokens), beam))
        self.finished.sort(key=lambda item: item[0], reverse=True)
        del self.finished[self._rules.group_size :]

    def _is_decided(self, going_on: list[_Extension], num_tokens: int) -> bool:
        """Whether nothing that these beams could come to is looked for any more."""
        rules = self._rules
        if not going_on or len(self.finished) < rules.group_size:
            return not going_on
        worst_score, _ = self.finished[-1]
        return rules.stop_criteria == "early" or worst_score >= rules.best_possible(
            going_on[0].ranking, num_tokens
        )


class BeamSearch:
    """The search of one request, from its prompt to its hypotheses.

    Up to `beam_width` beams run in places 0 to beam_width - 1. At first only the prompt runs, in place 0.
    Continuations keep their parents' places as far as they can, so that little has to be copied.

    Args:
        params: with `beam_width` at least 2.
        eos_token_ids: the model's end-of-sequence ids.
        max_tokens: most output tokens of a hypothesis.
    """

    def __init__(self, params: SamplingParams, *, eos_token_ids: Sequence[int], max_tokens: int) -> None:
        rules = _Rules(
            group_size=params.beam_width // params.num_beam_groups,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            ending_ids=ending_token_ids(params, eos_token_ids),
            diversity_penalty=params.diversity_penalty,
            length_penalty=params.length_penalty,
            stop_criteria=params.stop_criteria,
        )
        self._rules = rules
        self._groups = [_Group(rules) for _ in range(params.num_beam_groups)]
        self._num_places = params.beam_width
        self._num_returned = params.n
        self._stop_reasons = frozenset(params.stop_token_ids) - (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self._num_tokens = 0

    @property
    def live_places(self) -> list[int]:
        """Places whose beams go on, ascending; empty when the search has ended."""
        return sorted({beam.place for group in self._groups for beam in group.beams})

    def output_token_ids(self, place: int) -> list[int]:
        """Return the output so far of the beam in a place.

        Raises:
            ValueError: no beam runs there.
        """
        for group in self._groups:
            for beam in group.beams:
                if beam.place == place:
                    return [] if beam.path is None else beam.path.token_ids()
        raise ValueError(f"no beam runs in place {place}; beams run in {self.live_places}")

    def advance(self, candidates: Mapping[int, BeamCandidates]) -> BeamStep:
        """Choose how the beams go on; return what goes on where.

        Args:
            candidates: for each of `live_places`, the `num_candidates` likeliest tokens, or all there are.
        """
        before = self.live_places
        self._num_tokens += 1
        taken: Counter[int] = Counter()
        for group in self._groups:
            taken.update(group.advance(self._num_tokens, candidates, taken))
        beams = [beam for group in self._groups for beam in group.beams]
        parents = [beam.place for beam in beams]
        continuations = []
        for beam, place in zip(beams, assign_places(parents, self._num_places), strict=True):
            assert beam.path is not None, "a beam that has been advanced has tokens"
            continuations.append(Continuation(place, beam.place, beam.path.token_id))
            beam.place = place
        after = {beam.place for beam in beams}
        return BeamStep(sorted(continuations), [place for place in before if place not in after])

    def hypotheses(self) -> list[Hypothesis]:
        """Return the `n` best finished hypotheses, the best first.

        They are fewer only if the model gives all other continuations the probability 0.
        """
        finished = [item for group in self._groups for item in group.finished]
        finished.sort(key=lambda item: item[0], reverse=True)
        return [self._hypothesis(score, beam) for score, beam in finished[: self._num_returned]]

    def _hypothesis(self, score: float, beam: _Beam) -> Hypothesis:
        assert beam.path is not None, "a finished beam has tokens"
        last = beam.path.token_id
        return Hypothesis(
            token_ids=beam.path.token_ids(),
            score=score,
            cumulative_logprob=beam.logprob,
            finish_reason=FinishReason.STOP if last in self._rules.ending_ids else FinishReason.LENGTH,
            stop_reason=last if last in self._stop_reasons else None,
        )


def assign_places(parents: Sequence[int], num_places: int) -> list[int]:
    """Return a place for each beam, given the places of their parents: [beams].

    The first child of each parent stays where its parent was; the others take the lowest places that no
    child stays in.
    """
    free = iter(sorted(set(range(num_places)).difference(parents)))
    stayed: set[int] = set()
    places = []
    for parent in parents:
        places.append(next(free) if parent in stayed else parent)
        stayed.add(parent)
    return places
