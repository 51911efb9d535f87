#!/usr/bin/env bash
# Debian's servers, tracer, browser and promtool for the tests that use real ones. Safe to run again.
# The tests start servers of their own: what is installed here neither starts now nor at boot.
set -euo pipefail
packages=(
  strace iproute2 iptables aria2 chromium chromium-driver
  etcd-server etcd-client redis-server postgresql prometheus
  tinyproxy-bin # S3 behind a proxy
  docker-registry # models as artefacts of a registry
  slurm-wlm munge # a batch system that gives nodes to workers
  openssh-server openssh-client # hosts that workers are started on
  ceph-mon ceph-osd radosgw uuid-runtime # an S3 server beside rclone's: Ceph's object gateway
  buildah mmdebstrap # images from the Containerfile, on a base made here
)
missing=()
for each in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$each" 2>/dev/null | grep -q 'install ok installed' || missing+=("$each")
done
[ "${#missing[@]}" -eq 0 ] && exit 0

policy=/usr/sbin/policy-rc.d # what dpkg asks before it starts a service
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
for each in "${missing[@]}"; do # a server that was here before keeps its setting
  case "$each" in
  etcd-server) services=etcd ;;
  openssh-server) services=ssh ;;
  slurm-wlm) services="slurmctld slurmd" ;;
  radosgw) if [ -d /run/systemd/system ]; then services=ceph.target; else services=radosgw; fi ;;
  redis-server | postgresql | prometheus | docker-registry | munge) services=$each ;;
  *) continue ;;
  esac
  for service in $services; do
    if [ -d /run/systemd/system ]; then systemctl disable --quiet --now "$service"; else update-rc.d "$service" disable; fi
  done
done
