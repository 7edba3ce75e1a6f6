"""Payloads of another fsdp layout than the mesh's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco import config as config_lib
from diloco.run import mesh as run_mesh
from diloco.wire import exchange, payload


@pytest.mark.parametrize(
  ("fields", "before", "warns"),
  [
    ({}, 4, True),
    ({}, 2, False),
    ({}, None, False),
    ({"wire.format": "bf16"}, 4, False),
    ({"wire.format": "bf16", "wire.compressor": "topk"}, 4, True),
    ({"algorithm": "data_parallel"}, 4, False),
  ],
)
def test_other_shards_are_told(tiny, monkeypatch, fields, before, warns):
  said = []
  warning = lambda message, *values: said.append(message % values)
  monkeypatch.setattr(exchange.logging, "warning", warning)
  tiny.update_from_flattened_dict(fields)
  exchange.warn_of_other_shards(config_lib.resolve(tiny), before, 2)
  assert [text[:25] for text in said] == ["mesh.fsdp was 4 and is 2:"] * warns


@pytest.mark.parametrize(("shards", "compressor"), [(2, "topk"), (4, "quantize")])
def test_a_payload_of_another_layout_has_the_values_that_were_sent(
  tiny, shards, compressor
):
  tiny.wire.compressor = compressor
  c = config_lib.resolve(tiny)
  codec = payload.make_codec_from_config(c)
  mesh = run_mesh.make_mesh(c, jax.devices()[:1])
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  # Weight axes of 8 are divided; 5 is not, so that every shard holds all of it.
  delta_M = {
    "blocks": {"w": draw(2, 3, 8, 6), "odd": draw(2, 3, 5)},
    "embed": {"tokens": draw(2, 8, 4)},
  }
  keys = jax.random.split(jax.random.key(1), 2)
  encode = jax.jit(jax.vmap(lambda tree, key: payload.encode_tree(codec, tree, key)))
  decode_one = lambda code, like: payload.decode_tree(codec, code, like)
  decode = jax.jit(jax.vmap(decode_one, in_axes=(0, None)))
  codes, values = [], []
  for s in range(shards):
    mine = slice(s * 8 // shards, (s + 1) * 8 // shards)
    part_M = {
      "blocks": {**delta_M["blocks"], "w": delta_M["blocks"]["w"][:, :, mine]},
      "embed": {"tokens": delta_M["embed"]["tokens"][:, mine]},
    }
    codes.append(encode(part_M, keys))
    values.append(decode(codes[-1], jax.tree.map(lambda x: x[0], part_M)))

  like = jax.tree.map(lambda x: x[0], delta_M)
  sent = jnp.stack(codes, axis=1)
  found = jax.jit(lambda x: exchange.decode_all(codec, mesh, x, like))(sent)
  np.testing.assert_array_equal(
    found["blocks"]["w"], np.concatenate([v["blocks"]["w"] for v in values], axis=2)
  )
  np.testing.assert_array_equal(found["blocks"]["odd"], values[0]["blocks"]["odd"])
  np.testing.assert_array_equal(
    found["embed"]["tokens"],
    np.concatenate([v["embed"]["tokens"] for v in values], axis=1),
  )
  reduced = jax.jit(lambda x: exchange.reduce_own(codec, mesh, x, like, 2))
  mean, _ = reduced(sent)
  np.testing.assert_allclose(
    mean["blocks"]["w"], np.mean(found["blocks"]["w"], axis=0), rtol=1e-6
  )
