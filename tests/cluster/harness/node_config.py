# SPDX-License-Identifier: Apache-2.0
"""Settings of the programs on a real node, as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import keys
from .place import Place
from .size import EVICTION, Size

SOCKET = "/run/containerd/containerd.sock"
CNI_PROGRAMS = Path("/usr/lib/cni")


def kubelet(place: Place, name: str, address: str, folder: Path, size: Size) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "tlsCertFile": str(place.keys / f"{name}.crt"),
        "tlsPrivateKeyFile": str(place.keys / f"{name}.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(place.keys / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{place.cgroup}/{name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        # Containers on some build machines are not allowed to lower this value.
        "oomScoreAdj": 0,
        "clusterDNS": [place.host],
        "clusterDomain": keys.CLUSTER_DOMAIN,
        # There is no upstream server for names outside of the cluster.
        "resolvConf": str(folder / "resolv.conf"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "systemReserved": size.reserved(),
        "evictionHard": {"memory.available": EVICTION, "nodefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        # With the control plane's grace period, a lost node is detected within 20 s.
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 16,
        "serializeImagePulls": False,
    }


def proxy(place: Place, name: str, address: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": name,
        "clusterCIDR": place.pods,
        "bindAddress": address,
        "clientConnection": {"kubeconfig": str(keys.kubeconfig(place, "proxy"))},
        # Zero keeps the machine's own limits.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


def pod_network(place: Place, index: int) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": "/run/pod-addresses",
        "ranges": [[{"subnet": place.node_pods(index)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": addresses,
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}


def containerd(folder: Path, sandbox_image: str) -> str:
    return f"""version = 2
root = "{folder}/containerd"
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox_image}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PROGRAMS}"
    conf_dir = "{folder}/network"
"""
