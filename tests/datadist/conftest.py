"""Fixtures: sides by themselves, and pairs of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import sides
from model_pairs import Models
from pairs import PAIRS, Pair, PairMaker

from quire.datadist import LLMDataDist, LLMRole


@pytest.fixture(params=PAIRS)
def make_pair(request: pytest.FixtureRequest) -> Iterator[PairMaker]:
    with contextlib.ExitStack() as stack:
        yield PairMaker(request.param, stack)


@pytest.fixture
def pair(make_pair: PairMaker) -> Pair:
    return make_pair()


@pytest.fixture
def new_datadist() -> Iterator[Callable[[LLMRole, int], LLMDataDist]]:
    """Make objects that are not initialised, and finalize them when the test ends."""
    with contextlib.ExitStack() as stack:

        def new(role: LLMRole, cluster_id: int = 1) -> LLMDataDist:
            made = LLMDataDist(role, cluster_id)
            stack.callback(made.finalize)
            return made

        yield new


@pytest.fixture
def prompt() -> Iterator[LLMDataDist]:
    started = sides.start_prompt()
    yield started
    started.finalize()


@pytest.fixture
def decoder() -> Iterator[LLMDataDist]:
    started = sides.start_decoder()
    yield started
    started.finalize()


@pytest.fixture
def models(pair: Pair) -> Models:
    return Models(pair)
