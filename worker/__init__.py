"""Data plane: one model replica on one or more GPUs. No ray, no redis, no HTTP."""
