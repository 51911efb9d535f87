#!/usr/bin/env bash
# Install into a virtual environment the wheels that lock files name, and nothing else:
#   requirements/install.sh VENV LOCK...        (`make setup`, `make peers` and Containerfile call it)
#
# torch.lock stands for torch as this machine gets it: see below.
# Every wheel must match a SHA-256 of its lock, whichever index serves it; source distributions are
# refused, because building one runs its code. All but torch comes from one index: uv's, else pip's
# configured one, else the default. Torch alone may come from elsewhere: PACELINE_TORCH_INDEX, or a
# folder of wheels that uv's or pip's find-links names.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
shift
python=$venv/bin/python

fail() { echo "paceline set-up: $*" >&2; exit 2; }
# The value of one of pip's settings, from its files or the environment; "": not set.
setting() { { "$python" -m pip config list 2>/dev/null || true; } | sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" | tail -n 1; }

[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv" ||
  fail "python3 -m venv failed: on Debian and Ubuntu install python3-venv"
if ! uv=$(command -v uv); then
  uv=$venv/bin/uv
  [ -x "$uv" ] || "$python" -m pip install --quiet --disable-pip-version-check --no-input \
    --require-hashes --only-binary :all: -r "$here/bootstrap.lock" || fail "pip could not install uv"
fi
index=$(setting index-url)
links=${UV_FIND_LINKS:-$(setting find-links)}
certificates=$(setting cert)
unset UV_FIND_LINKS UV_EXTRA_INDEX_URL UV_INDEX
[ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
[ -z "$certificates" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$certificates}"

install() {
  "$uv" pip install --quiet --python "$python" --no-deps --require-hashes --only-binary :all: \
    --compile-bytecode "$@" ||
    fail "a wheel is not to be had, or is none of those that requirements/*.lock name (see above)"
}

locks=() torch=
for lock in "$@"; do
  if [ "$(basename "$lock")" = torch.lock ]; then torch=yes; else locks+=(-r "$lock"); fi
done
install "${locks[@]}"
[ -n "$torch" ] || exit 0

cpu=$here/torch-cpu.lock
if [ -n "${PACELINE_TORCH_INDEX:-}" ]; then
  install --default-index "$PACELINE_TORCH_INDEX" -r "$cpu"
elif [ -n "$links" ] && "$uv" pip install --quiet --python "$python" --no-deps --no-index --dry-run \
  --find-links "$links" "$(sed -n '1s/ .*//p' "$cpu")" 2>/dev/null; then
  install --no-index --find-links "$links" -r "$cpu"
else
  install -r "$here/torch.lock"
fi
if "$python" -c 'import importlib.metadata as m, sys
sys.exit(not any("nvidia" in each or "cuda" in each for each in m.requires("torch") or []))'; then
  install -r "$here/cuda.lock"
fi
