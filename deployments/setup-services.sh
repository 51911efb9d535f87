#!/usr/bin/env bash
# Debian's servers, tracer and browser for the tests that use real ones. Safe to run again.
set -euo pipefail
packages=(strace iproute2 iptables aria2 chromium chromium-driver)
missing=()
for each in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$each" 2>/dev/null | grep -q 'install ok installed' || missing+=("$each")
done
[ "${#missing[@]}" -eq 0 ] && exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
