"""The manifests are what Kubernetes and KubeRay take, and agree with each other."""

import copy
import json
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from manifests import (
    CLUSTERS,
    DEPLOY,
    FILES,
    MANIFESTS,
    NETWORK_POLICIES,
    READER,
    ROOT,
    RUN,
    STANDING,
    WITH_PODS,
    Tree,
    at,
    check,
    cluster,
    containers,
    groups,
    load,
)

from dovetail.cli.experiment import understand
from dovetail.cli.train import _parser
from dovetail.hosts.deployment import Deployment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (DEPLOY / "requirements.lock").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
(PLACEMENT,) = load("kubernetes/placement.yaml")
(STORAGE,) = load("kubernetes/storage.yaml")
(GPU,) = load("kubernetes-gpu/kustomization.yaml")


def mounts(template: Tree) -> dict[str, str]:
    """Where a pod's one container sees its volumes."""
    (container,) = template["spec"]["containers"]
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


# The schemas.


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_fits_its_schema(name: str) -> None:
    check(MANIFESTS[name])


WORKER = "spec/rayClusterSpec/workerGroupSpecs/0"


@pytest.mark.parametrize(
    "manifest, path, value",
    [
        (RUN, "spec/entryPoint", "dovetail train"),
        (RUN, "spec/ttlSecondsAfterFinished", "300"),
        (RUN, "spec/rayClusterSpec/authOption", {"mode": "token"}),
        (RUN, "spec/rayClusterSpec/authOptions/mode", "tokens"),
        (RUN, "spec/rayClusterSpec/headGroupSpec/rayStartParams/num-cpus", 0),
        (RUN, f"{WORKER}/replicas", "2"),
        (RUN, f"{WORKER}/template/spec/containers/0/imagePullPolcy", "Always"),
        (RUN, f"{WORKER}/template/spec/containers/0/env/0/value", 1),
        (RUN, f"{WORKER}/template/spec/containers/0/resources/limits", ["4"]),
        (RUN, "spec/submitterPodTemplate/spec/restartPolicy", True),
        (STANDING, "apiVersion", "ray.io/v1alpha1"),
        (STANDING, "metadata/name", "Dovetail"),
        (STANDING, "spec/headGroupSpec/template/spec/volumes/0/persistentVolumeClaim", "runs"),
        (READER, "spec/containers/0/volumeMounts/0/readonly", True),
        (STORAGE, "spec/accessModes", "ReadWriteOnce"),
        (NETWORK_POLICIES[0], "spec/ingres", []),
        (NETWORK_POLICIES[0], "spec/ingress/0/ports/0/port", [8265]),
        (PLACEMENT, "data/deployment.toml", {"cluster": "auto"}),
        (GPU, "image", []),
    ],
)
def test_a_mistake_is_refused(manifest: Tree, path: str, value: Any) -> None:
    broken = copy.deepcopy(manifest)
    parent, _, key = path.rpartition("/")
    (at(broken, parent) if parent else broken)[key] = value
    with pytest.raises(jsonschema.ValidationError):
        check(broken)


@pytest.mark.parametrize(
    "manifest, path",
    [
        (RUN, "spec/rayClusterSpec"),
        (RUN, "spec/rayClusterSpec/authOptions"),
        (RUN, f"{WORKER}/groupName"),
        (RUN, f"{WORKER}/template/spec/containers"),
        (STANDING, "spec/headGroupSpec/rayStartParams"),
        (NETWORK_POLICIES[0], "spec/podSelector"),
    ],
)
def test_what_is_missing_is_missed(manifest: Tree, path: str) -> None:
    broken = copy.deepcopy(manifest)
    parent, _, key = path.rpartition("/")
    del at(broken, parent)[key]
    with pytest.raises(jsonschema.ValidationError):
        check(broken)


# They agree with each other, and with the project.


@WITH_PODS
def test_the_image_is_that_of_the_project(manifest: Tree) -> None:
    images = {container["image"] for container in containers(manifest)}
    assert images == {f"dovetail:{PROJECT['version']}"}


@CLUSTERS
def test_the_version_of_ray_is_the_locked_one(manifest: Tree) -> None:
    (locked,) = re.findall(r"^ray==(\S+)", LOCK, flags=re.MULTILINE)
    assert cluster(manifest)["rayVersion"] == locked


def test_the_standing_cluster_is_that_of_a_run_with_more_workers() -> None:
    ours, theirs = copy.deepcopy(cluster(RUN)), copy.deepcopy(cluster(STANDING))
    for spec, name in ((ours, "run"), (theirs, "standing")):
        for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
            assert group["template"].pop("metadata") == {"labels": {"dovetail/cluster": name}}
    for few, many in zip(ours["workerGroupSpecs"], theirs["workerGroupSpecs"], strict=True):
        for count in ("replicas", "minReplicas", "maxReplicas"):
            assert few.pop(count) < many.pop(count)
    assert ours == theirs


@CLUSTERS
def test_workers_are_as_many_as_asked_for(manifest: Tree) -> None:
    for group in cluster(manifest)["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]


@CLUSTERS
def test_the_head_works_for_nobody_and_keeps_the_runs(manifest: Tree) -> None:
    head, *workers = groups(manifest)
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert [group["groupName"] for group in workers] == ["actors", "learners"]
    claimed = {"claimName": STORAGE["metadata"]["name"]}
    volume = {"name": "runs", "persistentVolumeClaim": claimed}
    for template in (head["template"], READER):
        assert volume in template["spec"]["volumes"]
        assert mounts(template)["runs"] == "/runs"
    assert all("volumes" not in group["template"]["spec"] for group in workers)


@CLUSTERS
def test_the_head_sees_where_processes_go(manifest: Tree) -> None:
    template = groups(manifest)[0]["template"]
    placement = {"name": "placement", "configMap": {"name": PLACEMENT["metadata"]["name"]}}
    assert placement in template["spec"]["volumes"]
    (file,) = PLACEMENT["data"]
    assert f"--deploy {mounts(template)['placement']}/{file} " in RUN["spec"]["entrypoint"]


@CLUSTERS
def test_workers_offer_what_they_are_for(manifest: Tree) -> None:
    """The shell makes one word of JSON of it; KubeRay strips quotes, and reads it for GPUs."""
    _, *workers = groups(manifest)
    offers = [group["rayStartParams"]["resources"] for group in workers]
    assert [[json.loads(word) for word in shlex.split(offer)] for offer in offers] == [
        [{"actor": 4}],
        [{"learner": 1}],
    ]
    assert [json.loads(offer.strip("'\"` ")) for offer in offers] == [{"actor": 4}, {"learner": 1}]


def test_the_entry_point_is_a_command_of_dovetail() -> None:
    program, command, *words = shlex.split(RUN["spec"]["entrypoint"])
    assert (program, command) == ("dovetail", "train")
    values = {
        place.rpartition(".")[2]: text
        for place, text in understand(_parser(), words).values.items()
    }
    assert values["cluster"] == "auto"
    assert values["folder"].startswith("/runs/")


def placed(manifest: Tree, tmp_path: Path) -> Deployment:
    file = tmp_path / "deployment.toml"
    file.write_text(manifest["data"][file.name], encoding="utf-8")
    return Deployment.load(file)


def test_the_processes_of_the_run_fit_its_pods(tmp_path: Path) -> None:
    """Eight actors and a learner, each on the pods that are meant for it."""
    wanted = placed(PLACEMENT, tmp_path)
    assert wanted.cluster == "auto"
    actors = int(re.findall(r"--actors (\d+)", RUN["spec"]["entrypoint"])[0])
    processes = {"actor": (actors, wanted.actor), "learner": (1, wanted.learner)}
    for group, (name, (number, share)) in zip(groups(RUN)[1:], processes.items(), strict=True):
        (container,) = group["template"]["spec"]["containers"]
        offered = json.loads(group["rayStartParams"]["resources"].strip("'"))
        assert dict(share.resources) == {name: 1}
        most = min(offered[name], int(container["resources"]["limits"]["cpu"]) // share.cpus)
        assert number <= group["replicas"] * most


# The variant with GPUs.


def with_gpu(manifest: Tree) -> Tree:
    """A manifest as the variant patches it."""
    changed = copy.deepcopy(manifest)
    target = {"kind": manifest["kind"], "name": manifest["metadata"]["name"]}
    (patch,) = [entry["patch"] for entry in GPU["patches"] if entry["target"] == target]
    for change in yaml.safe_load(patch):
        parent, _, key = change["path"].rpartition("/")
        if change["op"] == "test":
            assert at(changed, change["path"]) == change["value"]
        else:
            assert (key in at(changed, parent)) == (change["op"] == "replace")
            at(changed, parent)[key.replace("~1", "/")] = change["value"]
    return changed


def test_the_variant_gives_learners_a_gpu_and_nobody_else(tmp_path: Path) -> None:
    run = with_gpu(RUN)
    check(run)
    gpus = [
        container["resources"]["limits"].get("nvidia.com/gpu")
        for group in groups(run)
        for container in group["template"]["spec"]["containers"]
    ]
    assert gpus == [None, None, "1"]
    for container in containers(run):
        assert container["resources"]["requests"] == container["resources"]["limits"]
    before, after = placed(PLACEMENT, tmp_path), placed(with_gpu(PLACEMENT), tmp_path)
    assert (before.learner.gpus, after.learner.gpus, after.actor.gpus) == (0, 1, 0)
    assert replace(after, learner=replace(after.learner, gpus=0.0)) == before


def test_the_variant_is_built_upon_the_run() -> None:
    (base,) = load("kubernetes/kustomization.yaml")
    assert base["resources"] == ["placement.yaml", "rayjob.yaml"]
    assert [(DEPLOY / "kubernetes-gpu" / path).resolve() for path in GPU["resources"]] == [
        DEPLOY / "kubernetes"
    ]
    (image,) = GPU["images"]
    name, _, tag = containers(RUN)[0]["image"].partition(":")
    assert (image["name"], image["newTag"].partition("-")[0]) == (name, tag)


# The page.


def test_the_page_names_what_exists() -> None:
    named = set(re.findall(r"deploy/[\w./-]*\w", PAGE))
    assert [path for path in named if not (ROOT / path).exists()] == []
    shown = {
        name for name in FILES if f"deploy/{name}" in PAGE or name.endswith("kustomization.yaml")
    }
    assert shown == set(FILES)


def test_the_page_knows_the_names_in_the_manifests() -> None:
    wanted = [f"job/{RUN['metadata']['name']}", f"ray.io/cluster={STANDING['metadata']['name']}"]
    wanted += [f"{READER['metadata']['name']}:/runs", containers(RUN)[0]["image"]]
    wanted += [GPU["images"][0]["newTag"], "kuberay-system"]
    assert [name for name in wanted if name not in PAGE] == []
