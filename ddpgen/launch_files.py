"""The files of launch/, filled with other values than a project's answers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpgen.questions import load_config, template_root

if TYPE_CHECKING:
    import jinja2

# Target -> name of its file in a project, and in the template.
FILES = {
    "local": "local.sh",
    "node": "node.sh",
    "ssh": "ssh.sh",
    "slurm": "slurm.sbatch",
    "kubernetes": "kubernetes.yaml",
    "kubeflow": "kubeflow.yaml",
}
ALWAYS = ("local", "node")


def render(target: str, values: Mapping[str, Any]) -> str:
    """Fill the launch file of a target.

    Args:
        target: One of FILES.
        values: What copier.yml explains under `launch`, all of them.
    """
    name = FILES[target]
    if target not in ALWAYS:
        name = f"{{% if with_{target} %}}{name}{{% endif %}}"
    return _environment().get_template(f"template/launch/{name}.jinja").render(launch=values)


def defaults() -> dict[str, Any]:
    """Return what the files are filled with where nothing else is said."""
    import yaml

    text = load_config(template_root())["launch"]["default"]
    nobody = {"package_name": "train", "nodes": 1, "gpus_per_node": 1}
    values: dict[str, Any] = yaml.safe_load(_environment().from_string(text).render(nobody))
    return values


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Make Jinja read the template as copier does."""
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    root = template_root()
    options = dict(load_config(root)["_envops"])
    options["undefined"] = getattr(jinja2, options["undefined"].rpartition(".")[2])
    environment = SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(root), keep_trailing_newline=True, **options
    )
    # YAML has no pairs of escapes for what lies beyond 16 bits.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment
