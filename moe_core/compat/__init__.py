"""Adapters between the engine and other libraries. Each module imports only its own library."""
