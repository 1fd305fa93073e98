"""Transformer-XL once more, in NumPy, for one stream: the paper by index, plain and slow, without the package's code.

    log_probs, memory = read(weights, config, lengths, ids, memory)

`weights` has the names of `TransformerXL.state_dict()`, `config` and `lengths` the fields of
`transformer_xl.config.settings`.
`memory` is one array [M, D] for each layer. A batch is its rows one by one: a row that holds less has a shorter memory,
and what pads it is not read at all. There is no dropout.

Every function is analytic in the weights, so the imaginary part of a result at weights + i h direction, over a tiny h,
is its derivative to the last digit (Squire & Trapp 1998). Memory carries none, for no gradient enters it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]


def read(
    weights: Weights, config: Any, lengths: Any, ids: list[int], memory: list[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Log-probabilities [T, V] of what follows each token, and the memory behind the last one."""
    if config.zero_memory:
        memory = [
            np.concatenate([np.zeros((max(lengths.mem_len - len(past), 0), config.d_model)), past]) for past in memory
        ]
    x = np.stack([embed(weights, config, token) for token in ids])
    after = []
    for n, past in enumerate(memory):
        seen = np.concatenate([past, x.real])
        after.append(seen[max(len(seen) - lengths.mem_len, 0) :])
        x = attention(weights, config, lengths, n, x, past)
        x = feed_forward(weights, config, n, x)
    if config.final_norm:
        x = norm(weights, config, "backbone.final_norm", x)
    return np.stack([log_distribution(weights, config, hidden) for hidden in x]), after


def nll(log_probs: np.ndarray, targets: list[int]) -> np.ndarray:
    """Nats of each target, 0 where it is -1."""
    return np.stack([0 * row[0] if w < 0 else -row[w] for row, w in zip(log_probs, targets, strict=True)])


def attention(weights: Weights, config: Any, lengths: Any, n: int, x: np.ndarray, past: np.ndarray) -> np.ndarray:
    """Section 3.3: query i stands behind the M rows of memory, at distance d = M + i - j from key j."""
    H, K, D = config.n_head, config.d_head, config.d_model
    name, T, M = f"backbone.layers.{n}.attention", len(x), len(past)
    context = np.concatenate([past, x])
    if config.pre_lnorm:
        context = norm(weights, config, f"{name}.norm", context)
    W_q, W_k, W_v = weights[f"{name}.qkv.weight"].reshape(3, H, K, D)
    W_r = weights[f"{name}.position.weight"].reshape(H, K, D)
    W_o = weights[f"{name}.output.weight"].reshape(D, H, K)
    gain = weights.get(f"{name}.qk_norm", 1)
    u, v = (weights[bias][n if config.untie_r else 0] for bias in ("backbone.content_bias", "backbone.position_bias"))
    farthest = M + T if lengths.clamp_len is None else lengths.clamp_len
    window = M + T if lengths.attn_len is None else lengths.attn_len
    out = np.zeros(x.shape, W_o.dtype)
    for h in range(H):
        keys = [standardised(config, W_k[h] @ row) for row in context]
        values = [W_v[h] @ row for row in context]
        relative = [W_r[h] @ encoding(min(d, farthest), D) for d in range(M + T)]
        for i in range(T):
            query, scores, attended = gain * standardised(config, W_q[h] @ context[M + i]), [], []
            for j in range(M + T):
                d = M + i - j
                if 0 <= d < window:
                    content, position = query @ keys[j], query @ relative[d]
                    scores.append((content + position + u[h] @ keys[j] + v[h] @ relative[d]) / K**0.5)
                    attended.append(values[j])
            for log_p, value in zip(log_softmax(scores), attended, strict=True):
                out[i] += np.exp(log_p) * (W_o[:, h] @ value)
    out = np.stack([join(weights, config, f"{name}.join", *rows) for rows in zip(x, out, strict=True)])
    return out if config.pre_lnorm else norm(weights, config, f"{name}.norm", out)


def standardised(config: Any, head: np.ndarray) -> np.ndarray:
    """With QK-norm, a head's query or key with mean 0 and variance 1."""
    centred = head - head.mean()
    return centred / np.sqrt((centred**2).mean() + 1e-5) if config.qk_norm else head


def join(weights: Weights, config: Any, name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A sublayer's input and output in one position, joined: Parisotto et al. 2019 (arXiv 1910.06764), section 3.2."""
    y = np.where(y.real > 0, y, 0) if config.relu_output else y
    if config.gate == "none":
        return x + y
    of_x, of_y, b = (weights.get(f"{name}.{part}") for part in ("of_x.weight", "of_y.weight", "gate_bias"))
    if config.gate == "input":
        return sigmoid(of_x @ x) * x + y
    if config.gate == "output":
        return x + sigmoid(of_x @ x - b) * y
    if config.gate == "highway":
        return sigmoid(of_x @ x + b) * x + (1 - sigmoid(of_x @ x + b)) * y
    if config.gate == "sigmoid-tanh":
        W, U = np.split(of_y, 2)
        return x + sigmoid(W @ y - b) * np.tanh(U @ y)
    (W_r, W_z, W_g), (U_r, U_z) = np.split(of_y, 3), np.split(of_x, 2)
    r = sigmoid(W_r @ y + U_r @ x)
    z = sigmoid(W_z @ y + U_z @ x - b)
    new = np.tanh(W_g @ y + weights[f"{name}.of_reset.weight"] @ (r * x))
    return (1 - z) * x + z * new


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def encoding(d: int, D: int) -> np.ndarray:
    """The sinusoids of a distance: all sines, then all cosines."""
    angles = [d / 10000 ** (2 * i / D) for i in range(D // 2)]
    return np.array([np.sin(angle) for angle in angles] + [np.cos(angle) for angle in angles])


def feed_forward(weights: Weights, config: Any, n: int, x: np.ndarray) -> np.ndarray:
    """Two linear layers with a ReLU between, in each position alone."""
    name, out = f"backbone.layers.{n}.feed_forward", []
    for row in x:
        inner = norm(weights, config, f"{name}.norm", row) if config.pre_lnorm else row
        inner = weights[f"{name}.inner.weight"] @ inner + weights[f"{name}.inner.bias"]
        inner = np.where(inner.real > 0, inner, 0)
        inner = weights[f"{name}.outer.weight"] @ inner + weights[f"{name}.outer.bias"]
        row = join(weights, config, f"{name}.join", row, inner)
        out.append(row if config.pre_lnorm else norm(weights, config, f"{name}.norm", row))
    return np.stack(out)


def norm(weights: Weights, config: Any, name: str, x: np.ndarray) -> np.ndarray:
    """LayerNorm over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    scaled = centred / np.sqrt(variance + config.layer_norm_epsilon)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def log_softmax(scores: Any) -> np.ndarray:
    scores = np.array(scores)
    scores = scores - scores.real.max()
    return scores - np.log(np.exp(scores).sum())


def band_edges(config: Any) -> list[tuple[int, int]]:
    """First id of each band, and the first behind it."""
    return list(pairwise([0, *config.cutoffs, config.vocab_size]))


def projected(config: Any) -> bool:
    return config.div_val > 1 or config.d_embed not in (None, config.d_model)


def embed(weights: Weights, config: Any, token: int) -> np.ndarray:
    """The token's row of its band's table, projected, times sqrt(d_model)."""
    scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
    band, first = 0, 0
    if config.div_val > 1:
        band, first = next((b, low) for b, (low, high) in enumerate(band_edges(config)) if low <= token < high)
    row = weights[f"embedding.tables.{band}"][token - first]
    return scale * (weights[f"embedding.projections.{band}"] @ row if projected(config) else row)


def log_distribution(weights: Weights, config: Any, hidden: np.ndarray) -> np.ndarray:
    """Words of band 0 and the other bands as wholes share one softmax; a band's words share what falls to it."""
    scores = []
    for b, (low, high) in enumerate(band_edges(config)):
        own = b if config.div_val > 1 else 0
        table = weights[f"{'embedding' if config.tie_weight else 'softmax'}.tables.{own}"]
        table = table if config.div_val > 1 else table[low:high]
        bias, inner = weights["softmax.bias"][low:high], hidden
        if projected(config):
            tied = config.tie_projs and config.tie_projs[b]
            inner = weights[f"embedding.projections.{own}" if tied else f"softmax.projections.{b}"].T @ hidden
        if b == 0 and config.cutoffs:
            table = np.concatenate([table, weights["softmax.cluster_weight"]])
            bias = np.concatenate([bias, weights["softmax.cluster_bias"]])
        scores.append(table @ inner + bias)
    head, words = log_softmax(scores[0]), band_edges(config)[0][1]
    tails = [head[words + b - 1] + log_softmax(scores[b]) for b in range(1, len(scores))]
    return np.concatenate([head[:words], *tails])
