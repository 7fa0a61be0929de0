"""What `ddpgen --help` says. It imports nothing, so that help comes at once."""

from __future__ import annotations

COMMANDS = {
    "new": "Write a project into a new folder, PATH.",
    "update": "Bring a project to this ddpgen's template, with your edits kept.",
    "set": "Change answers of a project.",
    "launch": "Write a launch file for more machines, also for a script of your own.",
    "options": "Explain every question and its choices.",
    "demo": "Write a default project and train it.",
    "sync": "Put the template where plain `copier update` finds it.",
}


def help_text() -> str:
    """Write what `ddpgen --help` shows."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: ddpgen COMMAND ...",
            "",
            "Writes complete, plain PyTorch DistributedDataParallel projects.",
            "",
            "Commands:",
            *lines,
            "",
            "ddpgen COMMAND --help shows what it takes; ddpgen --version, which ddpgen this is.",
        ]
    )
