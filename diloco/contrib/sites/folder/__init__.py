"""A folder or a bucket instead of a coordinator (docs/sites.md)."""
