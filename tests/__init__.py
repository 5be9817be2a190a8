"""The promises of mlxspec, each with tests that fail when it is broken."""
