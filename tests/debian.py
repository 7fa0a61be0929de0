"""Packages of Debian that tests need, installed when they are missing."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


def need(*packages: str) -> None:
    """Install packages that are missing; skip the test where this cannot be done."""
    if not shutil.which("dpkg-query"):
        pytest.skip("this is no Debian system")
    # Two workers of pytest must not run apt at the same time.
    with (Path(tempfile.gettempdir()) / "ddpgen-tests-apt.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        missing = [package for package in packages if not is_installed(package)]
        if not missing:
            return
        if os.geteuid() != 0:
            pytest.skip(f"not installed, and only root could: {' '.join(missing)}")
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (
            ["apt-get", "update", "-q"],
            ["apt-get", "install", "-qy", "--no-install-recommends", *missing],
        ):
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
            if done.returncode:
                pytest.skip(f"cannot install {' '.join(missing)}: {done.stderr[-500:]}")


def is_installed(package: str) -> bool:
    """Return whether a package is installed."""
    command = ["dpkg-query", "-W", "-f", "${Status}", package]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout == "install ok installed"
