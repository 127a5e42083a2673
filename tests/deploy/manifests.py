"""The manifests below deploy/, and the schemas that refuse a wrong one without a cluster.

Kubernetes' own kinds, pod templates included, are checked by Kubernetes' published schemas. Those
of KubeRay and kustomize are described here as far as the manifests use them: what is not described
is refused, as the API server refuses what it does not know.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

Tree = dict[str, Any]
"""A manifest or a part of one, as YAML gives it."""

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: the oldest and the newest that the manifests are checked for."""


def load(name: str) -> list[Tree]:
    """The manifests of one file, by its path below deploy/."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


FILES = sorted(path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*.yaml"))
MANIFESTS = {
    f"{name}-{number}": manifest for name in FILES for number, manifest in enumerate(load(name))
}
"""Every manifest, by its file and its place there."""


(RUN,) = load("kubernetes/rayjob.yaml")
(STANDING,) = load("kubernetes/raycluster.yaml")
(READER,) = load("kubernetes/reader.yaml")
NETWORK_POLICIES = load("kubernetes/network-policy.yaml")
CLUSTERS = pytest.mark.parametrize("manifest", [RUN, STANDING], ids=["run", "standing"])
WITH_PODS = pytest.mark.parametrize(
    "manifest", [RUN, STANDING, READER], ids=["run", "standing", "reader"]
)


def at(tree: Any, path: str) -> Any:
    """What stands at `path`: at(run, "spec/workerGroupSpecs/1/groupName"), ~1 for a slash."""
    for word in path.strip("/").split("/"):
        tree = tree[int(word)] if isinstance(tree, list) else tree[word.replace("~1", "/")]
    return tree


def cluster(manifest: Tree) -> Tree:
    """The specification of the Ray cluster in a RayJob or a RayCluster."""
    spec = manifest["spec"]
    return spec["rayClusterSpec"] if manifest["kind"] == "RayJob" else spec


def groups(manifest: Tree) -> list[Tree]:
    """The head's group, and those of the workers."""
    spec = cluster(manifest)
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def templates(manifest: Tree) -> Iterator[Tree]:
    """Every pod template in a RayJob or a RayCluster; a pod is one itself."""
    if manifest["kind"] == "Pod":
        yield manifest
    if manifest["kind"] in ("RayJob", "RayCluster"):
        yield from (group["template"] for group in groups(manifest))
    if manifest["kind"] == "RayJob":
        yield manifest["spec"]["submitterPodTemplate"]


def containers(manifest: Tree) -> list[Tree]:
    """Every container of every pod."""
    return [c for template in templates(manifest) for c in template["spec"]["containers"]]


def check(manifest: Tree) -> None:
    """Raises jsonschema.ValidationError unless the API server would take it."""
    schema = OTHERS.get(manifest["kind"])
    if schema is not None:
        jsonschema.validate(manifest, schema)
        own = [
            {"apiVersion": "v1", "kind": "PodTemplate", "template": t} for t in templates(manifest)
        ]
    else:
        own = [manifest]
    for tree in own:
        for version in VERSIONS:
            kubernetes_validate.validate(tree, version, strict=True)


# The schemas.


def _record(required: Tree, optional: Tree | None = None) -> Tree:
    """An object with these fields, and no others."""
    fields = {**required, **(optional or {})}
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(of: Tree) -> Tree:
    return {"type": "array", "items": of, "minItems": 1}


TEXT: Tree = {"type": "string", "minLength": 1}
FLAG: Tree = {"type": "boolean"}
COUNT: Tree = {"type": "integer", "minimum": 0}
TEXTS: Tree = {"type": "object", "additionalProperties": TEXT}
POD: Tree = {"type": "object", "minProperties": 1}  # Kubernetes' own schema checks it
NAMED = _record({"name": {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}})

HEAD = _record(
    {"rayStartParams": TEXTS, "template": POD},
    {
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        "enableIngress": FLAG,
    },
)
WORKERS = _record(
    {
        "groupName": TEXT,
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "rayStartParams": TEXTS,
        "template": POD,
    }
)
CLUSTER = _record(
    {
        "rayVersion": TEXT,
        "authOptions": _record({"mode": {"enum": ["disabled", "token"]}}),
        "headGroupSpec": HEAD,
        "workerGroupSpecs": _list(WORKERS),
    },
    {"enableInTreeAutoscaling": FLAG},
)
JOB = _record(
    {"entrypoint": TEXT, "rayClusterSpec": CLUSTER, "submitterPodTemplate": POD},
    {
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        "backoffLimit": COUNT,
        "activeDeadlineSeconds": {"type": "integer", "minimum": 1},
        "shutdownAfterJobFinishes": FLAG,
        "ttlSecondsAfterFinished": COUNT,
    },
)
KUSTOMIZATION = _record(
    {
        "apiVersion": {"const": "kustomize.config.k8s.io/v1beta1"},
        "kind": {"const": "Kustomization"},
        "resources": _list(TEXT),
    },
    {
        "images": _list(_record({"name": TEXT, "newTag": TEXT})),
        "patches": _list(_record({"target": _record({"kind": TEXT, "name": TEXT}), "patch": TEXT})),
    },
)


def _resource(kind: str, spec: Tree) -> Tree:
    head = {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": kind}, "metadata": NAMED}
    return _record({**head, "spec": spec})


OTHERS = {
    "RayJob": _resource("RayJob", JOB),
    "RayCluster": _resource("RayCluster", CLUSTER),
    "Kustomization": KUSTOMIZATION,
}
"""The schemas of the kinds that are not Kubernetes' own."""
