"""The commands: from words on the command line to one call each."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import click

from ddpgen import __version__, questions
from ddpgen.errors import UserError, show
from ddpgen.questions import Answer, Question
from ddpgen.usage import COMMANDS, help_text

WRONG_USAGE = 2


def run(words: Sequence[str]) -> int:
    """Carry out a command line and return its exit code.

    Raises:
        UserError: If it is not possible, or not understood (with the code for wrong usage).
        KeyboardInterrupt: If a signal arrived.
    """
    try:
        return program.main(words, prog_name="ddpgen", standalone_mode=False) or 0
    except click.UsageError as error:
        raise _usage_error(error, words) from None
    except click.Abort:
        raise KeyboardInterrupt from None


def _usage_error(error: click.UsageError, words: Sequence[str]) -> UserError:
    # click does not always say where it was.
    known = ["ddpgen", *words[:1]] if words and words[0] in COMMANDS else ["ddpgen"]
    command = error.ctx.command_path if error.ctx else " ".join(known)
    what, near = error.format_message(), None
    if isinstance(error, click.NoSuchOption):
        what = f"No such option: {error.option_name}."
        near = next(iter(error.possibilities or ()), None)
    elif isinstance(error, click.MissingParameter) and error.param:
        what = f"{error.param.human_readable_name} is missing."
    refusal = _wrong_usage(what, command, near)
    if command == "ddpgen launch":
        refusal.fix += " (arguments for the program follow --)"
    return refusal


def _wrong_usage(what: str, command: str, near: str | None) -> UserError:
    return UserError(
        what,
        f"{command} cannot be started like this.",
        f"Did you mean {near}?" if near else f"Type: {command} --help",
        code=WRONG_USAGE,
    )


class _Group(click.Group):
    def get_help(self, ctx: click.Context) -> str:
        return help_text()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        near = next(iter(difflib.get_close_matches(args[0], self.commands, n=1)), None)
        raise _wrong_usage(f"No such command: {show(args[0])}.", "ddpgen", near)


class _CommandWithQuestions(click.Command):
    """A command with one flag per question. The flags are made when the command is used."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *self._flags()]

    def _flags(self) -> list[click.Option]:
        return [_flag(question) for question in questions.visible()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Questions"):
            formatter.write_dl(_records(self._flags(), ctx))
        with formatter.section("Options"):
            formatter.write_dl(_records(super().get_params(ctx), ctx))


def _flag(question: Question) -> click.Option:
    return click.Option(
        [question.flags, question.name],
        help=question.help,
        metavar=question.values or None,
        type=bool if question.type == "bool" else str,
        default=None,
    )


def _records(params: Sequence[click.Parameter], ctx: click.Context) -> list[tuple[str, str]]:
    # The argument has no line of its own: the text above explains it.
    options = [param for param in params if isinstance(param, click.Option)]
    return [record for option in options if (record := option.get_help_record(ctx))]


@click.group(cls=_Group)
@click.version_option(__version__, message="ddpgen %(version)s")
def program() -> None:
    """Hold the commands together."""


@program.command(
    cls=_CommandWithQuestions,
    help=f"{COMMANDS['new']}\n\nAsks the questions on a terminal; each one is also a flag.",
)
@click.argument("path")
@click.option("--defaults", is_flag=True, help="Take the default of every question not given.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="An answer; repeatable."
)
@click.option("--answers", metavar="FILE", help="A YAML file of answers.")
@click.option(
    "--template-url", metavar="URL", help="Where `copier update` finds the template; for teams."
)
@click.option("--dry-run", is_flag=True, help="Show ledger and files, write nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--force", is_flag=True, help="Allow a PATH that is not empty.")
def new(path: str, settings: Sequence[str], answers: str | None, **others: Any) -> None:
    """Carry out `ddpgen new`."""
    from ddpgen import new as new_command

    names = ("template_url", "defaults", "dry_run", "yes", "force")
    switches = {name: others.pop(name) for name in names}
    given = _given(others, settings, answers)
    plan = new_command.create(new_command.Request(path, given, **switches))
    if plan:
        print("\n".join(new_command.ending(plan)))


def _given(
    flags: dict[str, Any], settings: Sequence[str], answers: str | None
) -> dict[str, Answer]:
    """Put flags, --set and --answers together; the first named wins over the later ones."""
    typed = {
        name: value if isinstance(value, bool) else questions.find(name).parse(value)
        for name, value in flags.items()
        if value is not None
    }
    in_settings = questions.parse_settings(settings)
    for name, value in typed.items():
        if in_settings.get(name, value) != value:
            raise questions.contradiction(name, value, in_settings[name])
    in_file = questions.read_answers(answers) if answers is not None else {}
    return in_file | in_settings | typed


@program.command(
    help=f"{COMMANDS['update']}\n\nPATH is the folder of the project, or one in it; the current "
    "one if not given. The project must be in git, without open changes. New questions take their "
    "defaults."
)
@click.argument("path", default=".")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="An answer; repeatable."
)
@click.option("--dry-run", is_flag=True, help="Show what would change, write nothing.")
def update(path: str, settings: Sequence[str], dry_run: bool) -> None:
    """Carry out `ddpgen update`."""
    from ddpgen import update as update_command

    update_command.update(update_command.Request(path, settings, dry_run))


@program.command(
    "set",
    help=f"{COMMANDS['set']}\n\nKEY=VALUE may be repeated. PATH is the folder of the project, or "
    "one in it; the current one if not given. What will change is shown first.",
)
@click.argument("words", nargs=-1, required=True, metavar="KEY=VALUE... [PATH]")
@click.option("--dry-run", is_flag=True, help="Show what would change, write nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def set_answers(words: Sequence[str], dry_run: bool, yes: bool) -> None:
    """Carry out `ddpgen set`."""
    from ddpgen import update as update_command

    path = words[-1] if "=" not in words[-1].split("/")[0] else "."
    settings = words[:-1] if path == words[-1] else words
    if not settings:
        raise _wrong_usage("KEY=VALUE is missing.", "ddpgen set", None)
    update_command.set_answers(update_command.Request(path, settings, dry_run, yes))


class _LaunchCommand(click.Command):
    """A command that passes everything behind -- on, to the program that will be launched."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        behind = args.index("--") if "--" in args else len(args)
        ctx.meta["arguments"] = args[behind + 1 :]
        return super().parse_args(ctx, args[:behind])


_LAUNCH_VALUES = (
    ("--nodes", "N|MIN:MAX", "Machines; with MIN:MAX some may come and go (node, slurm)."),
    ("--gpus-per-node", "N", "Processes on each, one per GPU."),
    ("--hosts", "A,B,...", "Names of the machines, the first one first (ssh)."),
    ("--hostfile", "FILE", "The same, one per line (ssh)."),
    ("--partition", "NAME", "Partition (slurm)."),
    ("--account", "NAME", "Account (slurm)."),
    ("--time", "TIME", "Time limit, like 24:00:00 (slurm)."),
    ("--port", "N", "Port of the first machine where all meet."),
    ("--interface", "NAME", "Network interface to talk over, like eth0."),
    ("--max-restarts", "N", "How often a job that failed starts again. Default: 0."),
    ("--image", "IMAGE", "Container image (slurm with apptainer, kubernetes, kubeflow)."),
    ("--namespace", "NAME", "Namespace (kubernetes, kubeflow)."),
    ("--script", "FILE", "A training script of your own, from PATH."),
    ("--module", "NAME", "The same as a module, as for python -m."),
)


@program.command(
    cls=_LaunchCommand,
    options_metavar="[OPTIONS]",
    help=f"{COMMANDS['launch']}\n\nTARGET is local, node, ssh, slurm, kubernetes or kubeflow. PATH "
    "is the folder of a project, whose answers are the defaults, or the one to start --script or "
    "--module in; the current one if not given. What follows -- is for the program.",
)
@click.argument("target")
@click.argument("path", default=".", metavar="[PATH] [-- ARGUMENTS]")
@click.option("--env", multiple=True, metavar="K=V", help="A variable for it; repeatable.")
@click.option(
    "--setup", multiple=True, metavar="COMMAND", help="To run first, like module load; repeatable."
)
@click.option("--output", metavar="FILE", help="The file to write.")
@click.option("--dry-run", is_flag=True, help="Print the file, write nothing.")
@click.pass_context
def launch(
    ctx: click.Context, /, target: str, path: str, output: str | None, dry_run: bool, **flags: Any
) -> None:
    """Carry out `ddpgen launch`."""
    from ddpgen import launch as launch_command
    from ddpgen import launch_files

    if target not in launch_files.FILES:
        near = difflib.get_close_matches(target, launch_files.FILES, n=1)
        raise _wrong_usage(
            f"No such target: {show(target)}.", "ddpgen launch", next(iter(near), None)
        )
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    launch_command.launch(
        launch_command.Request(target, path, given, ctx.meta["arguments"], output, dry_run)
    )


launch.params += [
    click.Option([flag], metavar=metavar, help=text) for flag, metavar, text in _LAUNCH_VALUES
]


@program.command(help=COMMANDS["options"])
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def options(as_json: bool) -> None:
    """Carry out `ddpgen options`."""
    from ddpgen import options as options_command

    click.echo(options_command.as_json() if as_json else options_command.as_text())


@program.command(
    help=f"{COMMANDS['demo']}\n\nIt goes to PATH (ddpgen-demo) and is trained with two processes "
    "on this machine."
)
@click.argument("path", default="ddpgen-demo")
def demo(path: str) -> None:
    """Carry out `ddpgen demo`."""
    from ddpgen import demo as demo_command

    demo_command.demo(path)


@program.command(help=COMMANDS["sync"])
def sync() -> None:
    """Carry out `ddpgen sync`."""
    from ddpgen import store

    click.echo(store.sync().tag)
