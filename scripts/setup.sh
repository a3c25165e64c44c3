#!/usr/bin/env bash
# Makes .venv with everything that the demo and the tests need; does nothing if that is done already.
#   PYTHON       the interpreter to use (default: python3), 3.11 or newer
#   TORCH_SPEC   what to install for torch when the interpreter has none, e.g. torch==2.13.0 or a wheel's path or address
# pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) and configuration hold as always.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
torch_spec=${TORCH_SPEC:-torch==2.13.0}
venv=.venv
stamp=$venv/.installed

say() { printf '%s\n' "$*" >&2; }

if ! command -v "$python" >/dev/null; then
  say "setup: $python is not there: install Python 3.11 or newer, or name one with PYTHON=..."
  exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  say "setup: $("$python" --version) is too old: Python 3.11 or newer is needed; name one with PYTHON=..."
  exit 2
fi

# Whatever decides what is installed, in one line: if it has not changed, nothing is to be done.
wanted="$("$python" -c 'import sys; print(sys.version)' | tr -d '\n') ${TORCH_SPEC:-default} $(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi

has_torch() { "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; }

if [ ! -x "$venv/bin/python" ]; then
  options=()
  if [ -z "${TORCH_SPEC:-}" ] && has_torch "$python"; then
    say "setup: using the torch that $python has"
    options=(--system-site-packages)
  fi
  if ! "$python" -m venv "${options[@]}" "$venv"; then
    rm -rf "$venv"
    say "setup: $python cannot make a virtual environment: install its venv package (Debian and Ubuntu: python3-venv)"
    exit 2
  fi
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

if [ -n "${TORCH_SPEC:-}" ] || ! has_torch "$venv/bin/python"; then
  if [ ! -e /dev/nvidia0 ] && ! command -v nvidia-smi >/dev/null; then
    say "setup: no NVIDIA GPU here, so a CPU build of torch is enough; the general build works too, but may be several GB larger."
    say "setup: to choose one, stop this and point pip to where your CPU builds are: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or"
    say "setup: PIP_FIND_LINKS, and, if they have a version of their own, TORCH_SPEC='torch==2.13.0+cpu'."
  fi
  say "setup: installing $torch_spec"
  pip install --constraint constraints.txt "$torch_spec"
fi
say "setup: installing geomesh and its other dependencies"
pip install --constraint constraints.txt --editable '.[dev]'
printf '%s\n' "$wanted" >"$stamp"
say "setup: done: $venv/bin/geomesh"
