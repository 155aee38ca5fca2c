"""Control plane: everything that spans machines. No torch, no triton."""
