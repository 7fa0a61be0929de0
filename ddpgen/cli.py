"""The start: help at once, commands when they are used, errors to exit codes in one place."""

from __future__ import annotations

import sys

from ddpgen import __version__
from ddpgen.errors import UserError, show
from ddpgen.usage import help_text

DONE, USER_ERROR, INTERRUPTED = 0, 1, 130


def main(argv: list[str] | None = None) -> int:
    """Run ddpgen and return the exit code: 0 done, 1 user error, 2 wrong usage, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character of a path is no reason to fail.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        if sys.stdout:
            sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(error)
    except KeyboardInterrupt:
        print("ddpgen: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone, as in `ddpgen options | head`. Python would complain at its end.
        sys.stdout = None
        return USER_ERROR
    except OSError as error:
        return _fail(_system_error(error))


def _run(words: list[str]) -> int:
    # These two answer before anything is imported that takes time.
    if words in ([], ["--help"]):
        print(help_text())
        return DONE
    if words == ["--version"]:
        print(f"ddpgen {__version__}")
        return DONE
    from ddpgen import commands, interrupts

    with interrupts.caught():
        return commands.run(words)


def _fail(error: UserError) -> int:
    print(error, file=sys.stderr)
    return error.code


def _system_error(error: OSError) -> UserError:
    where = f": {show(error.filename)}" if error.filename else ""
    return UserError(
        f"{error.strerror or error}{where}.",
        "The system refused it.",
        "Type: the command again when that is mended",
    )
