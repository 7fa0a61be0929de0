"""Questions: read from copier.yml, made into flags, and answered strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ddpgen import questions
from ddpgen.errors import UserError, show
from ddpgen.questions import Answer

from .conftest import ROOT, Ddpgen

NAMES = (
    "project_name, package_name, starter, nodes, gpus_per_node, micro_batch_size, "
    "accumulation_steps, precision, sync_batchnorm, checkpoint, save_every_steps, "
    "keep_checkpoints, save_best, tracker, launchers, ci"
)
MADE_UP = """
_subdirectory: template
flavour:
  type: str
  multiselect: true
  help: Several of them
  default: "[a]"
  choices:
    "a: the first": a
    "b: the second": {value: b, validator: "{% if size > 3 %}too big{% endif %}"}
size: {type: float, default: 1.5}
plain: {type: str, default: x, choices: [x, y]}
pairs: {type: int, default: 1, choices: [[one, 1], [two, 2]]}
odd: {type: yaml, default: "{{ plain }}", when: "{{ plain == 'x' and size > 1 }}"}
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another copier.yml, with what today's does not have."""
    (tmp_path / "copier.yml").write_text(MADE_UP)
    monkeypatch.setattr(questions, "template_root", lambda: tmp_path)
    questions.load_questions.cache_clear()
    yield
    questions.load_questions.cache_clear()


def parse(name: str, text: str) -> Answer:
    return questions.find(name).parse(text)


def refused(name: str, text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(name, text)
    return str(caught.value)


def test_every_question_of_copier_yml_is_here_and_nothing_else() -> None:
    content = yaml.safe_load((ROOT / "copier.yml").read_text())
    assert list(questions.load_questions()) == [name for name in content if name[0] != "_"]
    assert ", ".join(question.name for question in questions.visible()) == NAMES


def test_choices_of_a_text_are_texts() -> None:
    # A bare no or 1.0 in copier.yml would be something else.
    for question in questions.visible():
        if question.type == "str":
            assert all(isinstance(choice.value, str) for choice in question.choices)


def test_every_question_says_effect_and_has_a_default() -> None:
    for question in questions.visible():
        assert question.help
        assert question.default is not None


@pytest.mark.parametrize("text", ["none", "epoch", "steps"])
def test_none_is_a_text(text: str) -> None:
    assert parse("checkpoint", text) == text


@pytest.mark.parametrize("text", ["3.10", "no", "010", "yes", "1:30:00", "null", "~", "1e3", ""])
def test_texts_stay_texts(text: str) -> None:
    assert parse("project_name", text) == text


@pytest.mark.parametrize(("text", "number"), [("2", 2), ("-1", -1), ("0", 0), ("100000", 100000)])
def test_whole_numbers(text: str, number: int) -> None:
    assert parse("nodes", text) == number


@pytest.mark.parametrize(
    "text",
    ["two", "", "010", "1_000", " 7", "7 ", "2.0", "1e3", "0x10", "+1", "٣", "1\n", "9" * 30],
)
def test_what_is_no_whole_number(text: str) -> None:
    assert refused("nodes", text) == (
        f"ddpgen: nodes = {show(text)} is not possible.\n"
        "Use a whole number in digits, like 8.\n"
        "Type: --nodes N"
    )


@pytest.mark.parametrize("text", ["true", "yes", "on", "1", "True", "ON"])
def test_yes(text: str) -> None:
    assert parse("ci", text) is True


@pytest.mark.parametrize("text", ["false", "no", "off", "0", "False", "OFF"])
def test_no(text: str) -> None:
    assert parse("ci", text) is False


@pytest.mark.parametrize("text", ["maybe", "", "2", "y", "none", "tru"])
def test_what_is_neither_yes_nor_no(text: str) -> None:
    assert refused("ci", text) == (
        f"ddpgen: ci = {show(text)} is not possible.\nUse true or false.\nType: --ci/--no-ci"
    )


def test_a_value_that_is_no_choice() -> None:
    assert refused("precision", "bf61") == (
        "ddpgen: precision = bf61 is not possible.\n"
        "Use one of: fp32, bf16, fp16.\n"
        "Type: --precision fp32|bf16|fp16"
    )


@pytest.mark.usefixtures("made_up")
def test_several_choices_are_a_list_with_commas() -> None:
    assert parse("flavour", "a,b") == ["a", "b"]
    assert parse("flavour", " b ") == ["b"]
    assert parse("flavour", "") == []
    assert refused("flavour", "a,c") == (
        "ddpgen: flavour = c is not possible.\nUse one of: a, b.\n"
        "Type: --flavour a|b (several: a,b)"
    )


@pytest.mark.usefixtures("made_up")
def test_all_forms_of_choices_and_types() -> None:
    found = {question.name: question for question in questions.visible()}
    assert [(choice.value, choice.meaning) for choice in found["flavour"].choices] == [
        ("a", "the first"),
        ("b", "the second"),
    ]
    assert parse("plain", "y") == "y"
    assert parse("pairs", "2") == 2
    assert parse("size", "0.25") == 0.25
    assert "Use a number, like 0.1." in refused("size", "nan")
    assert parse("odd", "[1, 2]") == "[1, 2]"
    assert found["odd"].condition == "plain == 'x' and size > 1"
    assert questions.named_in(found["odd"].condition) == ["size", "plain"]


@pytest.mark.usefixtures("made_up")
def test_several_choices_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.yml"
    path.write_text("flavour: [a, b]\nplain: y\n")
    assert questions.read_answers(str(path)) == {"flavour": ["a", "b"], "plain": "y"}
    path.write_text("plain: [x]\n")
    with pytest.raises(UserError, match="Use a single value"):
        questions.read_answers(str(path))


@pytest.mark.parametrize(
    ("name", "near"),
    [("nmae", "project_name"), ("node", "nodes"), ("gpus-per-node", "gpus_per_node"),
     ("batch_size", "micro_batch_size"), ("Precision", "precision"), ("trakcer", "tracker")],
)  # fmt: skip
def test_an_unknown_key_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        questions.find(name)
    assert str(caught.value) == (
        f"ddpgen: {name} is no question.\nThe questions are {NAMES}.\nDid you mean {near}?"
    )


def test_an_unknown_key_that_is_near_to_nothing() -> None:
    with pytest.raises(UserError) as caught:
        questions.find("xyzzy")
    assert str(caught.value) == (
        f"ddpgen: xyzzy is no question.\nThe questions are {NAMES}.\n"
        "Type: ddpgen options, to see what they mean"
    )


def test_a_computed_value_cannot_be_set() -> None:
    with pytest.raises(UserError) as caught:
        questions.parse_settings(["reserved_names=[]"])
    assert str(caught.value) == (
        "ddpgen: reserved_names cannot be set.\n"
        "It is a value that the template computes.\n"
        f"Type: --set KEY=VALUE with one of {NAMES}"
    )


def test_settings() -> None:
    given = ["nodes=2", "project_name=a=b", "ci=on", "nodes=2"]
    assert questions.parse_settings(given) == {"nodes": 2, "project_name": "a=b", "ci": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nodes"], "ddpgen: --set nodes is not possible.\nIt needs a key, an equals sign and a "
                    "value.\nType: --set nodes=VALUE"),
        (["nodes=1", "nodes=2"], "ddpgen: nodes is given twice: 1 and 2.\nOnly one of them can "
                                 "hold.\nType: the command again with one value for nodes"),
    ],
)  # fmt: skip
def test_settings_that_are_not_possible(given: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        questions.parse_settings(given)
    assert str(caught.value) == message


def test_a_file_is_taken_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "answers.yml"
    path.write_text(
        "# my answers\nproject_name: 3.10\nnodes: 2\nci: no\ncheckpoint: 'none'\n"
        "_commit: v1.0.0\n_src_path: somewhere\n"
    )
    assert questions.read_answers(str(path)) == {
        "project_name": "3.10",
        "nodes": 2,
        "ci": False,
        "checkpoint": "none",
    }
    path.write_text("")
    assert questions.read_answers(str(path)) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- nodes", "cannot be used.\nThe file is no list of questions with their values.\n"
                     "Type: --answers FILE, with lines like nodes: 2"),
        (b"nodes: [", "cannot be read.\nwhile parsing"),
        (b"\xff\xfe\x00", "cannot be read.\n'utf-8' codec can't decode byte 0xff"),
        (b"nmae: x", "ddpgen: nmae is no question."),
        (b"{[a]: 1}", "is no question."),
        (b"nodes: 1\nnodes: 2", "ddpgen: nodes is given twice: 1 and 2."),
        (b"nodes: {a: 1}", "ddpgen: nodes = a list or mapping is not possible."),
        (b"nodes: 010", "ddpgen: nodes = 010 is not possible."),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "answers.yml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        questions.read_answers(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"), [("gone.yml", "No such file or directory"), (".", "Is a directory")]
)
def test_a_file_that_is_none(cwd: Path, name: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        questions.read_answers(name)
    assert str(caught.value) == (
        f"ddpgen: The answers in {name} cannot be read.\n{reason}.\n"
        "Type: --answers FILE, with lines like nodes: 2"
    )


def test_a_missing_template_is_a_broken_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "template_root", lambda: tmp_path)
    with pytest.raises(UserError) as caught:
        questions.load_questions.__wrapped__()
    assert str(caught.value) == (
        f"ddpgen: The template of ddpgen is missing: {show(tmp_path / 'copier.yml')}.\n"
        "The system says: No such file or directory.\n"
        "Type: python -m pip install --force-reinstall ddpgen"
    )


def test_the_template_of_a_checkout_and_of_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "__file__", str(tmp_path / "ddpgen" / "questions.py"))
    assert questions.template_root() == tmp_path
    (tmp_path / "ddpgen" / "_template").mkdir(parents=True)
    assert questions.template_root() == tmp_path / "ddpgen" / "_template"


@pytest.mark.parametrize(
    ("value", "shown"),
    [("a b", "a b"), ("", "''"), (" a", "' a'"), ("a\nb", "'a\\nb'"), ("\x1b[31m", "'\\x1b[31m'"),
     ("é", "é"), ("x" * 99, "x" * 57 + "..."), (True, "true"), (3, "3"), (["a", "b"], "a,b"),
     ([], "none of them")],
)  # fmt: skip
def test_values_in_messages_stay_on_their_line(value: Answer, shown: str) -> None:
    assert show(value) == shown


def test_options_for_people(ddpgen: Ddpgen) -> None:
    result = ddpgen("options")
    assert (result.code, result.err) == (0, "")
    paragraphs = result.out.strip().split("\n\n")
    assert [text.split()[0].split("/")[0] for text in paragraphs] == [
        question.flag for question in questions.visible()
    ]
    assert paragraphs[0].endswith("default: made from PATH")
    assert paragraphs[7] == (
        "--precision fp32|bf16|fp16\n"
        "    Number format of the forward pass. The weights stay fp32\n"
        "      fp32  exact, slowest on a GPU\n"
        "      bf16  faster, needs an Ampere GPU or newer\n"
        "      fp16  faster on older GPUs, with loss scaling\n"
        "    default: fp32"
    )
    assert paragraphs[10].endswith("default: 500\n    asked only when checkpoint == 'steps'")


def test_options_for_programs(ddpgen: Ddpgen) -> None:
    result = ddpgen("options", "--json")
    entries = {entry["name"]: entry for entry in json.loads(result.out)}
    assert ", ".join(entries) == NAMES
    assert entries["package_name"]["default"] is None
    assert entries["package_name"]["default_from"] == ["project_name"]
    assert entries["sync_batchnorm"] == {
        "name": "sync_batchnorm",
        "flag": "--sync-batchnorm",
        "type": "bool",
        "help": "Share BatchNorm statistics between GPUs. For few samples per GPU; costs "
        "communication in every layer",
        "choices": [],
        "several": False,
        "default": False,
        "default_from": [],
        "asked_when": "starter == 'vision'",
    }
    assert entries["starter"]["choices"][0] == {
        "value": "vision",
        "meaning": "convolutional network with BatchNorm on 1,797 handwritten digits",
    }
