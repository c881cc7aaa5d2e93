# SPDX-License-Identifier: Apache-2.0
"""Certificates and kubeconfigs of one cluster, created with openssl."""

from __future__ import annotations

import base64
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .place import Place

DAYS = "365"
CLUSTER_DOMAIN = "cluster.local"
API_NAMES = [
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    f"kubernetes.default.svc.{CLUSTER_DOMAIN}",
]
AUTHORITY = """
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
"""
MEMBER = """
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
"""


def make(place: Place, nodes: list[tuple[str, str]]) -> None:
    """Creates all keys of a cluster whose nodes have these names and addresses."""
    place.keys.mkdir(mode=0o700, exist_ok=True)
    _certify(place.keys, "ca", {"CN": f"elasticdl-{place.name}"}, AUTHORITY, signed=False)
    _openssl(
        "genpkey",
        "-algorithm",
        "EC",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-out",
        place.keys / "accounts.key",
    )
    _openssl(
        "pkey", "-in", place.keys / "accounts.key", "-pubout", "-out", place.keys / "accounts.pub"
    )
    api_addresses = [place.host, place.loopback, place.kubernetes_service]
    wanted = [
        ("apiserver", {"CN": "kube-apiserver"}, MEMBER + _names(API_NAMES, api_addresses)),
        ("kubelet-client", {"O": "system:masters", "CN": "kube-apiserver"}, MEMBER),
        ("admin", {"O": "system:masters", "CN": "admin"}, MEMBER),
        ("controllers", {"CN": "system:kube-controller-manager"}, MEMBER),
        ("scheduler", {"CN": "system:kube-scheduler"}, MEMBER),
        ("proxy", {"CN": "system:kube-proxy"}, MEMBER),
        *(
            (
                name,
                {"O": "system:nodes", "CN": f"system:node:{name}"},
                MEMBER + _names([name], [address]),
            )
            for name, address in nodes
        ),
    ]
    with ThreadPoolExecutor(4) as pool:
        for made in [pool.submit(_certify, place.keys, *each) for each in wanted]:
            made.result()
    for name, _, _ in wanted[2:]:
        _write_kubeconfig(place, name)


def kubeconfig(place: Place, name: str = "admin") -> Path:
    return place.keys / f"{name}.kubeconfig"


def _certify(
    folder: Path, name: str, subject: dict[str, str], extensions: str, signed: bool = True
) -> None:
    subject_lines = "\n".join(f"{key} = {value}" for key, value in subject.items())
    config = folder / f"{name}.cnf"
    config.write_text(
        "[req]\nprompt = no\ndistinguished_name = subject\nx509_extensions = extensions\n"
        f"[subject]\n{subject_lines}\n[extensions]\n{extensions}"
    )
    signer = ["-CA", folder / "ca.crt", "-CAkey", folder / "ca.key"] if signed else []
    _openssl(
        "req",
        "-x509",
        "-config",
        config,
        "-days",
        DAYS,
        "-nodes",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        *signer,
        "-keyout",
        folder / f"{name}.key",
        "-out",
        folder / f"{name}.crt",
    )


def _names(hosts: list[str], addresses: list[str]) -> str:
    listed = [f"DNS:{host}" for host in hosts] + [f"IP:{address}" for address in addresses]
    return f"subjectAltName = {', '.join(listed)}\n"


def _write_kubeconfig(place: Place, name: str) -> None:
    def text(file: str) -> str:
        return base64.b64encode((place.keys / file).read_bytes()).decode()

    # JSON is also YAML.
    path = kubeconfig(place, name)
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": place.name,
                "contexts": [
                    {"name": place.name, "context": {"cluster": place.name, "user": name}}
                ],
                "clusters": [
                    {
                        "name": place.name,
                        "cluster": {
                            "server": place.server,
                            "certificate-authority-data": text("ca.crt"),
                        },
                    }
                ],
                "users": [
                    {
                        "name": name,
                        "user": {
                            "client-certificate-data": text(f"{name}.crt"),
                            "client-key-data": text(f"{name}.key"),
                        },
                    }
                ],
            }
        )
    )
    path.chmod(0o600)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
