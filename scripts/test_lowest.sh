#!/usr/bin/env bash
# Tests with the lowest version of each library that pyproject.toml allows, in a fresh
# environment with Python 3.11. What these libraries need in turn has its newest version.
#
#   scripts/test_lowest.sh                 # data, tokenizers, checkpoints, outer step, wire
#   scripts/test_lowest.sh tests/model -x  # arguments for pytest
set -euo pipefail

if ! python3.11 -c '' 2>/dev/null; then
  echo "test_lowest.sh: python3.11 does not start; install Python 3.11." >&2
  exit 1
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
cd "$(dirname "$0")/.."
# shellcheck disable=SC1091
source "$folder/venv/bin/activate"
export JAX_PLATFORMS=cpu

# `jax>=0.10.2,<0.13` becomes `jax==0.10.2`.
python - > "$folder/lowest.txt" << 'EOT'
import re
import tomllib

with open("pyproject.toml", "rb") as file:
  project = tomllib.load(file)["project"]
for bound in project["dependencies"] + project["optional-dependencies"]["test"]:
  name, lowest = re.fullmatch(r"([\w.-]+)>=([\w.]+)(,.*)?", bound).group(1, 2)
  print(f"{name}=={lowest}")
EOT
pip install --quiet --constraint "$folder/lowest.txt" '.[test]'
pip freeze
if [ $# = 0 ]; then
  set -- tests/{data,tokenizer,checkpoint,library,wire} \
    tests/algorithm/test_{outer,outer_reference,state}.py
fi
pytest "$@"
