"""Optimizer and learning rate. Their clock is the optimizer step, not the forward pass."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .config import Config


def scaled_learning_rate(config: Config, global_batch_size: int) -> float:
    """Return the peak learning rate for this global batch size."""
    ratio = global_batch_size / config.lr_reference_batch_size
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]
    return config.learning_rate * factor


def build_optimizer(model: nn.Module, config: Config, learning_rate: float) -> torch.optim.AdamW:
    """Make AdamW. Matrices and kernels decay; biases and the scales of norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # One kernel for all parameters instead of several per parameter.
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, warmup: int, total: int) -> LambdaLR:
    """Make a schedule over `total` optimizer steps: linear warm-up, then cosine to zero."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
