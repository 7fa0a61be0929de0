"""`ddpgen launch`: settle the values, check them, show the plan, write one file."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpgen import launch_files, launch_values, new
from ddpgen import project as projects
from ddpgen.errors import UserError, show
from ddpgen.launch_values import Size
from ddpgen.project import Project
from ddpgen.topology import Ledger, count

# What may be given for each target, beside what all of them take.
FOR_ALL = ("gpus_per_node", "max_restarts", "env", "setup", "script", "module")
FOR_TARGET = {
    "local": (),
    "node": ("nodes", "port", "interface"),
    "ssh": ("nodes", "hosts", "hostfile", "port", "interface"),
    "slurm": ("nodes", "partition", "account", "time", "port", "interface", "image"),
    "kubernetes": ("nodes", "port", "interface", "image", "namespace"),
    "kubeflow": ("nodes", "interface", "image", "namespace"),
}
START = {
    "local": "bash {file}",
    "node": "MASTER_ADDR=$(hostname) NODE_RANK=0 bash {file}  # others: ITS_NAME, NODE_RANK=1 ...",
    "ssh": "bash {file}",
    "slurm": "sbatch {file}",
    "kubernetes": "kubectl apply -f {file}",
    "kubeflow": "kubectl apply -f {file}",
}


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line.

    Attributes:
        target: Where it will run; one of `launch_files.FILES`.
        path: The folder of the project, or the one that torchrun is started in.
        given: The flags with a value, by name, as they were typed.
        arguments: What the program is given.
        output: The file to write, if it is not the usual one.
        dry_run: Print the file, write nothing.
    """

    target: str
    path: str = "."
    given: Mapping[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    output: str | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Program:
    """What torchrun starts.

    Attributes:
        folder: Where it is started, absolute.
        typed: The same as a person would type it here.
        name: What the job is called.
        words: The words for torchrun, ready for bash.
        has_config: Whether it reads configs/train.yaml.
        project: The project it belongs to, if ddpgen wrote that.
        missing: The script, if it is not there.
    """

    folder: Path
    typed: str
    name: str
    words: str
    has_config: bool = False
    project: Project | None = None
    missing: str = ""


def launch(request: Request) -> None:
    """Write a launch file, or print it.

    Raises:
        UserError: If something is missing or cannot be; nothing is written.
    """
    given = dict(request.given)
    _refuse_idle(request.target, given)
    program = _program(request, given)
    size = _size(request, given, program)
    values = _values(request, given, program, size)
    output = _output(request, program, size)
    text = launch_files.render(request.target, {**values, **_place(output, program)})
    print("\n".join(describe(program, size, request.arguments)), file=sys.stderr)
    if request.dry_run:
        print(text, end="")
        return
    _write(output, text)
    print("\n".join(_ending(request.target, output, program)))


def _refuse_idle(target: str, given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in (*FOR_ALL, *FOR_TARGET[target]):
            takers = [other for other, names in FOR_TARGET.items() if name in names]
            raise UserError(
                f"{_flag(name)} has no meaning for {target}.",
                f"It is one of {', '.join(takers)}.",
                f"Type: the command again without {_flag(name)}",
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _program(request: Request, given: dict[str, Any]) -> Program:
    script, module = given.pop("script", None), given.pop("module", None)
    if script is not None and module is not None:
        raise UserError(
            f"--script {show(script)} and --module {show(module)} are given.",
            "torchrun starts one of them.",
            "Type: the command again with one of the two",
        )
    arguments = [shlex.quote(launch_values.argument(word)) for word in request.arguments]
    if script is None and module is None:
        project = _project(request)
        if project is not None:
            package = str(project.answers["package_name"])
            words = ["-m", "--", f"{package}.train", "--config", '"$CONFIG"', *arguments]
            name = launch_values.job_name(package)
            return Program(project.path, project.typed, name, " ".join(words), True, project)
        script = _ask("script", "The Python script that trains", launch_values.script)
    folder = _folder(request.path)
    if script is None:
        words = ["-m", "--", launch_values.module(str(module)), *arguments]
        name = launch_values.job_name(str(module).rpartition(".")[2])
        return Program(folder, request.path, name, " ".join(words))
    words = ["--", shlex.quote(launch_values.script(script)), *arguments]
    name = launch_values.job_name(Path(script).stem)
    path = folder / script
    missing = "" if path.is_file() else show(os.path.relpath(path))
    return Program(folder, request.path, name, " ".join(words), missing=missing)


def _project(request: Request) -> Project | None:
    """Return the project at the path; None if there is none and somebody can be asked."""
    if Path(request.path).is_file():
        raise UserError(
            f"{show(request.path)} is a file.",
            "PATH is the folder that torchrun is started in.",
            f"Type: ddpgen launch {request.target} --script {shlex.quote(request.path)}",
        )
    try:
        return projects.find(request.path, f"ddpgen launch {request.target} PATH")
    except UserError as error:
        if not Path(request.path).is_dir() or ".copier-answers.yml" not in error.why:
            raise
        if new.on_terminal():
            return None
        raise UserError(
            f"{show(request.path)} is no project of ddpgen, and no program is named.",
            "torchrun needs to know what to start.",
            f"Type: ddpgen launch {request.target} --script train.py, or --module PACKAGE.MODULE",
        ) from None


def _folder(path: str) -> Path:
    folder = Path(path).resolve()
    if folder.is_dir():
        return folder
    raise UserError(
        f"{show(path)} is no folder.",
        "PATH is the folder that the program is started in.",
        "Type: the command again with that folder, or without PATH for this one",
    )


def _size(request: Request, given: dict[str, Any], program: Program) -> Size:
    """Return how many machines and processes it will be, and where."""
    answers = program.project.answers if program.project else {}
    hosts = launch_values.hosts(given.pop("hosts", None), given.pop("hostfile", None))
    if request.target == "ssh" and not hosts.names:
        typed = _ask("hosts", "Host names, the first machine first", launch_values.hosts)
        hosts = launch_values.hosts(typed)
    nodes = given.pop("nodes", None)
    if request.target == "local":
        nodes = "1"
    elif request.target == "ssh":
        nodes = launch_values.nodes_for(hosts, nodes)
    elif nodes is None:
        known = answers.get("nodes")
        nodes = str(
            known
            or _ask("nodes", "Machines (nodes)", lambda x: launch_values.nodes(x, request.target))
        )
    gpus = given.pop("gpus_per_node", None) or hosts.slots
    if gpus is None:
        known = answers.get("gpus_per_node")
        gpus = str(known or _ask("gpus_per_node", "GPUs per node", launch_values.gpus))
    return Size(launch_values.nodes(nodes, request.target), launch_values.gpus(gpus), hosts.names)


def _ask(name: str, text: str, check: Callable[[str], object]) -> str:
    """Ask for a value that has no default, until it is possible."""
    if not new.on_terminal():
        raise UserError(
            f"{_flag(name)} is missing.",
            "There is no default for it, and no terminal to ask on.",
            f"Type: the command again with {_flag(name)}",
        )
    import questionary
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.output import create_output

    def is_possible(value: str) -> bool | str:
        try:
            check(value)
        except UserError as error:
            return error.why
        return True

    with create_app_session(output=create_output(stdout=sys.stderr)):
        return str(questionary.text(f"{text}:", validate=is_possible).unsafe_ask())


def _values(
    request: Request, given: dict[str, Any], program: Program, size: Size
) -> dict[str, Any]:
    """Return all that the file is filled with, but for its place."""
    if request.target in ("kubernetes", "kubeflow") and "image" not in given:
        text = "Container image with the program, torch and all else"
        given["image"] = _ask("image", text, launch_values.CHECKS["image"])
    env = launch_values.env(given.pop("env", ()))
    checked = {
        name: launch_values.CHECKS[name](value) for name, value in given.items() if value != ()
    }
    return launch_files.defaults() | {
        "has_config": program.has_config,
        "program": program.words,
        # A project keeps a log file for each process itself.
        "logs": "" if program.has_config else "logs",
        "name": program.name,
        "nodes": size.nodes,
        "gpus_per_node": size.gpus_per_node,
        "fixed": True,
        "hosts": " ".join(size.hosts),
        "env": [f"{name}={shlex.quote(value)}" for name, value in env],
        "env_pairs": [list(pair) for pair in env],
        **checked,
    }


def _output(request: Request, program: Program, size: Size) -> Path:
    """Return the file to write, absolute.

    Raises:
        UserError: If it is there already, or belongs to the template.
    """
    stem, ending = launch_files.FILES[request.target].split(".")
    usual = program.folder / "launch" / f"{stem}-{size.label}.{ending}"
    output = Path(request.output) if request.output else usual
    output = output.absolute()
    if program.project and output.parent == program.project.path / "launch":
        taken = output.name in launch_files.FILES.values()
        if taken and not request.dry_run:
            raise UserError(
                f"launch/{output.name} belongs to the template.",
                "Updates of the project write it from its answers.",
                "Type: the command again with another --output, or without",
            )
    if request.output == "-" or output.is_dir():
        raise UserError(
            f"--output {show(request.output or output)} is not possible.",
            "It is no name of a file.",
            "Type: --dry-run, to see the file, or --output with the name of a file",
        )
    if os.path.lexists(output) and not request.dry_run:
        raise UserError(
            f"{show(os.path.relpath(output))} is there already.",
            "It may hold changes of yours.",
            "Type: the command again with another --output, or remove the file first",
        )
    return output


def _place(output: Path, program: Program) -> dict[str, str]:
    """Return how the file and the folder find each other, ready for bash."""
    inside = output.is_relative_to(program.folder)
    up = os.path.relpath(program.folder, output.parent) if inside else str(program.folder)
    file = os.path.relpath(output, program.folder) if inside else str(output)
    for text in (up, file):
        if not text.isprintable():
            raise UserError(
                f"{show(text)} has characters that cannot be shown.",
                "The file would not be readable.",
                "Type: the command again in another folder, or with another --output",
            )
    # Inside, the folder is found from the file: both may move together.
    from_file = f'"$(dirname -- "${{BASH_SOURCE[0]}}")"/{shlex.quote(up)}'
    return {"folder": from_file if inside else shlex.quote(up), "file": shlex.quote(file)}


def describe(program: Program, size: Size, arguments: Sequence[str]) -> list[str]:
    """Write what this size means for the training."""
    if program.project is None:
        note = [f"Note: {program.missing} is not there yet."] if program.missing else []
        return [f"{count(size.world_size, 'process', 'processes')}: {size.derivation}", *note]
    usual = _ledger(program.project, ())
    ledger = replace(
        _ledger(program.project, arguments),
        nodes=size.most_nodes,
        gpus_per_node=size.gpus_per_node,
    )
    notes = [*_changed_batch(usual, ledger, size), *ledger.notes()]
    return [*ledger.lines(), *new.note_lines(notes)]


def _ledger(project: Project, arguments: Sequence[str]) -> Ledger:
    """Return the ledger of the project as it is now, with what the arguments change."""
    import yaml

    words = [word for argument in arguments for word in argument.split("=", 1)]
    typed = dict(itertools.pairwise(words))
    config: dict[str, Any] = {}
    what = ""
    try:
        for name in ("configs/train.yaml", typed.get("--config")):
            if name is not None:
                what = (
                    f"The settings in {show(os.path.relpath(project.path / name))} cannot be read."
                )
                config |= yaml.safe_load((project.path / name).read_text(encoding="utf-8"))
        Ledger.from_answers({**project.answers, **config}, config)
        what = f"The arguments {show(' '.join(arguments))} are not possible."
        known = {name: value for name in config if (value := typed.get(f"--{name}"))}
        config |= {name: yaml.safe_load(value) for name, value in known.items()}
        ledger = Ledger.from_answers({**project.answers, **config}, config)
        if ledger.global_batch_size < 1:
            raise ValueError(f"The global batch would be {ledger.global_batch_size}")
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(what, f"{reason}.", "Type: the command again when that is mended") from None
    return ledger


def _changed_batch(usual: Ledger, ledger: Ledger, size: Size) -> list[str]:
    notes = []
    if size.is_elastic:
        notes.append(
            f"With {size.nodes} machines the global batch changes whenever one comes or goes; "
            f"the ledger shows it for {size.most_nodes}."
        )
    if ledger.global_batch_size == usual.global_batch_size:
        return notes
    ratio = ledger.global_batch_size / usual.global_batch_size
    steps = "Fewer" if ratio > 1 else "More"
    notes.append(
        f"The global batch is {ratio:.4g} times that of the project as it is "
        f"({usual.global_batch_size:,}, with {usual.derivation}). {steps} steps per epoch, and the "
        "learning rate may need another value: see learning_rate and lr_scaling in "
        "configs/train.yaml, or change accumulation_steps to keep the batch."
    )
    return notes


def _write(output: Path, text: str) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        if text.startswith("#!"):
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o777 & ~mask)
        # Unlike a rename it fails if somebody was faster.
        os.link(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)


def _ending(target: str, output: Path, program: Program) -> list[str]:
    folder = program.folder
    inside = output.is_relative_to(folder)
    file = shlex.quote(os.path.relpath(output, folder) if inside else str(output))
    lines = [f"Wrote {show(os.path.relpath(output))}. Next:"]
    if folder != Path.cwd():
        lines += [f"  cd {shlex.quote(os.path.relpath(folder))}"]
    return [*lines, f"  {START[target].format(file=file)}"]
