"""Sampling one row at a time in the plainest Python, to test the vectorized sampler against."""

import math

import numpy as np

from quire.sampling_params import SamplingParams


def adjusted(logits, params: SamplingParams, prompt, output, eos_token_ids=()):
    """Bans, bias and penalties on a copy of one row, in scalar float32 arithmetic."""
    row = [np.float32(logit) for logit in logits]
    for sequence in params.bad_words_token_ids:
        prefix = list(sequence[:-1])
        if not prefix or list(output[-len(prefix) :]) == prefix:
            row[sequence[-1]] = np.float32(-np.inf)
    if len(output) < params.min_tokens:
        for token in (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids):
            row[token] = np.float32(-np.inf)
    for token, bias in params.logit_bias.items():
        row[token] += np.float32(bias)
    for token in set(prompt) | set(output):
        repetition = np.float32(params.repetition_penalty)
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= np.float32(params.frequency_penalty) * np.float32(list(output).count(token))
        row[token] -= np.float32(params.presence_penalty)
    return np.array(row, dtype=np.float32)


def kept_weights(logits, params: SamplingParams):
    """(token, weight) that temperature, min-p, top-k and top-p leave, likeliest first."""
    likeliest = float(max(logits))
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = [math.exp(max((float(logits[t]) - likeliest) / params.temperature, -1e6)) for t in order]
    kept = [(t, w) for t, w in zip(order, weights, strict=True) if w > 0 and w >= params.min_p]
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        mass = math.fsum(weight for _, weight in kept)
        cumulative, count = 0.0, 0
        while cumulative < params.top_p * mass and count < len(kept):
            cumulative += kept[count][1]
            count += 1
        kept = kept[:count]
    return kept


def chosen(logits, params: SamplingParams, uniform: float) -> int:
    """The token of one row of adjusted logits."""
    if params.temperature == 0:
        return int(np.argmax(logits))
    kept = kept_weights(logits, params)
    target = uniform * math.fsum(weight for _, weight in kept)
    cumulative = 0.0
    for token, weight in kept:
        cumulative += weight
        if cumulative > target:
            return token
    return kept[-1][0]
