"""Tests of mlxspec/cli."""
