"""`ddpgen launch`: what it writes, says and refuses. Other tests run what it writes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from ddpgen import launch, launch_files
from ddpgen.questions import load_config, template_root
from tests.projects import make_project
from tests.test_render import shell_is_clean

from .conftest import Ddpgen, tree

ALL = ["ssh", "slurm", "kubernetes", "kubeflow"]
# What each target cannot do without, for a script of one's own.
NEEDS: dict[str, tuple[str, ...]] = {
    "local": ("--gpus-per-node", "8"),
    "node": ("--nodes", "4", "--gpus-per-node", "8"),
    "ssh": ("--hosts", "a,b,c,d", "--gpus-per-node", "8"),
    "slurm": ("--nodes", "4", "--gpus-per-node", "8"),
    "kubernetes": ("--nodes", "4", "--gpus-per-node", "8", "--image", "me/train:1"),
    "kubeflow": ("--nodes", "4", "--gpus-per-node", "8", "--image", "me/train:1"),
}
NAMES = {
    "local": "local-1x8.sh",
    "node": "node-4x8.sh",
    "ssh": "ssh-4x8.sh",
    "slurm": "slurm-4x8.sbatch",
    "kubernetes": "kubernetes-4x8.yaml",
    "kubeflow": "kubeflow-4x8.yaml",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with every launch file, for one machine with two GPUs. Tests take copies of it."""
    return make_project(tmp_path_factory.mktemp("made") / "p", launchers=ALL)


@pytest.fixture
def project(made: Path, cwd: Path) -> Path:
    """The same in the working folder."""
    return Path(shutil.copytree(made, cwd / "p"))


def is_clean(file: Path) -> None:
    """Let the file's own tools read it."""
    if file.suffix == ".yaml":
        assert all(yaml.safe_load_all(file.read_text()))
    else:
        shell_is_clean(file.read_text())


@pytest.mark.parametrize("target", launch_files.FILES)
def test_any_script_can_be_launched(ddpgen: Ddpgen, cwd: Path, target: str) -> None:
    result = ddpgen("launch", target, *NEEDS[target], "--script", "train.py")
    assert (result.code, tree(cwd)) == (0, ["launch", f"launch/{NAMES[target]}"]), result.err
    file = cwd / "launch" / NAMES[target]
    is_clean(file)
    assert os.access(file, os.X_OK) == (file.suffix != ".yaml")
    processes = "8 processes: 1 node" if target == "local" else "32 processes: 4 nodes"
    assert result.err == f"{processes} x 8 GPUs per node\nNote: train.py is not there yet.\n"
    first, start = result.out.splitlines()
    assert first == f"Wrote launch/{NAMES[target]}. Next:"
    assert start.partition("  #")[0].endswith(f"launch/{NAMES[target]}")


# A value for every flag, that no other place of the file has.
VALUES = {
    "max_restarts": "7", "env": "A_NAME=its value", "setup": "module load cuda-13",
    "nodes": "4", "port": "12321", "interface": "eth7", "partition": "gpu-a", "account": "us-b",
    "time": "1-02:03:04", "image": "me/train:1.2", "namespace": "team-c", "hosts": "w,x,y,z",
}  # fmt: skip


@pytest.mark.parametrize("program", ["--script=its train.py", "--module=its.train", "project"])
@pytest.mark.parametrize("target", launch_files.FILES)
def test_every_flag_reaches_the_file(
    ddpgen: Ddpgen, project: Path, cwd: Path, target: str, program: str
) -> None:
    names = {*launch.FOR_ALL, *launch.FOR_TARGET[target]} & set(VALUES)
    flags = [f"--{name.replace('_', '-')}={VALUES[name]}" for name in sorted(names)]
    words = ["p"] if program == "project" else [program]
    result = ddpgen("launch", target, *words, "--gpus-per-node=3", *flags, "--output=x.sh")
    assert result.code == 0, result.err
    text = (cwd / "x.sh").read_text()
    for name in names:
        assert VALUES[name].replace(",", " ").split("=")[-1] in text, name
    if target in ("kubernetes", "kubeflow"):
        assert all(yaml.safe_load_all(text))
    else:
        shell_is_clean(text)


@pytest.mark.parametrize("target", launch_files.FILES)
def test_the_file_of_a_project_is_the_one_that_the_template_has(project: Path, target: str) -> None:
    """One source for each launcher: `ddpgen launch` and the template fill the same file alike."""
    values = launch_files.defaults() | {
        "program": '-m -- p.train --config "$CONFIG"', "name": "p", "gpus_per_node": 2,
    }  # fmt: skip
    file = project / "launch" / launch_files.FILES[target]
    assert launch_files.render(target, values) == file.read_text()


@pytest.mark.parametrize("target", launch_files.FILES)
def test_dry_run_prints_the_file_and_writes_nothing(
    ddpgen: Ddpgen, project: Path, cwd: Path, target: str
) -> None:
    before = tree(cwd)
    words = ["launch", target, "p", *NEEDS[target]]
    dry = ddpgen(*words, "--dry-run")
    assert (dry.code, tree(cwd)) == (0, before)
    assert ddpgen(*words).code == 0
    assert dry.out == (project / "launch" / NAMES[target]).read_text()
    assert "global batch" in dry.err


def test_the_ledger_at_this_size(ddpgen: Ddpgen, project: Path) -> None:
    """What the project's settings and the program's arguments make of it, now."""
    settings = project / "configs/train.yaml"
    settings.write_text(settings.read_text().replace("lr_scaling: none", "lr_scaling: linear"))
    result = ddpgen(
        "launch", "slurm", "p", "--nodes", "2", "--gpus-per-node", "4",
        "--", "--micro_batch_size", "16", "--accumulation_steps=2",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert result.err == (
        "  processes      8      2 nodes x 4 GPUs per node\n"
        "  global batch   256    16 samples per GPU x 2 accumulation steps x 8 processes\n"
        "  learning rate  0.012  0.003 x (256 / 64) (lr_scaling: linear)\n"
        "  precision      fp32   forward pass and weights\n"
        "  checkpoint     epoch  after every epoch; the newest 3 are kept, and the best\n"
        "\n"
        "  Note: The global batch is 4 times that of the project as it is (64, with 1 node x 2 "
        "GPUs per\n"
        "  node). Fewer steps per epoch, and the learning rate may need another value: see "
        "learning_rate\n"
        "  and lr_scaling in configs/train.yaml, or change accumulation_steps to keep the batch.\n"
        "\n"
        "  Note: The global batch of 256 is large for the 1,438 training digits of the vision "
        "starter: 5\n"
        "  optimizer steps per epoch.\n"
        "\n"
    )
    small = ddpgen("launch", "local", "p", "--gpus-per-node", "1")
    assert "0.5 times that of the project as it is" in small.err
    assert "More steps per epoch" in small.err
    debug = ("--config", "configs/debug.yaml", "--accumulation_steps", "1")
    other = ddpgen("launch", "local", "p", "--output", "x.sh", "--", *debug)
    assert "  global batch   32 " in other.err
    quiet = ddpgen("launch", "local", "p")
    assert (quiet.code, "Note" in quiet.err) == (0, False), quiet.err


def test_the_usual_size_is_that_of_the_answers(ddpgen: Ddpgen, cwd: Path) -> None:
    make_project(cwd / "p", nodes=3, gpus_per_node=5)
    assert ddpgen("launch", "slurm", "p/configs").code == 0
    text = (cwd / "p/launch/slurm-3x5.sbatch").read_text()
    assert "#SBATCH --nodes=3\n" in text
    assert "#SBATCH --gpus-per-node=5\n" in text
    assert ddpgen("launch", "node", "p", "--nodes", "1:3").code == 0
    assert '"${NODES:-1:3}"' in (cwd / "p/launch/node-1-3x5.sh").read_text()


REFUSED: list[tuple[str, str]] = [
    ("ssh --hosts a,b,a", "--hosts a is not possible."),
    ("ssh --hosts a,me@A", "--hosts me@A is not possible."),
    ("ssh --hosts a,b --nodes 3", "--nodes 3 is not possible.\nThere are 2 hosts: a,b."),
    ("ssh --hosts a,b --nodes 1:2", "--nodes 1:2 is not possible."),
    ("ssh --hosts '-oProxyCommand=x'", "--hosts -oProxyCommand=x is not possible."),
    ("ssh --hosts 'a,b c;d'", "--hosts c;d is not possible."),
    ("ssh --hosts a --hostfile h", "--hosts and --hostfile are given."),
    ("ssh --hostfile none.txt", "--hostfile none.txt is not possible.\nIt cannot be read: No such"),
    ("ssh", "--hosts is missing."),
    ("slurm --gpus-per-node 0", "--gpus-per-node 0 is not possible."),
    ("slurm --gpus-per-node 1025", "--gpus-per-node 1025 is not possible."),
    ("slurm --nodes 0", "--nodes 0 is not possible."),
    ("slurm --nodes 3:2", "--nodes 3:2 is not possible."),
    ("slurm --nodes two", "--nodes two is not possible."),
    ("slurm --port 80", "--port 80 is not possible."),
    ("slurm --port 65536", "--port 65536 is not possible."),
    ("slurm --time 1h", "--time 1h is not possible."),
    ("slurm --partition 'a b'", "--partition a b is not possible."),
    ("slurm --interface eth0;x", "--interface eth0;x is not possible."),
    ("slurm --max-restarts -1", "--max-restarts -1 is not possible."),
    ("slurm --env A", "--env A is not possible."),
    ("slurm --env 1A=b", "--env 1A=b is not possible."),
    ("slurm --env WANDB_API_KEY=abc", "--env WANDB_API_KEY looks like a secret."),
    ("slurm --env hf_token=abc", "--env hf_token looks like a secret."),
    ("slurm -- --config abc.yaml", "The settings in abc.yaml cannot be read.\nNo such file"),
    ("slurm -- --learning_rate x", "The arguments --learning_rate x are not possible."),
    ("slurm -- --micro_batch_size 0", "The arguments --micro_batch_size 0 are not possible."),
    ("slurm README.md", "README.md is a file."),
    ("slurm --module train.py", "--module train.py is not possible."),
    ("slurm --script ''", "--script '' is not possible.\nIt is no name of a file."),
    ("slurm --output -", "--output - is not possible."),
    ("slurm --output launch", "--output launch is not possible."),
    ("ssh --hosts gpu1:8,gpu2:8", "--hosts gpu1:8 is not possible."),
    ("ssh --hostfile configs/debug.yaml", "--hostfile configs/debug.yaml is not possible.\nLine "),
    ("slurm --setup ''", "--setup '' is not possible."),
    ("slurm --env A=b\\\nc", "--env 'A=b\\nc' is not possible."),
    ("slurm --setup 'a\nb'", "--setup 'a\\nb' is not possible."),
    ("slurm -- 'a\nb'", "The argument 'a\\nb' is not possible."),
    ("slurm --script a.py --module a", "--script a.py and --module a are given."),
    ("slurm --module a.py-b", "--module a.py-b is not possible."),
    ("slurm --hosts a,b", "--hosts has no meaning for slurm.\nIt is one of ssh."),
    ("local --nodes 2", "--nodes has no meaning for local."),
    ("kubernetes", "--image is missing."),
    ("kubernetes --image 'a b'", "--image a b is not possible."),
    ("kubernetes --image x --namespace A", "--namespace A is not possible."),
    ("kubernetes --image x --nodes 1:2", "--nodes 1:2 is not possible."),
    ("slurm --output launch/slurm.sbatch", "launch/slurm.sbatch belongs to the template."),
    ("slurm --output configs/train.yaml", "configs/train.yaml is there already."),
]  # fmt: skip


@pytest.mark.parametrize(("words", "what"), REFUSED, ids=[words for words, _ in REFUSED])
def test_nonsense_is_refused_with_one_message(
    ddpgen: Ddpgen, project: Path, monkeypatch: pytest.MonkeyPatch, words: str, what: str
) -> None:
    monkeypatch.chdir(project)
    before = tree(project)
    result = ddpgen("launch", *shlex.split(words))
    assert (result.code, result.out, tree(project)) == (1, "", before)
    assert result.err.startswith(f"ddpgen: {what}"), result.err
    assert len(result.err.splitlines()) == 3
    assert "=abc" not in result.err


def test_what_is_missing_is_named(ddpgen: Ddpgen, cwd: Path) -> None:
    first = {
        words: ddpgen("launch", *words.split()).err.splitlines()[0]
        for words in ("slurm", "slurm --script a.py", "slurm --script a.py --nodes 2", "slurm x")
    }
    assert first == {
        "slurm": "ddpgen: . is no project of ddpgen, and no program is named.",
        "slurm --script a.py": "ddpgen: --nodes is missing.",
        "slurm --script a.py --nodes 2": "ddpgen: --gpus-per-node is missing.",
        "slurm x": "ddpgen: x is no folder.",
    }
    result = ddpgen("launch", "slrum")
    assert (result.code, result.err.splitlines()[0]) == (2, "ddpgen: No such target: slrum.")
    assert result.err.endswith("Did you mean slurm?\n")
    assert ddpgen("launch").code == 2
    result = ddpgen("launch", "slurm", "--nodes")
    assert (result.code, result.err.splitlines()) == (2, [
        "ddpgen: Option '--nodes' requires an argument.",
        "ddpgen launch cannot be started like this.",
        "Type: ddpgen launch --help (arguments for the program follow --)",
    ])  # fmt: skip
    result = ddpgen("launch", "slurm", "--script", "a.py", "--lr", "0.1")
    assert result.err.endswith(" (arguments for the program follow --)\n")


@pytest.fixture
def keys(terminal: None) -> Iterator[PipeInput]:
    """Type on a terminal that is none."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def test_what_is_missing_is_asked_on_a_terminal(ddpgen: Ddpgen, cwd: Path, keys: PipeInput) -> None:
    keys.send_text("my train.py\ra, b\rzwei\r\x154\r")  # asked again after a wrong answer
    result = ddpgen("launch", "ssh")
    assert result.code == 0, result.err
    assert tree(cwd) == ["launch", "launch/ssh-2x4.sh"]
    text = (cwd / "launch/ssh-2x4.sh").read_text()
    assert '"${HOSTS:-a b}"' in text
    assert "-- 'my train.py'" in text


def test_leaving_a_question_writes_nothing(ddpgen: Ddpgen, cwd: Path, keys: PipeInput) -> None:
    keys.send_text("\x03")
    assert ddpgen("launch", "slurm", "--script", "a.py").code == 130
    assert tree(cwd) == []


def test_a_hostfile(ddpgen: Ddpgen, cwd: Path) -> None:
    (cwd / "hosts").write_text("# ours\nnode-a slots=4\n\nme@node-b slots=4  # new\n")
    result = ddpgen("launch", "ssh", "--script", "a.py", "--hostfile", "hosts")
    assert result.code == 0, result.err
    assert '"${HOSTS:-node-a me@node-b}"' in (cwd / "launch/ssh-2x4.sh").read_text()
    (cwd / "hosts").write_text("# nobody\n")
    result = ddpgen("launch", "ssh", "--script", "a.py", "--hostfile", "hosts")
    assert "It names no machine." in result.err
    (cwd / "hosts").write_text("a\nA\n")
    result = ddpgen("launch", "ssh", "--script", "a.py", "--hostfile", "hosts")
    assert result.err.startswith("ddpgen: --hostfile hosts: the name A is not possible.\n")
    (cwd / "hosts").write_text("a slots=4\nb slots=8\n")
    result = ddpgen("launch", "ssh", "--script", "a.py", "--hostfile", "hosts")
    assert "Its machines have 4, 8 slots; all must have the same number." in result.err


SHOWS = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["A"], os.environ["B"], os.getcwd()]))
"""


@pytest.mark.slow
def test_paths_values_and_arguments_arrive_as_they_were_typed(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cwd / "ü 'q' \"$(touch X)\" `y`"
    folder.mkdir()
    monkeypatch.chdir(folder)
    name = "my 'train' $x.py"
    (folder / name).write_text(SHOWS)
    odd = ["a b", "it's", '"', "$HOME", "`id`", "--log", "--", "*", "ü\\n", ""]
    result = ddpgen(
        "launch", "local", "--gpus-per-node", "1", "--script", name, "--env", "A=x 'y' $z",
        "--setup", "B='from set-up'$NOBODY_SET_THIS; export B", "--", *odd,
    )  # fmt: skip
    assert result.code == 0, result.err
    (cwd / "link.sh").symlink_to(folder / "launch/local-1x1.sh")
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(cwd),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", folder / "launch/local-1x1.sh", "more than", "one"],
        cwd="/", env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = done.stdout.partition("]:")[2]
    assert json.loads(shown) == [
        [*odd, "more than", "one"], "x 'y' $z", "from set-up", str(folder)
    ]  # fmt: skip
    (log,) = (folder / "logs/node-0").rglob("stdout.log")
    assert json.loads(log.read_text())[0][0] == "a b"
    assert not (folder / "X").exists()


def test_output_may_be_anywhere(ddpgen: Ddpgen, cwd: Path) -> None:
    (cwd / "work").mkdir()
    words = ("launch", "local", "--gpus-per-node", "1", "--script", "a.py")
    assert ddpgen(*words, "work", "--output", "elsewhere/x.sh").code == 0
    assert f"cd -- {cwd}/work\n" in (cwd / "elsewhere/x.sh").read_text()
    result = ddpgen(*words, "work", "--output", "work/a/b/x y.sh")
    assert '"$(dirname -- "${BASH_SOURCE[0]}")"/../..\n' in (cwd / "work/a/b/x y.sh").read_text()
    assert result.out == "Wrote work/a/b/x y.sh. Next:\n  cd work\n  bash 'a/b/x y.sh'\n"
    taken = ddpgen(*words, "work", "--output", "work/a/b/x y.sh")
    assert (taken.code, "is there already" in taken.err) == (1, True)


def test_what_the_launch_files_are_filled_with_is_what_copier_yml_names(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that copier.yml does not know would be missing in every new project."""
    filled: list[dict[str, Any]] = []
    render = launch_files.render

    def note(target: str, values: dict[str, Any]) -> str:
        filled.append(values)
        return render(target, values)

    monkeypatch.setattr(launch_files, "render", note)
    for target, needs in NEEDS.items():
        assert ddpgen("launch", target, *needs, "--script", "train.py").code == 0
    assert all(set(values) == set(launch_files.defaults()) for values in filled)
    named = load_config(template_root())["launch"]["default"]
    used = "".join(path.read_text() for path in (template_root() / "template/launch").rglob("*.*"))
    for name in launch_files.defaults():
        assert f"    {name}:" in f"    {named}".replace("\n", "\n    ")
        assert f"launch.{name}" in used, name


def test_a_name_that_only_looks_like_a_secret(ddpgen: Ddpgen, project: Path) -> None:
    result = ddpgen("launch", "slurm", "p", "--env", "TOKENIZERS_PARALLELISM=false")
    assert result.code == 0, result.err


def test_a_broken_settings_file_is_named(ddpgen: Ddpgen, project: Path) -> None:
    (project / "configs/train.yaml").write_text("epochs: [\n")
    result = ddpgen("launch", "local", "p")
    assert (result.code, "configs/train.yaml cannot be read" in result.err) == (1, True)
