"""`decodefleet serve`: starts everything on this machine, says how it goes, and leaves nothing behind.

The command's own process only guards, and starts what is lost again (`lives.py`); its child runs `Launcher`:
private Redis, private Ray cluster, the Serve application. With `--address` the application goes to a Ray
cluster that is there already. Ray is imported inside, after its environment is set.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import psutil
from pydantic import SecretStr
from rich.console import Console

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.resolve import resolve_model
from decodefleet.worker.protocol import Failed

from . import local_ray
from .config import ConfigError, LoadedConfig, ServeConfig
from .embedded_redis import EmbeddedRedis, RedisUnavailable, check_redis
from .health import leave_address, trouble
from .lives import FAILED, STOPPED, STOPPED_AT_ONCE, UP, Lives
from .news import NewsReceiver
from .processes import end_descendants, port_is_free, tell_of_signal
from .startup_view import WorkersView, print_ready
from .terminal import Bars, FileProgress, print_error

log = logging.getLogger(__name__)

APPLICATION = "decodefleet"
POLL_S = 0.25
LOSS = "a part of Ray ended ({})"
UNSERVED_GRACE_S = 1.0


class StartupFailed(RuntimeError):
    """The server cannot come up; says what the part at fault said."""


class RayLost(RuntimeError):
    """A process is gone without which Ray starts nothing any more."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM: stop as usual."""


def serve(loaded: LoadedConfig, console: Console) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code. Raises ConfigError where nothing was started."""
    config = loaded.config
    _check_address(config)
    return Lives(lambda folder: Launcher(config, console, folder).run(), console).run()


class Launcher:
    """Owns what it started, in the order in which it is stopped."""

    def __init__(self, config: ServeConfig, console: Console, folder: Path) -> None:
        self._config = config
        self._console = console
        self._folder = folder
        self._stopping = False
        self._redis: EmbeddedRedis | None = None
        self._ray_runs = False
        self._ray: dict[str, psutil.Process] = {}
        self._is_ready = False
        self._application_runs = False
        self._bars: Bars | None = None

    def run(self) -> int:
        detach_output(self._console, self._folder / "launcher.log")
        self._take_signals()
        tell_of_signal(self._is_told_to_stop)
        failure: Exception | None = None
        try:
            self._serve()
        except Interrupted:
            pass
        except RayLost as loss:
            self._finish_without_ray(str(loss))
            return FAILED
        except Exception as error:
            # native code that a signal interrupts may turn Interrupted into an error of its own
            failure = None if self._stopping else error
            traceback.print_exc()
        if failure is not None:
            print_error(self._console, explained(failure))
        self._stopping = True
        self._stop()
        return STOPPED if failure is None else FAILED

    def _finish_without_ray(self, loss: str) -> None:
        """What runs may finish, for none of it needs Ray; then everything is to be started again."""
        self._stopping = True
        self._console.print(
            f"{loss}; running requests have {self._config.drain_s:g} s to finish, then all is started again"
        )
        local_ray.drain_proxy(self._config.drain_s)
        if self._redis is not None:
            self._redis.stop()
        end_descendants()

    def _serve(self) -> None:
        config = self._config
        self._console.print(f"logs: {self._folder}", style="dim", soft_wrap=True, highlight=False)
        leave_address(self._folder, config.url)
        if config.address is None:
            config = self._resolve(config)
            config = self._start_redis(config)
        news = NewsReceiver(f"ipc://{self._folder}/news")
        self._bars = view = WorkersView(self._console, config.first_workers)
        with view:
            view.stage("starting Ray and its HTTP proxy")
            self._start_ray(config)
            view.stage("starting workers and routers")
            self._deploy(config, news.endpoint)
            while (config.address is None and not view.complete) or not self._is_up(config):
                self._take_news(news, view)
        self._is_ready = True
        if config.address is None:
            (self._folder / UP).touch()
        print_ready(self._console, config)
        while True:
            self._take_news(news, view)

    def _resolve(self, config: ServeConfig) -> ServeConfig:
        """Fetches and converts the model once, here, where progress can be seen."""
        self._bars = progress = FileProgress(self._console)
        with progress:
            model = resolve_model(
                config.model, cache_dir=config.cache_dir, revision=config.revision, progress=progress
            )
        name = config.served_model_name or model.served_name
        self._console.print(f"model [bold]{name}[/] in {model.folder}", soft_wrap=True, highlight=False)
        return config.model_copy(update={"model": str(model.folder), "served_model_name": name})

    def _start_redis(self, config: ServeConfig) -> ServeConfig:
        if config.redis_url is not None:
            check_redis(config.redis_url.get_secret_value())
            return config
        self._redis = EmbeddedRedis()
        return config.model_copy(update={"redis_url": SecretStr(self._redis.start())})

    def _start_ray(self, config: ServeConfig) -> None:
        if config.address is not None:
            local_ray.join(config.address, config.host, config.port)
        else:
            local_ray.prepare(self._folder, config.drain_s, config.tls.pem())
            # each worker claims one CPU, and a machine may have fewer cores than it is told to run workers
            cpus = max(config.most_workers, len(os.sched_getaffinity(0)))
            local_ray.start(self._folder, cpus)
            self._ray = local_ray.essential_processes()
            threading.Thread(target=self._watch_start, name="watching the start", daemon=True).start()
            local_ray.start_serve(config.host, config.port)
        # ray has put a handler of its own for SIGTERM
        self._take_signals()
        self._ray_runs = True

    def _watch_start(self) -> None:
        """In a thread: without that process, calls that are made of Ray may wait for ever."""
        while not (self._is_ready or self._stopping):
            if (name := local_ray.lost(self._ray)) is not None:
                print_error(self._console, LOSS.format(name))
                # the guardian ends what is left
                os._exit(FAILED)
            time.sleep(POLL_S)

    def _deploy(self, config: ServeConfig, news: str) -> None:
        from ray import serve

        from .app import LocalRun, build_application

        local = LocalRun(log_dir=self._folder, news=news) if config.address is None else None
        target = serve.RunTarget(build_application(config, local), name=APPLICATION)
        self._application_runs = True
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )

    def _take_news(self, news: NewsReceiver, view: WorkersView) -> None:
        """Shows what workers say, for a moment. Raises StartupFailed where one fails before all are ready."""
        if self._stopping:
            raise Interrupted
        if self._is_ready and (name := local_ray.lost(self._ray)) is not None:
            raise RayLost(LOSS.format(name))
        for item in news.receive(POLL_S):
            if isinstance(item.news, Failed) and not view.complete:
                raise StartupFailed(item.news.message)
            view.show(item.worker_id, item.news)

    def _is_up(self, config: ServeConfig) -> bool:
        """Whether the server answers that a worker can generate. Raises StartupFailed when it never will."""
        from ray import serve

        status = serve.status().applications[APPLICATION]
        # UNHEALTHY passes: Serve replaces what did not answer it
        if status.status == "DEPLOY_FAILED":
            raise StartupFailed(status.message)
        return status.status == "RUNNING" and trouble(config.url) is None

    def _stop(self) -> None:
        for step in self._steps_of_stopping():
            try:
                step()
            except Exception:
                # the rest has to be stopped all the same
                log.exception("a part did not stop as it should")

    def _steps_of_stopping(self) -> Iterator[Callable[[], object]]:
        # before it was ready nobody was served, and what runs here descends from us: it is ended, not asked
        is_asked = self._is_ready or self._config.address is not None
        if self._application_runs and is_asked:
            limit_s = self._config.drain_s + 30
            yield lambda: local_ray.delete_application(APPLICATION, limit_s)
        if self._ray_runs and is_asked:
            yield local_ray.leave if self._config.address is not None else local_ray.stop
        if self._redis is not None:
            yield self._redis.stop
        if not is_asked:
            yield lambda: end_descendants(UNSERVED_GRACE_S)

    def _is_told_to_stop(self) -> None:
        """In a thread, when the first signal comes."""
        if self._bars is not None:
            # the line of one would be drawn once more below what is printed, and stay
            self._bars.end()
        drain = f"; running requests have {self._config.drain_s:g} s to finish, Ctrl-C ends them now"
        self._console.print("stopping" + (drain if self._is_ready else ""))
        if not self._is_ready and self._config.address is None:
            # the start of Ray takes no notice of signals for seconds; the guardian ends what is left
            time.sleep(UNSERVED_GRACE_S)
            if not self._is_ready:
                os._exit(0)

    def _take_signals(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._stopping:
            # the guardian ends what is left
            os._exit(STOPPED_AT_ONCE)
        self._stopping = True
        raise Interrupted


def explained(failure: Exception) -> str:
    """Our own words; of others also the kind. What failed in a process of Ray's comes without its traceback,
    which the log has.
    """
    if isinstance(failure, ConfigError | ModelError | RedisUnavailable | StartupFailed):
        return str(failure)
    cause = getattr(failure, "cause", None)
    shown = cause if isinstance(cause, Exception) else failure
    return f"{type(shown).__name__}: {shown}"


def detach_output(console: Console, file: Path) -> None:
    """From now on only `console` writes to where it did; all else that is printed goes to `file`."""
    console.file.flush()
    console.file = os.fdopen(os.dup(console.file.fileno()), "w", buffering=1, encoding="utf-8")
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)


def _check_address(config: ServeConfig) -> None:
    if config.address is not None:
        return
    try:
        free = port_is_free(config.host, config.port)
    except OSError as error:
        raise ConfigError(f"host: cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    if not free:
        raise ConfigError(f"port: {config.port} is in use on {config.host}; stop its owner or choose --port")
