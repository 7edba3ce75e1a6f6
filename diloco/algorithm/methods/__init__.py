"""Methods of later papers, each off by default; docs/methods.md lists them."""
