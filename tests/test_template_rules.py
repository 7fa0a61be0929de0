"""The rules of the template, as code: what keeps projects readable and updatable."""

from __future__ import annotations

import ast
import keyword
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.projects import ROOT, make_project, package_of, run

TEMPLATE = ROOT / "template"
QUESTIONS = yaml.safe_load((ROOT / "copier.yml").read_text())
PACKAGE_FILES = sorted(TEMPLATE.glob("*package_name*/*.py"))

# Who may import whom: a module may import those of the lines above its own.
LAYERS = [
    {"errors"},
    {"config", "seeding", "model", "data", "permutation", "failures"},
    {"distributed"},
    {"loading", "metrics", "optim", "probe", "stopping", "log", "run_folder", "checkpoint_files"},
    {"checkpoint", "wrapping", "ledger"},
    {"train"},
]


def ids(path: Path) -> str:
    return path.name


def test_the_template_is_found() -> None:
    assert len(PACKAGE_FILES) > 15


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=ids)
def test_the_package_has_no_jinja_and_no_name_of_its_own(path: Path) -> None:
    """Answers reach Python through configs/train.yaml alone: tools read the template as it is."""
    text = path.read_text()
    assert not re.search(r"\{%|\{##|\{\{ ?[a-z_]+ ?[|}]", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").split(".")[0] != "package_name"


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=ids)
def test_imports_point_one_way(path: Path) -> None:
    level = next(i for i, layer in enumerate(LAYERS) if path.stem in layer or path.stem[0] == "_")
    allowed = set().union(*LAYERS[: level + 1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.module in allowed, f"{path.stem} imports {node.module}"
            assert node.module != "train"


@pytest.mark.parametrize("path", sorted(TEMPLATE.glob("*is_*/*.py")), ids=ids)
def test_the_users_files_know_nothing_of_processes(path: Path) -> None:
    assert "distributed" not in path.read_text()
    assert path.read_text().startswith('"""YOURS: ')


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=ids)
def test_functions_fit_a_screen(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 55, f"{node.name} has {length} lines"


def test_whatever_communicates_says_so() -> None:
    """A function that calls a collective, or one that does, says "Collective" in its docstring."""
    primitive = {"all_reduce", "broadcast", "barrier", "all_gather_object", "init_process_group"}
    primitive |= {"broadcast_object_list", "destroy_process_group", "DistributedDataParallel"}
    functions: dict[str, ast.FunctionDef] = {}
    for path in PACKAGE_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                functions[node.name] = node
    calls = {
        name: {
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
        }
        for name, node in functions.items()
    }
    silent = [
        name
        for name, called in calls.items()
        if called & primitive and "Collective" not in (ast.get_docstring(functions[name]) or "")
    ]
    assert silent == []


def test_no_feature_of_copier_that_needs_trust() -> None:
    assert not {"_tasks", "_migrations", "_jinja_extensions", "_external_data"} & set(QUESTIONS)
    questions = [q for name, q in QUESTIONS.items() if not name.startswith("_")]
    assert not any("secret" in question for question in questions)


def test_conditional_names_are_few_and_plain() -> None:
    names = {path.name for path in TEMPLATE.rglob("*") if "{%" in path.name}
    assert len(names) <= 7
    for name in names:
        assert re.fullmatch(r"\{% if [a-z_]+ %\}[^%]+\{% endif %\}(\.jinja)?", name), name
    for path in TEMPLATE.rglob("*"):
        assert not set('"|:<>?*') & set(path.name), f"Windows cannot have {path.name}"


def test_block_tags_stand_alone_on_their_lines() -> None:
    for path in TEMPLATE.rglob("*.jinja"):
        for line in path.read_text().splitlines():
            if "{%" in line:
                assert re.fullmatch(r"\{% .* %\}", line), f"{path.name}: {line}"


def test_answers_stand_apart_from_lines_that_people_edit() -> None:
    """git merges two changes only if an unchanged line is between them."""
    names = "|".join(
        name
        for name, question in QUESTIONS.items()
        if not name.startswith("_") and question.get("when") is not False
        # These two never change in a project.
        and name not in ("package_name", "starter")
    )
    checked = 0
    for path in TEMPLATE.rglob("*.jinja"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("{%")]
        for number, line in enumerate(lines):
            if re.search(rf"\{{\{{[^}}]*\b({names})\b", line) and not line.startswith("#"):
                around = lines[max(number - 1, 0) : number] + lines[number + 1 : number + 2]
                assert all(re.match(r"\s*(#|$)", near) for near in around), (path.name, line)
                checked += 1
    assert checked > 12


def test_no_package_can_hide_a_module_of_python() -> None:
    reserved = set(yaml.safe_load(QUESTIONS["reserved_names"]["default"]))
    names = {name for name in sys.stdlib_module_names if re.fullmatch(r"[a-z][a-z0-9_]*", name)}
    words = {name for name in keyword.kwlist if name.islower()}
    assert names | words | {"torch", "numpy", "tests", "configs", "launch", "runs"} <= reserved


@pytest.mark.slow
def test_black_ruff_and_mypy_pass_on_the_template(tmp_path: Path) -> None:
    """The folders of the starters get names that Python can import; nothing else is changed."""
    for starter in ("vision", "text"):
        package = tmp_path / starter / "package"
        shutil.copytree(TEMPLATE / "{{ package_name }}", package)
        for path in (
            TEMPLATE / f"{{% if is_{starter} %}}{{{{ package_name }}}}{{% endif %}}"
        ).iterdir():
            shutil.copy(path, package)
        project = make_project(tmp_path / f"rendered-{starter}", starter=starter)
        shutil.copy(project / "pyproject.toml", tmp_path / starter)
    for command in (
        ["black", "--check", str(TEMPLATE)],
        ["ruff", "check", str(TEMPLATE)],
        [
            "mypy",
            "--config-file",
            str(tmp_path / "vision/pyproject.toml"),
            f"{tmp_path}/vision/package",
        ],
        [
            "mypy",
            "--config-file",
            str(tmp_path / "text/pyproject.toml"),
            f"{tmp_path}/text/package",
        ],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["vision", "text"])
def test_mypy_strict_passes_on_a_rendered_project(tmp_path: Path, starter: str) -> None:
    project = make_project(tmp_path / "project", starter=starter)
    done = run(project, sys.executable, "-m", "mypy", ".", timeout_s=300)
    assert done.returncode == 0, done.stdout


def test_the_readmes_tour_shows_every_file(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    readme = (project / "README.md").read_text()
    tour = readme.split("## What is where")[1].split("## How it trains")[0]
    for path in (project / package_of(project)).glob("*.py"):
        if path.name != "__init__.py":
            assert f"  {path.name} " in tour, path.name
    for name in re.findall(r"`((?:tests|launch|configs)/[\w./-]+)`", readme):
        assert (project / name).exists(), name


def test_no_setting_is_read_as_an_option_of_torchrun(tmp_path: Path) -> None:
    """torchrun takes `--log` for the beginning of its own --log-dir and fails."""
    from torch.distributed.run import get_args_parser

    project = make_project(tmp_path / "project")
    settings = yaml.safe_load((project / "configs/train.yaml").read_text())
    own = {option for action in get_args_parser()._actions for option in action.option_strings}
    for name in settings:
        assert not [option for option in own if option.startswith(f"--{name}")], name


def test_launch_scripts_switch_nothing_off_and_fix_no_port(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    for script in (project / "launch").iterdir():
        text = script.read_text()
        assert not re.search(r"NCCL_\w+_DISABLE", text)
        assert script.stat().st_mode & 0o100
    assert "29500" not in (project / "launch/local.sh").read_text()


def test_the_readme_lists_every_question() -> None:
    readme = (ROOT / "README.md").read_text()
    for name, question in QUESTIONS.items():
        if not name.startswith("_") and question.get("when") is not False:
            (row,) = [line for line in readme.splitlines() if line.startswith(f"| `{name}`: ")]
            assert question["help"][1:] in row
            for value in question.get("choices", {}).values():
                assert f"`{value}`" in row
