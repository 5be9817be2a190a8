"""Demo models: how they are named, fetched, converted and loaded."""
