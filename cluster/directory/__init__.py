"""The prefix directory in Redis: which worker holds which KV block. A hint for placement, never needed."""
