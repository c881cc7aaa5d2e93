# SPDX-License-Identifier: Apache-2.0
"""The control plane: etcd, API server, controllers, scheduler; and DNS for real nodes.

None of them needs root, unless it listens on a bridge.
"""

from __future__ import annotations

import json
from pathlib import Path

from . import keys
from .api import Api
from .daemon import Daemons
from .place import API_PORT, ETCD_PORT, Place

START_LIMIT = 90
# A node without a heartbeat for this long is NotReady. If it were shorter, nodes on a busy machine
# would be considered lost.
NODE_GRACE = "16s"
# With the default client limits (20 per second), two hundred pods would be slow.
QUICK = ["--kube-api-qps=300", "--kube-api-burst=500"]
# Tests of permissions do not need the requests of the cluster's own components.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "None",
            "users": [
                "system:apiserver",
                "system:kube-controller-manager",
                "system:kube-scheduler",
                "system:kube-proxy",
            ],
        },
        {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
        {"level": "Metadata"},
    ],
}


def start(place: Place, programs: Path, daemons: Daemons) -> Api:
    """Starts the control plane, and returns when it accepts pods."""
    _start_etcd(place, programs, daemons)
    _start_api_server(place, programs, daemons)
    api = Api(place)
    daemons.until(
        "the API server is ready", "apiserver", lambda: api.answers("/readyz"), START_LIMIT
    )
    _start_controllers(place, programs, daemons)
    daemons.until(
        "the controllers create the default service account",
        "controllers",
        lambda: api.answers("/api/v1/namespaces/default/serviceaccounts/default"),
        START_LIMIT,
    )
    return api


def audit_log(place: Place) -> Path:
    return place.folder / "audit.log"


def _start_etcd(place: Place, programs: Path, daemons: Daemons) -> None:
    client, peer = (f"http://{place.loopback}:{port}" for port in (ETCD_PORT, ETCD_PORT + 1))
    daemons.start(
        "etcd",
        programs / "etcd",
        "--data-dir",
        place.folder / "etcd",
        "--listen-client-urls",
        client,
        "--advertise-client-urls",
        client,
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        f"default={peer}",
        # The data does not have to survive a crash of the machine, so do not wait for the disk.
        "--unsafe-no-fsync",
        "--log-level",
        "warn",
    )


def _start_api_server(place: Place, programs: Path, daemons: Daemons) -> None:
    policy = place.folder / "audit-policy.json"
    policy.write_text(json.dumps(AUDIT_POLICY))
    own = place.keys
    daemons.start(
        "apiserver",
        programs / "kube-apiserver",
        f"--etcd-servers=http://{place.loopback}:{ETCD_PORT}",
        f"--bind-address={place.host}",
        f"--advertise-address={place.host}",
        f"--secure-port={API_PORT}",
        # Simulated pods do not connect to the server, and a loopback address cannot be an endpoint.
        f"--endpoint-reconciler-type={'lease' if place.has_bridge else 'none'}",
        f"--service-cluster-ip-range={place.services}",
        f"--tls-cert-file={own / 'apiserver.crt'}",
        f"--tls-private-key-file={own / 'apiserver.key'}",
        f"--client-ca-file={own / 'ca.crt'}",
        f"--service-account-issuer=https://kubernetes.default.svc.{keys.CLUSTER_DOMAIN}",
        f"--service-account-key-file={own / 'accounts.pub'}",
        f"--service-account-signing-key-file={own / 'accounts.key'}",
        f"--kubelet-client-certificate={own / 'kubelet-client.crt'}",
        f"--kubelet-client-key={own / 'kubelet-client.key'}",
        f"--kubelet-certificate-authority={own / 'ca.crt'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--profiling=false",
        f"--audit-policy-file={policy}",
        f"--audit-log-path={audit_log(place)}",
    )


def _start_controllers(place: Place, programs: Path, daemons: Daemons) -> None:
    own = place.keys
    daemons.start(
        "controllers",
        programs / "kube-controller-manager",
        *_as(place, "controllers"),
        *QUICK,
        f"--service-account-private-key-file={own / 'accounts.key'}",
        f"--root-ca-file={own / 'ca.crt'}",
        "--use-service-account-credentials=true",
        "--node-monitor-period=2s",
        f"--node-monitor-grace-period={NODE_GRACE}",
    )
    daemons.start("scheduler", programs / "kube-scheduler", *_as(place, "scheduler"), *QUICK)


def _as(place: Place, name: str) -> list[str]:
    """The identity and address of a component; there is no leader election."""
    config = keys.kubeconfig(place, name)
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        f"--bind-address={place.loopback}",
        "--leader-elect=false",
    ]


def start_dns(place: Place, programs: Path, daemons: Daemons) -> None:
    """Starts the DNS server for the names of Services."""
    config = place.folder / "Corefile"
    config.write_text(
        f"{keys.CLUSTER_DOMAIN}:53 in-addr.arpa:53 {{\n"
        f"  bind {place.host}\n  ready {place.loopback}:8181\n  errors\n"
        f"  kubernetes {keys.CLUSTER_DOMAIN} in-addr.arpa {{\n"
        f"    kubeconfig {keys.kubeconfig(place)} {place.name}\n    ttl 1\n  }}\n}}\n"
    )
    daemons.start("dns", programs / "dns", "-conf", config)
