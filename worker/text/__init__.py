"""Text on both sides of the model: tokens, chat templates, streaming output, stop strings. Torch-free."""
