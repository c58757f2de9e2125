"""Offline preparation of data: shards, staging, class maps."""
