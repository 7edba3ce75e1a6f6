"""The papers' configs: every scale resolves to the papers' shapes and budgets."""

import importlib.util
import pathlib

import pytest

from diloco import config as config_lib
from diloco import recommend
from diloco.scaling_laws import paper

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def load(name, arg=None):
  spec = importlib.util.spec_from_file_location(
    f"config_{name}", CONFIGS / f"{name}.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module, config_lib.resolve(module.get_config(*([arg] if arg else [])))


# arXiv 2503.09799, Table 3, with the 70M of its first row corrected to 700M.
TABLE_3 = """35M,6,8,512,2048,700000000
90M,9,12,768,3072,1800000000
180M,12,16,1024,4096,3600000000
330M,15,20,1280,5120,6600000000
550M,18,24,1536,6144,11000000000
1.3B,24,32,2048,8192,26000000000
2.4B,30,40,2560,10240,48000000000
4B,36,48,3072,12288,80000000000
10B,48,64,4096,16384,200000000000"""

# arXiv 2501.18512, Table 2: feed-forward width, layers, heads, billions of tokens.
TABLE_2 = """35M,2048,6,8,0.7
100M,3072,9,12,1.5
200M,4096,12,16,3.5
300M,5120,15,20,6
500M,6144,18,24,11
1B,8192,24,32,25
4B,12288,36,48,83"""


@pytest.mark.parametrize("row", TABLE_3.splitlines())
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_scaling_laws_table_3(row, replicas):
  scale, layers, heads, dim, ff, tokens = row.split(",")
  _, c = load("chinchilla", f"{scale},M={replicas}")
  m = c.model
  shape = (m.num_layers, m.num_heads, m.dim, m.ff_dim)
  assert shape == tuple(map(int, (layers, heads, dim, ff)))
  per_step = c.train.batch_size * 2048
  assert 0 <= int(tokens) - c.train.tokens < per_step
  n = config_lib.num_params(c, with_positions_and_norms=False)
  assert c.train.tokens / n == pytest.approx(20, rel=0.1)
  assert 1e-6 < c.inner.learning_rate < 0.02
  # Fragments keep their three layers, so deeper models have more of them.
  assert len(config_lib.make_fragments(c)) == int(layers) // 3 + 1


@pytest.mark.parametrize("row", TABLE_2.splitlines())
def test_streaming_table_2(row):
  scale, ff, layers, heads, billions = row.split(",")
  _, c = load("streaming", scale)
  assert (c.model.ff_dim, c.model.num_layers, c.model.num_heads) == tuple(
    map(int, (ff, layers, heads))
  )
  assert c.train.tokens == pytest.approx(float(billions) * 1e9, rel=0.01)
  assert (c.model.vocab_size, c.model.seq_len, c.sync_every) == (32_000, 1024, 100)


def test_dolma_and_overtraining():
  _, c = load("streaming", "1B,data=dolma,tokens=100e9")
  assert (c.model.seq_len, c.data.eval_split) == (2048, "train[99%:]")
  assert c.train.tokens == pytest.approx(100e9, rel=1e-3)
  _, c = load("chinchilla", "90M,M=1,overtrain=4,H=100")
  assert (c.sync_every, c.train.tokens) == (100, pytest.approx(7.2e9, rel=1e-3))


def test_hyperparameters_are_those_of_the_laws():
  for arg, how in (
    ("1.3B,M=4", ("joint", "streaming")),
    ("1.3B,M=4,method=independent,algorithm=diloco", ("independent", "diloco")),
  ):
    _, c = load("chinchilla", arg)
    n = paper.num_params(c.model.num_layers, c.model.dim)
    hyper = recommend.recommend(n, 4, *how)
    assert c.inner.learning_rate == hyper.learning_rate
    assert c.train.batch_size == hyper.batch_sequences
    assert c.outer.learning_rate == hyper.outer_learning_rate == 0.6
  _, c = load("chinchilla", "1.3B,M=4,algorithm=data_parallel")
  assert c.inner.learning_rate == paper.law("inner_lr", "data_parallel")(n)


@pytest.mark.parametrize("size", ["10M", "60M", "700M", "3e9", "7B", "70B"])
@pytest.mark.parametrize("replicas", [1, 3, 16])
def test_any_other_size_has_the_nearest_shape_of_the_family(size, replicas):
  _, c = load("chinchilla", f"{size},M={replicas}")
  n = paper.num_params(c.model.num_layers, c.model.dim)
  assert n == pytest.approx(paper.number(size), rel=0.2)
  assert c.model.num_layers == pytest.approx(0.75 * c.model.num_heads, abs=0.5)
  assert c.train.tokens == pytest.approx(20 * n, rel=0.01)
  assert c.train.batch_size % replicas == 0


@pytest.mark.parametrize(
  ("name", "arg"),
  [
    ("chinchilla", "7X"),
    ("chinchilla", "2M"),
    ("chinchilla", "35M,K=2"),
    ("chinchilla", "35M,M"),
    ("streaming", "7B"),
    ("streaming", "35M,K=2"),
  ],
)
def test_arguments_that_are_not_understood(name, arg):
  with pytest.raises(ValueError, match=r"is not understood; write a s.* of 35M"):
    load(name, arg)


def test_independent_laws_exist_for_few_replicas():
  with pytest.raises(ValueError, match="no law of its own for diloco_M3"):
    load("chinchilla", "35M,M=3,method=independent")


def test_the_sample_is_small_and_has_at_least_four_fragments():
  _, c = load("sample")
  assert 0.8e6 < config_lib.num_params(c) < 1.3e6
  assert (c.replicas, tuple(c.overlap.taus), c.wire.format) == (2, (1, 1), "e3m0")
  assert len(config_lib.make_fragments(c)) >= 4
  schedule = config_lib.make_schedule(c)
  sends = sum(len(schedule.sends(t)) for t in range(1, c.train.steps + 1))
  assert sends >= 30
