"""What a run is made of: data, compiled programs and evaluation."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diloco import data as data_lib
from diloco.algorithm import inner as inner_lib
from diloco.algorithm import outer as outer_lib
from diloco.algorithm import state as state_lib
from diloco.algorithm import sync as sync_lib
from diloco.evaluate import heldout as evaluate_lib
from diloco.evaluate import score as score_lib
from diloco.model import sharding as mesh_lib
from diloco.run.processes import Peers


@dataclasses.dataclass(frozen=True)
class Run:
  """Data and compiled programs; what training changes is `state.TrainState`."""

  config: Any
  mesh: Any
  data: Any
  tokenizer: Any
  optimizer: Any
  inner_step: Any  # From `inner.make_inner_step`.
  hidden_exchange: Any  # From `sync.make_hidden_exchange`.
  longest_hiding: int  # Most inner steps of it.
  tuned: inner_lib.Tuned
  outer: outer_lib.Outer | None
  masks: dict[tuple[int, ...], Any]  # FedPart's, by the fragments that train.
  evaluate: Any  # From `evaluate.make_evaluate`.
  evaluate_tasks: Any  # From `score.make_evaluate_tasks`.
  batch_sharding: Any
  own_replicas: list[int]  # Those whose batches this process reads.
  peers: Peers

  def stretches(self, start: int) -> Iterator[range]:
    """The inner steps after `start`, in ranges that run without a look between them.

    Single steps, but for those that hide an exchange in one program with it.
    """
    c, t = self.config, start
    while t < c.train.steps:
      looks = [every for every in (c.eval.every, c.checkpoint.every) if every]
      ends = [c.train.steps - t, *(every - t % every for every in looks)]
      length = min(max(self.hiding_steps(t), 1), *ends)
      yield range(t + 1, t + length + 1)
      t += length

  def hiding_steps(self, t: int) -> int:
    """Inner steps after t that are one program with the exchange of what t sent."""
    if self.outer is None or not self.outer.transport.hides():
      return 0
    return self.outer.schedule.hiding_steps(t)

  def next_batch(self) -> jax.Array:
    """The next global batch, int32[M, B, L]; this process reads its own replicas'."""
    tokens_RxBxL = next(self.data)
    tokens_MxBxL = np.zeros((self.config.replicas, *tokens_RxBxL.shape[1:]), np.int32)
    tokens_MxBxL[self.own_replicas] = tokens_RxBxL
    whole = mesh_lib.by_replica(self.config, tokens_MxBxL)
    return mesh_lib.place(whole, self.batch_sharding)

  def trainable(self, t: int):
    """FedPart's mask for inner step t, None without it."""
    if self.outer is None or not self.masks:
      return None
    return self.masks[self.outer.schedule.next_to_send(t)]

  def outer_params(self, state: state_lib.TrainState):
    """The parameters that a run stands for: the outer ones (2501.18512, Table 3)."""
    if self.outer is None or state.outer is None:
      return state_lib.first_replica(state.params, self.mesh)
    self.outer.transport.settle()  # What follows may use all processes' devices.
    like = state_lib.abstract_params(self.config)
    return outer_lib.assemble(self.outer, state.outer, like)


def build(c, mesh, data, own_replicas: list[int], peers: Peers) -> Run:
  """Data, programs and evaluation; every error of the config comes from here."""
  tokenizer = data_lib.load_tokenizer(c.data.tokenizer)
  eval_set = data_lib.make_eval_set(c)
  optimizer = inner_lib.make_optimizer(c)
  inner_step = inner_lib.make_inner_step(c)
  streaming = c.algorithm != "data_parallel"
  outer = outer_lib.make_outer(c, mesh) if streaming else None
  return Run(
    config=c,
    mesh=mesh,
    data=data,
    tokenizer=tokenizer,
    optimizer=optimizer,
    inner_step=inner_step,
    hidden_exchange=sync_lib.make_hidden_exchange(inner_step, mesh),
    longest_hiding=outer.schedule.longest_hiding() if outer else 0,
    tuned=inner_lib.tuned(c),
    outer=outer,
    masks=_fedpart_masks(c, mesh, outer) if outer and c.outer.fedpart else {},
    evaluate=evaluate_lib.make_evaluate(c, mesh, eval_set),
    evaluate_tasks=score_lib.make_evaluate_tasks(c, mesh, tokenizer),
    batch_sharding=mesh_lib.batch_sharding(mesh, not streaming),
    own_replicas=own_replicas,
    peers=peers,
  )


def _fedpart_masks(c, mesh, outer: outer_lib.Outer) -> dict[tuple[int, ...], Any]:
  """FedPart's mask of each group of fragments, whole on every device."""
  like = state_lib.abstract_params(c)
  whole = NamedSharding(mesh, PartitionSpec())
  return {
    group: jax.tree.map(
      lambda x: mesh_lib.place(x, whole),
      inner_lib.fedpart_mask(like, [outer.fragments[p] for p in group]),
    )
    for group in outer.schedule.groups()
  }
