"""The router's side of the data plane: clients of scheduler and workers, on one event loop."""
