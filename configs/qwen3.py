"""A model that transformers, vLLM and lm-evaluation-harness load: Qwen3's architecture.

  python -m diloco.main --config=configs/qwen3.py --workdir=runs/qwen3
  python -m diloco export runs/qwen3 --format=hf --output=runs/qwen3_hf

Trains 1.00M parameters on as many tokens as configs/sample.py, in minutes on two CPU
cores, to a held-out loss of 4.35 nats per token. An argument gives the size of a public
model, or the folder of a public model whose training goes on (docs/models.md):

  --config=configs/qwen3.py:0.6B,M=4                    596,049,920 parameters
  --config=configs/qwen3.py:/models/Qwen3-0.6B-Base     with its tokenizer
"""

import pathlib

from diloco.config import default_config
from diloco.contrib.qwen3 import Qwen3
from diloco.contrib.qwen3.config_json import fields_of
from diloco.errors import ConfigError
from diloco.spec.fields import ModelConfig
from diloco.spec.shapes import matrix_params
from diloco.util.command import parse_options

# {size: (layers, width, feed-forward width, attention heads, whether the output head is
# the embedding)}. All have 8 key-value heads of size 128 (arXiv 2505.09388, table 1).
SIZES = {
  "0.6B": (28, 1024, 3072, 16, True),
  "1.7B": (28, 2048, 6144, 16, True),
  "4B": (36, 2560, 9728, 32, True),
  "8B": (36, 4096, 12_288, 32, False),
}
OPTIONS = {"M": int, "H": int}


def get_config(arg: str = "sample"):
  what, _, rest = arg.partition(",")
  options = parse_options(rest, OPTIONS)
  if what == "sample":
    c = sample()
  elif what in SIZES:
    c = from_scratch(*SIZES[what])
  elif "/" in what:
    c = from_folder(pathlib.Path(what))
  else:
    raise ConfigError(
      f"the size is {what!r}; write sample, {', '.join(SIZES)}, or a folder with a /."
    )
  c.replicas = options.get("M", c.replicas)
  c.sync_every = options.get("H", c.sync_every)
  return c


def sample():
  c = default_config("qwen3")
  c.sync_every, c.fragments.size, c.overlap.tau = 10, 1, 1
  # As in batch_32.py: the run is short, so the outer momentum is low.
  c.outer.optimizer, c.outer.learning_rate = "sgd(momentum=0.5, nesterov=True)", 0.5
  c.model.name = "qwen3"
  c.model.num_layers, c.model.dim, c.model.ff_dim = 4, 128, 352
  c.model.num_heads, c.qwen3.kv_heads, c.qwen3.head_dim = 4, 2, 32
  c.model.vocab_size, c.model.seq_len, c.model.dtype = 0, 128, "float32"
  c.model.remat, c.train.accumulate = "full", 2
  c.inner.learning_rate, c.inner.warmup_steps = 4e-3, 25
  c.train.batch_size, c.train.steps = 32, 400
  c.data.shuffle_window = 1024
  c.eval.every, c.eval.tokens, c.checkpoint.every = 100, 65_536, 100
  return c


def _large():
  """Makes the settings that all runs of public sizes share."""
  c = default_config("qwen3")
  c.model.name, c.model.seq_len = "qwen3", 2048
  c.model.remat, c.model.loss_chunk = "full", 256
  c.inner.gradient_dtype = "bfloat16"
  c.train.batch_size = 256
  c.data.source = "tfds:c4/en:3.1.0"
  c.eval.every, c.eval.tokens = 1000, 2**22
  return c


def from_scratch(layers: int, dim: int, ff_dim: int, heads: int, tied: bool):
  c = _large()
  c.model.num_layers, c.model.dim, c.model.ff_dim = layers, dim, ff_dim
  c.model.num_heads, c.qwen3.kv_heads, c.qwen3.head_dim = heads, 8, 128
  c.qwen3.tie_embeddings, c.model.vocab_size = tied, 151_936
  c.data.tokenizer = "c4_32k.model"
  n = matrix_params(ModelConfig(**c.model, extensions=(Qwen3(**c.qwen3),)))
  c.inner.learning_rate = 3978.82 * n**-0.780  # As in streaming.py.
  c.train.tokens = 20 * n
  return c


def from_folder(folder: pathlib.Path):
  c = _large()
  c.init.checkpoint = str(folder)
  c.update_from_flattened_dict(fields_of(folder))
  c.data.tokenizer = str(folder / "tokenizer.json")
  # The rate is low, because the model is already trained; no law gives this rate.
  c.inner.learning_rate, c.inner.warmup_steps = 3e-5, 100
  c.train.steps = 10_000
  return c
