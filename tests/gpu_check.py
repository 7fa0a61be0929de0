"""`make gpu-check`: what only GPUs can show, in a generated project, as a table."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.projects import ROOT, environment, make_project, package_of

LIMIT_S = 240


def main() -> int:
    """Print the table; return 1 if a check has failed."""
    with tempfile.TemporaryDirectory() as folder:
        project = make_project(Path(folder) / "project")
        text = (ROOT / "tests/in_project/gpu_check.py").read_text()
        (project / "tests/gpu_check.py").write_text(text.replace("PACKAGE", package_of(project)))
        with subprocess.Popen(
            [sys.executable, "-m", "tests.gpu_check"], cwd=project, stdout=subprocess.PIPE,
            # Killed processes leave semaphores, of which Python would warn.
            env=environment(PYTHONWARNINGS="ignore:resource_tracker"), text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            shown = False
            for line in process.stdout:
                # The trainings print much; the table and its head are what is asked for.
                if line.startswith("TABLE ") or not shown:
                    print(line.removeprefix("TABLE "), end="", flush=True)
                    shown = True
            return process.wait(timeout=LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
