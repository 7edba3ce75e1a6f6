"""The files of a group of sites, and the rules by which rounds close. No JAX."""
