"""Tests of mlxspec/drafting."""
