"""YOURS: the data sets. An update never touches this file.

A data set gives `(input, target)` for an index, or `(input, target, weight)` if samples do not all
weigh the same; input and target are tensors, or dicts, lists or tuples of tensors. It knows nothing
about ranks: `loading.py` deals the indices out. Two methods are optional:

`set_epoch(epoch)` is called before each epoch.
`read_batch(indices)` returns the same for many samples, stacked: faster for data in memory, and the
place to fill up samples of different length. Without it samples are read one by one and stacked.
"""

from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .seeding import mix

SEQUENCE_LENGTH = 128
VOCABULARY = 256  # the text is read as UTF-8 bytes
IGNORED = -100  # a target that does not count
VALIDATION_SHARE = 0.1


class Passages(Dataset[tuple[torch.Tensor, ...]]):
    """Texts cut into passages; targets are the next bytes. The last passage is shorter."""

    def __init__(self, texts: list[str]) -> None:
        """Keep the texts in memory as bytes."""
        self.passages: list[torch.Tensor] = []
        for text in texts:
            tokens = torch.tensor(list(text.encode()), dtype=torch.int64)
            # One byte of overlap: the last target of a passage is the first input of the next.
            starts = range(0, len(tokens) - 1, SEQUENCE_LENGTH)
            self.passages += [tokens[i : i + SEQUENCE_LENGTH + 1] for i in starts]

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return input [length], target [length] and weight: the number of targets that count."""
        return tuple(column[0] for column in self.read_batch([index]))

    def read_batch(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        """Return inputs and targets [samples, length of the longest] and weights [samples]."""
        chosen = [self.passages[index] for index in indices]
        inputs = pad_sequence([passage[:-1] for passage in chosen], batch_first=True)
        targets = pad_sequence([passage[1:] for passage in chosen], True, padding_value=IGNORED)
        return inputs, targets, torch.tensor([len(passage) - 1 for passage in chosen])


def build_datasets(seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the training and the validation set, the same on every rank.

    Called on rank 0 first and on the others afterwards: the place for a download.

    Args:
        seed: The run's seed. Not used for the split: runs with other seeds must not train on what
            this one validates on.
    """
    # Whole topics, so that no passage of one is trained on and another validated on.
    held_out = {name for name in topics if mix("split", name) % 1000 < 1000 * VALIDATION_SHARE}
    return (
        Passages([text for name, text in sorted(topics.items()) if name not in held_out]),
        Passages([text for name, text in sorted(topics.items()) if name in held_out]),
    )
