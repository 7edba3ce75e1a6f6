"""Types that many files name; importing them needs no JAX."""

from typing import Any, TypeAlias

# PyTree: a tree of arrays as `jax.tree` sees it: nested dicts, tuples, named tuples and
# registered dataclasses, with leaves such as `jax.Array`, `np.ndarray`,
# `jax.ShapeDtypeStruct` or a `Sharding`. Python's types cannot say which keys and
# shapes a tree has, so the docstring of each function does. M replicas share one tree
# with the suffix `_M`, leaves (M, ...).
PyTree: TypeAlias = Any

# Json: a JSON object, as a config, a summary or a record in a file: string keys, and
# values of JSON.
Json: TypeAlias = dict[str, Any]
