"""One model on several ranks: who holds what, how they add up, and how rank 0 leads the others."""
