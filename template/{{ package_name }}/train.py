"""Train a model on one or many GPUs. READ THIS FIRST: `main`, `fit`, `train_step`, `evaluate`.

One process:             python -m PACKAGE.train --config configs/train.yaml
All GPUs of a machine:   bash launch/local.sh
By hand:                 torchrun --standalone --nproc-per-node=2 -m PACKAGE.train --config ...

(PACKAGE is the name of this file's folder.)

torchrun starts one process per GPU. Each runs this file from top to bottom on its own share of the
data; DistributedDataParallel (DDP) averages the gradients, so that all of them take the same step.
"""

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from .checkpoint import CheckpointWriter, TrainState, load_checkpoint
from .config import Config, load_config
from .data import build_datasets
from .distributed import (
    Process,
    broadcast_from_main,
    gather_objects,
    main_process_first,
    process_group,
)
from .errors import UserError
from .failures import run_and_exit
from .ledger import ledger
from .loading import (
    MicroBatch,
    TrainOrder,
    Window,
    len_of,
    map_tensors,
    refuse_sizes,
    train_windows,
    validation_batches,
)
from .log import RunLog, logger, set_up_logging
from .metrics import EvaluationSums, LateNumber, Stopwatch, TrainMeter
from .model import build_model, compute_losses, compute_scores
from .optim import build_optimizer, build_scheduler, scaled_learning_rate
from .probe import differences, gather_environment
from .run_folder import RunFolder, open_run_folder, write_atomically, write_config
from .seeding import mix, seed_all, set_deterministic
from .stopping import StopRequest
from .wrapping import (
    compare_ranks,
    name_what_ddp_counts,
    prepare_model,
    refuse_changed_parameters,
    refuse_unused_parameters,
    trainable_parameters,
    wrap_model,
)


class StepResult(NamedTuple):
    """What an optimizer step was.

    Attributes:
        loss_sum: Sum of this rank's losses: a scalar on the device.
        grad_norm: Norm of the gradients before clipping, equal on every rank.
        learning_rate: The learning rate that was used.
        skipped: Whether the weights were left alone because the gradients were not numbers.
    """

    loss_sum: torch.Tensor
    grad_norm: LateNumber
    learning_rate: float
    skipped: bool


@dataclass
class Training:
    """What the loop works with. Made once, in `set_up`.

    Attributes:
        ddp_model: `state.model` wrapped in DDP. Train through it; evaluate and save the bare one.
        trainable: The parameters that DDP knows, by name.
        writer: Writes checkpoints.
        validation: This rank's share of the validation set.
        n_validation: Samples of the whole validation set.
        last: The last optimizer step.
    """

    config: Config
    process: Process
    run: RunFolder
    log: RunLog
    stop: StopRequest
    state: TrainState
    ddp_model: DistributedDataParallel
    trainable: dict[str, nn.Parameter]
    writer: CheckpointWriter
    train_set: Dataset[Any]
    order: TrainOrder
    validation: DataLoader[Any]
    n_validation: int
    last: StepResult | None = None


def main() -> None:
    """Read the settings, join the other processes, train, leave together."""
    config = load_config()
    with process_group(config.device, config.timeout_s) as process:
        fit(set_up(config, process))


def set_up(config: Config, process: Process) -> Training:
    """Build everything, in the one order that is right. Collective."""
    stop = StopRequest(config.max_minutes)
    stop.listen()
    run = open_run_folder(config, process)
    stop.file = run.path / "STOP"
    set_up_logging(run.path / "logs", process)
    if config.deterministic:
        set_deterministic()
    # The same seed on every rank: the same initial weights, and data sets with the same content.
    seed_all(config.seed)
    with main_process_first(process):  # one process prepares the files, the others find them
        train_set, validation_set = build_datasets(config.seed)
    refuse_sizes([len_of(train_set), len_of(validation_set)], process)
    order = TrainOrder(
        n_samples=len_of(train_set),
        rank=process.rank,
        world_size=process.world_size,
        micro_batch_size=config.micro_batch_size,
        accumulation_steps=config.accumulation_steps,
        drop_last=config.drop_last,
        seed=config.seed,
    )
    order.check()
    state = build_state(config, process, order)
    # Load into the bare model, then wrap it: DDP sends rank 0's weights to all as it is built.
    loaded = load_checkpoint(run.load_from, state, process) if run.load_from else None
    training = Training(
        config=config,
        process=process,
        run=run,
        log=RunLog(run.path, process, config.tracker, config.to_dict()),
        stop=stop,
        state=state,
        ddp_model=wrap_model(state.model, config, process.device),
        trainable=trainable_parameters(state.model),
        writer=CheckpointWriter(run.checkpoints, config.keep_checkpoints, config.async_save),
        train_set=train_set,
        order=order,
        validation=validation_batches(validation_set, config, process),
        n_validation=len_of(validation_set),
    )
    announce(training, loaded.warnings if loaded else [])
    training.log.rewind(state.step, state.epoch)
    if config.exact_resume:
        warm_up(training)
    # From here on every rank draws other random numbers, or all would drop the same units.
    # Mixed from the global rank: local ranks are the same on every machine.
    seed_all(mix(config.seed, "rank", process.rank))
    if loaded:
        loaded.restore_own(state, process)  # last, because all of the above draws random numbers
    return training


def build_state(config: Config, process: Process, order: TrainOrder) -> TrainState:
    """Make the model, its optimizer and all else that changes during training."""
    model = prepare_model(build_model(), config, process.device)
    learning_rate = scaled_learning_rate(config, order.global_batch_size)
    optimizer = build_optimizer(model, config, learning_rate)
    total_steps = config.epochs * order.steps_per_epoch
    return TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config.warmup_steps, total_steps),
        scaler=torch.amp.GradScaler(process.device.type, enabled=config.precision == "fp16"),
        meter=TrainMeter(process.device),
    )


def warm_up(training: Training) -> None:
    """Do one forward and backward pass whose result is thrown away. Collective.

    After the first backward pass DDP sorts its buckets anew, which changes the order in which
    gradients are added up. A run that is started again would see the first order once more than a
    straight one. With two processes the order does not matter: a + b is b + a.
    """
    model, device = training.state.model, training.process.device
    buffers = [buffer.clone() for buffer in model.buffers()]
    window = next(train_windows(training.train_set, training.order, 0, 0, device))
    batch = window.micro_batches[0].to(device)
    training.ddp_model.train()
    with autocast(training.config.precision, device):
        outputs = training.ddp_model(batch.inputs)
    compute_losses(float32(outputs), batch.targets).sum().backward()
    model.zero_grad(set_to_none=True)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)


def fit(training: Training) -> None:
    """Train to the last epoch, or until somebody asks to stop. Collective."""
    config, state, stop = training.config, training.state, training.stop
    while state.epoch < config.epochs and not stop.agreed:
        train_epoch(training)
        if stop.agreed:
            break  # saved in the middle of the epoch, which goes on next time
        metrics = evaluate(training)
        if metrics is None:
            save(training)  # the epoch is trained; next time it is evaluated
            break
        is_best = metrics["loss"] < state.best_loss
        state.best_loss = min(state.best_loss, metrics["loss"])
        training.log.end_epoch(state.step, state.epoch, config.epochs, metrics)
        state.epoch += 1
        state.position = 0
        stop.agree(training.process)
        is_end = state.epoch == config.epochs or stop.agreed
        if config.checkpoint == "epoch" or is_end or (is_best and config.save_best):
            save(training, is_best)
    finish(training)


def train_epoch(training: Training) -> None:
    """Train on the rest of the present epoch. Collective."""
    config, state, order = training.config, training.state, training.order
    process, log, stop = training.process, training.log, training.stop
    refuse_changed_parameters(state.model, training.trainable)
    training.ddp_model.train()
    state.meter.clock.lap()
    done = state.position // order.global_batch_size
    log.start_epoch(state.epoch, config.epochs, done, order.steps_per_epoch)
    windows = train_windows(
        training.train_set, order, state.epoch, state.position, process.device,
        config.num_workers, config.loader_start,
    )  # fmt: skip
    for window in timed(windows, state.meter.clock):
        try:
            training.last = train_step(training, window)
        except RuntimeError as error:
            name_what_ddp_counts(error, training.trainable, state.step + 1)
            raise
        state.step += 1
        state.position += window.n_samples
        log.advance()
        if is_multiple(state.step, config.log_every_steps):
            log_step(training, training.last)
        if is_multiple(state.step, config.compare_ranks_every_steps):
            compare_ranks(state.model, process, state.step)
        at_epoch_end = state.position == order.samples_per_epoch
        due = config.checkpoint == "steps" and is_multiple(state.step, config.save_every_steps)
        if stop.is_due(state.step) or at_epoch_end:
            stop.agree(process)
        # A step that ends the epoch is saved after the evaluation.
        if stop.agreed or (due and not at_epoch_end):
            save(training)
        if stop.agreed:
            return


def train_step(training: Training, window: Window) -> StepResult:
    """Take one optimizer step. Collective.

    Args:
        training: The loop's objects.
        window: As many micro-batches on every rank: a backward pass waits for the other ranks.
    """
    process, ddp_model, scaler = training.process, training.ddp_model, training.state.scaler
    weight = total_weight(window, process)
    loss_total = torch.zeros((), device=process.device)
    for index, micro_batch in enumerate(window.micro_batches):
        batch = micro_batch.to(process.device)
        is_last = index == len(window.micro_batches) - 1
        # DDP averages the gradients in every backward pass, unless it is told not to. It decides in
        # the forward pass, so both are inside. Without this, accumulation costs as much
        # communication per forward pass as training without it.
        with nullcontext() if is_last else ddp_model.no_sync():
            with autocast(training.config.precision, process.device):
                outputs = ddp_model(batch.inputs)
            losses = compute_losses(float32(outputs), batch.targets)
            if losses.ndim != 1:
                raise not_per_sample(losses)
            loss_sum = losses.sum() if batch.weights is None else (losses * batch.weights).sum()
            # DDP divides by the number of processes. Multiplying by it, and dividing by the weight
            # of the whole step, gives the mean over all samples, however they were dealt; also in
            # a last step with fewer samples.
            scaler.scale(loss_sum * (process.world_size / weight)).backward()
        loss_total += loss_sum.detach()
    if not (training.config.find_unused_parameters or training.config.static_graph):
        refuse_unused_parameters(training.trainable, training.state.step + 1)
    # A parameter used in an early forward pass only has a gradient, but DDP waits for one of the
    # last pass, and has left others unaveraged. Otherwise said in the next step, if there is one.
    ddp_model._check_reducer_finalized()
    refuse_nonfinite(training)  # of the step before this one
    taken = apply_gradients(training, loss_total)
    training.state.meter.add(loss_total, weight, window.n_samples, taken.skipped)
    return taken


def not_per_sample(losses: torch.Tensor) -> UserError:
    """Return the error of a loss function that has averaged over the samples already."""
    return UserError(
        f"compute_losses in model.py returned a tensor of shape {list(losses.shape)}.",
        "It must be [samples], one loss for each: the loop divides by the samples of all ranks.",
        'reduction="none" in the loss function; a mean over anything but the samples is fine',
    )


def total_weight(window: Window, process: Process) -> float:
    """Return the weight of the step over all ranks. Collective if the data has weights."""
    if not window.weighted:
        return float(window.n_samples)  # every sample weighs 1: nothing to ask the others
    own = [m.weights.double().sum() for m in window.micro_batches if m.weights is not None]
    total = torch.stack(own).sum()
    dist.all_reduce(total, group=process.control)
    return total.item()


def apply_gradients(training: Training, loss_sum: torch.Tensor) -> StepResult:
    """Clip, step and clear, in the order that is right for scaled gradients.

    Args:
        training: The loop's objects.
        loss_sum: What the gradients are of; for the record.
    """
    state, max_norm = training.state, training.config.max_grad_norm or float("inf")
    scaler, optimizer = state.scaler, state.optimizer
    scaler.unscale_(optimizer)  # clipping scaled gradients would clip them to almost nothing
    # After the all-reduce the gradients, and so their norm, are the same on every rank.
    norm = nn.utils.clip_grad_norm_(training.trainable.values(), max_norm)
    result = StepResult(loss_sum, LateNumber(norm), optimizer.param_groups[0]["lr"], skipped=False)
    skipped = training.config.nonfinite == "skip" and not bool(norm.isfinite())
    if skipped and not scaler.is_enabled():  # the scaler skips by itself
        optimizer.zero_grad(set_to_none=True)
        if training.process.is_main:
            logger.warning(f"warning: step {state.step + 1} skipped: its gradients are not numbers")
        return result._replace(skipped=True)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    # fp16 skips a step with infinite gradients and lowers the scale. Infinity on one rank is
    # infinity on all, through the average, so all skip the same steps.
    if scaler.get_scale() >= scale:
        state.scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return result._replace(skipped=skipped)


@torch.no_grad()
def evaluate(training: Training) -> dict[str, float] | None:
    """Return loss, scores and number of samples of the whole validation set. Collective.

    Through the bare model: DDP's forward pass communicates, and ranks may have different numbers of
    batches here. Sums and counts are added up, and reduced once, so that every sample counts once
    and the result does not depend on the number of processes.

    Returns:
        None if all ranks agreed to stop on the way.
    """
    process, model, stop = training.process, training.state.model, training.stop
    for buffer in model.buffers():
        # BatchNorm's running statistics are each rank's own; evaluate, and save, one and the same.
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = EvaluationSums(process.device)
    batches = iter(training.validation)
    # As many rounds on every rank, though some have no batch left: they ask whether to stop.
    for number in range(1, validation_rounds(training) + 1):
        if (micro_batch := next(batches, None)) is not None:
            add_to(sums, training, micro_batch.to(process.device))
        if stop.is_due(number) and stop.agree(process):
            return None
    totals = sums.reduce(process)
    samples, weight = totals.pop("samples"), totals.pop("weight")
    if samples != training.n_validation:
        raise RuntimeError(f"evaluated {samples:.0f} samples of {training.n_validation}")
    return {**{name: total / weight for name, total in totals.items()}, "samples": samples}


def validation_rounds(training: Training) -> int:
    """Return the number of validation batches of the rank that has most."""
    per_round = training.config.micro_batch_size * training.process.world_size
    return -(-training.n_validation // per_round)


def add_to(sums: EvaluationSums, training: Training, batch: MicroBatch) -> None:
    """Add losses and scores of one validation batch to this rank's sums."""
    with autocast(training.config.precision, training.process.device):
        outputs = float32(training.state.model(batch.inputs))
    losses = compute_losses(outputs, batch.targets)
    weights = torch.ones_like(losses) if batch.weights is None else batch.weights
    sums.add("samples", float(len(losses)))
    sums.add("weight", weights)
    sums.add("loss", losses * weights)
    for name, values in compute_scores(outputs, batch.targets).items():
        sums.add(name, values * weights)


def refuse_nonfinite(training: Training) -> None:
    """Stop if the gradients of the last step were not numbers. Collective in that case.

    Infinity or NaN on one rank is on every rank after the all-reduce, so that all come to the same
    answer without asking each other. Looked at one step late, so that the processor need not wait
    for the GPU, but always before a checkpoint is written.

    Raises:
        UserError: They were not; names the ranks whose losses were the cause.
    """
    last, step = training.last, training.state.step
    fp16 = training.state.scaler.is_enabled()  # skips such steps by itself, to find its scale
    if last is None or last.skipped or fp16 or isfinite(last.grad_norm.item()):
        return
    losses = gather_objects(last.loss_sum.item(), training.process)
    causes = [f"{loss} on rank {rank}" for rank, loss in enumerate(losses) if not isfinite(loss)]
    training.last = None
    raise UserError(
        f"Step {step}: the loss is {', '.join(causes[:4]) or 'finite, but its gradients are not'}.",
        "The weights are no longer numbers; more training cannot repair them.",
        "look at the data of this step, lower --learning_rate, or use --nonfinite skip; the same "
        "command goes on from the last checkpoint",
    )


def save(training: Training, is_best: bool = False) -> None:
    """Save a checkpoint, if this run has any. Collective."""
    refuse_nonfinite(training)
    if training.config.checkpoint != "none":
        is_best = is_best and training.config.save_best
        training.writer.save(training.state, training.process, is_best)


def log_step(training: Training, taken: StepResult) -> None:
    """Record the means since the last line, and look whether they are numbers. Collective."""
    state = training.state
    metrics = state.meter.reduce()
    metrics["learning_rate"] = taken.learning_rate
    metrics["grad_norm"] = taken.grad_norm.item()
    training.log.train(state.step, state.epoch, metrics)
    refuse_changed_parameters(state.model, training.trainable)
    training.stop.pace(metrics["step_ms"] / 1000)
    refuse_nonfinite(training)
    # In fp16, where a step now and then is skipped.
    if not isfinite(metrics["loss"]) and training.config.nonfinite == "stop":
        first = max(1, state.step - training.config.log_every_steps + 1)
        raise UserError(
            f"The training loss is {metrics['loss']} in steps {first} to {state.step}.",
            "The weights are no longer numbers; more training cannot repair them.",
            "lower --learning_rate, or look at the data of these steps; then --resume none",
        )


def finish(training: Training) -> None:
    """Say how the run ended, in the run folder and on the terminal. Collective."""
    state, run, stop = training.state, training.run, training.stop
    training.writer.finish(training.process)
    finished = state.epoch == training.config.epochs
    reasons = [reason for reason in gather_objects(stop.reason, training.process) if reason]
    stop.pass_on(training.process)
    training.log.close()
    if not training.process.is_main:
        return
    if stop.file is not None:
        stop.file.unlink(missing_ok=True)  # or it would stop the next start too
    details = {"step": state.step, "epoch": state.epoch, "reason": reasons[0] if reasons else None}
    run.write_status("finished" if finished else "stopped", **details)
    if finished:
        logger.info(f"finished after step {state.step}; everything is in {run.path}")
    else:
        logger.info(f"stopped by {reasons[0]} after step {state.step}; the same command goes on")


def announce(training: Training, warnings: list[str]) -> None:
    """Print and write down what this run is: machines, batch, learning rate. Collective."""
    config, process, run = training.config, training.process, training.run
    environment = gather_environment(process)

    def write() -> None:
        write_config(run.path, config)
        text = json.dumps(environment, indent=1) + "\n"
        write_atomically(run.path / "environment.json", text)
        run.write_status("running", step=training.state.step)

    broadcast_from_main(write, process)
    if not process.is_main:
        return
    lines = ledger(config, training.order, environment, training.state.model, training.n_validation)
    for line in [*run.notes, f"run            {run.path}", *lines]:
        logger.info(line)
    if config.sync_batchnorm and process.device.type != "cuda":
        warnings = [*warnings, "sync_batchnorm needs GPUs: plain BatchNorm is used"]
    if config.comm_hook == "powersgd" and training.state.step:
        warnings = [*warnings, "powersgd starts anew: not bit for bit what a straight run does"]
    for line in [*warnings, *differences(environment)]:
        logger.warning(f"warning: {line}")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass."""
    if precision == "fp32":
        return nullcontext()
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype)


def float32(outputs: Any) -> Any:
    """Return the model's outputs in float32: losses need more digits than bf16 and fp16 have."""
    return map_tensors(lambda x: x.float() if x.is_floating_point() else x, outputs)


def is_multiple(step: int, every: int) -> bool:
    """Return whether something is due at this step; 0 means never."""
    return every > 0 and step % every == 0


def timed(windows: Iterator[Window], clock: Stopwatch) -> Iterator[Window]:
    """Yield the windows and note how long each was waited for."""
    while True:
        started = time.perf_counter()
        window = next(windows, None)
        clock.data_s += time.perf_counter() - started
        if window is None:
            return
        yield window


if __name__ == "__main__":
    run_and_exit(main)
