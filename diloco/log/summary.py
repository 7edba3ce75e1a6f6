"""Ends a run: evaluates the model, generates text, and writes summary.json."""

import dataclasses
import pathlib

import jax
from jax.sharding import Mesh

from diloco.algorithm.method import Method
from diloco.algorithm.state import TrainState, first_replica, replica_mean
from diloco.config import Config
from diloco.data.contents import repeated
from diloco.evaluate import tasks
from diloco.evaluate.evaluation import Evaluation, Scores
from diloco.log.log import Log
from diloco.model import attention, sampling
from diloco.processes.peers import Peers
from diloco.spec import call_text, sizes
from diloco.spec.shapes import matrix_params, num_params
from diloco.util import files
from diloco.util.types import Json

FILE = "summary.json"
# With fewer syncs than this number, the outer parameters are far behind the replicas.
_ENOUGH_SYNCS = 3
# Outer momentum 0.9 is useful from about this number of syncs on (docs/settings.md).
_SYNCS_OF_09 = 100


def make(
  c: Config,
  method: Method,
  state: TrainState,
  mesh: Mesh,
  evaluation: Evaluation,
  log: Log,
) -> Json:
  """Evaluates the model and generates text; writes, prints and returns summary.json.

  Args:
    method: the method that trained the run.
    state: the run's last state.
  """
  log.say("evaluating")
  outer = method.params(state)
  scores = evaluation(outer)
  losses = {"outer": scores.held_out.loss}
  test = {"outer": evaluation.test_loss(outer)}
  for name, choose in (("mean", replica_mean), ("first", first_replica)):
    if name == "first" and c.models == 1:  # The mean is the first replica.
      losses[name], test[name] = losses["mean"], test["mean"]
      continue
    params = choose(state.params, mesh=mesh)
    losses[name] = evaluation.loss(params).loss
    test[name] = evaluation.test_loss(params)
    del params  # Frees this copy of the parameters before the next one is made.
  log.flush()
  more = {f"loss_{name}": losses[name] for name in ("mean", "first")}
  log.evaluation(c.train.steps, scores.numbers | more)
  text = ""
  if c.log.sample_tokens:
    prompt = evaluation.tokenizer.encode(c.log.prompt)
    ids = sampling.generate(
      c.model, outer, prompt, c.log.sample_tokens, c.log.temperature, c.seed
    )
    text = evaluation.tokenizer.decode([*prompt, *ids])
  summary = _numbers(c, log, losses, scores)
  if c.eval.test_tokens:
    summary["test_loss"] = test
  summary |= method.account(summary)
  if log.peers.index == 0:
    files.write_json(log.workdir / FILE, summary)
    log.results(summary, text)
    log.close()  # Ends the progress bar.
    report(log.workdir, summary, text)
  return summary


def _numbers(c: Config, log: Log, losses: dict[str, float], scores: Scores) -> Json:
  """Returns the content of summary.json; bytes are those that one replica sends."""
  params, ledger, both = num_params(c.model), log.ledger, repeated(c.data)
  reference = sizes.all_reduce_bytes(c.replicas, params, c.train.steps)
  sent = log.sent(c.train.steps)
  return {
    "algorithm": c.algorithm,
    "replicas": c.replicas,
    "steps": c.train.steps,
    "tokens": c.train.tokens,
    "params": params,
    "matrix_params": matrix_params(c.model),  # The papers' N.
    "eval_loss": losses,
    "perplexity": scores.held_out.perplexity,
    "bits_per_byte": scores.held_out.bits_per_byte,
    "tasks": {task: dataclasses.asdict(r) for task, r in scores.tasks.items()},
    "bytes_sent_per_replica": sent,
    "bytes_data_parallel_per_replica": int(reference),
    "bytes_ratio_to_data_parallel": reference / sent if sent else None,
    "peak_bytes_per_sync": log.peak(),
    "syncs": ledger.syncs,
    "note": note(c),
    "mixtures": log.mixtures,
    "held_out_in_training": both and both._asdict(),
    "fragments": {
      p: {"syncs": n, "bytes": b} for p, (n, b) in ledger.fragments.items()
    },
    "averages": {
      kind: {"times": n, "bytes": b} for kind, (n, b) in ledger.averages.items()
    },
    "tokens_per_s": log.tokens_per_s(),
    "wall_s": log.spent().wall_s,
    "device": jax.devices()[0].device_kind,
    "devices": jax.device_count(),
    "attention": attention.choose(c.model, jax.devices()[0].device_kind),
    "jax": jax.__version__,
  }


def note(c: Config) -> str:
  """Returns warnings about a misleading held-out loss; "" if there are none."""
  return " ".join(
    filter(None, (_few_syncs(c) or _momentum(c), _warm_up(c), _in_both(c)))
  )


def _in_both(c: Config) -> str:
  """Returns a warning if held-out documents are in the training text too; else ""."""
  repeats = repeated(c.data)
  if not repeats or not repeats.documents:
    return ""
  return (
    f"{repeats.documents:,} of {repeats.of:,} held-out documents ({repeats.share:.1%}"
    " of the bytes) are also in the training text, so the held-out loss is too low;"
    " leave out what is repeated."
  )


def _few_syncs(c: Config) -> str:
  """Returns a warning if some fragments are rarely synchronised; else ""."""
  few = min(c.num_syncs(), default=_ENOUGH_SYNCS)
  if few >= _ENOUGH_SYNCS or c.outer.final_sync:
    return ""
  return (
    f"some fragments are synchronised only {few} time{'s' * (few > 1)} in"
    f" {c.train.steps} steps, so the outer parameters lag behind the replicas' mean;"
    " train longer or lower sync_every, or set outer.final_sync=true."
  )


def _momentum(c: Config) -> str:
  """Returns a warning if the outer momentum is high and syncs are few; else ""."""
  syncs = min(c.num_syncs(), default=_SYNCS_OF_09)
  _, arguments = call_text.parse("outer.optimizer", c.outer.optimizer)
  momentum = arguments.get("momentum") or 0  # None in optax is 0.
  if momentum < 0.9 or syncs >= _SYNCS_OF_09:
    return ""
  return (
    f"outer momentum {momentum:g} suits long runs, and a fragment has {syncs} syncs"
    " here; try 0.5 with outer.learning_rate=1.0, or 0.7 with 0.6 (docs/settings.md)."
  )


def _warm_up(c: Config) -> str:
  """Returns a warning if the warm-up is as long as the schedule; else ""."""
  if c.inner.warmup_steps < c.schedule_steps:
    return ""
  return (
    f"inner.warmup_steps is {c.inner.warmup_steps:,}, but the schedule ends at step"
    f" {c.schedule_steps:,}, so the learning rate never falls;"
    " lower inner.warmup_steps, or train longer."
  )


def read(workdir: pathlib.Path, peers: Peers) -> Json | None:
  """Reads process 0's summary.json; None if it is absent or damaged."""
  return peers.broadcast(files.read_json(workdir / FILE))


def set_aside(workdir: pathlib.Path, peers: Peers) -> None:
  """Renames the summary of a run that goes on to summary_STEPS.json."""
  path = workdir / FILE
  if peers.index == 0 and path.exists():
    steps = (files.read_json(path) or {}).get("steps", "damaged")
    path.rename(workdir / f"summary_{steps}.json")


def report(workdir: pathlib.Path, summary: Json, text: str = "") -> None:
  """Prints a summary and the paths of the run's files.

  Args:
    workdir: folder of the run.
    summary: from `make` or `read`.
    text: text that the model generated.
  """
  losses = summary["eval_loss"]
  ratio = summary["bytes_ratio_to_data_parallel"]
  sent = f"{summary['bytes_sent_per_replica']:,} bytes sent per replica"
  if summary["syncs"]:
    peak = summary["peak_bytes_per_sync"]
    sent += f" in {summary['syncs']} syncs, at most {peak:,} at once"
  averaged = ", ".join(
    f"{kind.replace('_', ' ')} {of['bytes']:,} ({of['times']:,}x)"
    for kind, of in summary["averages"].items()
  )
  test = "test text    {outer:.4f}, replicas' mean {mean:.4f}, first {first:.4f}"
  lines = [
    "",
    f"evaluation   outer parameters {losses['outer']:.4f} nats/token, perplexity"
    f" {summary['perplexity']:.2f}, {summary['bits_per_byte']:.4f} bits/byte",
    f"             replicas' mean {losses['mean']:.4f}, first replica"
    f" {losses['first']:.4f}",
    *([test.format(**summary["test_loss"])] if "test_loss" in summary else []),
    *(tasks.line(task, fields) for task, fields in summary["tasks"].items()),
    f"exchanged    {sent}",
    *([f"             of these, averages sent {averaged}"] if averaged else []),
    "             data-parallel with 16-bit gradients would have sent"
    f" {summary['bytes_data_parallel_per_replica']:,}"
    + (f": {ratio:,.1f} times as many" if ratio else ""),
    f"speed        {summary['tokens_per_s'] or 0:,.0f} tokens/s,"
    f" {summary['wall_s']:.0f} s in all",
  ]
  for name, value in summary.items():  # From `Method.account`.
    if isinstance(value, dict) and isinstance(value.get("text"), str):
      lines.append(f"{name:<12} {value['text']}")
  if summary["note"]:
    lines.append(f"note         {summary['note']}")
  lines += [f"mixture      {x}" for x in summary.get("mixtures", ())]
  if text:
    lines += ["", "generated    " + text.replace("\n", "\n             "), ""]
  lines += [
    f"checkpoint   {files.shown(workdir / 'checkpoints')}",
    f"metrics      {files.shown(workdir / 'metrics.jsonl')}"
    + (" and tensorboard/" if (workdir / "tensorboard").is_dir() else ""),
    f"summary      {files.shown(workdir / FILE)}",
  ]
  print("\n".join(lines))
