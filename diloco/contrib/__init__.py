"""Methods of later papers: each has a file or a folder; docs/methods.md compares them.

`qwen3` is not a method but an architecture that other programs can load, too
(docs/models.md).

A method is a plug-in: `--config.plugins=sparta` adds the method's fields to a config.
Some plug-ins add a choice to an existing field instead, such as the compressor
error_feedback. No file of diloco/algorithm names a method. The plug-in's file holds
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
