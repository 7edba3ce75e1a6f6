#!/bin/bash
# One run on several slices of Cloud TPU, with at least one replica on each:
#
#   export ACCELERATOR=v5litepod-16
#   scripts/launchers/tpu_multislice.sh create   # Requests the slices; may wait in a queue.
#   scripts/launchers/tpu_multislice.sh setup    # Installs this repository on all hosts.
#   scripts/launchers/tpu_multislice.sh run --config=configs/chinchilla.py:1.3B,M=2 \
#     --workdir=/mnt/runs/1.3B         # One process per host; continues a run.
#   scripts/launchers/tpu_multislice.sh stop     # SIGTERM: all save the same step and end.
#   scripts/launchers/tpu_multislice.sh delete
#
# Settings are environment variables: NAME, ZONE, PROJECT, SLICES (2), ACCELERATOR
# (v5litepod-256), RUNTIME (v2-alpha-tpuv5-lite). --workdir must lie on a file system
# that all hosts mount, for instance Filestore or a bucket through gcsfuse. DRY_RUN=1
# prints the commands and does not run them.
set -euo pipefail

NAME="${NAME:-diloco}"
SLICES="${SLICES:-2}"
ACCELERATOR="${ACCELERATOR:-v5litepod-256}"
RUNTIME="${RUNTIME:-v2-alpha-tpuv5-lite}"
WHERE=(--zone="${ZONE:?set ZONE}" --project="${PROJECT:?set PROJECT}")

queued() {
  if [[ -n "${DRY_RUN:-}" ]]; then
    printf '%q ' gcloud compute tpus queued-resources "$@" "${WHERE[@]}"
    echo
  else
    gcloud compute tpus queued-resources "$@" "${WHERE[@]}"
  fi
}

everywhere() {
  queued ssh "$NAME" --node=all --worker=all --command="$1"
}

command="${1:?create, setup, run, stop or delete}"
shift
case "$command" in
  create)
    queued create "$NAME" --node-count="$SLICES" --node-prefix="$NAME" \
      --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME"
    ;;
  setup)
    tar --exclude-vcs -czf "/tmp/$NAME.tgz" -C "$(dirname "$0")/.." .
    queued scp "/tmp/$NAME.tgz" "$NAME:" --node=all --worker=all
    # The Python of the image may be too old for diloco.
    everywhere "mkdir -p diloco && tar -xzf $NAME.tgz -C diloco &&
      python3 -m pip install -q uv && python3 -m uv venv -q --python=3.11 env &&
      python3 -m uv pip install -q --python=env ./diloco 'jax[tpu]'"
    ;;
  run)
    # JAX finds the other hosts and slices; no address is needed.
    everywhere "cd diloco && ../env/bin/python -m diloco.main --distributed=auto \
      --initialization_timeout=600 $(printf '%q ' "$@")"
    ;;
  stop)
    everywhere "pkill -TERM -f '[d]iloco.main'"
    ;;
  delete)
    queued delete "$NAME" --force
    ;;
  *)
    echo "$command is none of create, setup, run, stop and delete." >&2
    exit 2
    ;;
esac
