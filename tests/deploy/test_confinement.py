"""No pod has more than it needs, nothing is reached from outside, and nobody without a token."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from manifests import (
    CLUSTERS,
    MANIFESTS,
    NETWORK_POLICIES,
    READER,
    WITH_PODS,
    Tree,
    cluster,
    containers,
    templates,
)


def pairs(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield str(key), value
        if isinstance(value, dict | list):
            yield from pairs(value)


@CLUSTERS
def test_every_container_asks_for_the_token(manifest: Tree) -> None:
    """KubeRay makes the token; a container that named its own would be shut out."""
    assert cluster(manifest)["authOptions"] == {"mode": "token"}
    for container in containers(manifest):
        assert container["env"] == [{"name": "RAY_AUTH_MODE", "value": "token"}]


@WITH_PODS
def test_every_pod_passes_the_restricted_profile(manifest: Tree) -> None:
    for template in templates(manifest):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


@WITH_PODS
def test_every_container_is_given_what_it_may_use(manifest: Tree) -> None:
    for container in containers(manifest):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert re.fullmatch(r"\d+m?", resources["limits"]["cpu"])
        assert re.fullmatch(r"\d+[MG]i", resources["limits"]["memory"])


@pytest.mark.parametrize("name", MANIFESTS)
def test_nothing_is_exposed(name: str) -> None:
    manifest = MANIFESTS[name]
    assert manifest["kind"] not in ("Service", "Ingress", "Gateway", "HTTPRoute")
    found = list(pairs(manifest))
    assert [value for _, value in found if value in ("LoadBalancer", "NodePort")] == []
    ways_out = {"hostNetwork", "hostPort", "hostPath", "hostPID", "hostIPC", "privileged"}
    assert ways_out & {key for key, _ in found} == set()
    assert [value for key, value in found if key == "enableIngress" and value] == []


# The network.


def selects(selector: Tree, labels: dict[str, str]) -> bool:
    exist = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "Exists" for expression in exist)
    return all(expression["key"] in labels for expression in exist) and all(
        labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()
    )


def admits(peer: Tree, labels: dict[str, str], namespace: str) -> bool:
    """Whether a rule's peer is a pod with these labels, in this namespace."""
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    place = peer.get("namespaceSelector")
    there = {"kubernetes.io/metadata.name": namespace}
    near = namespace == "here" if place is None else selects(place, there)
    return near and selects(peer["podSelector"], labels)


def reaches(labels: dict[str, str], namespace: str, target: str, port: int) -> bool:
    """Whether a pod may talk to this port of a cluster's pods."""
    aimed = {"dovetail/cluster": target}
    chosen = [p["spec"] for p in NETWORK_POLICIES if selects(p["spec"]["podSelector"], aimed)]
    assert any("Ingress" in spec["policyTypes"] for spec in chosen)
    return any(
        any(admits(peer, labels, namespace) for peer in rule["from"])
        and ("ports" not in rule or port in [p["port"] for p in rule["ports"]])
        for spec in chosen
        for rule in spec["ingress"]
    )


OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}


@pytest.mark.parametrize(
    "labels, namespace, target, ports",
    [
        ({"dovetail/cluster": "run"}, "here", "run", {6379, 8265, 10001}),
        ({"dovetail/cluster": "standing"}, "here", "standing", {6379, 8265, 10001}),
        (OPERATOR, "kuberay-system", "run", {8265}),
        (OPERATOR, "kuberay-system", "standing", {8265}),
        ({"dovetail/cluster": "run"}, "here", "standing", set()),
        ({"dovetail/cluster": "none"}, "here", "run", set()),
        ({"dovetail/cluster": "run"}, "elsewhere", "run", set()),
        (OPERATOR, "here", "run", set()),
        ({}, "kuberay-system", "run", set()),
        ({}, "here", "run", set()),
        ({"dovetail/cluster": "run"}, "here", "none", set()),
    ],
)
def test_who_reaches_the_ports_of_ray(
    labels: dict[str, str], namespace: str, target: str, ports: set[int]
) -> None:
    found = {port for port in (6379, 8265, 10001) if reaches(labels, namespace, target, port)}
    assert found == ports


@WITH_PODS
def test_every_pod_has_the_label_that_closes_it(manifest: Tree) -> None:
    for template in templates(manifest):
        labels = template["metadata"]["labels"]
        assert selects(NETWORK_POLICIES[0]["spec"]["podSelector"], labels)
        assert ("none" in labels.values()) == (manifest is READER)


def test_pods_reach_their_own_cluster_and_names_only() -> None:
    first, *others = NETWORK_POLICIES
    assert [set(rule) for rule in first["spec"]["egress"]] == [{"ports"}]
    assert {port["port"] for port in first["spec"]["egress"][0]["ports"]} == {53}
    for policy in others:
        selector = policy["spec"]["podSelector"]
        assert policy["spec"]["ingress"] == [{"from": [{"podSelector": selector}]}]
        assert policy["spec"]["egress"] == [{"to": [{"podSelector": selector}]}]
    assert all(set(p["spec"]["policyTypes"]) == {"Ingress", "Egress"} for p in NETWORK_POLICIES)
