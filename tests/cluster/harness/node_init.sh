#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The first process of a node, in separate namespaces: mounts the node's own files where programs
# expect them, so nothing is written to the machine's files, then executes PROBE, which holds the
# namespaces open.   usage: node_init.sh NAME FOLDER PROBE
set -euo pipefail
name=$1 folder=$2 probe=$3
mkdir -p "$folder"/{kubelet,log,lib,lib-work}
hostname "$name"
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/lock
mount --bind "$folder/log" /var/log
mount -t overlay -o "lowerdir=/var/lib,upperdir=$folder/lib,workdir=$folder/lib-work" overlay /var/lib
mkdir -p /var/lib/kubelet
mount --bind "$folder/kubelet" /var/lib/kubelet
mount --make-shared /var/lib/kubelet

# A kubelet requires some kernel settings, which belong to the whole machine: mount files with the
# expected values instead.
pretend() {
  echo "$2" >"/run/${1//\//.}"
  mount --bind "/run/${1//\//.}" "/proc/sys/$1"
}
pretend vm/overcommit_memory 1
pretend vm/panic_on_oom 0
pretend kernel/panic 10
pretend kernel/panic_on_oops 1
pretend kernel/keys/root_maxkeys 1000000
pretend kernel/keys/root_maxbytes 25000000
exec "$probe" hold
