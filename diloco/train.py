"""The training loop: a whole run, from a config to its summary."""

import pathlib
from collections.abc import Sequence

import ml_collections

from diloco.config import Config
from diloco.mesh.modes import training_modes
from diloco.processes.peers import Peers
from diloco.processes.stop import Stopped
from diloco.session import Hook, Part, Session, open_session
from diloco.util.types import Json


def train(
  config: ml_collections.ConfigDict | Config,
  workdir: str | pathlib.Path,
  peers: Peers | None = None,
  part: Part | None = None,
  hooks: Sequence[Hook] = (),
) -> Json:
  """Trains a model, resuming from `workdir` if it has a checkpoint.

  Args:
    config: a config with the fields of `default_config`.
    workdir: receives config.json, checkpoints/, metrics.jsonl, tensorboard/
      and summary.json. All processes must see the same folder.
    peers: the processes that train together; all must call `train`. None: this process.
    part: this process's part of a run whose replicas do not all train together;
      `config` is then the config of the whole run. None: the whole run trains here.
    hooks: your functions and their periods in inner steps (`session.Hook`).

  Returns:
    The summary, as in summary.json; empty if SIGTERM ended the run early. If the
    run has finished before, its summary is read from the file.

  Raises:
    ConfigError: the config cannot work, `peers` are not JAX's processes, or workdir
      contains a run with another config.
    TrainingDiverged: a loss or gradient became NaN or infinite.
    Interrupted: Ctrl-C ended the run early, and the run is saved.
  """
  with training_modes(), open_session(config, workdir, peers, part, hooks) as session:
    return session.summary() if session.is_finished else loop(session)


def loop(session: Session) -> Json:
  """Runs the inner and outer steps of a session; returns the summary, or {} if stopped.

  `diloco.together`, which trains several runs at once, uses this loop, too.
  """
  method = session.method
  try:
    t, state = session.start()
    while t < session.last:
      steps = session.span(t, state)
      state, metrics = method.inner(steps, state, session.take(steps))
      t, state, events = method.outer(steps[-1], state)
      for hook in session.due(steps, t):  # Log, evaluate, save, stop.
        hook.call(steps, t, state, metrics, events)
    state, events = method.drain(t, state)
  except Stopped as stopped:
    session.leave(stopped)
    return {}
  return session.finish(state, events)
