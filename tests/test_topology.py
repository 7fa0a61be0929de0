"""The ledger: what the answers add up to."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from ddpgen.topology import Ledger

ANSWERS: dict[str, Any] = {
    "starter": "vision",
    "nodes": 2,
    "gpus_per_node": 8,
    "micro_batch_size": 4,
    "accumulation_steps": 2,
    "precision": "fp32",
    "sync_batchnorm": False,
    "checkpoint": "epoch",
    "keep_checkpoints": 3,
    "save_best": True,
}
CONFIG: dict[str, Any] = {
    "learning_rate": 0.003,
    "lr_scaling": "none",
    "lr_reference_batch_size": 64,
}


def ledger(config: dict[str, Any] | None = None, **answers: Any) -> Ledger:
    return Ledger.from_answers({**ANSWERS, **answers}, {**CONFIG, **(config or {})})


def row(of: Ledger, name: str) -> tuple[str, str]:
    return next((row.value, row.derivation) for row in of.rows() if row.name == name)


def test_the_products() -> None:
    assert ledger().world_size == 16
    assert ledger().global_batch_size == 4 * 2 * 16


def test_the_rows_of_a_small_project() -> None:
    small = ledger(nodes=1, gpus_per_node=1, micro_batch_size=1, accumulation_steps=1)
    assert [(row.name, row.value, row.derivation) for row in small.rows()] == [
        ("processes", "1", "1 node x 1 GPU per node"),
        ("global batch", "1", "1 sample per GPU x 1 accumulation step x 1 process"),
        (
            "learning rate",
            "0.003",
            "as in configs/train.yaml; not scaled with the batch (lr_scaling: none)",
        ),
        ("precision", "fp32", "forward pass and weights"),
        ("checkpoint", "epoch", "after every epoch; the newest 3 are kept, and the best"),
    ]


def test_the_rows_of_a_large_project() -> None:
    large = ledger(nodes=1000, gpus_per_node=8, micro_batch_size=32, accumulation_steps=4)
    assert row(large, "processes") == ("8,000", "1,000 nodes x 8 GPUs per node")
    assert row(large, "global batch") == (
        "1,024,000",
        "32 samples per GPU x 4 accumulation steps x 8,000 processes",
    )


@pytest.mark.parametrize(
    ("rule", "value", "derivation"),
    [
        ("linear", "0.006", "0.003 x (128 / 64) (lr_scaling: linear)"),
        ("sqrt", "0.00424264", "0.003 x sqrt(128 / 64) (lr_scaling: sqrt)"),
    ],
)
def test_a_scaled_learning_rate(rule: str, value: str, derivation: str) -> None:
    assert row(ledger({"lr_scaling": rule}), "learning rate") == (value, derivation)


def test_yaml_reads_one_e_minus_three_as_a_text() -> None:
    assert ledger({"learning_rate": "1e-3"}).scaled_learning_rate == 0.001


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (
            {"checkpoint": "none", "keep_checkpoints": None},
            "never saved; a killed run starts again",
        ),
        (
            {"checkpoint": "steps", "save_every_steps": 500, "save_best": False},
            "every 500 optimizer steps and at the end; the newest 3 are kept",
        ),
        (
            {"checkpoint": "steps", "save_every_steps": 1, "keep_checkpoints": 1},
            "every 1 optimizer step and at the end; the newest is kept, and the best",
        ),
    ],
)
def test_the_checkpoint_policy_in_words(answers: dict[str, Any], text: str) -> None:
    assert row(ledger(**answers), "checkpoint")[1] == text


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_slow_on_the_cpu(precision: str) -> None:
    assert ledger(precision=precision).notes() == [
        f"{precision} also works on the CPU, but is slow there."
    ]


def test_sync_batchnorm_needs_more_than_one_process() -> None:
    alone: dict[str, Any] = {"nodes": 1, "gpus_per_node": 1}
    assert ledger(**alone, sync_batchnorm=True).notes() == [
        "SyncBatchNorm has no effect with one process."
    ]
    assert ledger(**alone).notes() == []
    assert ledger(sync_batchnorm=True).notes() == []


@pytest.mark.parametrize(
    ("samples", "note"),
    [
        (143, ""),
        (144, "The global batch of 144 is large for the 1,438 training digits of the vision "
              "starter: 9 optimizer steps per epoch."),
        (1438, "The global batch of 1,438 is large for the 1,438 training digits of the vision "
               "starter: 1 optimizer step per epoch."),
        (1439, "The global batch of 1,439 is larger than the 1,438 training digits of the vision "
               "starter. A run refuses this unless drop_last is false in configs/train.yaml, or "
               "your own data is larger."),
    ],
)  # fmt: skip
def test_a_large_batch_for_few_digits(samples: int, note: str) -> None:
    batch: dict[str, Any] = {
        "nodes": 1,
        "gpus_per_node": 1,
        "accumulation_steps": 1,
        "micro_batch_size": samples,
    }
    assert ledger(**batch).notes() == ([note] if note else [])
    assert ledger(**batch, starter="text").notes() == []


def test_the_ledger_needs_nothing_else() -> None:
    code = "import sys, ddpgen.topology; print([n for n in sys.modules if n.startswith('ddpgen')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "['ddpgen', 'ddpgen.topology']\n"
