"""Methods of later papers: each has a file or a folder; docs/methods.md compares them.

`qwen3` is not a method but an architecture that other programs can load, too
(docs/models.md).

A method is a plug-in: `--config.plugins=sparta` adds the method's fields to a config.
Some plug-ins add a choice to an existing field instead, such as the compressor
error_feedback. No other file of the package knows the method. The plug-in's file holds
all that the method adds: fields, rules about other fields, the payload, and functions
(`diloco.spec.plugins` lists the hooks). `diagnostics/` is a plug-in that measures the
syncs of any method.

SparseLoCo is chunked_topk, error_feedback and bins; MuLoCo is error_feedback, bins and
the inner optimizer Muon.

Some methods need no file, because the fields of every config are enough:

SNOO (arXiv 2510.15830) is DiLoCo with M = 1: after every H steps of AdamW or Muon,
Nesterov momentum takes one step along the outer gradient. Nothing is sent. The authors
report that SNOO trains 1.5 to 2.5 times as fast as its inner optimizer alone, up to
1e23 FLOPs (source: notes of others).

Muon as inner optimizer, as in MuLoCo (arXiv 2505.23725): Muon orthogonalises the
momentum of every matrix, and AdamW trains the rest. `optimizers.py` tells Muon which
tensors are stacks of matrices. `consistent_rms=0.2` makes Muon's updates as large as
AdamW's (arXiv 2502.16982, section 2.2). MuLoCo's authors report a lower loss than
DiLoCo with AdamW for every M, from 150M to 3.1B parameters (sources: abstract, code).
"""

# Former fields that plug-ins replaced: {former field: (its default, the new field, an
# example of a value)}. For a removed field: (its default, "", what was removed). A
# saved config may still contain the default of a former field.
MOVED = {
  "log.diagnostics_every": (0, "diagnostics.every", 4),
  "model.head_dim": (0, "qwen3.head_dim", 128),
  "model.norm_eps": (1e-6, "qwen3.norm_eps", 1e-6),
  "model.num_kv_heads": (0, "qwen3.kv_heads", 8),
  "model.rope_theta": (1e6, "qwen3.rope_theta", 1e6),
  "model.tie_embeddings": (True, "qwen3.tie_embeddings", False),
  "outer.decay_syncs": (0, "", "falling"),
  "outer.fedpart": (False, "fedpart.on", True),
  "outer.final_fraction": (1.0, "", "falling"),
  "outer.final_momentum": (-1.0, "", "falling"),
  "outer.restart_every": (0, "", "restarted"),
  "wire.chunk": (0, "wire.compressor", "chunked_topk(chunk=4096)"),
  "wire.rounding": ("nearest", "", "stochastic"),
  "wire.error_feedback": (0, "wire.compressor", "error_feedback(beta=1, of='topk')"),
}
