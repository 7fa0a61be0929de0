"""The error that a person can cause and mend."""

from __future__ import annotations

LONGEST_VALUE = 60


class UserError(Exception):
    """Say what happened, why it cannot go on, and what to type."""

    def __init__(self, what: str, why: str, fix: str, code: int = 1) -> None:
        super().__init__(what, why, fix)
        self.what = what
        self.why = why
        self.fix = fix
        self.code = code

    def __str__(self) -> str:
        return f"ddpgen: {self.what}\n{self.why}\n{self.fix}"


def show(value: object) -> str:
    """Write a value for an error message: on one line, not too long, without control characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(show, value)) or "none of them"
    text = str(value)
    if len(text) > LONGEST_VALUE:
        text = text[: LONGEST_VALUE - 3] + "..."
    plain = bool(text) and text.isprintable() and text == text.strip()
    return text if plain else repr(text)
