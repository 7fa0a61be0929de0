"""The values that `ddpgen launch` takes, each checked in one place, ready for the launch files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpgen.errors import UserError, show
from ddpgen.topology import count

MOST_NODES, MOST_GPUS = 100_000, 1024
# A label of Kubernetes has 63 characters; the pods add a number to the name.
LONGEST_NAME = 50
_SECRETS = re.compile(
    r"(^|_)(TOKEN|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE|SECRET)_?KEY)(_|$)"
)


@dataclass(frozen=True)
class Hosts:
    """Machines by name, and the processes on each if a hostfile says so."""

    names: tuple[str, ...] = ()
    slots: str | None = None


@dataclass(frozen=True)
class Size:
    """How many machines and processes.

    Attributes:
        nodes: A number, or MIN:MAX.
        gpus_per_node: Processes on each.
        hosts: Names of the machines, where they are known.
    """

    nodes: int | str
    gpus_per_node: int
    hosts: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        """Return whether machines may come and go."""
        return isinstance(self.nodes, str)

    @property
    def most_nodes(self) -> int:
        """Return the number of machines, or the largest one."""
        return int(str(self.nodes).rpartition(":")[2])

    @property
    def world_size(self) -> int:
        """Return the number of processes on all machines."""
        return self.most_nodes * self.gpus_per_node

    @property
    def label(self) -> str:
        """Return what stands for the size in a file name: 4x8, 2-4x8."""
        return f"{self.nodes}x{self.gpus_per_node}".replace(":", "-")

    @property
    def derivation(self) -> str:
        """Return where the number of processes comes from."""
        machines = f"{self.nodes} nodes" if self.is_elastic else count(self.most_nodes, "node")
        return f"{machines} x {count(self.gpus_per_node, 'GPU')} per node"


def refusal(flag: str, value: object, why: str, example: str) -> UserError:
    """Build the error for a value that is not possible."""
    return UserError(
        f"{flag} {show(value)} is not possible.", why, f"Type: {flag} with a value like {example}"
    )


def nodes(text: str, target: str) -> int | str:
    """Check a number of machines, or MIN:MAX."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?", text, re.ASCII)
    if not match or not int(match[1]) <= int(match[2] or match[1]) <= MOST_NODES:
        why = f"Machines are a number from 1 to {MOST_NODES}, or MIN:MAX with MIN not above MAX."
        raise refusal("--nodes", text, why, "4")
    if match[2] is None or match[1] == match[2]:
        return int(match[1])
    if target in ("kubernetes", "kubeflow", "ssh"):
        raise refusal("--nodes", text, f"The number of machines is fixed for {target}.", match[2])
    return text


def gpus(text: str) -> int:
    """Check a number of processes on each machine."""
    if re.fullmatch(r"[1-9][0-9]{0,3}", text, re.ASCII) and int(text) <= MOST_GPUS:
        return int(text)
    why = f"GPUs of one machine are a number from 1 to {MOST_GPUS}; without GPUs, processes."
    raise refusal("--gpus-per-node", text, why, "8")


def hosts(listed: str | None, file: str | None = None) -> Hosts:
    """Read the names of machines from a list or a hostfile; at most one of them is given."""
    if listed is not None and file is not None:
        raise UserError(
            "--hosts and --hostfile are given.",
            "The machines can come from one of them only.",
            "Type: the command again with one of the two",
        )
    if file is not None:
        return _hostfile(file)
    if listed is None:
        return Hosts()
    return Hosts(_names("--hosts", re.split(r"[,\s]+", listed.strip())))


def _hostfile(file: str) -> Hosts:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise refusal("--hostfile", file, f"It cannot be read: {reason}.", "hosts.txt") from None
    rows = [line.split("#")[0].split() for line in lines]
    for number, row in enumerate(rows, start=1):
        for word in row[1:]:
            if not re.fullmatch(r"\w+=\S*", word, re.ASCII):
                why = f"Line {number} has {show(word)} behind the name: one machine per line."
                raise refusal("--hostfile", file, why, "hosts.txt")
    names = [row[0] for row in rows if row]
    if not names:
        raise refusal("--hostfile", file, "It names no machine.", "hosts.txt")
    slots = {word.partition("=")[2] for row in rows for word in row[1:] if "slots=" in word}
    if len(slots) > 1:
        why = f"Its machines have {', '.join(sorted(slots))} slots; all must have the same number."
        raise refusal("--hostfile", file, why, "hosts.txt")
    return Hosts(_names(f"--hostfile {show(file)}: the name", names), next(iter(slots), None))


def _names(flag: str, names: Sequence[str]) -> tuple[str, ...]:
    seen = set()
    for name in names:
        host = name.rpartition("@")[2].lower()
        if not re.fullmatch(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9][\w.-]*", name, re.ASCII):
            why = "Names are letters, digits, dots and dashes; a port belongs into ~/.ssh/config."
            raise _refused_name(flag, name, why)
        if host in seen:
            raise _refused_name(flag, name, "It is named twice; each machine runs one torchrun.")
        seen.add(host)
    return tuple(names)


def _refused_name(flag: str, name: str, why: str) -> UserError:
    return UserError(
        f"{flag} {show(name)} is not possible.", why, "Type: names as in --hosts node-a,node-b"
    )


def nodes_for(machines: Hosts, text: str | None) -> str:
    """Return the number of machines, which a number that is given must not contradict."""
    number = len(machines.names)
    if text is not None and text != str(number):
        why = f"There are {count(number, 'host')}: {show(machines.names)}."
        raise refusal("--nodes", text, why, str(number))
    return str(number)


def script(path: str) -> str:
    """Check the path of a script. It may be written later."""
    if not path or path.endswith("/"):
        raise refusal("--script", path, "It is no name of a file.", "train.py")
    if not path.isprintable():
        raise refusal("--script", path, "It has characters that cannot be shown.", "train.py")
    return path


def module(name: str) -> str:
    """Check the name of a module."""
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        why = "Modules are named as in an import, without .py."
        raise refusal("--module", name, why, "package.train")
    return name


def argument(word: str) -> str:
    """Check an argument of the program."""
    if not word.isprintable():
        why = "It has characters that cannot be shown, or more than one line."
        raise UserError(
            f"The argument {show(word)} is not possible.",
            why,
            "Type: the command again without it; the program may read it from a file",
        )
    return word


def job_name(text: str) -> str:
    """Make a name that Slurm and Kubernetes take."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"train-{name}".strip("-")


def env(settings: Sequence[str]) -> list[tuple[str, str]]:
    """Check variables NAME=VALUE; what looks like a secret does not belong into a file."""
    pairs = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            why = "It needs a name of letters, digits and _, an equals sign and a value."
            raise refusal("--env", setting, why, "NCCL_DEBUG=INFO")
        if _SECRETS.search(name.upper()):
            raise UserError(
                f"--env {name} looks like a secret.",
                "The launch file is kept and shared, and its content is shown in logs.",
                f"Type: export {name}=..., on the machines or in a secret of the cluster",
            )
        if not value.isprintable():
            why = "The value has characters that cannot be shown, or more than one line."
            raise refusal("--env", setting, why, f"{name}=VALUE")
        pairs.append((name, value))
    return pairs


def _matching(flag: str, pattern: str, why: str, example: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII):
            raise refusal(flag, value, why, example)
        return value

    return check


def _port(value: str) -> int:
    if re.fullmatch(r"[1-9][0-9]{3,4}", value, re.ASCII) and 1024 <= int(value) <= 65535:
        return int(value)
    raise refusal("--port", value, "Ports that programs may use are 1024 to 65535.", "29500")


def _restarts(value: str) -> int:
    if re.fullmatch(r"0|[1-9][0-9]{0,3}", value, re.ASCII):
        return int(value)
    raise refusal("--max-restarts", value, "It is a number from 0 to 9999.", "3")


def _commands(values: Sequence[str]) -> list[str]:
    for value in values:
        if not value.strip() or not value.isprintable():
            raise refusal("--setup", value, "It is one command on one line.", "'module load cuda'")
    return list(values)


_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_TIME = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}"
_SLURM_NAME = "Names in Slurm are letters, digits and . _ - , here."

# Flag -> its check, which returns what stands in the file.
CHECKS: dict[str, Callable[[Any], Any]] = {
    "partition": _matching("--partition", r"[\w.,-]+", _SLURM_NAME, "gpu"),
    "account": _matching("--account", r"[\w.,-]+", _SLURM_NAME, "my-group"),
    "time": _matching(
        "--time", _TIME, "Slurm reads MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS.", "24:00:00"
    ),
    "port": _port,
    "interface": _matching(
        "--interface", r"[\w.@-]{1,15}", "It is the name of one network interface.", "eth0"
    ),
    "max_restarts": _restarts,
    "image": _matching(
        "--image", r"[\w][\w./:@+-]*|/[\w./:@+-]+", "It is a name without spaces.", "my/image:1.0"
    ),
    "namespace": _matching(
        "--namespace", _LABEL, "Kubernetes takes small letters, digits and dashes.", "team-a"
    ),
    "setup": _commands,
}
