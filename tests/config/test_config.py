"""Resolving a config: derived fields, and one clear error per mistake."""

import re

import conftest
import pytest

from diloco.config import changed, complete, default_config, resolve
from diloco.config.resolve import leaves
from diloco.errors import ConfigError


def make(**fields):
  c = default_config()
  c.train.steps = 200
  conftest.update(c, fields)
  return c


ALONE, HOST = {"replicas": 1}, {"overlap.transport": "host"}
PLAIN, SITES = {"algorithm": "data_parallel"}, {"overlap.transport": "sites"}
DELAYED, ELASTIC = {"delayed_averaging.on": True}, {"elastic.pull": 0.3}
FEDPART = {"fedpart.on": True}


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"algorithm": "sgd"}, "algorithm is 'sgd'; choose one of data_parallel, diloco"),
    ({"sync_every": 4, "overlap.tau": 4}, "overlap.tau is 4, but sync_every is 4; tau"),
    ({"overlap.taus": (-1, 1)}, "overlap.tau is -1, but sync_every is 100; tau must"),
    ({"train.batch_size": 33}, "train.batch_size is 33, which replicas"),
    ({"data.shards": 3}, "train.batch_size is 256, which data.shards = 3 does not"),
    ({"data.shards": 1}, "data.shards is 1, which replicas = 2 does not divide; ch"),
    ({"fragments.size": 0}, "fragments.size is 0, but the model has 6 layers"),
    ({"fragments.size": 7}, "fragments.size is 7, but the model has 6 layers"),
    ({"fragments.pattern": "odd"}, "fragments.pattern is 'odd'; choose one of strided"),
    ({"overlap.alpha": 1.5}, "is 1.5; it must be at least 0 and at most 1"),
    ({"overlap.taus": (1, 2, 3)}, r"overlap.taus is \(1, 2, 3\); give 2 whole numbers"),
    ({"overlap.taus": ("1,a",)}, "overlap.taus is .*; give values such as"),
    ({"wire.density": 0.0}, "wire.density is 0.0; it must be above 0 and at most"),
    ({"wire.compressor": "topk(k=1)"}, "wire.compressor is 'topk.k=1.', but topk"),
    ({"wire.compressor": "topk("}, r"wire.compressor is 'topk\('; write a name, alone"),
    ({**ALONE, "des_loc.second_every": 3}, "is 3, but replicas is 1, and a single"),
    ({**ALONE, "sparta.share": 0.1}, r"replicas is 1, .*, or set sparta.share=0\.0"),
    ({"warm_start.momentum": False}, "is False, but warm_start.steps is 0; .*=true"),
    ({"model.num_heads": 7}, r"model.dim is \d+, which model.num_heads = 7 does not d"),
    ({"model.loss_chunk": 300}, "model.seq_len is 2048, which model.loss_chunk = 300"),
    ({"eval.test_tokens": 9, "eval.tokens": 0}, "test_tokens is 9, .* set eval"),
    ({"data.source": "tfds:a", "data.eval_split": "train"}, "is 'train', but this spl"),
    ({"train.steps": 0}, "train.steps is 0 and train.tokens is 0; set train.steps"),
    ({"train.tokens": 1e6}, "train.tokens is 1,000,000, but train.steps is 200, which"),
    ({"train.steps": 0, "train.tokens": 10}, "is 10; .* one batch of 524288 tokens"),
    ({"inner.learning_rate": float("nan")}, "inner.learning_rate is nan; give a fini"),
    ({"wire.compressor": "zip"}, "wire.compressor is 'zip'; choose one of quantize"),
    ({"wire.format": "e9m9"}, "wire.format is 'e9m9'; choose fp32, bf16 or eXmY"),
    ({**HOST, "diagnostics.every": 3}, "is 3, which .*transport is host; choose devic"),
    ({**HOST, "des_loc.first_every": 3}, "is 3, .* is host; choose device, or set"),
    ({**DELAYED, "overlap.alpha": 0.5}, "but overlap.alpha is 0.5; choose 0"),
    ({**DELAYED, "overlap.taus": (1, 2)}, r"taus is \(1, 2\); choose equal ones"),
    ({**DELAYED, "overlap.tau": 0}, "overlap.tau is 0: no inner step runs during"),
    ({**ELASTIC, "overlap.alpha": 0.5}, r"elastic\.pull.*overlap\.alpha"),
    ({**ELASTIC, "overlap.taus": (1, 2)}, r"elastic\.pull.*choose equal ones"),
    ({**ELASTIC, **DELAYED}, r"elastic\.pull.*delayed_averaging\.on"),
    ({**FEDPART, "warm_start.steps": 4}, "on is True, .* but warm_start.steps is 4"),
    ({**FEDPART, "algorithm": "diloco"}, "on is True, but the only fragment is"),
    ({**SITES, "warm_start.steps": 4}, "steps is 4, which .*transport is sites"),
  ],
)
def test_errors_name_field_value_and_remedy(fields, message):
  with pytest.raises(ConfigError, match=message) as error:
    resolve(make(**fields))
  name = re.match(r"[\w.]+", str(error.value))[0]
  assert name in fields or message.startswith(name)


@pytest.mark.parametrize(
  ("field", "value", "useless", "useful"),
  [
    ("data.eval_split", "test", {}, {"data.eval_source": "tfds:c4/en:3.1.0"}),
    ("data.train_split", "train[:9%]", {}, {"data.source": "tfds:c4/en:3.1.0"}),
    ("eval.task_items", 3, {}, {"eval.tasks": "piqa"}),
    ("inner.weight_decay_scaling", "rate", {"inner.weight_decay": 0}, {}),
    ("log.prompt", "We", {"log.sample_tokens": 0}, {}),
    ("log.temperature", 0.1, {"log.sample_tokens": 0}, {}),
    ("overlap.tau", 3, {"overlap.taus": (1, 2)}, {"overlap.taus": (1, 3)}),
    ("wire.density", 0.5, {}, {"wire.compressor": "topk"}),
  ],
)
def test_a_field_without_effect_is_refused(field, value, useless, useful):
  resolve(make(**{field: value}, **useful))
  c = make(**{field: value}, **useless)
  said = rf"^{field} is {re.escape(str(value))}, .*; change that, or "
  with pytest.raises(ConfigError, match=said):
    resolve(c)
  complete(c.to_dict())  # A run of an older version can be read.


def test_an_unknown_field_is_refused_and_a_missing_one_has_its_default():
  c = make()
  with c.unlocked():
    c.model.colour = 3
  with pytest.raises(
    ConfigError,
    match=r"model.colour is 3, but there is no such field; diloco.main --print",
  ):
    resolve(c)
  c = make(**{"overlap.taus": ("",), "plugins": ("",)})  # As of empty flags.
  del c.outer.learning_rate
  assert resolve(c) == resolve(make())


def test_tokens_do_not_pass_the_limit_of_the_steps(tiny):
  tiny.train.steps, tiny.train.tokens = 0, 10**18
  with pytest.raises(ConfigError, match=r"train.steps is .*; it must be"):
    resolve(tiny)


def test_resolving_fills_in_and_is_idempotent():
  c = make(**{"train.steps": 0, "train.tokens": 100_000_000})
  r = resolve(c)
  assert r.train.steps == 100_000_000 // (256 * 2048)
  assert r.train.tokens == r.train.steps * 256 * 2048
  assert r.inner.weight_decay == 1 / r.train.steps
  taus = tuple(r.overlap.taus)
  assert (r.wire.format, taus, r.model.ff_dim) == ("e3m0", (1, 1), 2048)
  assert resolve(r) == r
  r = changed(resolve(make()), {"model.dim": 64, "overlap.alpha": 0.5})
  assert (r.model.dim, r.overlap.alpha, r.train.steps) == (64, 0.5, 200)


def test_a_resolved_config_is_typed_frozen_and_hashable():
  r = resolve(make())
  assert {r, resolve(make())} == {r}
  assert r != resolve(make(seed=1))
  with pytest.raises(AttributeError):
    r.wire.format = "fp32"
  assert leaves(r.to_dict()).keys() == leaves(default_config().to_dict()).keys()


def test_diloco_is_one_fragment_without_overlap():
  r = resolve(make(algorithm="diloco", **{"overlap.tau": 5, "overlap.alpha": 0.5}))
  assert len(r.make_fragments()) == 1
  assert tuple(r.overlap.taus) == (0, 0)
  assert (r.overlap.alpha, r.wire.format) == (0.0, "fp32")
  assert changed(r, {"algorithm": "streaming"}) == resolve(make())


def test_a_run_that_never_synchronises_some_parameters_is_refused():
  # 3 fragments with sync_every=100 are first sent at steps 100, 133 and 166.
  message = "train.steps is 165, .* sync_every=100 .* at step 166, .* outer.final_sync"
  with pytest.raises(ConfigError, match=message):
    resolve(make(**{"train.steps": 165}))
  assert resolve(make(**{"train.steps": 166})).num_syncs() == (1, 1, 1)
  assert resolve(make(**{"train.steps": 200})).num_syncs() == (2, 1, 1)
  final = {"train.steps": 10, "outer.final_sync": True}
  assert resolve(make(**final)).num_syncs() == (1, 1, 1)
  warm = {"train.steps": 150, "warm_start.steps": 150}
  message = "after 150 joint steps .* lower the number of joint steps or"
  with pytest.raises(ConfigError, match=message):
    resolve(make(**warm))
  # A saved config is read whatever its number of syncs.
  assert complete(make(**{"train.steps": 10}).to_dict()).train.steps == 10


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("error_feedback(beta=0.9, of='quantize')", "is fp32: no code loses anything"),
    ("error_feedback(beta=0.9, of='dare')", "dare enlarges the values that it sends"),
    ("error_feedback(beta=2, of='topk')", "beta is 2; give a number above 0"),
    ("error_feedback(beta=0.9, of='zip')", "but of is 'zip'; choose one"),
    ("error_feedback(beta=0.9, of=3)", "but of is 3; give a compressor, such as"),
    ("error_feedback(beta=1, of=\"error_feedback(beta=1,of='topk')\")", "of its own"),
    ("error_feedback(of='topk')", "missing 1 required .*: 'beta'"),
    ("chunked_topk(chunk=0)", "chunk is 0, but must be a whole number of at least 1"),
  ],
)
def test_arguments_of_a_compressor_that_cannot_work_are_refused(text, message):
  fields = {"plugins": ("error_feedback", "chunked_topk"), "wire.format": "fp32"}
  with pytest.raises(ConfigError, match=f"wire.compressor.*{message}"):
    resolve(make(**fields, **{"wire.compressor": text}))
  of = "error_feedback(beta=0.9, of='chunked_topk(chunk=64)')"
  resolve(make(**fields, **{"wire.compressor": of}))


def test_data_parallel_averages_nothing_between_syncs():
  c = resolve(make(**{"sparta.share": 0.01, "des_loc.first_every": 3}))
  assert len(c.averages) == 2
  assert changed(c, PLAIN).averages == {}


def test_data_parallel_ignores_the_fields_of_the_outer_step():
  fields = {"sync_every": 1, "overlap.taus": (1, 2, 3), "wire.exchange": "psum"}
  fields |= {"model.num_layers": 2, "train.steps": 1}
  assert resolve(make(**PLAIN, **HOST, **fields)).train.steps == 1
