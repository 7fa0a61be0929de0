"""The header of a run: machines, batch, steps, learning rate, and where each number comes from."""

from typing import Any

from torch import nn

from .config import Config
from .loading import TrainOrder
from .optim import scaled_learning_rate


def ledger(
    config: Config,
    order: TrainOrder,
    environment: list[dict[str, Any]],
    model: nn.Module,
    n_validation: int,
) -> list[str]:
    """Return the header of a run: every number that is derived, with its derivation.

    Args:
        config: The settings.
        order: The deal of the training samples.
        environment: Of every rank, from `probe.gather_environment`.
        model: The bare model.
        n_validation: Size of the validation set.
    """
    first = environment[0]
    hosts = len({facts["host"] for facts in environment})
    total_steps = config.epochs * order.steps_per_epoch
    learning_rate = scaled_learning_rate(config, order.global_batch_size)
    n_parameters = sum(p.numel() for p in model.parameters())
    reference = f" = {config.learning_rate:g} for {config.lr_reference_batch_size} samples"
    scaling = "" if config.lr_scaling == "none" else f"{reference}, {config.lr_scaling} scaling"
    saving = {
        "none": "none",
        "epoch": "after every epoch",
        "steps": f"every {config.save_every_steps} steps",
    }[config.checkpoint]
    return [
        f"processes      {order.world_size} on {hosts} machine(s), {first['device_name']}, "
        f"{first['backend']}, torch {first['torch']}, {first['threads']} thread(s) each",
        f"model          {n_parameters:,} parameters, {config.precision}",
        f"global batch   {order.global_batch_size} = {config.micro_batch_size} per forward pass x "
        f"{config.accumulation_steps} forward passes x {order.world_size} processes",
        f"data           {order.n_samples:,} training samples, {order.samples_per_epoch:,} used "
        f"per epoch; {n_validation:,} for validation",
        f"steps          {total_steps} = {order.steps_per_epoch} per epoch x {config.epochs}",
        f"learning rate  {learning_rate:g}{scaling}, {config.warmup_steps} steps of warm-up, "
        "then cosine",
        f"checkpoints    {saving}",
    ]
