"""YOURS: the model, its loss and its scores. An update never touches this file.

Knows nothing about processes: what is here also runs in a notebook. The model takes the input of
the data set, in batches; what it returns goes to `compute_losses` and `compute_scores` as it is.
"""

import torch
from torch import nn
from torch.nn import functional

from .data import IGNORED, SEQUENCE_LENGTH, VOCABULARY


class Transformer(nn.Module):
    """A small decoder-only transformer over bytes."""

    def __init__(
        self, width: int = 64, layers: int = 2, heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQUENCE_LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens int64 [samples, length] to logits [samples, length, vocabulary]."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Block(nn.Module):
    """Attention to earlier tokens, then a small network for each token."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, length, width] to the same shape."""
        x = x + self.dropout(self.attend(self.norm1(x)))
        mixed: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return mixed

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Mix every token with those before it."""
        samples, length, width = x.shape
        split = self.qkv(x).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return out


def build_model() -> nn.Module:
    """Make the model. Called with the same seed on every rank: the same weights everywhere."""
    return Transformer()


def compute_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each sample, the mean over its tokens: float32 [samples].

    Not the mean over samples: the data set gives each sample its number of tokens as weight, and
    the loop divides by the tokens of the whole step, over all processes.

    Args:
        logits: float32 [samples, length, vocabulary].
        targets: int64 [samples, length]; IGNORED where there is no next token.
    """
    losses = functional.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    )
    return losses.sum(dim=1) / count_tokens(targets)


def compute_scores(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return further numbers for each validation sample, each [samples]. Means are logged."""
    hits = (logits.argmax(dim=2) == targets).sum(dim=1)
    return {"token_accuracy": hits / count_tokens(targets)}


def count_tokens(targets: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of each sample count: int64 [samples], at least 1."""
    return (targets != IGNORED).sum(dim=1).clamp(min=1)
