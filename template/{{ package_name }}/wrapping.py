"""The model on its device and in DDP, and the checks that keep the copies of all ranks the same."""

import re
from collections.abc import Iterable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from .config import Config
from .distributed import Process, gather_objects
from .errors import UserError


def prepare_model(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Move the model to its device, and switch on SyncBatchNorm and compilation if wanted.

    Before the optimizer and before DDP: both hold on to the parameters that they are given.
    """
    if config.precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError(
            f"precision is bf16, but {torch.cuda.get_device_name(device)} cannot compute in it.",
            "bf16 needs an Ampere GPU or newer.",
            "--precision fp16",
        )
    model = model.to(device)
    if config.sync_batchnorm and device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.compile:
        # In place, so that the names in checkpoints stay what they are; and before DDP, which then
        # still sends gradients while others are computed.
        model.compile()
    return model


def wrap_model(model: nn.Module, config: Config, device: torch.device) -> DistributedDataParallel:
    """Let DDP average the model's gradients over all ranks. Collective.

    The model must be complete: parameters that are frozen, thawed or added later are not seen.
    """
    # Renamed in torch 2.13.
    new_name = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if new_name else "broadcast_buffers"
    options: dict[str, Any] = {} if config.sync_buffers else {sync_buffers: False}
    ddp_model = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        **options,
    )
    add_comm_hook(ddp_model, config, device)
    return ddp_model


def add_comm_hook(ddp_model: DistributedDataParallel, config: Config, device: torch.device) -> None:
    """Let gradients be sent in fewer bytes, if wanted."""
    if config.comm_hook == "bf16":
        if device.type != "cuda":
            raise UserError(
                f"comm_hook is bf16, but the processes talk over gloo on the {device.type}.",
                "Only NCCL, on GPUs, can add up bf16.",
                "--comm_hook none, or fp16",
            )
        ddp_model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if config.comm_hook == "fp16":
        ddp_model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if config.comm_hook == "powersgd":
        # Exact gradients at first: early ones change too fast to be approximated.
        exact_steps = max(2, config.warmup_steps)
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=exact_steps)
        ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name, in the order that DDP counts them."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def refuse_unused_parameters(trainable: dict[str, nn.Parameter], step: int) -> None:
    """Name the parameters that got no gradient. Call between backward pass and optimizer step.

    DDP itself notices in the next step, without names, and has left other gradients unsynchronised
    by then.

    Args:
        trainable: The parameters that DDP waits for.
        step: The step that is being taken, for the message.

    Raises:
        UserError: There are some.
    """
    unused = [name for name, parameter in trainable.items() if parameter.grad is None]
    if unused:
        raise no_gradient(unused, len(trainable), step)


def no_gradient(unused: list[str], n_parameters: int, step: int) -> UserError:
    """Return the error of parameters on which the loss does not depend."""
    return UserError(
        f"{len(unused)} of {n_parameters} parameters got no gradient in step {step}: "
        f"{listed(unused)}.",
        "DDP waits for the gradient of every parameter on every rank.",
        "use them in the loss, remove them, or freeze them in build_model in model.py; if it "
        "depends on the data whether they are used: --find_unused_parameters true",
    )


def name_what_ddp_counts(
    error: RuntimeError, trainable: dict[str, nn.Parameter], step: int
) -> None:
    """Name the parameters whose numbers DDP gives, if the error is its complaint.

    That a parameter was not used in the last forward pass of a step, but in an earlier one, only
    DDP can see.

    Args:
        error: What was raised.
        trainable: The parameters that DDP waits for.
        step: The step that is being taken, for the message.

    Raises:
        UserError: DDP has not finished the reduction of this step.
    """
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    if numbers is not None:
        names = [list(trainable)[int(number)] for number in numbers[1].split()]
        raise no_gradient(names, len(trainable), step) from None


def refuse_changed_parameters(model: nn.Module, wrapped: Iterable[str]) -> None:
    """Name the parameters that were frozen, thawed, added or removed since DDP was built.

    DDP would not send the gradients of new ones, so that the ranks train apart without a word; and
    it waits for those that are frozen now.

    Args:
        model: The bare model.
        wrapped: The names of its `trainable_parameters` when DDP was built.

    Raises:
        UserError: There are some.
    """
    before, now = set(wrapped), set(trainable_parameters(model))
    if now == before:
        return
    raise UserError(
        f"After DDP was built, the parameters that are trained have changed: "
        f"new {listed(now - before) or 'none'}; gone {listed(before - now) or 'none'}.",
        "DDP and the optimizer know only those that they were built with.",
        "freeze, thaw and add parameters in build_model in model.py",
    )


def compare_ranks(model: nn.Module, process: Process, step: int) -> None:
    """Name the ranks and the tensors that differ from rank 0's. Collective.

    Running statistics of BatchNorm are left out: they are each rank's own until they are evaluated.

    Raises:
        UserError: There are some.
    """
    names = [name for name, _ in shared_tensors(model)]
    sums = torch.stack([bit_sum(tensor) for _, tensor in shared_tensors(model)]).tolist()
    first, *others = gather_objects(dict(zip(names, sums, strict=True)), process)
    for rank, other in enumerate(others, start=1):
        if apart := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            raise UserError(
                f"After step {step} rank {rank} differs from rank 0 in {listed(apart)}.",
                "The ranks train apart: every average of their gradients is now of other models.",
                "find what changes these on one rank alone (a step skipped, a weight set by hand), "
                "then start the same command again: it goes on from the last checkpoint",
            )


def shared_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what must be the same on every rank, with its name."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        own_statistics = isinstance(module, _NormBase) and not isinstance(module, nn.SyncBatchNorm)
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if not own_statistics:
                yield name, buffer


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum that changes with any bit of the tensor: int64, a scalar."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous().reshape(-1)
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.view(integers[real.element_size()]).sum(dtype=torch.int64)


def listed(names: list[str] | set[str], most: int = 5) -> str:
    """Return the first few names, for a message."""
    some = sorted(names) if isinstance(names, set) else names
    return ", ".join(some[:most]) + (f" and {len(some) - most} more" if len(some) > most else "")
