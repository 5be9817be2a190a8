"""Tests of mlxspec/engine."""
