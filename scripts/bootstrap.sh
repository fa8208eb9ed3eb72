#!/usr/bin/env bash
# Make .venv with a suitable Python and the pinned packages of requirements.lock. Uses uv when it is installed, else pip.
set -euo pipefail
cd "$(dirname "$0")/.."

suitable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

# A name on PATH may be a version manager's shim that refuses to run, so each candidate is tried.
find_python() {
  local candidate
  for candidate in "${MMRL_PYTHON:-}" python3.13 python3.12 python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3; do
    if [ -n "$candidate" ] && suitable "$candidate"; then command -v "$candidate"; return; fi
  done
  return 1
}

if ! python=$(find_python); then
  cat >&2 <<'MESSAGE'
No suitable Python found: mmrl needs Python 3.12 or 3.13 with the venv module (LeRobot needs 3.12).
Install one, for example "apt-get install python3.12 python3.12-venv", "pyenv install 3.13" or "uv python install 3.13",
or name an interpreter: MMRL_PYTHON=/path/to/python3.13 make install
MESSAGE
  exit 2
fi
echo "Using $("$python" --version) at $python"

if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
  uv venv --quiet --allow-existing --python "$python" .venv
  uv pip install --quiet --python .venv/bin/python -r requirements.lock
  uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation -e .
else
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
fi
touch .venv/.installed
