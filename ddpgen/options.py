"""`ddpgen options`: every question explained."""

from __future__ import annotations

import json

from ddpgen import questions
from ddpgen.errors import show
from ddpgen.questions import Question


def as_text() -> str:
    """Write all questions for people."""
    return "\n\n".join(_paragraph(question) for question in questions.visible())


def as_json() -> str:
    """Write all questions for programs: a list of objects. A derived default is null."""
    return json.dumps([_entry(question) for question in questions.visible()], indent=2)


def _paragraph(question: Question) -> str:
    lines = [question.usage, f"    {question.help}"]
    width = max((len(show(choice.value)) for choice in question.choices), default=0)
    lines += [
        f"      {show(choice.value):{width}}  {choice.meaning}" for choice in question.choices
    ]
    sources = _sources(question)
    default = f"made from {' and '.join(sources)}" if sources else show(question.default)
    lines += [f"    default: {default}"]
    if question.condition:
        lines += [f"    asked only when {question.condition}"]
    return "\n".join(lines)


def _entry(question: Question) -> dict[str, object]:
    return {
        "name": question.name,
        "flag": question.flag,
        "type": question.type,
        "help": question.help,
        "choices": [vars(choice) for choice in question.choices],
        "several": question.multiselect,
        "default": None if question.derived else question.default,
        "default_from": _sources(question),
        "asked_when": question.condition or None,
    }


def _sources(question: Question) -> list[str]:
    """Name what a derived default is made from."""
    if not question.derived:
        return []
    path = ["PATH"] if "_folder_name" in question.default else []
    return path + questions.named_in(question.default)
