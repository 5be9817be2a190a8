"""Real models: what they say is what mlx-lm says, and drafting changes none of it."""
