"""YOURS: the model, its loss and its scores. An update never touches this file.

Knows nothing about processes: what is here also runs in a notebook. The model takes the input of
the data set, in batches; what it returns goes to `compute_losses` and `compute_scores` as it is.
"""

import torch
from torch import nn
from torch.nn import functional


class DigitsNet(nn.Module):
    """A small convolutional network for 8 x 8 images."""

    def __init__(self, classes: int = 10, width: int = 32, dropout: float = 0.2) -> None:
        super().__init__()
        self.features = nn.Sequential(
            convolution(1, width),
            convolution(width, 2 * width),
            nn.MaxPool2d(2),
            convolution(2 * width, 2 * width),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width * 2 * 2, classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images [samples, 1, 8, 8] to logits [samples, classes]."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Return a 3 x 3 convolution with BatchNorm. The norm makes a bias redundant."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def build_model() -> nn.Module:
    """Make the model. Called with the same seed on every rank: the same weights everywhere."""
    return DigitsNet()


def compute_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each sample: float32 [samples].

    Not their mean: the loop divides by the number of samples of the whole step, over all processes.

    Args:
        logits: float32 [samples, classes].
        labels: int64 [samples].
    """
    return functional.cross_entropy(logits, labels, reduction="none")


def compute_scores(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return further numbers for each validation sample, each [samples]. Means are logged."""
    return {"accuracy": (logits.argmax(dim=1) == labels).float()}
