"""Methods of later papers, a file or a folder each; docs/methods.md compares them.

`qwen3` is an architecture instead, with the folders of other programs (docs/models.md).

A method is a plug-in: `--config.plugins=sparta` gives a config its fields, or the names
that it adds to others, such as the compressor error_feedback; no other file of the
package knows the method. A file holds all that its method adds: fields, rules about
other fields, what is sent, and the functions (`diloco.spec.plugins` lists the hooks).
`diagnostics/` is a plug-in that measures the syncs of any method.

SparseLoCo is chunked_topk, error_feedback and bins; MuLoCo is error_feedback, bins and
the inner optimizer Muon.

Some methods need no file, because the fields of every config are enough:

SNOO (arXiv 2510.15830) is DiLoCo with M = 1: every H steps of AdamW or Muon, Nesterov
momentum steps along the outer gradient, and nothing is sent. Its authors report that it
trains 1.5 to 2.5 times as fast as its inner optimizer alone, up to 1e23 FLOPs (source:
notes of others).

Muon as inner optimizer, as in MuLoCo (arXiv 2505.23725): Muon orthogonalises the
momentum of every matrix, and AdamW trains the rest. `optimizers.py` tells Muon which
tensors are stacks of matrices. `consistent_rms=0.2` makes Muon's updates as large as
AdamW's (arXiv 2502.16982, section 2.2). MuLoCo's authors report a lower loss than
DiLoCo with AdamW for every M, from 150M to 3.1B parameters (sources: abstract, code).
"""

# Fields that became choices or fields of plug-ins: {former field: (its default, the
# field now, an example of its value)}. If it was removed, (its default, "", the name in
# `plugins.REMOVED`). A saved config may contain that default.
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
