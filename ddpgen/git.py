"""git, found by its full path and started so that no setting of anybody reaches it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from ddpgen.errors import UserError, show

# git's own variables for one repository, set for example while a hook runs.
_SETTINGS = "GIT_CONFIG"
_IDENTITY = {"NAME": "ddpgen", "EMAIL": "ddpgen@localhost"}


class GitFailed(UserError):
    """git ended with an error; `said` is what it wrote about it."""

    def __init__(self, subcommand: str, said: bytes) -> None:
        self.said = said.decode(errors="replace").strip()
        lines = self.said.splitlines() or ["nothing"]
        reason = next((line for line in lines if line.startswith("fatal: ")), lines[-1])
        super().__init__(
            f"git {subcommand} failed.",
            f"git says: {show(reason)}",
            "Type: the command again when that is mended",
        )


def path() -> str:
    """Return PATH without relative entries: a program of the working folder is not git."""
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(entry for entry in entries if os.path.isabs(entry))


def program() -> str:
    """Return where git is.

    Raises:
        UserError: If it is not installed.
    """
    found = shutil.which("git", path=path() or os.devnull)
    if found is None:
        raise UserError(
            "git is not found.",
            "Updates are merged with it, and the template's history is kept in it.",
            "Type: the command again when git is installed and on the PATH",
        )
    return found


def alone() -> dict[str, str]:
    """Return an environment in which git has neither settings nor a repository of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = {f"GIT_{role}_{part}": value for role in ("AUTHOR", "COMMITTER")
           for part, value in _IDENTITY.items()}  # fmt: skip
    return kept | who | {
        "PATH": path(),
        "LC_ALL": "C",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        # Bundles are files: nothing of this ever needs a network.
        "GIT_ALLOW_PROTOCOL": "file",
    }  # fmt: skip


def _in_project() -> dict[str, str]:
    """Return an environment for a person's own repository: their settings count, but no more.

    Their settings say which files are ignored and which folders are trusted.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_SETTINGS)
    }
    return kept | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}


def run(folder: Path, *arguments: str, given: bytes = b"") -> bytes:
    """Run git in a repository of ours and return what it writes.

    Raises:
        GitFailed: If it fails.
        UserError: If there is no git.
    """
    return _run(folder, arguments, alone(), given)


def in_project(folder: Path, *arguments: str, given: bytes = b"") -> bytes:
    """Run git in a person's repository, without hooks and without watching programs.

    Raises:
        GitFailed: If it fails.
        UserError: If there is no git.
    """
    quiet = ("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false")
    return _run(folder, (*quiet, *arguments), _in_project(), given)


def _run(folder: Path, arguments: Iterable[str], env: dict[str, str], given: bytes) -> bytes:
    command = [program(), *arguments]
    done = subprocess.run(command, cwd=folder, env=env, input=given, capture_output=True)
    if done.returncode:
        raise GitFailed(next(word for word in command[1:] if word[0] != "-" and "=" not in word),
                        done.stderr)  # fmt: skip
    return done.stdout


def words(output: bytes) -> list[str]:
    """Split what git writes with -z into its names."""
    return [os.fsdecode(word) for word in output.split(b"\0") if word]
