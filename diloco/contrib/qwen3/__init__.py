"""Qwen3 (arXiv 2505.09388): a decoder that other programs load by this name. No JAX.

With plugins=('qwen3',), `model.name=qwen3` trains this architecture. init.checkpoint
may be a folder of transformers' Qwen3ForCausalLM, and export writes such a folder
(docs/models.md):

  python -m diloco.main --config=qwen3 --workdir=runs/qwen3
  python -m diloco export runs/qwen3 --format=hf --output=runs/qwen3_hf

Letters: N layers, D width, F feed-forward width, H query heads, G heads of keys and
values, K head size, V vocabulary.
"""

import dataclasses
from typing import Annotated

from diloco.config import Config
from diloco.config.checks import divide
from diloco.errors import ConfigError
from diloco.spec import plugins, shapes
from diloco.spec.fields import Count, ModelConfig, Range
from diloco.spec.plugins import Rule
from diloco.spec.shapes import Architecture
from diloco.util.types import Json

NAME = "qwen3"


@dataclasses.dataclass(frozen=True)
class Qwen3(plugins.Extension):
  """Fields of model.name=qwen3, in addition to those of `model` (docs/models.md)."""

  # Heads of keys and values, a divisor of model.num_heads. 0: model.num_heads.
  kv_heads: Count = 0
  # Size of a head, an even number; if set, model.num_heads need not divide model.dim.
  # 0: model.dim / model.num_heads.
  head_dim: Count = 0
  # Base of the frequencies that rotate queries and keys.
  rope_theta: Annotated[float, Range(1)] = 1e6
  # Number that RMSNorm adds to the mean square.
  norm_eps: Annotated[float, Range(0, 1, open=True)] = 1e-6
  # Whether the head is the token embedding. False: the head has its own matrix.
  tie_embeddings: bool = True

  def fill_in(self, c: Config) -> Json:
    if c.model.name != NAME:
      return {}
    dim, heads = c.model.dim, c.model.num_heads
    divide("model.dim", dim, "model.num_heads", 0 if self.head_dim else heads)
    size = self.head_dim or dim // heads
    return {"qwen3.kv_heads": self.kv_heads or heads, "qwen3.head_dim": size}

  def check(self, c: Config) -> None:
    if c.model.name != NAME:
      return
    divide("model.num_heads", c.model.num_heads, "qwen3.kv_heads", self.kv_heads)
    if not c.model.qk_norm:
      raise ConfigError(
        "model.qk_norm is False, but model.name=qwen3 always normalises queries and"
        " keys; set it to True, or set model.name=decoder."
      )
    if self.head_dim % 2:
      raise ConfigError(
        f"the head size is {self.head_dim}, but model.name=qwen3 rotates pairs; set"
        " qwen3.head_dim or model.num_heads so that it is even."
      )


def parameters(m: ModelConfig) -> shapes.Shapes:
  """Returns the parameter shapes of a resolved config."""
  n, d, f, q = m.num_layers, m.dim, m.ff_dim or 4 * m.dim, m.of(Qwen3)
  queries, keys = m.num_heads * m.head_size, q.kv_heads * m.head_size
  norm = lambda *shape: {"scale": shape}
  table = (m.vocab_size, d)
  return {
    "embed": {"tokens": table, "norm": norm(d)}
    | ({} if q.tie_embeddings else {"head": table}),
    "blocks": {
      "attention_norm": norm(n, d),
      "attention": {
        "q": (n, d, queries),
        "k": (n, d, keys),
        "v": (n, d, keys),
        "out": (n, queries, d),
        "q_norm": norm(n, m.head_size),
        "k_norm": norm(n, m.head_size),
      },
      "ff_norm": norm(n, d),
      "ff": {"gate": (n, d, f), "up": (n, d, f), "down": (n, f, d)},
    },
  }


def attention_flops(m: ModelConfig) -> float:
  """Returns the training FLOPs per token of all attention scores, masked ones too."""
  return 12.0 * m.num_layers * m.num_heads * m.head_size * m.seq_len


Qwen3.rules = tuple(
  Rule(
    f"{NAME}.{field.name}",
    None,
    f"which only model.name={NAME} has",
    {"model.name": (NAME,)},
  )
  for field in dataclasses.fields(Qwen3)
)
plugins.register("fields", NAME, Qwen3)
plugins.register(
  "model.name", NAME, Architecture(f"{__name__}.model", parameters, attention_flops)
)
