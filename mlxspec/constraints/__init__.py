"""Constrained output: a grammar says which tokens may come next, drafts and rows obey it."""
