"""The error that is meant for the person at the keyboard, and the one that is meant for nobody."""


class UserError(Exception):
    """Something the user can put right. Shown as three lines, without a traceback.

    Attributes:
        what: What happened, with the actual values.
        why: Why the run cannot go on.
        fix: What to type or to change.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what, why, fix)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.fix}"


class AnotherRankFailed(RuntimeError):
    """Raised on the ranks that must end because another one has failed, which says why itself."""
