"""One colour per algorithm, in every figure of the project. No JAX."""

# Colours of seaborn's palette "colorblind".
COLORS = {
  "data_parallel": "#0173b2",  # blue
  "diloco": "#de8f05",  # orange
  "streaming": "#029e73",  # green
}
