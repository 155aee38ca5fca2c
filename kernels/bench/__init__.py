"""Times every operation against what the machine allows; run by `decodefleet bench kernels`."""
