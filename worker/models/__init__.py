"""Model families, one file each over shared layers, and the loading of their weights."""
