#!/usr/bin/env bash
# Tests with the newest libraries that pyproject.toml allows, in a fresh environment, and
# measures coverage, which slows down Python 3.11 more than newer ones.
#
#   scripts/test_newest.sh                            # the newest of 3.14, 3.13, 3.12
#   scripts/test_newest.sh python3.12 tests/model -x  # a Python, arguments for pytest
#
# A DeprecationWarning that a module of diloco causes is an error.
set -euo pipefail

pythons=(python3.14 python3.13 python3.12)
if [[ ${1:-} == *python3* ]]; then
  pythons=("$1")
  shift
fi
for name in "${pythons[@]}"; do
  # A name on the path may not start: pyenv has a command for every Python installed.
  if "$name" -c '' 2>/dev/null; then python=$name && break; fi
done
if [ -z "${python:-}" ]; then
  echo "test_newest.sh: none of these starts: ${pythons[*]}. Name a Python." >&2
  exit 1
fi

venv=$(mktemp -d)/venv
trap 'rm -rf "$(dirname "$venv")"' EXIT
"$python" -m venv "$venv"
cd "$(dirname "$0")/.."
# shellcheck disable=SC1091
source "$venv/bin/activate"
export JAX_PLATFORMS=cpu COVERAGE_CORE=sysmon

# With libtpu, so that the dry run is tested, too.
pip install --quiet --upgrade --upgrade-strategy eager '.[test,tpu]'
# Every Python process runs this line when it starts: tests start processes, which do
# not read the filters of pytest.
echo 'import warnings; warnings.filterwarnings(' \
  '"error", category=DeprecationWarning, module="diloco|__main__")' \
  > "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/strict.pth"
python --version
pip freeze
if [ $# = 0 ]; then
  set -- -m 'not slow' --cov --cov-fail-under=90
fi
pytest "$@"
