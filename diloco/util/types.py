"""Types that many files use; importing this file needs no JAX."""

from typing import Any, TypeAlias

# PyTree: a tree of arrays as `jax.tree` sees it: nested dicts, tuples, named tuples and
# registered dataclasses, with leaves such as `jax.Array`, `np.ndarray`,
# `jax.ShapeDtypeStruct` or a `Sharding`. Python's types cannot say which keys and
# shapes a tree has, so the docstring of each function says this. A tree whose name ends
# in `_M` holds M replicas; its leaves have the shapes (M, ...).
PyTree: TypeAlias = Any

# Json: a JSON object, such as a config, a summary or a record in a file. Its keys are
# strings, and its values are values of JSON.
Json: TypeAlias = dict[str, Any]
