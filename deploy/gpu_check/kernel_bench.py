"""Every kernel against its roofline and its peers, as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from decodefleet.kernels.bench.run import bench_rows, operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    limits, rows = bench_rows(operations(), print, torch.device(options.device))
    options.json.write_text(json.dumps({"limits": limits, "rows": rows}))


if __name__ == "__main__":
    main()
