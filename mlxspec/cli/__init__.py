"""The command line: what mlx-lm's commands do, and what speculation adds to them."""
