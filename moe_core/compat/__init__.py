"""Adapters between the engine and other libraries, each of which imports its own library."""
