"""The generated loop does next to nothing that a minimal one written by hand does not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.projects import ROOT, TORCHRUN, make_project, package_of, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_calls_operators_and_collectives_of_a_step(tmp_path: Path, accumulation_steps: int) -> None:
    """Counted, not timed: see tests/in_project/counts.py."""
    project = make_project(tmp_path / "project")
    text = (ROOT / "tests/in_project/counts.py").read_text()
    (project / "counts.py").write_text(text.replace("PACKAGE", package_of(project)))
    done = run(
        project, *TORCHRUN, "--nproc-per-node=2", "counts.py",
        "--config", "configs/debug.yaml", "--output_dir", str(tmp_path / "runs"),
        "--micro_batch_size", "16", "--accumulation_steps", str(accumulation_steps),
        "--log_every_steps", "25", "--checkpoint", "none", "--epochs", "1000",
        "--resume", "none",
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("COUNTS")]
    ours, theirs = (line.split()[1:4], line.split()[4:7])
    calls, operators, collectives = (
        (float(a), float(b)) for a, b in zip(ours, theirs, strict=True)
    )
    assert min(*calls, *operators) > 50, line
    assert calls[0] <= 1.15 * calls[1], line
    assert operators[0] <= 1.0 * operators[1], line
    assert collectives[0] == pytest.approx(collectives[1], abs=0.05), line
