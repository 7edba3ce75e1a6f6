#!/bin/bash
# One run on several slices of Cloud TPU, with at least one replica on each:
#
#   export ACCELERATOR=v5litepod-16
#   scripts/launchers/tpu_multislice.sh create   # Requests the slices; may wait in a queue.
#   scripts/launchers/tpu_multislice.sh setup    # Installs this clone on all hosts.
#   scripts/launchers/tpu_multislice.sh run --config=chinchilla:1.3B,M=2 \
#     --workdir=/mnt/runs/1.3B         # Starts one process per host, or continues a run.
#   scripts/launchers/tpu_multislice.sh train --config=...   # `run`, until the run ends.
#   scripts/launchers/tpu_multislice.sh log      # The last lines of every host.
#   scripts/launchers/tpu_multislice.sh stop     # SIGTERM: all save the same step and end.
#   scripts/launchers/tpu_multislice.sh delete
#
# `run` ends when the processes are started. They go on without this machine, so it may
# lose its connection or be switched off. `train` first stops a run that is there, and
# ends with the worst exit status of its processes: 1 if the same command may go on.
# Without a clone, give `setup` a wheel: `setup diloco-0.1.0-py3-none-any.whl`.
#
# Settings are environment variables: NAME, ZONE, PROJECT, SLICES (2), ACCELERATOR
# (v5litepod-256), RUNTIME (v2-alpha-tpuv5-lite). --workdir must lie in a bucket, or on
# a file system that all hosts mount, for instance Filestore. DRY_RUN=1 prints the
# commands and does not run them.
set -euo pipefail

NAME="${NAME:-diloco}"
SLICES="${SLICES:-2}"
ACCELERATOR="${ACCELERATOR:-v5litepod-256}"
RUNTIME="${RUNTIME:-v2-alpha-tpuv5-lite}"
if [[ -z "${ZONE:-}" || -z "${PROJECT:-}" ]]; then
  echo "error: set ZONE and PROJECT." >&2
  exit 2
fi
WHERE=(--zone="$ZONE" --project="$PROJECT")
# `--node-count` must be above 1.
NODES=(--node-count="$SLICES" --node-prefix="$NAME")
if [[ "$SLICES" == 1 ]]; then NODES=(--node-id="$NAME"); fi

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

# Whether the process that `run` started is there; its number may belong to another now.
RUNS="grep -qs diloco.main /proc/\$(cat $NAME.pid 2>/dev/null)/cmdline"

command="${1:?create, setup, run, train, log, stop or delete}"
shift
case "$command" in
  create)
    queued create "$NAME" "${NODES[@]}" \
      --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME"
    ;;
  setup)
    package="${1:-}"
    unpack=""
    if [[ -z "$package" ]]; then
      clone="$(cd "$(dirname "$0")/../.." && pwd)"
      if ! git -C "$clone" ls-files --error-unmatch pyproject.toml > /dev/null 2>&1; then
        echo "error: $clone is no clone of diloco; give setup a wheel of it." >&2
        exit 2
      fi
      package="/tmp/$NAME.tgz"
      # Without what git ignores: runs and environments may be large.
      git -C "$clone" ls-files -z --cached --others --exclude-standard |
        tar -C "$clone" --null --ignore-failed-read -T - -czf "$package"
      unpack="rm -rf diloco && mkdir diloco && tar -xzf $NAME.tgz -C diloco &&"
    fi
    file="$(basename "$package")"
    everywhere "if $RUNS; then echo 'a run is there; stop it first.' >&2; exit 2; fi"
    queued scp "$package" "$NAME:" --node=all --worker=all
    # The Python of the image may be too old for diloco.
    everywhere "$unpack python3 -m pip install -q uv &&
      python3 -m uv venv -q --allow-existing --python=3.12 env &&
      python3 -m uv pip install -q --python=env ./${file/#$NAME.tgz/diloco} 'jax[tpu]'"
    ;;
  train)
    trap 'bash "$0" stop; exit 0' TERM
    bash "$0" stop
    bash "$0" run "$@"
    # gcloud says no more than that some host failed, and older ones not even that. So
    # each host prints its status, and gcloud's own counts only if a connection broke.
    said="$(mktemp)" lost=0
    everywhere "while $RUNS; do sleep 2; done; tail -n 5 $NAME.log; sleep 1
      echo $NAME.exit=\$(cat $NAME.exit || echo 1)" > "$said" &
    wait $! || lost=1
    cat "$said"
    statuses="$(sed -n "s/.*$NAME\.exit=//p" "$said")"
    rm "$said"
    exit "$(printf '%s\n' "${statuses:-1}" $lost | sort -n | tail -n 1)"
    ;;
  run)
    # JAX finds the other hosts and slices; no address is needed.
    everywhere "if $RUNS; then echo 'a run is there; stop it first.' >&2; exit 2; fi
      rm -f $NAME.pid $NAME.exit; trap '' HUP
      (env/bin/python -m diloco.main --distributed=auto --initialization_timeout=600 \
        $(printf '%q ' "$@") & echo \$! > $NAME.pid
        wait \$!; echo \$? > $NAME.exit) >> $NAME.log 2>&1 < /dev/null &
      until [[ -s $NAME.pid ]]; do sleep 0.1; done"
    ;;
  log)
    everywhere "tail -n 20 $NAME.log"
    ;;
  stop)
    everywhere "if $RUNS; then kill \$(cat $NAME.pid); fi; while $RUNS; do sleep 1; done"
    ;;
  delete)
    queued delete "$NAME" --force
    ;;
  *)
    echo "$command is none of create, setup, run, train, log, stop and delete." >&2
    exit 2
    ;;
esac
