# SPDX-License-Identifier: Apache-2.0
"""Jobs on a real cluster: a user submits, watches, scales and stops them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from harness.audit import requests
from harness.cluster import Cluster
from harness.kubectl import Kubectl
from harness.waiting import until
from jobs import ROOT, Client, account, accuracies, has_token, phases, pods_of, rbac

# Far longer than any job takes, even on a busy machine.
JOB_LIMIT = 400


@pytest.fixture
def client(command: Path, image: str, kubectl: Kubectl, tmp_path: Path) -> Client:
    # Nodes must be able to enter the folder.
    tmp_path.chmod(0o755)
    client = Client(command, image, kubectl, tmp_path)
    client.allow()
    return client


def running(client: Client, job: str, workers: int) -> bool:
    done = client("status", job, "--json")
    if done.code != 0:
        return False
    status = json.loads(done.out)
    working = [i for i in status["instances"] if i["role"] == "worker" and i["state"] == "working"]
    return status["state"] == "running" and len(working) == workers


def test_a_job_is_submitted_watched_and_audited(client: Client, kubectl: Kubectl) -> None:
    done = client.train("test-mnist", "--num_epochs=2", "--evaluation_steps=50")
    assert done.code == 0, done.err
    assert "job test-mnist succeeded" in done.out
    assert phases(kubectl, "test-mnist") == {
        "elasticdl-test-mnist-master": "Succeeded",
        "elasticdl-test-mnist-ps-0": "Succeeded",
        "elasticdl-test-mnist-worker-0": "Succeeded",
    }
    log = kubectl("logs", "job/elasticdl-test-mnist-master")
    # Asynchronous training is noisy: the last evaluation may not be the best.
    assert max(accuracies(log)) >= 0.77, log
    audited = client("audit", "test-mnist")
    assert audited.code == 0, audited.err
    assert "every record of every finished epoch was trained exactly once" in audited.out
    assert "succeeded" in client("list").out


def test_a_running_job_is_listed_scaled_stopped_and_resumed(
    cluster: Cluster, client: Client, kubectl: Kubectl
) -> None:
    done = client.train("long", "--num_epochs=0", "--detach")
    assert (done.code, done.out) == (0, "long\n"), done.err
    until("one worker is working", lambda: running(client, "long", 1), JOB_LIMIT)
    assert client("scale", "long", "--workers=2").out == "job long: workers scaled from 1 to 2\n"
    until("two workers are working", lambda: running(client, "long", 2), JOB_LIMIT)
    # Between two epochs, it is saving its best model for a moment.
    until("the job is listed as running", lambda: "running" in client("list").out, JOB_LIMIT)
    assert "worker-0" in client("logs", "long").out
    assert client("logs", "long", "--master", "-n", "1").out.count("\n") == 1
    assert client("audit", "long").code == 0
    stopped = client("stop", "long")
    assert stopped.out == "job long stopped\n", stopped.err
    until("its Job has ended", lambda: ended(kubectl, "elasticdl-long-master"), JOB_LIMIT)
    assert phases(kubectl, "long")["elasticdl-long-master"] == "Failed", (
        "the pod is kept for its log"
    )
    assert used_permissions(cluster, kubectl) >= STOP_PERMISSIONS
    again = client("train", "--resume", "long", "--num_epochs=1")
    assert again.code == 0, again.err
    assert client("clean", "long").out == "removed long\n"
    until("all objects are removed", lambda: not client.left("long"), JOB_LIMIT)


BAD = {
    "image": (["--image_name=no-such:image"], "image `no-such:image`"),
    "claim": (["--volume=claim_name=no-such,mount_path=/data"], "volume claim `no-such`"),
    "class": (["--worker_pod_priority=no-such"], "PriorityClass `no-such`"),
    "account": (["--service_account=no-such"], '"no-such" not found'),
    "namespace": (["--namespace=no-such"], "namespace `no-such` does not exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_a_one_line_error_and_leaves_nothing(client: Client, case: str) -> None:
    arguments, expected = BAD[case]
    flags = [flag for flag in client.flags("bad") if not shadowed(flag, arguments)]
    namespace = [] if case == "namespace" else [f"--namespace={client.kubectl.namespace}"]
    done = client.raw("train", *flags, *arguments, *namespace)
    assert done.code == 2, done.err
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("error: ") and expected in last, done.err
    until("all objects are removed", lambda: not client.left("bad"), JOB_LIMIT)


def shadowed(flag: str, arguments: list[str]) -> bool:
    return any(flag.split("=")[0] == argument.split("=")[0] for argument in arguments)


def test_an_exhausted_quota_is_reported_by_name(client: Client, kubectl: Kubectl) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    kubectl.apply({"apiVersion": "v1", "kind": "ResourceQuota", **quota})
    until(
        "the quota takes effect",
        lambda: "hard" in kubectl.json("get", "resourcequota", "none").get("status", {}),
        JOB_LIMIT,
    )
    done = client.train("bad")
    assert done.code == 2 and "exceeded quota: none" in done.err, done.err
    until("all objects are removed", lambda: not client.left("bad"), JOB_LIMIT)


def test_a_name_that_is_taken_is_refused_with_the_next_step(client: Client) -> None:
    assert client.train("taken", "--num_epochs=0", "--detach").code == 0
    done = client.train("taken")
    assert done.code == 2 and "`taken` is already in use" in done.err, done.err
    assert "elasticdl attach taken" in done.err
    assert client("stop", "taken").code == 0


def test_a_user_without_permission_gets_the_error_of_the_api_server(
    client: Client, kubectl: Kubectl, tmp_path: Path
) -> None:
    token = kubectl("create", "token", "default").strip()
    config = yaml.safe_load(kubectl("config", "view", "--raw", "--minify"))
    config["users"][0]["user"] = {"token": token}
    kubeconfig = tmp_path / "unprivileged.kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    done = client.train("bad", kubeconfig=kubeconfig)
    assert done.code == 2 and "cannot create resource" in done.err, done.err
    assert not client.left("bad")


def test_printed_objects_can_be_applied_and_use_exactly_their_permissions(
    cluster: Cluster, client: Client, kubectl: Kubectl
) -> None:
    printed = client.train("applied", "--yaml", "--num_epochs=1")
    assert printed.code == 0 and "kind: Secret" not in printed.out, printed.err
    kubectl("apply", "--filename", "-", stdin=printed.out)
    master = "elasticdl-applied-master"
    until("the job ends", lambda: ended(kubectl, master), JOB_LIMIT)
    assert phases(kubectl, "applied")[master] == "Succeeded", log_of(kubectl, master)
    used = used_permissions(cluster, kubectl)
    rules = rbac(kubectl.namespace)[0]["rules"]
    granted = {
        (verb, name) for rule in rules for name in rule["resources"] for verb in rule["verbs"]
    }
    assert used <= granted
    # These are needed to remove pods, for a job under the operator, and to stop a job.
    unused = {("delete", "pods"), *STOP_PERMISSIONS}
    unused |= {(verb, "configmaps") for verb in ("list", "patch", "watch")}
    assert granted - used <= unused
    tokens = {pod["metadata"]["name"]: has_token(pod) for pod in pods_of(kubectl, "applied")}
    assert [name for name, given in tokens.items() if given] == [
        name for name in tokens if name.startswith(master)
    ]


# A master that stops its job updates its own Kubernetes Job.
STOP_PERMISSIONS = {("get", "jobs"), ("patch", "jobs")}


def used_permissions(cluster: Cluster, kubectl: Kubectl) -> set[tuple[str, str]]:
    """The permissions that masters used. No other process sent requests, and none was denied."""
    for role in ("ps", "worker"):
        assert not requests(cluster.audit_log, account(kubectl.namespace, role))
    sent = requests(cluster.audit_log, account(kubectl.namespace, "master"))
    sent = {request for request in sent if request.resource}
    assert not {request for request in sent if not request.allowed}
    return {(request.verb, request.resource) for request in sent}


def log_of(kubectl: Kubectl, job: str) -> str:
    return kubectl("logs", f"job/{job}")


def ended(kubectl: Kubectl, job: str) -> bool:
    found = kubectl.json("get", "job", job)["status"].get("conditions", [])
    return any(each["type"] in ("Complete", "Failed") for each in found if each["status"] == "True")


def test_a_master_without_permissions_reports_it_and_continues_once_it_has_them(
    command: Path, image: str, kubectl: Kubectl, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    client = Client(command, image, kubectl, tmp_path)
    missing = client.train("poor", "--detach")
    assert missing.code == 2 and "manifests/elasticdl-rbac.yaml" in missing.err, missing.err
    until("all objects are removed", lambda: not client.left("poor"), JOB_LIMIT)
    accounts = [each for each in rbac(kubectl.namespace) if each["kind"] == "ServiceAccount"]
    kubectl.apply(*accounts)
    assert client.train("poor", "--detach").code == 0

    def shows_reason() -> bool:
        shown = client("status", "poor").out
        return "cannot list resource" in shown and "manifests/elasticdl-rbac.yaml" in shown

    until("status shows what is missing", shows_reason, JOB_LIMIT)
    log = kubectl("logs", "job/elasticdl-poor-master")
    assert "kubectl apply -f manifests/elasticdl-rbac.yaml" in log, log
    client.allow()
    watched = client("attach", "poor")
    assert watched.code == 0, watched.err


@pytest.mark.parametrize("name", ["elasticdl-demo-minikube", "elasticdl-demo-k8s"])
def test_every_demo_succeeds(client: Client, kubectl: Kubectl, name: str) -> None:
    """Only the image's name and the node's folder are changed."""
    client.put_mnist()
    text = (ROOT / "manifests" / "examples" / f"{name}.yaml").read_text()
    text = text.replace("elasticdl:mnist_ps", client.image)
    text = text.replace("IfNotPresent", "Never")
    text = text.replace("host_path=/data", f"host_path={client.work}")
    text = text.replace("path: /data\n", f"path: {client.work}\n")
    volume = {"claim": f"{kubectl.namespace}-data"} if "claim_name" in text else {}
    if volume:
        kubectl.apply(*shared_claim("elasticdl-data", volume["claim"], client.work))
    try:
        kubectl("apply", "--filename", "-", stdin=text)
        master = "elasticdl-demo-mnist-master"
        until("the job ends", lambda: ended(kubectl, master), JOB_LIMIT)
        log = log_of(kubectl, master)
        assert phases(kubectl, "demo-mnist")[master] == "Succeeded", log
        # Asynchronous training is noisy: the last evaluation may not be the best.
        assert max(accuracies(log)) >= 0.77, log
    finally:
        for claim in volume.values():
            kubectl("delete", "persistentvolume", claim, "--wait=false")


def shared_claim(name: str, volume: str, folder: Path) -> list[dict]:
    """A claim that every node can mount, and the volume that it is bound to."""
    same = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    size = {"storage": "1Gi"}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {**same, "capacity": size, "hostPath": {"path": str(folder)}},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": {**same, "volumeName": volume, "resources": {"requests": size}},
        },
    ]


def test_the_api_server_accepts_the_priority_classes(kubectl: Kubectl) -> None:
    for name in ("high-prio", "low-prio"):
        file = ROOT / "manifests" / "examples" / f"{name}.yaml"
        kubectl("apply", "--dry-run=server", "--filename", str(file))
