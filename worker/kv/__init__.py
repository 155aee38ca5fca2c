"""Paged KV memory: hashing, the block pool, and what the batcher sees of both."""
