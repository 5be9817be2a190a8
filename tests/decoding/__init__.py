"""Tests of mlxspec/decoding."""
