"""What the answers add up to: processes, batch and learning rate, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Training images of the vision starter: 80 % of scikit-learn's 1,797 digits.
DIGITS = 1438
FEW_STEPS = 10


@dataclass(frozen=True)
class Row:
    """A line of the ledger: a value and where it comes from."""

    name: str
    value: str
    derivation: str


@dataclass(frozen=True)
class Ledger:
    """The numbers of one project. `None` stands for a question that does not apply."""

    starter: str
    nodes: int
    gpus_per_node: int
    micro_batch_size: int
    accumulation_steps: int
    precision: str
    sync_batchnorm: bool | None
    checkpoint: str
    save_every_steps: int | None
    keep_checkpoints: int | None
    save_best: bool | None
    learning_rate: float
    lr_scaling: str
    lr_reference_batch_size: int

    @classmethod
    def from_answers(cls, answers: Mapping[str, Any], config: Mapping[str, Any]) -> Ledger:
        """Collect the numbers.

        Args:
            answers: All answers that apply, by question.
            config: The project's configs/train.yaml; it holds what the starter brings along.
        """
        return cls(
            starter=answers["starter"],
            nodes=answers["nodes"],
            gpus_per_node=answers["gpus_per_node"],
            micro_batch_size=answers["micro_batch_size"],
            accumulation_steps=answers["accumulation_steps"],
            precision=answers["precision"],
            sync_batchnorm=answers.get("sync_batchnorm"),
            checkpoint=answers["checkpoint"],
            save_every_steps=answers.get("save_every_steps"),
            keep_checkpoints=answers.get("keep_checkpoints"),
            save_best=answers.get("save_best"),
            learning_rate=float(config["learning_rate"]),
            lr_scaling=config["lr_scaling"],
            lr_reference_batch_size=config["lr_reference_batch_size"],
        )

    @property
    def world_size(self) -> int:
        """Return the number of processes in total."""
        return self.nodes * self.gpus_per_node

    @property
    def global_batch_size(self) -> int:
        """Return the samples in one optimizer step, over all processes."""
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    @property
    def scaled_learning_rate(self) -> float:
        """Return the learning rate that the run uses after its rule."""
        ratio = self.global_batch_size / self.lr_reference_batch_size
        factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]
        return self.learning_rate * factor

    def rows(self) -> list[Row]:
        """Return the ledger line by line."""
        return [
            Row("processes", f"{self.world_size:,}", self.derivation),
            Row("global batch", f"{self.global_batch_size:,}", self._batch()),
            Row("learning rate", f"{self.scaled_learning_rate:.6g}", self._rate()),
            Row("precision", self.precision, self._number_format()),
            Row("checkpoint", self.checkpoint, self._policy()),
        ]

    @property
    def derivation(self) -> str:
        """Return where the number of processes comes from."""
        return f"{count(self.nodes, 'node')} x {count(self.gpus_per_node, 'GPU')} per node"

    def lines(self) -> list[str]:
        """Write the ledger as a table, and an empty line."""
        rows = self.rows()
        names = max(len(row.name) for row in rows)
        values = max(len(row.value) for row in rows)
        lines = [f"  {row.name:{names}}  {row.value:{values}}  {row.derivation}" for row in rows]
        return [*lines, ""]

    def _batch(self) -> str:
        steps = count(self.accumulation_steps, "accumulation step")
        processes = count(self.world_size, "process", "processes")
        samples = count(self.micro_batch_size, "sample")
        return f"{samples} per GPU x {steps} x {processes}"

    def _rate(self) -> str:
        if self.lr_scaling == "none":
            return "as in configs/train.yaml; not scaled with the batch (lr_scaling: none)"
        root = "sqrt" if self.lr_scaling == "sqrt" else ""
        reference = self.lr_reference_batch_size
        ratio = f"{root}({self.global_batch_size:,} / {reference:,})"
        return f"{self.learning_rate:.6g} x {ratio} (lr_scaling: {self.lr_scaling})"

    def _number_format(self) -> str:
        return {
            "fp32": "forward pass and weights",
            "bf16": "forward pass; the weights stay fp32",
            "fp16": "forward pass, with loss scaling; the weights stay fp32",
        }[self.precision]

    def _policy(self) -> str:
        if self.checkpoint == "none":
            return "never saved; a killed run starts again"
        when = "after every epoch"
        if self.checkpoint == "steps":
            when = f"every {count(self.save_every_steps or 0, 'optimizer step')} and at the end"
        keep = self.keep_checkpoints or 0
        kept = "the newest is kept" if keep == 1 else f"the newest {keep:,} are kept"
        return f"{when}; {kept}{', and the best' if self.save_best else ''}"

    def notes(self) -> list[str]:
        """Return what a person should know before the first run; often nothing."""
        notes = []
        if self.sync_batchnorm and self.world_size == 1:
            notes.append("SyncBatchNorm has no effect with one process.")
        if self.starter == "vision" and self.global_batch_size > DIGITS:
            notes.append(
                f"The global batch of {self.global_batch_size:,} is larger than the {DIGITS:,} "
                "training digits of the vision starter. A run refuses this unless drop_last is "
                "false in configs/train.yaml, or your own data is larger."
            )
        elif self.starter == "vision" and self.global_batch_size * FEW_STEPS > DIGITS:
            steps = count(DIGITS // self.global_batch_size, "optimizer step")
            notes.append(
                f"The global batch of {self.global_batch_size:,} is large for the {DIGITS:,} "
                f"training digits of the vision starter: {steps} per epoch."
            )
        if self.precision != "fp32":
            notes.append(f"{self.precision} also works on the CPU, but is slow there.")
        return notes


def count(number: int, one: str, many: str = "") -> str:
    """Write a number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
