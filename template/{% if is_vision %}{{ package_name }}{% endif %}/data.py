"""YOURS: the data sets. An update never touches this file.

A data set gives `(input, target)` for an index, or `(input, target, weight)` if samples do not all
weigh the same; input and target are tensors, or dicts, lists or tuples of tensors. It knows nothing
about ranks: `loading.py` deals the indices out. Two methods are optional:

`set_epoch(epoch)` is called before each epoch.
`read_batch(indices)` returns the same for many samples, stacked: faster for data in memory, and the
place to fill up samples of different length. Without it samples are read one by one and stacked.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

from .seeding import generator

VALIDATION_SHARE = 0.2


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Handwritten digits of scikit-learn: 8 x 8 grey images."""

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, augment_seed: int | None = None
    ) -> None:
        """Keep the images in memory.

        Args:
            images: float32 [samples, 1, 8, 8], values from 0 to 1.
            labels: int64 [samples], 0 to 9.
            augment_seed: Seed of the augmentation; None: no augmentation.
        """
        self.images = images
        self.labels = labels
        self.augment_seed = augment_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the augmentation of this epoch. Called by the loop before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.read_batch([index])
        return images[0], labels[0]

    def read_batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 images [samples, 1, 8, 8] and int64 labels [samples]."""
        images = self.images[indices]
        if self.augment_seed is not None:
            pairs = zip(images, indices, strict=True)
            images = torch.stack([augment(i, self.augment_seed, self.epoch, n) for i, n in pairs])
        return images, self.labels[indices]


def augment(image: torch.Tensor, seed: int, epoch: int, index: int) -> torch.Tensor:
    """Move an image by up to one pixel and add a little noise.

    A function of seed, epoch and index alone, not of a global random stream: so it is the same in
    any loader process and on any rank, and a resumed run sees exactly what a straight run sees.
    """
    stream = generator(seed, "augment", epoch, index)
    down, right = torch.randint(-1, 2, (2,), generator=stream).tolist()
    noise = 0.05 * torch.randn(image.shape, generator=stream)
    return image.roll((down, right), dims=(1, 2)) + noise


def build_datasets(seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the training and the validation set, the same on every rank.

    Called on rank 0 first and on the others afterwards: the place for a download.

    Args:
        seed: The run's seed. Used for the augmentation, not for the split: runs with other seeds
            must not train on what this one validates on.
    """
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=generator("split"))
    n_validation = int(VALIDATION_SHARE * len(labels))
    validation, training = order[:n_validation], order[n_validation:]
    return (
        Digits(images[training], labels[training], augment_seed=seed),
        Digits(images[validation], labels[validation]),
    )
