"""The manifests: valid for the API, consistent in themselves, and their containers train for real.

There is no cluster here. What Kubernetes and the Kubeflow Trainer do with a manifest is played by
this file, after their documentation: labels, variables, names; each "pod" is a process on loopback,
if possible in a PID namespace, where it is process 1 as in a container.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from ddpgen import launch_files
from ddpgen.questions import load_config, template_root
from tests.projects import environment, make_project, metrics, status, train
from tests.test_render import shell_is_clean

KINDS = ("kubernetes", "kubeflow")

# The oldest Kubernetes that the files are for, and all that there are schemas of.
OLDEST = "1.29"
VERSIONS = [
    version
    for version in all_versions()
    if tuple(map(int, version.split(".")[:2])) >= tuple(map(int, OLDEST.split(".")))
]

# Texts that could be taken for something else by YAML, by Kubernetes or by Bash.
ODD = (
    "", " ", "plain", "yes", "1e3", "null", "it's \"quoted\"", "two\nlines\n", "tab\tand \\back",
    "${HOME} $HOME `id` $(id)", "$(NODES) $$(NODES) $$$(NODES) $$", "# no: comment", "ü 模型",
    "{{ jinja }}", "--- !!python/object", "*alias &anchor", "<b>&amp;</b>", "\U0001f680 launched",
)  # fmt: skip


def manifest(kind: str, **values: Any) -> list[dict[str, Any]]:
    """Fill a manifest with what `ddpgen launch` could give it."""
    text = launch_files.render(kind, {**plain_values(), **values})
    return list(yaml.safe_load_all(text))


def plain_values() -> dict[str, Any]:
    """Return the values for a script that is not a project of ddpgen."""
    names = re.findall(
        r"(?m)^(\w+):", load_config(template_root())["launch"]["default"].replace("{{", "")
    )
    return {
        **dict.fromkeys(names, ""),
        "has_config": False, "program": "-- train.py", "logs": "logs", "name": "job", "nodes": 2,
        "gpus_per_node": 1, "max_restarts": 0, "env": [], "setup": [], "env_pairs": [],
    }  # fmt: skip


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the one document of a kind."""
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the container that trains, of a Job or a TrainJob."""
    if any(document["kind"] == "TrainJob" for document in documents):
        return dict(of_kind(documents, "TrainJob")["spec"]["trainer"])
    (found,) = of_kind(documents, "Job")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def pod_spec(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a manifest says about its pods."""
    if not any(document["kind"] == "TrainJob" for document in documents):
        return dict(of_kind(documents, "Job")["spec"]["template"]["spec"])
    (patch,) = of_kind(documents, "TrainJob")["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    return dict(job["template"]["spec"]["template"]["spec"])


def variable(documents: list[dict[str, Any]], name: str) -> str:
    """Return the value of one of the container's variables."""
    (found,) = [entry for entry in container(documents)["env"] if entry["name"] == name]
    return str(found["value"])


def expanded(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) and $$ as Kubernetes does in commands, arguments and values."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def labels(kind: str, name: str, uid: str) -> dict[str, str]:
    """Return the labels that the controllers put on a pod."""
    if kind == "kubernetes":
        return {
            "batch.kubernetes.io/job-name": name,
            "batch.kubernetes.io/controller-uid": uid,
        }
    return {
        "batch.kubernetes.io/job-name": f"{name}-node-0",
        "batch.kubernetes.io/controller-uid": "of the Job inside",
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/jobset-uid": uid,
    }


def validate(documents: list[dict[str, Any]], versions: list[str]) -> None:
    """Check documents against the schemas; nothing unknown may be in them."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob  # slow

    for document in documents:
        if document["kind"] == "TrainJob":
            model = TrainerV1alpha1TrainJob.from_dict(document)
            assert model is not None
            # Fields that the API does not know are lost on the way.
            assert model.to_dict() == document
            continue
        for version in versions:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project for two nodes of one process each, in a folder that has to be quoted."""
    folder = tmp_path_factory.mktemp("pods") / "a b 'ü'"
    return make_project(folder, project_name="p", launchers=KINDS, nodes=2, gpus_per_node=1)


def test_there_are_schemas_of_new_versions() -> None:
    assert VERSIONS[0].startswith(OLDEST)
    assert len(VERSIONS) >= 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("nodes", "gpus", "package"),
    [(1, 1, "a"), (2, 4, "p_q"), (1024, 8, "a" * 40), (100000, 1024, "x" * 40)],
)
def test_a_projects_manifests_are_valid(
    tmp_path: Path, kind: str, nodes: int, gpus: int, package: str
) -> None:
    folder = make_project(
        tmp_path / "p", package_name=package, launchers=[kind], nodes=nodes, gpus_per_node=gpus
    )
    documents = list(yaml.safe_load_all((folder / f"launch/{kind}.yaml").read_text()))
    validate(documents, VERSIONS if nodes == 2 else [VERSIONS[0], VERSIONS[-1]])
    resources = container(documents).get("resources") or container(documents)["resourcesPerNode"]
    assert resources["limits"]["nvidia.com/gpu"] == gpus
    # Trainer starts one process per pod, whatever numProcPerNode says, if there are no requests.
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert int(variable(documents, "OMP_NUM_THREADS")) * gpus == int(resources["requests"]["cpu"])
    if kind == "kubeflow":
        trainer = of_kind(documents, "TrainJob")["spec"]["trainer"]
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (nodes, gpus)
        # Set by the Trainer, which refuses jobs that set them.
        taken = {"NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
        assert not {f"PET_{name}" for name in taken} & {entry["name"] for entry in trainer["env"]}
        return
    job = of_kind(documents, "Job")["spec"]
    assert job["completions"] == job["parallelism"] == int(variable(documents, "NODES")) == nodes
    assert int(variable(documents, "PROCESSES")) == gpus


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_field_would_be_seen(kind: str) -> None:
    """The checks of this file are worth nothing if they accept everything."""
    documents = manifest(kind)
    validate(documents, VERSIONS[-1:])
    pod_spec(documents)["volumes"][1]["emptyDir"]["sizelimit"] = "8Gi"
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        validate(documents, VERSIONS[-1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("namespace", ["", "team-1"])
@pytest.mark.parametrize("name", ["a", "x" * 40])
def test_the_documents_fit_together(kind: str, name: str, namespace: str) -> None:
    documents = manifest(kind, name=name, namespace=namespace, nodes=100000)
    validate(documents, [VERSIONS[0], VERSIONS[-1]])
    for document in documents:
        assert document["metadata"] == {"name": name} | (
            {"namespace": namespace} if namespace else {}
        )
    on_pods = labels(kind, name, "some-uid")

    policy = of_kind(documents, "NetworkPolicy")["spec"]
    (rule,) = policy["ingress"]
    assert policy["policyTypes"] == ["Ingress"]
    assert list(rule) == ["from"]  # all ports
    for selector in (policy["podSelector"], *(peer["podSelector"] for peer in rule["from"])):
        assert selector["matchLabels"].items() <= on_pods.items()
        assert name in selector["matchLabels"].values()

    last_host = f"{name}-99999" if kind == "kubernetes" else f"{name}-node-0-99999"
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", last_host)
    if kind == "kubeflow":
        return  # the Service and the names are made by the JobSet
    service = of_kind(documents, "Service")
    assert service["spec"]["selector"].items() <= on_pods.items()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod_spec(documents)["subdomain"] == service["metadata"]["name"]
    assert variable(documents, "MASTER_ADDR") == f"{name}-0.{service['metadata']['name']}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_project", [True, False])
def test_pods_have_what_a_training_needs(project: Path, kind: str, is_project: bool) -> None:
    text = (project / f"launch/{kind}.yaml").read_text()
    documents = list(yaml.safe_load_all(text)) if is_project else manifest(kind)
    pod = pod_spec(documents)
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert "claimName" in volumes[mounts[variable(documents, "RUNS")]]["persistentVolumeClaim"]
    # torchrun kills what does not leave after the one; Kubernetes kills torchrun after the other.
    spare_s = pod["terminationGracePeriodSeconds"] - int(
        variable(documents, "PET_SHUTDOWN_TIMEOUT")
    )
    assert 10 <= spare_s < 60
    # `kubectl delete -f` must not delete the runs; and no password stands in a file.
    kinds = {document["kind"] for document in documents}
    assert kinds <= {"Service", "NetworkPolicy", "Job", "TrainJob"}
    assert not re.search(r"(?i)secret|password:|token:\s*['\"]?\w{8}", text)
    assert not re.search(r"hostNetwork|privileged|hostPath", text)


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_lost_pod_starts_all_again_so_many_times(restarts: int) -> None:
    """The rules are those of the API server: it refuses a Job whose policies do not fit."""
    job = of_kind(manifest("kubernetes", max_restarts=restarts, nodes=8), "Job")["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    # Counted per pod, because all pods fail together. The first one that has no try left ends all.
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (restarts, 0)
    assert "backoffLimit" not in job
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "Ignore"
    assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["podReplacementPolicy"] == "Failed"  # the only one that goes with podFailurePolicy
    # torchrun would start its own processes again, without the lost ones.
    assert "--max-restarts" not in container(manifest("kubernetes"))["command"][2]
    assert variable(manifest("kubeflow", max_restarts=restarts), "MAX_RESTARTS") == str(restarts)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_values_arrive_unchanged(kind: str) -> None:
    pairs = [(f"V{number}", text) for number, text in enumerate(ODD)]
    documents = manifest(
        kind, env_pairs=pairs, image="registry:5000/a/b@sha256:0", interface="eth0.1",
        setup=["export A='$(NODES) $$ $HOME'", "export B=$(echo b)"],
    )  # fmt: skip
    validate(documents, [VERSIONS[0], VERSIONS[-1]])
    variables = {"NODES": "2", "HOME": "/home/me"}
    entries = {entry["name"]: entry.get("value", "") for entry in container(documents)["env"]}
    for name, text in pairs:
        assert expanded(entries[name], variables) == text
    assert container(documents)["image"] == "registry:5000/a/b@sha256:0"
    assert entries["NCCL_SOCKET_IFNAME"] == entries["GLOO_SOCKET_IFNAME"] == "eth0.1"
    script = expanded(container(documents)["command"][2], variables)
    assert "\nexport A='$(NODES) $$ $HOME'\nexport B=$(echo b)\n" in script


@pytest.mark.parametrize("kind", KINDS)
def test_scripts_of_containers_are_clean(project: Path, kind: str) -> None:
    choices = itertools.product(("", "'lo gs'"), ([], ["echo hello"]), (1, 2048))
    scripts = {
        container(manifest(kind, logs=logs, setup=setup, nodes=nodes))["command"][2]
        for logs, setup, nodes in choices
    }
    assert len(scripts) == 4
    documents = list(yaml.safe_load_all((project / f"launch/{kind}.yaml").read_text()))
    scripts.add(container(documents)["command"][2])
    for script in scripts:
        shell_is_clean("#!/usr/bin/env bash\n" + expanded(script, {}))
        # Blank lines and comments aside, one readable command at the end
        assert script.count("torchrun --") == 1
        assert "exec torchrun" in script


class Pod:
    """A process that is started as Kubernetes would start the container of a pod.

    Attributes:
        pid: The container's first process, as it is numbered out here.
    """

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str], log: Path) -> None:
        self.out, self.err = log.with_suffix(".out"), log.with_suffix(".err")
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*namespace(), *command], cwd=cwd, env=env, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        self.pid = self.process.pid
        if namespace():
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
            until(lambda: bool(children.read_text().split()) or self.process.poll() is not None)
            self.pid = int((children.read_text().split() or [str(self.pid)])[0])

    def signal(self, number: int) -> None:
        """Send a signal to the first process; SIGKILL ends all of them, as in a container."""
        if number == signal.SIGKILL and not namespace():
            os.killpg(self.process.pid, number)
        else:
            os.kill(self.pid, number)

    def prints(self, text: str) -> None:
        """Wait for a text on the standard output."""
        until(lambda: text in self.out.read_text() or self.process.poll() is not None)
        assert text in self.out.read_text(), self.err.read_text()

    def ends(self, timeout_s: float = 60) -> int:
        """Return the exit code, once there is one."""
        return self.process.wait(timeout_s)


@functools.cache
def namespace() -> tuple[str, ...]:
    """Return what makes a process number 1 of a PID namespace; nothing if that is impossible."""
    command = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    try:
        works = subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    return command if works else ()


def until(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Cluster:
    """Starts the pods of a manifest on this machine."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch
        self.runs = folder / "the 'runs'"
        self.pods: list[Pod] = []

    def start(
        self, documents: list[dict[str, Any]], project: Path, *arguments: str, uid: str = "uid-1",
        indices: tuple[int, ...] = (0, 1), **variables: str,
    ) -> list[Pod]:  # fmt: skip
        """Start the pods with these indices.

        Args:
            documents: The manifest.
            project: The working folder of the image.
            arguments: What somebody wrote into `args`.
            uid: The one of the Job or TrainJob.
            indices: Numbers of the pods.
            variables: Values that somebody changed in the manifest.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        variables = {
            "RUNS": str(self.runs), "CONFIG": "configs/debug.yaml", "OMP_NUM_THREADS": "1",
            "WAIT_S": "60", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables,
        }  # fmt: skip
        started = []
        for index in indices:
            env = pod_variables(documents, index, uid, variables)
            trainer = container(documents)
            assert trainer["args"] == []
            command = [expanded(word, env) for word in [*trainer["command"], *arguments]]
            log = self.scratch / f"pod-{len(self.pods)}"
            started.append(Pod(command, project, environment(TMPDIR=str(self.scratch), **env), log))
            self.pods += started[-1:]
        return started

    def stop(self) -> None:
        """Leave nothing behind."""
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.signal(signal.SIGKILL)
                pod.ends()


def pod_variables(
    documents: list[dict[str, Any]], index: int, uid: str, changed: dict[str, str]
) -> dict[str, str]:
    """Return the variables of a container: the manifest's, and those that the controllers add."""
    is_trainjob = any(document["kind"] == "TrainJob" for document in documents)
    name = documents[0]["metadata"]["name"]
    on_pod = labels("kubeflow" if is_trainjob else "kubernetes", name, uid)
    env: dict[str, str] = {}
    for entry in container(documents)["env"]:
        if "valueFrom" in entry:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            if path == "status.podIP":
                env[entry["name"]] = changed.get("POD_IP", "127.0.0.1")
                continue
            env[entry["name"]] = on_pod[re.fullmatch(r"metadata\.labels\['(.*)'\]", path)[1]]  # type: ignore[index]
        else:
            env[entry["name"]] = changed.get(entry["name"], expanded(entry["value"], env))
    if not is_trainjob:
        return env | {"JOB_COMPLETION_INDEX": str(index)}
    trainer = container(documents)
    return env | {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": changed["MASTER_ADDR"],
        "PET_MASTER_PORT": changed["MASTER_PORT"],
    }


@pytest.fixture
def cluster(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A machine that plays the cluster."""
    # torchrun makes sockets in its temporary folder: the path must be short.
    cluster = Cluster(tmp_path, tmp_path_factory.mktemp("s"))
    yield cluster
    cluster.stop()


EPOCHS = ("--epochs", "4")


@pytest.fixture(scope="module")
def straight(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the pods should repeat: two processes of one torchrun."""
    runs = tmp_path_factory.mktemp("straight")
    done = train(project, 2, "--config", "configs/debug.yaml", "--output_dir", str(runs), *EPOCHS)
    assert done.returncode == 0, done.stderr
    return runs / "debug-001"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pods_train_stop_and_go_on_bit_for_bit(
    project: Path, straight: Path, cluster: Cluster
) -> None:
    documents = list(yaml.safe_load_all((project / "launch/kubernetes.yaml").read_text()))
    run = cluster.runs / "debug-001"

    pods = cluster.start(documents, project, *EPOCHS)
    pods[0].prints("step     10")
    for pod in pods:  # what Kubernetes does when the Job is deleted
        pod.signal(signal.SIGTERM)
    assert [pod.ends() for pod in pods] == [1, 1]  # not finished
    stopped = status(run)
    assert (stopped["state"], stopped["reason"]) == ("stopped", "SIGTERM")
    assert 10 <= stopped["step"] < 44
    assert list((run / "checkpoints").glob(f"step-{stopped['step']:08d}*.pt"))

    again = cluster.start(documents, project, *EPOCHS)
    assert [pod.ends(120) for pod in again] == [0, 0], again[0].err.read_text()
    assert f"going on with {run}" in again[0].out.read_text()
    assert status(run)["state"] == "finished"
    for lines in ("train", "validation"):
        assert metrics(run, lines) == metrics(straight, lines)
    assert metrics(run, "validation")[-1]["accuracy"] > 0.9
    assert [path.name for path in cluster.runs.iterdir()] == ["debug-001"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("lost", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGTERM)]
)
def test_when_a_pod_is_lost_the_others_fail_soon(
    project: Path, cluster: Cluster, lost: int, how: signal.Signals
) -> None:
    """Then Kubernetes replaces all of them, which go on with the run.

    torchrun alone waits 300 s for the lost one, and ends with 0: its pod would count as finished.
    """
    documents = list(yaml.safe_load_all((project / "launch/kubernetes.yaml").read_text()))
    pods = cluster.start(documents, project, "--epochs", "1000")
    pods[0].prints("step     10")
    pods[lost].signal(how)
    start = time.monotonic()
    assert [pod.ends(60) == 0 for pod in pods] == [False, False]
    assert time.monotonic() - start < 40
    if how == signal.SIGTERM:  # a machine is drained
        assert status(cluster.runs / "debug-001")["state"] == "stopped"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_does_not_resolve_is_one_clear_line(
    project: Path, cluster: Cluster, kind: str
) -> None:
    documents = list(yaml.safe_load_all((project / f"launch/{kind}.yaml").read_text()))
    start = time.monotonic()
    pods = cluster.start(documents, project, MASTER_ADDR="node-0.invalid", WAIT_S="2")
    assert [pod.ends() for pod in pods] == [1, 1]
    assert time.monotonic() - start < 30
    for pod in pods:
        (line,) = pod.err.read_text().splitlines()
        assert re.fullmatch(
            r"error: node-0\.invalid, the name of node 0, does not resolve after \d+ s "
            r"\(WAIT_S=2\): is its pod running\? kubectl get pods",
            line,
        )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_first_node_that_does_not_answer_is_one_clear_line(
    project: Path, cluster: Cluster
) -> None:
    documents = list(yaml.safe_load_all((project / "launch/kubernetes.yaml").read_text()))
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        (pod,) = cluster.start(documents, project, indices=(1,), MASTER_PORT=port, WAIT_S="1")
        assert pod.ends() == 1
    (line,) = pod.err.read_text().splitlines()
    assert re.fullmatch(
        rf"error: node 0 does not answer at 127\.0\.0\.1:{port} after \d+ s \(WAIT_S=1\): see its "
        r"log, and the NetworkPolicies",
        line,
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_name_that_still_means_the_pod_before_is_not_used(
    project: Path, cluster: Cluster
) -> None:
    """After a restart DNS may give the old address for half a minute."""
    documents = list(yaml.safe_load_all((project / "launch/kubernetes.yaml").read_text()))
    (pod,) = cluster.start(documents, project, indices=(0,), POD_IP="127.0.0.7", WAIT_S="1")
    assert pod.ends() == 1
    (line,) = pod.err.read_text().splitlines()
    assert line.startswith("error: 127.0.0.1 resolves, but not to this pod, 127.0.0.7, after ")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_waiting_pod_leaves_when_it_is_told_to(project: Path, cluster: Cluster) -> None:
    """Process 1 of a container ignores SIGTERM unless it asks for it."""
    if not namespace():
        pytest.skip("no PID namespaces here")
    documents = list(yaml.safe_load_all((project / "launch/kubernetes.yaml").read_text()))
    (pod,) = cluster.start(documents, project, indices=(1,))
    children = Path(f"/proc/{pod.pid}/task/{pod.pid}/children")
    until(lambda: "sleep" in commands(children.read_text().split()))
    pod.signal(signal.SIGTERM)
    assert pod.ends(20) == 143
    assert pod.err.read_text() == ""


def commands(pids: list[str]) -> list[str]:
    """Return the programs of processes, as far as they still exist."""
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
told = [os.environ[name] for name in ("TORCHELASTIC_RUN_ID", "A")]
print(json.dumps([dist.get_rank(), int(total), *told, sys.argv]), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_any_script_gets_its_arguments_and_the_jobs_identity(
    tmp_path: Path, cluster: Cluster, kind: str
) -> None:
    project = tmp_path / "image"
    project.mkdir()
    (project / "my train.py").write_text(SCRIPT)
    documents = manifest(
        kind, program="-- 'my train.py' --lr 0.1 --log '$(NODES) $HOME'", logs="'lo gs'",
        env_pairs=[("A", ODD[10])], setup=['echo "set up on $(whoami)"'],
    )  # fmt: skip
    pods = cluster.start(documents, project, "--name", "a 'b'", "--", "ü", uid="uid-7")
    assert [pod.ends() for pod in pods] == [0, 0], pods[0].err.read_text()
    arguments = [
        "my train.py",
        "--lr",
        "0.1",
        "--log",
        "$(NODES) $HOME",
        "--name",
        "a 'b'",
        "--",
        "ü",
    ]
    for rank, pod in enumerate(pods):
        first, line = pod.out.read_text().splitlines()
        assert first.startswith("set up on ")
        assert json.loads(line.partition("]:")[2]) == [rank, 3, "uid-7", ODD[10], arguments]
        (log,) = (cluster.runs / "lo gs" / f"node-{rank}").rglob("stdout.log")
        assert json.loads(log.read_text()) == json.loads(line.partition("]:")[2])
