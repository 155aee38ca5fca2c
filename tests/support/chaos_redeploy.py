"""Deploys what a running `decodefleet serve` serves again with other options: an upgrade, a change of scale.

    python chaos_redeploy.py FOLDER REDIS_URL GCS_ADDRESS [NAME=VALUE ...]

`redeploy` runs this as a process of its own, which has the keys to the private cluster in its environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from chaos_cluster import Cluster

# the keys of a private cluster, and that it is on loopback only
OF_THE_CLUSTER = ("RAY_AUTH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")


def redeploy(cluster: Cluster, **changes: object) -> None:
    """With the cluster's options and these changes. Returns when it is asked for, not when it is done."""
    options = {"model": cluster.model, "port": cluster.served.port, **cluster.options, **changes}
    census = cluster.served.census()
    folder = re.findall(r"logs: (\S+)", cluster.served.log.read_text())[-1]
    socket = re.findall(r"unixsocket:(\S+)", " ".join(census["redis"][-1].cmdline()))[0]
    gcs = re.findall(r"--gcs-address=(\S+)", " ".join(census["raylet"][-1].cmdline()))[0]
    environ = census["controller"][-1].environ()
    keys = {name: value for name, value in environ.items() if name.startswith(OF_THE_CLUSTER)}
    subprocess.run(
        [sys.executable, __file__, folder, f"unix://{socket}", gcs]
        + [f"{name}={value}" for name, value in options.items()],
        env=os.environ | keys,
        check=True,
    )


def main(folder: str, redis_url: str, gcs: str, *options: str) -> None:
    import ray
    from ray import serve

    from decodefleet.cluster.app import LocalRun, build_application
    from decodefleet.cluster.config import load_config
    from decodefleet.cluster.launcher import APPLICATION

    values = dict(option.split("=", 1) for option in options) | {"redis_url": redis_url}
    config = load_config(env={f"DECODEFLEET_{name.upper()}": value for name, value in values.items()}).config
    ray.init(address=gcs, log_to_driver=False, configure_logging=False)
    application = build_application(config, LocalRun(Path(folder), f"ipc://{folder}/news"))
    serve.run_many([serve.RunTarget(application, name=APPLICATION)], wait_for_applications_running=False)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
