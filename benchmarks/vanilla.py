"""The vanilla Transformer of the paper's Table 9 with a sliding window: it reads a whole window for each token.

It is made as fast as possible. Weights have the precision of the products, causal attention is fused, and the last
layer computes only what the last position needs: all keys and values, one query, one feed-forward, one softmax.
Several windows are read side by side. Positions are absolute and learned, and cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.config.settings import TransformerXLConfig

from .bound import Product


class Layer(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.n_head, width, d_model = sizes["n_head"], sizes["n_head"] * sizes["d_head"], sizes["d_model"]
        self.query = nn.Linear(d_model, width, bias=False)
        self.keys_values = nn.Linear(d_model, 2 * width, bias=False)
        self.output = nn.Linear(width, d_model, bias=False)
        self.inner = nn.Linear(d_model, sizes["d_inner"])
        self.outer = nn.Linear(sizes["d_inner"], d_model)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2))

    def forward(self, x: Tensor, last: bool) -> Tensor:
        """All positions, or only the last one of each window."""
        k, v = (self._heads(part) for part in self.keys_values(x).chunk(2, -1))
        x = x[:, -1:] if last else x
        attended = F.scaled_dot_product_attention(self._heads(self.query(x)), k, v, is_causal=not last)
        x = self.norms[0](x + self.output(attended.transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.outer(F.relu(self.inner(x))))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)


class Vanilla(nn.Module):
    """Log-probabilities of the token after each window [W, L]."""

    def __init__(self, sizes: dict[str, Any], attn_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes["vocab_size"], sizes["d_model"])
        self.positions = nn.Parameter(torch.randn(attn_len, sizes["d_model"]))
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["n_layer"]))
        self.softmax = nn.Linear(sizes["d_model"], sizes["vocab_size"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions
        for layer in self.layers[:-1]:
            x = layer(x, last=False)
        return self.softmax(self.layers[-1](x, last=True)[:, 0]).float().log_softmax(-1)


class Sliding:
    """Windows that advance by one token; one unit of work has `batch` of them."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if job["precision"] == "bf16" else torch.float32
        model = Vanilla(job["model"], job["attn_len"]).to(job["device"], dtype)
        self.model = model.eval()
        text = torch.randint(job["model"]["vocab_size"], (job["attn_len"] + job["batch"] - 1,))
        self.windows = text.unfold(0, job["attn_len"], 1).to(job["device"])

    @torch.no_grad()
    def run(self) -> None:
        self.model(self.windows)


def vanilla_products(config: TransformerXLConfig, windows: int, attn_len: int) -> list[Product]:
    """The fewest matrix products that `Vanilla` needs for windows."""
    heads, size, width = config.n_head, config.d_head, config.d_model
    rows, inside, pairs, below = windows * attn_len, heads * size, windows * heads, config.n_layer - 1
    causal = below * (attn_len + 1) / 2 / attn_len
    return [
        Product("keys, values", 1, rows, width, 2 * inside, config.n_layer),
        Product("queries", 1, rows, width, inside, below),
        Product("scores", pairs, attn_len, size, attn_len, causal),
        Product("weighted values", pairs, attn_len, attn_len, size, causal),
        Product("output", 1, rows, inside, width, below),
        Product("inner", 1, rows, width, config.d_inner, below),
        Product("outer", 1, rows, config.d_inner, width, below),
        Product("last query", 1, windows, width, inside, 1),
        Product("last scores", pairs, 1, size, attn_len, 1),
        Product("last weighted values", pairs, 1, attn_len, size, 1),
        Product("last output", 1, windows, inside, width, 1),
        Product("last inner", 1, windows, width, config.d_inner, 1),
        Product("last outer", 1, windows, config.d_inner, width, 1),
        Product("softmax", 1, windows, width, config.vocab_size, 1),
    ]
