"""Layers shared by the model families: plain objects over weights, computing through `kernels.ops`."""
