"""Every knob of a run: one dataclass, filled from a YAML file and the command line.

Order of precedence: the defaults below, then `--config FILE`, then `--key value`. No torch in here.
"""

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from .errors import UserError

# The text under each field below becomes its line in --help.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True)
class Config:
    """Knobs of a training run."""

    # What a run is, and where it goes.
    run_name: str = "train"
    """Name of the run. Its folder is OUTPUT_DIR/RUN_NAME-001, -002, ..."""
    output_dir: str = "runs"
    """Folder that holds the run folders."""
    resume: str = "auto"
    """auto: go on with the newest unfinished run of this name and these settings, else start a new
    one. none: always start a new one. PATH: a run folder to go on with, or a checkpoint file to
    start a new run from."""
    seed: int = 0
    """Seed of weights, sample order, augmentation and dropout."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: GPUs if there are any, else the CPU."""
    timeout_s: float = 600.0
    """Seconds that a process waits for the others before the job fails."""
    exact_resume: bool = False
    """Bit-identical results after a restart with three or more processes too. Costs one more
    forward and backward pass at the start."""
    deterministic: bool = False
    """Bit-identical results on GPUs too. Slower; some operators have no such form."""

    max_minutes: float = 0.0
    """Minutes after which the run saves and stops, as on a signal. 0: never. Less than what the
    scheduler grants."""

    # The batch. global batch = micro_batch_size x accumulation_steps x number of processes.
    epochs: int = 20
    """Passes over the training data."""
    micro_batch_size: int = 32
    """Samples per process in one forward pass."""
    accumulation_steps: int = 1
    """Forward passes per optimizer step."""
    drop_last: bool = True
    """Leave out the last, incomplete global batch of an epoch (other samples every epoch).
    false: train on it too."""
    num_workers: int = 0
    """Loader processes per training process. 0 is fastest for data in memory."""
    loader_start: Literal["auto", "fork", "forkserver", "spawn"] = "auto"
    """How loader processes start. auto: forkserver with a GPU, fork without."""

    # The optimizer. Its clock is the optimizer step.
    learning_rate: float = 0.001
    """Learning rate after warm-up."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """none: learning_rate as it is. linear, sqrt: times (global batch / lr_reference_batch_size),
    or its square root."""
    lr_reference_batch_size: int = 64
    """Global batch size, in samples, for which learning_rate was found. Used by lr_scaling."""
    warmup_steps: int = 50
    """Optimizer steps in which the learning rate rises linearly. Then it falls to 0 (cosine)."""
    weight_decay: float = 0.01
    """AdamW weight decay of matrices and kernels; biases and norms have none."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm if theirs is larger. 0: never."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """When gradients are infinite or not numbers. stop: end with an error that names the rank.
    skip: leave the weights alone in that step; waits for the GPU at every step."""

    # The numbers.
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of the forward pass. The weights stay fp32."""
    sync_batchnorm: bool = False
    """BatchNorm statistics over all GPUs instead of each one's own. GPUs only."""

    # The copies of the model, and how DDP keeps them the same.
    compile: bool = False
    """Compile the model. Costs a minute at the start; needs a C++ compiler on the CPU."""
    bucket_cap_mb: float = 25.0
    """Gradients are sent in buckets of this many MiB, while others are still computed."""
    gradient_as_bucket_view: bool = True
    """Gradients live in the buckets: saves their memory and a copy. Then never detach_() one."""
    sync_buffers: bool = True
    """Send rank 0's buffers (BatchNorm statistics) to all before each forward pass. false: faster,
    and as good for BatchNorm, whose statistics are sent before each evaluation anyway."""
    find_unused_parameters: bool = False
    """Allow parameters without a gradient, others in each step. Costs a walk through the graph per
    step (up to twice the time of a small model)."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order: allows a layer to be
    checkpointed (recomputed) more than once in a pass. Not with accumulation_steps > 1."""
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """Send gradients in fewer bytes, for slow networks. bf16 (GPUs only) and fp16: half of them,
    rounded. powersgd: a rank-1 approximation, after warmup_steps; restarts are not exact."""
    compare_ranks_every_steps: int = 0
    """Optimizer steps between two comparisons of all weights over all ranks. 0: never. Reads every
    weight once."""

    # Checkpoints and logs.
    checkpoint: Literal["epoch", "steps", "none"] = "epoch"
    """When to save."""
    save_every_steps: int = 500
    """Optimizer steps between two checkpoints, if checkpoint is steps."""
    keep_checkpoints: int = 3
    """Newest checkpoints kept on disk. The best one is kept beside them."""
    async_save: bool = False
    """Write checkpoints in the background. Costs memory for a copy of weights and optimizer."""
    save_best: bool = True
    """Keep the checkpoint with the lowest validation loss."""
    log_every_steps: int = 10
    """Optimizer steps between two lines of metrics."""
    tracker: Literal["none", "tensorboard", "wandb", "mlflow"] = "none"
    """Where metrics go besides metrics.jsonl."""

    def __post_init__(self) -> None:
        """Check what types cannot say.

        Raises:
            UserError: A value is out of range.
        """
        at_least = {
            "timeout_s": 1,
            "max_minutes": 0,
            "epochs": 1,
            "micro_batch_size": 1,
            "accumulation_steps": 1,
            "num_workers": 0,
            "learning_rate": 0,
            "lr_reference_batch_size": 1,
            "warmup_steps": 0,
            "weight_decay": 0,
            "max_grad_norm": 0,
            "bucket_cap_mb": 0.001,
            "compare_ranks_every_steps": 0,
            "save_every_steps": 1,
            "keep_checkpoints": 1,
            "log_every_steps": 1,
        }
        for name, low in at_least.items():
            value = getattr(self, name)
            if not value >= low or value == float("inf"):
                default = getattr(type(self), name)
                raise UserError(
                    f"{name} is {value}.",
                    f"It must be a number from {low} up.",
                    f"--{name} {default} (the default)",
                )
        if not self.run_name or self.run_name.startswith(".") or "/" in self.run_name:
            raise UserError(
                f"run_name is {self.run_name!r}.",
                "It becomes the name of a folder.",
                "--run_name train (no slash, no leading dot)",
            )
        self.refuse_pairs()

    def refuse_pairs(self) -> None:
        """Refuse knobs that do not work together.

        Raises:
            UserError: Two of them are set.
        """
        pairs = [
            (
                self.static_graph and self.accumulation_steps > 1,
                f"static_graph is true and accumulation_steps is {self.accumulation_steps}.",
                "DDP's static graph breaks on passes that send nothing, which accumulation needs.",
                "--static_graph false",
            ),
            (
                self.static_graph and self.find_unused_parameters,
                "static_graph and find_unused_parameters are both true.",
                "The one promises that no step differs, the other expects that they do.",
                "--static_graph false, or --find_unused_parameters false",
            ),
            (
                self.exact_resume and self.comm_hook == "powersgd",
                "exact_resume is true and comm_hook is powersgd.",
                "Its memory of what was left out is as large as the model, on every rank, and is "
                "not saved.",
                "--exact_resume false, or another --comm_hook",
            ),
        ]
        for is_set, what, why, fix in pairs:
            if is_set:
                raise UserError(what, why, fix)

    def global_batch_size(self, world_size: int) -> int:
        """Return the samples of one optimizer step over all `world_size` processes."""
        return self.micro_batch_size * self.accumulation_steps * world_size

    def to_dict(self) -> dict[str, Any]:
        """Return the knobs as plain values, in the order of their definition."""
        return dataclasses.asdict(self)


def load_config(argv: Sequence[str] | None = None) -> Config:
    """Read the command line (`sys.argv` if None) and the YAML file that it names.

    Raises:
        UserError: An unknown key, a wrong value, or a file that cannot be read.
        SystemExit: After --help and --print_config, with code 0.
    """
    parser = build_parser()
    # A -- that a launcher left over means nothing here, and would break the parser.
    words = [word for word in (sys.argv[1:] if argv is None else argv) if word != "--"]
    try:
        return Config(**namespace_to_dict(parser.parse_args(words)))
    except ArgumentError as error:
        raise explain(str(error)) from None


def build_parser() -> ArgumentParser:
    """Make the command line out of `Config`."""
    parser = ArgumentParser(
        prog=f"python -m {__package__}.train",
        description="Train. The defaults below are those of the code; --config brings others.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below.")
    parser.add_class_arguments(Config)
    return parser


def namespace_to_dict(namespace: Namespace) -> dict[str, Any]:
    """Return the parsed values without the name of the YAML file."""
    names = {field.name for field in dataclasses.fields(Config)}
    return {key: value for key, value in namespace.as_dict().items() if key in names}


def explain(message: str) -> UserError:
    """Turn jsonargparse's message into one with a way out."""
    knobs = [field.name for field in dataclasses.fields(Config)]
    text = " ".join(line.strip() for line in message.splitlines())
    if wrong := re.search(r'key "(\w+)": Expected a (.+?)\. Got value: (.*)', text):
        name, kind, value = wrong.groups()
        kind = re.sub(r"<class '(\w+)'>|typing\.Literal\[(.*)\]", r"\1\2", kind)
        hint = " YAML reads a bare off, no or false as False." if value == "False" else ""
        return UserError(
            f"{name} is {value}.",
            f"It must be: {kind}.{hint}",
            f"--{name} {getattr(Config, name)} (the default)",
        )
    if unknown := re.search(r"unrecognized arguments: (.*)|Option '(.*)' is not accepted", text):
        word = (unknown[1] or unknown[2]).lstrip("-").split()[0].split("=")[0]
        near = difflib.get_close_matches(word, knobs, n=1, cutoff=0.5)
        fix = f"did you mean --{near[0]}?" if near else "--help lists all knobs"
        return UserError(f"{unknown[1] or unknown[2]} is not known.", "There is no such knob.", fix)
    text = text.replace("Problems parsing config", "The --config file is not valid YAML")
    text = text.replace('Parser key "config": File', "The --config file")
    return UserError(text, "Without its settings there is no run.", "--help lists all knobs")


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two configurations: name -> (old, new).

    Where a run writes, and how often it logs or saves, are left out: they do not change its result.
    """
    harmless = {
        "run_name", "output_dir", "resume", "timeout_s", "max_minutes", "num_workers",
        "loader_start", "compare_ranks_every_steps", "checkpoint", "save_every_steps",
        "keep_checkpoints", "async_save", "save_best", "log_every_steps", "tracker",
    }  # fmt: skip
    names = [name for name in {**old, **new} if name not in harmless]
    pairs = {name: (old.get(name), new.get(name)) for name in names}
    return {name: (before, after) for name, (before, after) in pairs.items() if before != after}


def available_cores() -> int:
    """Return the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
