import numpy as np
import pytest

from quire.execution.sampling.rng import philox4x32, uniforms
from quire.execution.sampling.table import SamplingTable
from quire.sampling_params import SamplingParams

# Published known answers for philox4x32, 10 rounds (Random123's kat_vectors).
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values):
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, answer):
    assert tuple(int(word[0]) for word in philox4x32(words(*counter), words(*key))) == answer


def test_philox_of_many_is_that_of_each():
    counters = tuple(
        np.array(column, dtype=np.uint64) for column in zip(*(c for c, _, _ in KNOWN_ANSWERS), strict=True)
    )
    keys = tuple(
        np.array(column, dtype=np.uint64) for column in zip(*(k for _, k, _ in KNOWN_ANSWERS), strict=True)
    )
    together = np.stack(philox4x32(counters, keys), axis=1)
    assert together.tolist() == [list(answer) for _, _, answer in KNOWN_ANSWERS]


def test_uniforms_come_from_the_first_two_words_of_the_counter_at_the_position():
    high, low = 0x6627E8D5, 0xE169C58D
    expected = (((high >> 5) << 26) | (low >> 6)) / 2**53
    assert uniforms(np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64)).tolist() == [expected]


def test_uniforms_use_all_of_seed_and_position():
    seeds = np.array([0, 1, 1 << 32, 0, 0, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 0, 0, 1, 1 << 32, 0])
    drawn = uniforms(seeds, positions)
    assert len(set(drawn.tolist())) == len(drawn)
    for row in range(len(seeds)):
        alone = uniforms(seeds[row : row + 1], positions[row : row + 1])
        assert alone[0] == drawn[row]


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_uniforms_are_uniform_and_neighbours_independent(along):
    count = 40_000
    varied, fixed = np.arange(count), np.full(count, 11)
    if along == "positions":
        drawn = uniforms(fixed.astype(np.uint64), varied)
    else:
        drawn = uniforms(varied.astype(np.uint64), fixed)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    buckets = np.histogram(drawn, bins=100, range=(0, 1))[0]
    chi_square = ((buckets - count / 100) ** 2 / (count / 100)).sum()
    assert chi_square < 149  # 99 degrees of freedom, probability 0.001
    pairs = np.histogram2d(drawn[:-1], drawn[1:], bins=10)[0]
    chi_square = ((pairs - count / 100) ** 2 / (count / 100)).sum()
    assert chi_square < 149


def test_what_a_slot_draws_depends_on_its_seed_and_position_only():
    """However far apart positions are, and whatever was drawn ahead for them or another request."""
    rng, table = np.random.default_rng(0), SamplingTable(3, 50)
    seeds = np.zeros(3, dtype=np.uint64)
    for step in range(200):
        if step % 20 == 0:
            seeds[step // 20 % 3] = seed = int(rng.integers(2**62))
            params = SamplingParams(seed=seed, top_k=7)
            table.write(step // 20 % 3, params, num_prompt_tokens=1, eos_token_ids=())
        first = step if step % 7 else int(rng.integers(2**40))
        slots = np.repeat(rng.permutation(3), rng.integers(1, 100, 3))  # with drafts
        positions = first + np.arange(len(slots))
        found = table.draws(slots, positions)
        assert np.array_equal(found[-1], uniforms(seeds[slots], positions))
