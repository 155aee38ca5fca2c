"""The steps that make the image, run for real in a bare environment, and what they leave, without a compiler.

The order and the files of each step are the Dockerfile's.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import make_certificate
from dockerfile import ROOT, image_environment, instructions
from packaging.utils import canonicalize_name
from served import Served
from waiting import until

from decodefleet.cluster.health import unverified
from decodefleet.kernels.cpu.prebuilt import LEVELS, processor_flags

NO_COPY = shutil.ignore_patterns("__pycache__", "*.egg-info", "prebuilt")
INSTALL_LIMIT_S = 900


class Image:
    """What the build stage makes, below `folder` in place of /opt/decodefleet."""

    def __init__(self, folder: Path) -> None:
        self.source, self.root = folder / "source", folder / "decodefleet"
        subprocess.run([sys.executable, "-m", "venv", self.root], check=True)

    def environment(self) -> dict[str, str]:
        """Without our packages, and with nothing but the system's own programs."""
        kept = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "HTTP", "SSL"))}
        # the index that `make` took torch from: its files are in pip's cache already
        index = {"TORCH_CPU_INDEX": os.environ.get("TORCH_CPU_INDEX", "")}
        return kept | index | {"PATH": f"{self.root / 'bin'}:{os.defpath}", "HOME": os.environ["HOME"]}

    def copy(self, names: list[str]) -> None:
        *sources, target = names
        for name in sources:
            place = self.source / target / (Path(name).name if target.endswith("/") else "")
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.source / target, symlinks=True, ignore=NO_COPY)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, place)

    def run(self, *words: str | Path) -> str:
        done = subprocess.run(
            [*map(str, words)],
            cwd=self.source,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_LIMIT_S,
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def build(self) -> None:
        for word, rest in instructions():
            if word == "COPY" and "--from" not in rest:
                self.copy(rest.split())
            for step in re.findall(r"deploy/install\.sh ([^&]+)", rest) if word == "RUN" else ():
                words = (
                    step.replace("/opt/decodefleet", str(self.root)).replace('"${VARIANT}"', "cpu").split()
                )
                self.run("deploy/install.sh", *words)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("image")
    image = Image(folder)
    image.build()
    yield image
    # gigabytes
    shutil.rmtree(folder)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * INSTALL_LIMIT_S),
    pytest.mark.skipif(
        "DECODEFLEET_LONG" not in os.environ, reason="installs all anew: DECODEFLEET_LONG=1 runs it"
    ),
]


def test_what_is_installed_is_pinned_and_fits_together(image: Image) -> None:
    pinned = {}
    for line in (ROOT / "deploy" / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([\w.-]+)==(\S+)", line):
            pinned[canonicalize_name(found[1])] = found[2]
    listed = json.loads(image.run("python", "-m", "pip", "list", "--format", "json"))
    versions = {canonicalize_name(found["name"]): found["version"].partition("+")[0] for found in listed}
    assert versions.pop("decodefleet") == importlib.metadata.version("decodefleet")
    # of venv itself
    versions.pop("pip")
    assert {name: pinned.get(name) for name in versions} == versions
    image.run("python", "-m", "pip", "check")


def test_the_command_is_there_and_nothing_of_the_build_is_needed(image: Image) -> None:
    assert image.run("decodefleet", "--version").startswith("decodefleet ")
    assert not (image.source / "cluster" / "__pycache__").exists()


def test_kernels_are_there_without_a_compiler(image: Image) -> None:
    if not LEVELS["x86-64-v3"] <= processor_flags():
        pytest.skip("needs an x86 processor with AVX2")
    code = "from decodefleet.kernels.cpu import native; assert native.library() is not None, native.status()"
    done = subprocess.run(
        [image.root / "bin" / "python", "-c", code],
        env={"PATH": str(image.root / "bin"), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_proxys_command_is_for_everybody(image: Image) -> None:
    folder = image.root / Path(image_environment()["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent.name
    for path in (folder, *folder.iterdir()):
        wanted = 0o5 if path.is_dir() or path.name == "haproxy" else 0o4
        assert path.stat().st_mode & wanted == wanted, path
    assert str(image.root) in (folder / "haproxy").read_text()


def test_it_serves_https_and_its_health_check_knows_where(
    image: Image, smollm2: Path, tmp_path: Path
) -> None:
    certificate, key = make_certificate(tmp_path / "tls")
    served = Served(
        tmp_path / "log",
        str(smollm2),
        *("--fake", "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)),
        env={"PYTHONPATH": "", "PATH": f"{image.root / 'bin'}:{os.defpath}"},
        program=[str(image.root / "bin" / "decodefleet")],
    )
    url = served.url.replace("http:", "https:")

    def healthy() -> bool:
        assert served.process.poll() is None, served.log.read_text()
        check = [image.root / "bin" / "python", "-m", "decodefleet.cluster.health"]
        done = subprocess.run(check, env={"PATH": ""}, capture_output=True, text=True, check=False, cwd="/")
        # other servers of ours may run beside it
        return f"{url} is ready" in done.stdout.splitlines()

    try:
        until(healthy, look_s=0.5)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified())
        )
        for file in image.root.glob("lib/*/site-packages/decodefleet/cluster/api/page/*"):
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            with opener.open(url + path, timeout=60) as answer:
                assert answer.read() == file.read_bytes(), path
    finally:
        assert served.stop() == 0
