"""The questions, read from the template's copier.yml: the only place that defines them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpgen.errors import UserError, show

Answer = str | int | float | bool | list[Any]

_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
# Copier's own notes in an answers file. They are no answers, and such a file is a good FILE.
_RECORDS = ("_commit", "_src_path")


@dataclass(frozen=True)
class Choice:
    """One of the values that a question allows."""

    value: Answer
    meaning: str


@dataclass(frozen=True)
class Question:
    """A question of copier.yml. `default` and `when` may be Jinja texts; only copier runs those."""

    name: str
    type: str
    help: str
    choices: tuple[Choice, ...]
    default: Any
    when: bool | str
    validator: str
    multiselect: bool

    @property
    def hidden(self) -> bool:
        """Tell whether nobody may answer it: it is a value that the template computes."""
        return self.when is False

    @property
    def derived(self) -> bool:
        """Tell whether the default is made from PATH or other answers."""
        return isinstance(self.default, str) and ("{{" in self.default or "{%" in self.default)

    @property
    def condition(self) -> str:
        """Return when it is asked, as in copier.yml without the braces; empty if always."""
        return self.when.strip("{} ") if isinstance(self.when, str) else ""

    @property
    def flag(self) -> str:
        """Return the flag as it is typed, without a value."""
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> str:
        """Return the flag and, for yes-or-no questions, its opposite."""
        return f"{self.flag}/--no-{self.flag[2:]}" if self.type == "bool" else self.flag

    @property
    def values(self) -> str:
        """Return what stands for the value in usage lines; empty for yes-or-no questions."""
        if self.type == "bool":
            return ""
        if self.choices:
            listed = "|".join(show(choice.value) for choice in self.choices)
            return f"{listed} (several: a,b)" if self.multiselect else listed
        return {"int": "N", "float": "X", "path": "PATH"}.get(self.type, "TEXT")

    @property
    def usage(self) -> str:
        """Return the flag with what it takes: `--nodes N`."""
        return f"{self.flags} {self.values}".rstrip()

    def parse(self, text: str) -> Answer:
        """Turn the text of a flag, of `--set` or of a file into a value, strictly.

        Raises:
            UserError: If the text is no value of the question's type or none of its choices.
        """
        if self.multiselect:
            return [self._parse_one(part.strip()) for part in text.split(",") if part.strip()]
        return self._parse_one(text)

    def _parse_one(self, text: str) -> Answer:
        value = self._cast(text)
        allowed = [choice.value for choice in self.choices]
        if allowed and value not in allowed:
            raise self.refusal(text, f"Use one of: {', '.join(map(show, allowed))}.")
        return value

    def _cast(self, text: str) -> Answer:
        if self.type == "int":
            # int() would take "1_000", " 7" and digits of other scripts, and YAML reads 010 as 8.
            if re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", text, re.ASCII):
                return int(text)
            raise self.refusal(text, "Use a whole number in digits, like 8.")
        if self.type == "float":
            if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]{1,2})?", text, re.ASCII | re.IGNORECASE):
                return float(text)
            raise self.refusal(text, "Use a number, like 0.1.")
        if self.type == "bool":
            if text.lower() in _WORDS:
                return _WORDS[text.lower()]
            raise self.refusal(text, "Use true or false.")
        return text

    def refusal(self, value: object, why: str) -> UserError:
        """Build the error for a value that is not possible."""
        return UserError(
            f"{self.name} = {show(value)} is not possible.", why, f"Type: {self.usage}"
        )


Questions = Mapping[str, Question]


def template_root() -> Path:
    """Return the folder with copier.yml: inside an installed package, or the checkout's root."""
    here = Path(__file__).resolve().parent
    packaged = here / "_template"
    return packaged if packaged.is_dir() else here.parent


@functools.lru_cache(maxsize=1)
def load_questions() -> Questions:
    """Read the questions of this ddpgen.

    Raises:
        UserError: If copier.yml is not there, which means a broken installation.
    """
    return questions_in(load_config(template_root()))


def load_config(root: Path) -> Mapping[str, Any]:
    """Read copier.yml.

    Raises:
        UserError: If the file is not there, which means a broken installation.
    """
    path = root / "copier.yml"
    try:
        return parse_config(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"The template of ddpgen is missing: {show(path)}.",
            f"The system says: {error.strerror}.",
            "Type: python -m pip install --force-reinstall ddpgen",
        ) from None


def parse_config(text: str) -> Mapping[str, Any]:
    """Read the text of a copier.yml."""
    import yaml

    # The loader in C, where PyYAML was built with it, takes a tenth of the time.
    content: Mapping[str, Any] = yaml.load(
        text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return content


def questions_in(content: Mapping[str, Any]) -> Questions:
    """Make the questions of a copier.yml."""
    return {
        name: _question(name, entry) for name, entry in content.items() if not name.startswith("_")
    }


def _question(name: str, entry: Mapping[str, Any]) -> Question:
    return Question(
        name=name,
        type=entry["type"],
        help=entry.get("help", ""),
        choices=tuple(_choices(entry.get("choices", {}))),
        default=entry.get("default"),
        when=entry.get("when", True),
        validator=entry.get("validator", ""),
        multiselect=entry.get("multiselect", False),
    )


def _choices(entry: Mapping[str, Any] | Iterable[Any]) -> Iterable[Choice]:
    # copier allows {label: value}, [[label, value]] and [value]; a value may be a mapping
    # {value: x, validator: y}.
    pairs = entry.items() if isinstance(entry, Mapping) else entry
    for pair in pairs:
        label, value = pair if isinstance(pair, (tuple, list)) else (pair, pair)
        if isinstance(value, Mapping):
            value = value["value"]
        yield Choice(value, str(label).removeprefix(f"{value}: "))


def visible(known: Questions | None = None) -> list[Question]:
    """Return the questions that people answer, in their order."""
    every = load_questions() if known is None else known
    return [question for question in every.values() if not question.hidden]


def named_in(expression: str, known: Questions | None = None) -> list[str]:
    """Return the visible questions that a Jinja expression mentions."""
    words = set(re.findall(r"\w+", expression))
    return [question.name for question in visible(known) if question.name in words]


def find(name: str, known: Questions | None = None) -> Question:
    """Return the question that people may answer under this name.

    Args:
        name: Its name.
        known: The questions of another version of the template.

    Raises:
        UserError: If there is none; it names the nearest one, or all.
    """
    question = (load_questions() if known is None else known).get(name)
    if question and not question.hidden:
        return question
    names = [question.name for question in visible(known)]
    if question:
        raise UserError(
            f"{name} cannot be set.",
            "It is a value that the template computes.",
            f"Type: --set KEY=VALUE with one of {', '.join(names)}",
        )
    near = _nearest(name, names)
    raise UserError(
        f"{show(name)} is no question.",
        f"The questions are {', '.join(names)}.",
        f"Did you mean {near}?" if near else "Type: ddpgen options, to see what they mean",
    )


def _nearest(name: str, names: list[str]) -> str | None:
    import difflib

    typed = name.lower().replace("-", "_")
    wholes = difflib.get_close_matches(typed, names, n=1)
    # "nmae" is near to no whole name, but to a part of project_name.
    parts = {part: whole for whole in reversed(names) for part in whole.split("_")}
    nearest_parts = difflib.get_close_matches(typed, parts, n=1)
    return next(iter(wholes + [parts[part] for part in nearest_parts]), None)


def parse_settings(settings: Iterable[str], known: Questions | None = None) -> dict[str, Answer]:
    """Read the KEY=VALUE texts of `--set`.

    Args:
        settings: The texts.
        known: The questions of another version of the template.

    Raises:
        UserError: If one has no "=", an unknown key or an impossible value, or if two contradict.
    """
    answers: dict[str, Answer] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UserError(
                f"--set {show(setting)} is not possible.",
                "It needs a key, an equals sign and a value.",
                f"Type: --set {find(key, known).name}=VALUE",
            )
        value = find(key, known).parse(text)
        if answers.setdefault(key, value) != value:
            raise contradiction(key, answers[key], value)
    return answers


def contradiction(key: str, first: Answer, second: Answer) -> UserError:
    """Build the error for two different values of one question."""
    return UserError(
        f"{key} is given twice: {show(first)} and {show(second)}.",
        "Only one of them can hold.",
        f"Type: the command again with one value for {key}",
    )


def idle(given: Iterable[str], applied: Mapping[str, Answer]) -> list[str]:
    """Return which of the given answers belong to questions that do not apply."""
    return [name for name in given if name not in applied]


def refuse_idle(
    given: Mapping[str, Answer],
    applied: Mapping[str, Answer],
    *,
    certain_only: bool = False,
    known: Questions | None = None,
) -> None:
    """Refuse answers to questions that do not apply.

    Args:
        given: What was given.
        applied: All answers that apply.
        certain_only: Refuse only where no answer that is still to come can change that.
        known: The questions of another version of the template.

    Raises:
        UserError: If there is one.
    """
    for name in idle(given, applied):
        question = find(name, known)
        named = named_in(question.condition, known)
        causes = [cause for cause in named if cause in applied]
        if certain_only and not (causes and all(cause in given for cause in causes)):
            continue
        here = " and ".join(f"{cause} = {show(applied[cause])}" for cause in causes)
        raise UserError(
            f"{name} = {show(given[name])} has no meaning here.",
            f"It is asked only when {question.condition}{f'; here {here}' if here else ''}.",
            f"Type: the command again without {name}",
        )


def read_answers(path: str) -> dict[str, Answer]:
    """Read a YAML file of answers. Values are taken as they are written: 3.10 and no stay texts.

    Raises:
        UserError: If the file cannot be read, is no mapping, or holds what is no answer.
    """
    import yaml

    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(
            f"The answers in {show(path)} cannot be read.",
            f"{reason}.",
            "Type: --answers FILE, with lines like nodes: 2",
        ) from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UserError(
            f"The answers in {show(path)} cannot be used.",
            "The file is no list of questions with their values.",
            "Type: --answers FILE, with lines like nodes: 2",
        )
    answers: dict[str, Answer] = {}
    for key_node, value_node in root.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else show(key_node.value)
        if key in _RECORDS:
            continue
        value = _value(find(key), value_node)
        if key in answers:
            raise contradiction(key, answers[key], value)
        answers[key] = value
    return answers


def _value(question: Question, node: Any) -> Answer:
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return question.parse(node.value)
    parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if question.multiselect and all(isinstance(part, yaml.ScalarNode) for part in parts):
        return [question._parse_one(part.value) for part in parts]
    raise question.refusal("a list or mapping", "Use a single value.")
