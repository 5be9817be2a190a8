"""Constrained output: what is written, what is drafted, what is refused."""
