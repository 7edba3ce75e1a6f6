"""What bandwidth a method needs and how long training takes. Imports no JAX."""
