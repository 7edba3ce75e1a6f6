"""The configuration: every field with its default and its meaning, once.

`default_config()` is the whole record of an experiment; a file in `configs/`
changes what it needs and command-line flags (`--config.field=value`) change the
rest. `resolve()` fills in what follows from other fields and `validate()` refuses
what cannot work, before anything compiles. This module imports no JAX.
"""

import math

import ml_collections

from diloco.algorithm import schedule as fragments_lib

ALGORITHMS = ("data_parallel", "diloco", "streaming")
# With momentum, and those of optax that need a learning rate and nothing else.
OUTER_OPTIMIZERS = (
  "nesterov",
  "sgd",
  "adabelief",
  "adadelta",
  "adafactor",
  "adagrad",
  "adam",
  "adamax",
  "adamaxw",
  "adamw",
  "adan",
  "amsgrad",
  "fromage",
  "lamb",
  "lars",
  "lion",
  "nadam",
  "nadamw",
  "novograd",
  "optimistic_gradient_descent",
  "radam",
  "rmsprop",
  "rprop",
  "sign_sgd",
  "sm3",
  "yogi",
)


class ConfigError(ValueError):
  """A configuration that cannot work: one sentence with field, value, remedy."""


def default_config() -> ml_collections.ConfigDict:
  """Streaming DiLoCo with the papers' choices; see the comments for each field."""
  c = ml_collections.ConfigDict()

  # What is computed: data_parallel (one replica, no outer step), diloco (one
  # fragment of everything, no overlap) or streaming (fragments, tau, alpha).
  c.algorithm = "streaming"
  # M, the number of replicas. data_parallel trains one replica on the batches of
  # all M and uses M to count what M workers would have all-reduced.
  c.replicas = 2
  # H, inner steps between two syncs of one fragment.
  c.sync_every = 100
  # Seed of initialisation, data order and stochastic rounding.
  c.seed = 0

  c.fragments = ml_collections.ConfigDict()
  # Transformer blocks per fragment (Streaming DiLoCo, figure 6).
  c.fragments.size = 3
  # strided, sequential or whole (figure 2); diloco is always whole.
  c.fragments.pattern = "strided"
  # Place of the embedding's fragment in the schedule: last or first. The papers
  # do not state it.
  c.fragments.embedding = "last"

  c.overlap = ml_collections.ConfigDict()
  # tau, inner steps that hide the exchange; 0 waits for it.
  c.overlap.tau = 1
  # tau_m of each replica (heterogeneous workers, section 3.3.2); empty: tau for all.
  c.overlap.taus = ()
  # alpha, the weight of the local parameters in the merge: 0 discards the local
  # updates made during the overlap, 0.5 averages, 1 never listens.
  c.overlap.alpha = 0.0
  # device: devices exchange payloads while they train and hold the outer state.
  # host: processes exchange them over TCP, and hosts hold the outer state. Both give
  # the same results; see diloco/transport.py.
  c.overlap.transport = "device"

  c.outer = ml_collections.ConfigDict()
  # nesterov, sgd or an optax optimizer (adam, lion, ...): one of OUTER_OPTIMIZERS.
  c.outer.optimizer = "nesterov"
  # Constant. 0.4 in Streaming DiLoCo, 0.7 in DiLoCo, {0.2..1.0} in the scaling laws.
  c.outer.learning_rate = 0.4
  # Momentum of nesterov and sgd.
  c.outer.momentum = 0.9
  # Whether every fragment is synchronised once more after the last step.
  c.outer.final_sync = False
  # Whether outer parameters and momentum wait in the host's memory and a fragment is
  # fetched when it is sent, so that only it takes memory of the devices.
  c.outer.offload = False
  # FedPart ablation (section 3.3.1): freeze all but the next fragment to be sent.
  c.outer.fedpart = False

  c.wire = ml_collections.ConfigDict()
  # What a replica sends: quantize, topk, random (FedDropout) or dare.
  c.wire.compressor = "quantize"
  # Number format: e3m0, any eXmY of 2 to 8 bits, bf16, fp32; auto is e3m0 for
  # streaming and fp32 for diloco.
  c.wire.format = "auto"
  # Consecutive values of one layer's tensor that share a power-of-two scale of one
  # byte; 0 shares it over the whole tensor, -1 over a row. Silent in the papers. Of a
  # tensor that mesh.fsdp divides, each device's shard is coded as if it were a tensor:
  # blocks end with it, and so it is with the values that topk and random choose.
  c.wire.block_size = 128
  # nearest or stochastic.
  c.wire.rounding = "nearest"
  # Share of the values that topk, random and dare keep, of each device's shard.
  c.wire.density = 0.1
  # gather: all-gather the packed codes, accumulate in float32. psum: all-reduce the
  # decoded float32 values, the reference against which gather is tested.
  c.wire.exchange = "gather"

  c.inner = ml_collections.ConfigDict()
  # Peak learning rate of AdamW.
  c.inner.learning_rate = 3e-3
  c.inner.b1 = 0.9
  c.inner.b2 = 0.99
  c.inner.eps = 1e-8
  # Linear warm-up from zero, in steps.
  c.inner.warmup_steps = 1000
  # The cosine ends at this fraction of the peak, at the last step.
  c.inner.final_fraction = 0.05
  # Decoupled weight decay; negative means 1/T (Wang & Aitchison, 2024).
  c.inner.weight_decay = -1.0
  # What multiplies the decay: schedule (the rate relative to its peak) or rate.
  c.inner.weight_decay_scaling = "schedule"
  # Global L2 norm to which each replica's gradient is clipped; 0 never clips.
  c.inner.clip_norm = 1.0
  # What data_parallel all-reduces: float32, or bfloat16, as the papers count.
  c.inner.gradient_dtype = "float32"

  c.train = ml_collections.ConfigDict()
  # Sequences per step over all replicas; must be divisible by M * accumulate.
  c.train.batch_size = 256
  # Microbatches per step whose gradients are averaged.
  c.train.accumulate = 1
  # T, inner steps; 0 takes it from `tokens`.
  c.train.steps = 0
  # Token budget over all replicas; used when steps is 0.
  c.train.tokens = 0

  c.model = ml_collections.ConfigDict()
  c.model.num_layers = 6
  c.model.dim = 512
  c.model.num_heads = 8
  # Feed-forward width; 0 means 4 * dim.
  c.model.ff_dim = 0
  # Rows of the embedding; at least the tokenizer's pieces (papers: 32,000 and 32,768).
  c.model.vocab_size = 32_768
  # Tokens per sequence, and rows of the learned positions.
  c.model.seq_len = 2048
  # LayerNorm on queries and keys (Wortsman et al., 2023).
  c.model.qk_norm = True
  # Weight of the squared log-partition of the logits (PaLM).
  c.model.z_loss = 1e-4
  # Type of activations and matrix products; logits and softmax are float32.
  c.model.dtype = "bfloat16"
  # Type in which replicas keep their parameters; outer ones are always float32.
  c.model.param_dtype = "float32"
  # Whether blocks are rematerialised in the backward pass.
  c.model.remat = False
  # Whether each document of a packed sequence is treated as if it were alone: it
  # attends to itself only, from position 0 on. The papers do not say that they do.
  c.model.segment_masks = False
  # Sequence positions whose logits exist at once; must divide seq_len; 0: all.
  c.model.loss_chunk = 0

  c.data = ml_collections.ConfigDict()
  # sotu (embedded text), tfds:<name>:<version>, files:<glob> of text or JSON lines, or
  # arrays:<folder> of tokens from scripts/prepare_data.py.
  c.data.source = "sotu"
  # Splits of a TFDS source, slices allowed: train[:99%]; subfolders of arrays.
  c.data.train_split = "train"
  c.data.eval_split = "validation"
  # Where TFDS data sets lie; empty: TFDS's own default.
  c.data.data_dir = ""
  # A SentencePiece .model by path, or the name of one in diloco/data/tokenizers.
  c.data.tokenizer = "sotu_2048"
  # Whether documents begin with BOS, as NanoDO's do; they always end with EOS.
  c.data.add_bos = False
  # Packed sequences of a replica that are shuffled among themselves; 0: none are.
  # Else the consecutive sequences of a long document fill whole batches.
  c.data.shuffle_window = 0
  # Batches prepared ahead by a background thread; 0 prepares them in line.
  c.data.prefetch = 2

  c.eval = ml_collections.ConfigDict()
  # Steps between evaluations of the outer parameters; 0: only at the end.
  c.eval.every = 0
  # Held-out tokens per evaluation; 0: all.
  c.eval.tokens = 0
  # Zero-shot tasks of every evaluation of the outer parameters, by commas: hellaswag,
  # piqa, arc_easy, arc_easy_test, or paths of .jsonl items (diloco/tasks.py).
  c.eval.tasks = ""
  # Items per task, the first ones; 0: all.
  c.eval.task_items = 0
  # Sequences per evaluation batch.
  c.eval.batch_size = 32

  c.checkpoint = ml_collections.ConfigDict()
  # Steps between checkpoints; 0: only at the end (and on SIGTERM).
  c.checkpoint.every = 1000
  # Checkpoints kept, newest first.
  c.checkpoint.keep = 2

  c.log = ml_collections.ConfigDict()
  # Steps between lines of metrics.jsonl and TensorBoard points.
  c.log.every = 1
  c.log.tensorboard = True
  # Weights & Biases project; empty: off. Needs the extra `wandb`.
  c.log.wandb_project = ""
  # The text continued at the end of training, its length and temperature.
  c.log.prompt = "The"
  c.log.sample_tokens = 64
  c.log.temperature = 0.8

  c.mesh = ml_collections.ConfigDict()
  # Devices along the replica axis, a divisor of M; 0: the largest that fits.
  c.mesh.replica = 0
  # Devices along the fsdp axis, inside a replica; 0: all that are left. A run may go
  # on with another one, but then outer gradients lose other bits, see wire.block_size.
  c.mesh.fsdp = 0
  return c


def resolve(config) -> ml_collections.FrozenConfigDict:
  """Fills in what follows from other fields, and validates.

  Args:
    config: a ConfigDict with the fields of `default_config`.

  Returns:
    A frozen copy in which steps, tokens, taus, ff_dim, weight decay, wire format
    and, for diloco, the pattern and the overlap have their final values. Resolving
    it again changes nothing.

  Raises:
    ConfigError: a field cannot work.
  """
  c = ml_collections.ConfigDict(config.to_dict())
  _check_fields(c)
  if c.algorithm == "diloco":
    c.fragments.pattern = "whole"
    c.overlap.tau, c.overlap.taus, c.overlap.alpha = 0, (), 0.0
  if c.wire.format == "auto":
    c.wire.format = "fp32" if c.algorithm == "diloco" else "e3m0"
  if not c.overlap.taus:
    c.overlap.taus = (c.overlap.tau,) * c.replicas
  c.overlap.taus = tuple(c.overlap.taus)
  c.model.ff_dim = c.model.ff_dim or 4 * c.model.dim
  tokens_per_step = c.train.batch_size * c.model.seq_len
  if c.train.steps == 0 and tokens_per_step > 0:
    c.train.steps = c.train.tokens // tokens_per_step
    if c.train.steps < 1:
      raise ConfigError(
        f"train.steps is 0 and train.tokens is {c.train.tokens}; set train.steps, or"
        f" train.tokens to at least one batch of {tokens_per_step} tokens."
      )
  c.train.tokens = c.train.steps * tokens_per_step
  validate(c)
  if c.inner.weight_decay < 0:
    c.inner.weight_decay = 1.0 / c.train.steps
  return ml_collections.FrozenConfigDict(c)


def complete(saved: dict) -> ml_collections.FrozenConfigDict:
  """A config that was kept as JSON; fields that came later take their defaults.

  Raises:
    ConfigError: it has a field that is gone, or one that cannot work.
  """
  return resolve(ml_collections.ConfigDict(merge(default_config().to_dict(), saved)))


def validate(c) -> None:
  """Refuses what cannot work, before anything compiles.

  Args:
    c: a config whose derived fields are filled in, see `resolve`.

  Raises:
    ConfigError: one sentence with the field, its value and the remedy.
  """
  _choice("algorithm", c.algorithm, ALGORITHMS)
  _choice("outer.optimizer", c.outer.optimizer, OUTER_OPTIMIZERS)
  _choice("wire.rounding", c.wire.rounding, ("nearest", "stochastic"))
  _choice("wire.exchange", c.wire.exchange, ("gather", "psum"))
  _choice("overlap.transport", c.overlap.transport, ("device", "host"))
  _choice(
    "inner.weight_decay_scaling", c.inner.weight_decay_scaling, ("schedule", "rate")
  )
  for field in ("model.dtype", "model.param_dtype", "inner.gradient_dtype"):
    _choice(field, _get(c, field), ("float32", "bfloat16"))
  for field, least in _LEAST.items():
    value = _get(c, field)
    if not value >= least:
      raise ConfigError(f"{field} is {value}; it must be at least {least}.")
  for field in ("overlap.alpha", "inner.final_fraction"):
    value = _get(c, field)
    if not 0 <= value <= 1:
      raise ConfigError(f"{field} is {value}; choose a value from 0 to 1.")
  for field in ("outer.momentum", "inner.b1", "inner.b2"):
    value = _get(c, field)
    if not 0 <= value < 1:
      raise ConfigError(f"{field} is {value}; choose a value from 0 to below 1.")
  if not c.inner.eps > 0:
    raise ConfigError(f"inner.eps is {c.inner.eps}; choose a value above 0.")
  if c.overlap.transport == "host" and c.wire.exchange == "psum":
    raise ConfigError(
      "overlap.transport is host, but wire.exchange is psum, which reduces on the"
      " devices; choose gather."
    )
  if not 0 < c.wire.density <= 1:
    raise ConfigError(
      f"wire.density is {c.wire.density}; choose a share above 0 and up to 1."
    )
  if c.train.batch_size % (c.replicas * c.train.accumulate):
    raise ConfigError(
      f"train.batch_size is {c.train.batch_size}, which replicas * train.accumulate"
      f" = {c.replicas} * {c.train.accumulate} does not divide; choose a multiple of"
      f" {c.replicas * c.train.accumulate}."
    )
  if c.model.dim % c.model.num_heads:
    raise ConfigError(
      f"model.num_heads is {c.model.num_heads}, which does not divide model.dim ="
      f" {c.model.dim}; choose a divisor (the papers use dim / 64)."
    )
  if c.model.loss_chunk and c.model.seq_len % c.model.loss_chunk:
    raise ConfigError(
      f"model.loss_chunk is {c.model.loss_chunk}, which does not divide"
      f" model.seq_len = {c.model.seq_len}; choose a divisor, or 0."
    )
  if not all(isinstance(tau, int) for tau in c.overlap.taus):
    raise ConfigError(
      f"overlap.taus is {tuple(c.overlap.taus)}, but each tau counts inner steps; give"
      " whole numbers."
    )
  if len(c.overlap.taus) != c.replicas:
    raise ConfigError(
      f"overlap.taus is {tuple(c.overlap.taus)}, one tau for each of"
      f" {len(c.overlap.taus)} replicas, but replicas is {c.replicas}; give one per"
      " replica or leave it empty."
    )
  try:
    make_schedule(c)
  except ConfigError:
    raise
  except ValueError as error:
    raise ConfigError(str(error)) from error


def make_fragments(c) -> tuple[fragments_lib.Fragment, ...]:
  """The fragments of a resolved config."""
  return fragments_lib.make_fragments(
    c.model.num_layers, c.fragments.size, c.fragments.pattern, c.fragments.embedding
  )


def make_schedule(c) -> fragments_lib.Schedule:
  """The schedule of a resolved config."""
  return fragments_lib.Schedule(
    len(make_fragments(c)), c.sync_every, tuple(c.overlap.taus)
  )


def trained_replicas(c) -> int:
  """Copies of the model that are trained: M, or one for data-parallel."""
  return 1 if c.algorithm == "data_parallel" else c.replicas


def num_params(c, with_positions_and_norms: bool = True) -> int:
  """Parameters N of a resolved config.

  Without positions and norms it is 12 N d^2 + V d, the papers' naming.
  """
  m = c.model
  blocks = m.num_layers * (4 * m.dim**2 + 2 * m.dim * m.ff_dim)
  total = blocks + m.vocab_size * m.dim
  if with_positions_and_norms:
    head = m.dim // m.num_heads
    norms = m.num_layers * (2 * m.dim + (2 * head if m.qk_norm else 0)) + m.dim
    total += m.seq_len * m.dim + norms
  return total


def difference(old: dict, new: dict, prefix: str = "") -> list[str]:
  """Lines `field: old -> new` for every leaf in which two config dicts differ."""
  lines = []
  for key in sorted({*old, *new}):
    a, b = old.get(key, "(absent)"), new.get(key, "(absent)")
    if isinstance(a, dict) and isinstance(b, dict):
      lines += difference(a, b, f"{prefix}{key}.")
    elif (list(a) if isinstance(a, tuple) else a) != (
      list(b) if isinstance(b, tuple) else b
    ):
      lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
  return lines


# Smallest value that each numeric field may have.
_LEAST = {
  "seed": 0,
  "replicas": 1,
  "sync_every": 1,
  "outer.learning_rate": 0,
  "wire.block_size": -1,
  "inner.learning_rate": 0,
  "inner.warmup_steps": 0,
  "inner.clip_norm": 0,
  "model.num_layers": 1,
  "model.dim": 1,
  "model.num_heads": 1,
  "model.vocab_size": 4,
  "model.seq_len": 2,
  "model.ff_dim": 1,
  "model.loss_chunk": 0,
  "model.z_loss": 0,
  "train.batch_size": 1,
  "train.accumulate": 1,
  "train.steps": 1,
  "data.prefetch": 0,
  "data.shuffle_window": 0,
  "eval.every": 0,
  "eval.tokens": 0,
  "eval.task_items": 0,
  "eval.batch_size": 1,
  "checkpoint.every": 0,
  "checkpoint.keep": 1,
  "log.every": 1,
  "log.sample_tokens": 0,
  "log.temperature": 0,
  "mesh.replica": 0,
  "mesh.fsdp": 0,
}


def _get(c, field: str):
  for part in field.split("."):
    c = c[part]
  return c


def merge(default: dict, saved: dict) -> dict:
  """Nested `saved` with what it lacks from `default`; JSON's lists become tuples."""
  found = {**default}
  for key, value in saved.items():
    if isinstance(value, dict) and isinstance(default.get(key), dict):
      value = merge(default[key], value)
    found[key] = tuple(value) if isinstance(value, list) else value
  return found


def _choice(field: str, value: str, choices: tuple[str, ...]) -> None:
  if value not in choices:
    raise ConfigError(f"{field} is {value!r}; choose one of {', '.join(choices)}.")


def leaves(c, prefix: str = "") -> dict:
  found = {}
  for key, value in c.items():
    if isinstance(value, ml_collections.ConfigDict | dict):
      found.update(leaves(value, f"{prefix}{key}."))
    else:
      found[f"{prefix}{key}"] = value
  return found


def _check_fields(c) -> None:
  """Unknown, missing and non-finite fields are errors."""
  known, given = leaves(default_config()), leaves(c)
  for field in given:
    if field not in known:
      raise ConfigError(
        f"{field} is set to {given[field]!r}, but there is no such field;"
        " diloco/config.py lists all of them."
      )
  for field in known:
    if field not in given:
      raise ConfigError(
        f"{field} is missing; start from default_config(), where it is"
        f" {known[field]!r}."
      )
    if isinstance(given[field], float) and not math.isfinite(given[field]):
      raise ConfigError(
        f"{field} is {given[field]}; choose a finite number, its default is"
        f" {known[field]!r}."
      )
