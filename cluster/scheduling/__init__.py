"""The global scheduler: queue, placement and reservation in one pure library, and the server around it."""
