"""A Qwen3 in plain numpy that evicts keys, one token, layer and head at a time."""

from __future__ import annotations

import functools

import numpy as np

from naive_eviction import NaiveLayer


def rms_norm(values: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return values / np.sqrt((values**2).mean(-1, keepdims=True) + eps) * weight


def rotated(values: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotate heads [heads, head_dim] to a position."""
    half = values.shape[-1] // 2
    cos, sin = rotation(position, half, theta)
    first, second = values[..., :half], values[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)


@functools.cache
def rotation(position: int, half: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    angle = position * theta ** (-np.arange(half) / half)
    return np.cos(angle), np.sin(angle)


class NaiveEvictingModel:
    """Keys are kept as they are before rotation, and rotated to whatever position they have when used."""

    def __init__(self, model, config, block_size: int) -> None:
        self.weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
        self.hf = model.config
        self.theta = model.config.rope_parameters["rope_theta"]
        self.config = config
        random = np.random.Generator(np.random.PCG64(0))
        self.layers = [NaiveLayer(config, block_size, random) for _ in range(self.hf.num_hidden_layers)]
        self.keys = [{} for _ in self.layers]  # by token number: [kv_heads, head_dim]
        self.rotated_keys = [{} for _ in self.layers]  # by token number and position
        self.values = [{} for _ in self.layers]
        self.held = [[] for _ in self.layers]
        self.num_known = 0

    def continuation(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """Return greedy tokens and their log-probabilities."""
        window = self.config.snapkv_window_size
        first = max(len(prompt) - window, 0) if window else 0
        totals = [{} for _ in self.layers]
        for number, token in enumerate(prompt):
            logits, seen = self.compute(token)
            for total, weights in zip(totals, seen, strict=True):
                for other, weight in weights.items() if number >= first else ():
                    total[other] = total.get(other, 0.0) + weight
        for total in totals:  # tokens that nobody looked at
            total.update({number: 0.0 for number in range(len(prompt)) if number not in total})
        self.register(list(range(len(prompt))), totals, min(window, len(prompt)) if window else None)
        tokens, logprobs = [], []
        while True:
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()))
            if len(tokens) == count:
                return tokens, logprobs
            logits, seen = self.compute(tokens[-1])
            self.register([self.num_known - 1], seen, 1)

    def register(self, new: list[int], weights: list[dict], window: int | None) -> None:
        for number, layer in enumerate(self.layers):
            layer.see(new, weights[number].get, window)
            keys = [
                {
                    token: self.rotated_key(number, token, place)[head]
                    for place, token in enumerate(layer.held)
                }
                for head in range(self.hf.num_key_value_heads)
            ]
            layer.evict(keys)
            self.held[number] = list(layer.held)

    def rotated_key(self, layer: int, token: int, place: int) -> np.ndarray:
        position = place if self.config.apply_rotation else token
        known = self.rotated_keys[layer]
        if (token, position) not in known:
            known[token, position] = rotated(self.keys[layer][token], position, self.theta)
        return known[token, position]

    def compute(self, token_id: int) -> tuple[np.ndarray, list[dict[int, float]]]:
        """Compute the next token: its logits, and the weight that each held token gets, by layer."""
        token, self.num_known = self.num_known, self.num_known + 1
        hidden = self.weights["model.embed_tokens.weight"][token_id]
        seen = []
        for layer in range(len(self.layers)):
            weight = lambda name, layer=layer: self.weights[f"model.layers.{layer}.{name}.weight"]  # noqa: E731
            normed = rms_norm(hidden, weight("input_layernorm"), self.hf.rms_norm_eps)
            attended, weights = self.attend(layer, token, normed, weight)
            seen.append(weights)
            hidden = hidden + weight("self_attn.o_proj") @ attended
            normed = rms_norm(hidden, weight("post_attention_layernorm"), self.hf.rms_norm_eps)
            gate = weight("mlp.gate_proj") @ normed
            up = weight("mlp.up_proj") @ normed
            hidden = hidden + weight("mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)
        normed = rms_norm(hidden, self.weights["model.norm.weight"], self.hf.rms_norm_eps)
        return self.weights["lm_head.weight"] @ normed, seen

    def attend(self, layer: int, token: int, normed: np.ndarray, weight) -> tuple[np.ndarray, dict]:
        dim, eps = self.hf.head_dim, self.hf.rms_norm_eps
        query = (weight("self_attn.q_proj") @ normed).reshape(-1, dim)
        query = rms_norm(query, weight("self_attn.q_norm"), eps)
        key = (weight("self_attn.k_proj") @ normed).reshape(-1, dim)
        self.keys[layer][token] = rms_norm(key, weight("self_attn.k_norm"), eps)
        self.values[layer][token] = (weight("self_attn.v_proj") @ normed).reshape(-1, dim)
        self.held[layer].append(token)
        held = self.held[layer]
        keys = np.array([self.rotated_key(layer, other, place) for place, other in enumerate(held)])
        values = np.array([self.values[layer][other] for other in held])
        position = len(held) - 1 if self.config.apply_rotation else token
        query = rotated(query, position, self.theta)
        group = len(query) // len(key)
        attended, total = [], np.zeros(len(held))
        for head, one in enumerate(query):
            scores = keys[:, head // group] @ one / np.sqrt(dim)
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            total += shares
            attended.append(shares @ values[:, head // group])
        return np.concatenate(attended), dict(zip(held, total.tolist(), strict=True))
