"""`ddpgen new`: settle the answers, render aside, show the plan, ask, move into place."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddpgen import __version__, generate, interrupts, questions, store, target
from ddpgen.errors import UserError, show
from ddpgen.questions import Answer
from ddpgen.target import Target
from ddpgen.topology import Ledger


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    path: str
    given: Mapping[str, Answer] = field(default_factory=dict)
    template_url: str | None = None
    defaults: bool = False
    dry_run: bool = False
    yes: bool = False
    force: bool = False


@dataclass(frozen=True)
class Plan:
    """What will be written."""

    target: Target
    answers: Mapping[str, Answer]
    ledger: Ledger
    files: list[Path]
    overwritten: list[Path]


def create(request: Request) -> Plan | None:
    """Write a project and return what was written, or None after a dry run or a "no".

    Raises:
        UserError: If it is not possible; nothing is left behind.
        KeyboardInterrupt: If a signal arrived; nothing is left behind.
    """
    if request.template_url is not None:
        store.check_url(request.template_url)
    place = target.check(request.path, force=request.force)
    written = False
    try:
        answers = _settle(request, place)
        with target.stage(place, on_disk=not request.dry_run) as staged:
            plan = _plan(request, place, staged, answers)
            if request.dry_run:
                print("\n".join(describe(plan)))
                return None
            print("\n".join(describe(plan)), file=sys.stderr)
            if not _agreed(request, plan):
                print("Nothing was written.", file=sys.stderr)
                return None
            _record_template(request, staged)
            with interrupts.held():
                target.commit(place, staged)
                written = True
    except KeyboardInterrupt:
        if not written:
            print("Nothing was written.", file=sys.stderr)
        raise
    return plan


def on_terminal() -> bool:
    """Tell whether somebody is there to answer."""
    return all(
        stream is not None and not stream.closed and stream.isatty()
        for stream in (sys.stdin, sys.stderr)
    )


def _settle(request: Request, place: Target) -> Mapping[str, Answer]:
    """Return the answers to render with; ask for what is missing."""
    if request.defaults:
        return request.given
    # All that was given is checked before the first question is asked.
    applied = generate.resolve(place.name, request.given)
    if not on_terminal():
        questions.refuse_idle(request.given, applied)
        _refuse_missing(request, applied)
        return request.given
    questions.refuse_idle(request.given, applied, certain_only=True)
    return _ask(request, place)


def _ask(request: Request, place: Target) -> Mapping[str, Answer]:
    print("Enter takes the value shown. Ctrl-C leaves, and nothing is written.\n", file=sys.stderr)
    gpus = visible_gpus()
    answers = generate.interview(place.name, request.given, {"gpus_per_node": gpus} if gpus else {})
    for name in questions.idle(request.given, answers):
        why = f"it is asked only when {questions.find(name).condition}"
        print(f"Left out {name} = {show(request.given[name])}: {why}.", file=sys.stderr)
    return answers


def _refuse_missing(request: Request, applied: Mapping[str, Answer]) -> None:
    missing = [
        question
        for question in questions.visible()
        if question.name in applied and question.name not in request.given and not question.derived
    ]
    if missing:
        count = "1 answer is" if len(missing) == 1 else f"{len(missing)} answers are"
        raise UserError(
            f"{count} missing: {', '.join(question.usage for question in missing)}.",
            "There is no terminal to ask on.",
            f"Type: ddpgen new {shlex.quote(request.path)} --defaults, or give the missing flags",
        )


def visible_gpus() -> int:
    """Count this machine's GPUs as nvidia-smi lists them; 0 if there are none or it cannot tell."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=3, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    if chosen is None:
        return count
    devices = [device.strip() for device in chosen.split(",")]
    # CUDA ignores everything from the first invalid device on; -1 is the usual one.
    usable = devices[: devices.index("-1")] if "-1" in devices else devices
    return min(count, len([device for device in usable if device]))


def _plan(request: Request, place: Target, staged: Path, answers: Mapping[str, Answer]) -> Plan:
    import yaml

    applied = generate.render(staged, answers)
    if request.defaults:
        questions.refuse_idle(request.given, applied)
    config = yaml.safe_load((staged / "configs" / "train.yaml").read_text(encoding="utf-8"))
    return Plan(
        target=place,
        answers=applied,
        ledger=Ledger.from_answers(applied, config),
        files=target.files_in(staged),
        overwritten=target.clashes(place, staged),
    )


def describe(plan: Plan) -> list[str]:
    """Write the plan as lines: files, ledger, notes. The ledger is near to the question below."""
    lines = [f"{len(plan.files)} files in {show(plan.target.typed)}:"]
    for file in plan.files:
        lines += [f"  {file}{'  (overwritten)' if file in plan.overwritten else ''}"]
    lines += ["", f"{plan.answers['project_name']} ({plan.ledger.starter} starter)", ""]
    return [*lines, *plan.ledger.lines(), *note_lines(plan.ledger.notes())]


def note_lines(notes: Iterable[str]) -> list[str]:
    """Write notes under a ledger, each with an empty line."""
    lines = []
    for note in notes:
        lines += textwrap.wrap(f"Note: {note}", 96, initial_indent="  ", subsequent_indent="  ")
        lines += [""]
    return lines


def _agreed(request: Request, plan: Plan) -> bool:
    """Ask for the last word on a terminal."""
    if request.yes:
        return True
    if not on_terminal():
        if plan.overwritten:
            target.refuse_clashes(plan.target, plan.overwritten)
        return True
    import click

    count = len(plan.overwritten)
    text = "Write them?"
    if count:
        text = f"Overwrite {count} {'file' if count == 1 else 'files'} and write the others?"
    try:
        return click.confirm(text, default=not count, err=True)
    except click.Abort:
        raise KeyboardInterrupt from None


def _record_template(request: Request, staged: Path) -> None:
    """Put the template where updates will find it, and let the project name that."""
    notes = {}
    if request.template_url:
        notes["_src_path"] = request.template_url
    try:
        tag = store.sync().tag
    except UserError as error:
        # The project is good without; `ddpgen update` too.
        print(
            f"Note: plain `copier update` will need `ddpgen sync` first. {error.what} {error.why}",
            file=sys.stderr,
        )
    else:
        # An edited checkout has a version of its own.
        if tag != f"v{__version__}":
            notes["_commit"] = tag
    if notes:
        generate.record(staged / generate.ANSWERS_FILE, **notes)


def ending(plan: Plan) -> list[str]:
    """Write what happened and what to type next."""
    typed = plan.target.typed
    if Path(typed) == Path():
        enter = []
    else:
        # A name that starts with a dash would be taken for an option of cd.
        enter = [f"  cd {shlex.quote(f'./{typed}' if typed.startswith('-') else typed)}"]
    return [
        f"Wrote {len(plan.files)} files to {show(typed)}. Next:",
        *enter,
        "  python -m pip install -e .",
        "  bash launch/local.sh",
    ]
