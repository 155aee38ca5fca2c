"""The `decodefleet` command: the composition root.

Each command imports what it needs inside itself, so that help is instant and only `generate` loads torch.
What users can put right ends as one red message and exit status 1; everything else is a bug, and says how to
get its traceback.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench.options import BenchOptions
from .commands import Commands
from .config import LoadedConfig, options
from .flags import Flag, flags_of, with_flags
from .fleet_cli import directory, drain_node, health, top
from .keys_cli import keys
from .simulate.options import SimulateOptions

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = (
    "Every option can also be set by an environment variable (DECODEFLEET_MAX_NUM_SEQS=8) "
    "or in a YAML file (max_num_seqs: 8) named by --config. Flags go before the environment, "
    "that before the file."
)

FIRST_STEPS = (
    "Start with decodefleet serve; http://127.0.0.1:8000 then shows the fleet and a playground in a browser. "
    "decodefleet COMMAND --help tells what a command can be told."
)

app = Commands(
    name="decodefleet",
    epilog=FIRST_STEPS,
    help="Serve large language models from a cluster of GPUs, or from one CPU.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
bench = Commands(help="Measure servers, ours or others.")
app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")

Model = Annotated[
    str | None,
    typer.Argument(
        help="built-in name, folder in Hugging Face form, .gguf file, or hub id "
        r"[dim]\[default: smollm2-135m][/dim]",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of `option: value` lines", show_default=False),
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks; may stand anywhere")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"decodefleet {installed('decodefleet')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def _serve_flags() -> list[Flag]:
    return [
        Flag(option.name, option.annotation, option.default, option.description, option.panel, option.hidden)
        for option in options().values()
        if option.name != "model" and not option.env_only
    ]


def _load(model: str | None, file: Path | None, flags: dict[str, Any]) -> LoadedConfig:
    from .config import load_config

    return load_config({"model": model, **flags}, file, os.environ)


def _serve(model: Model = None, config: ConfigFile = None, **flags: Any) -> None:
    """Serve a model behind an OpenAI-compatible endpoint, on this machine or on a Ray cluster.

    Without options: a small model, fetched once, at http://127.0.0.1:8000. Ctrl-C stops it.

    Example: decodefleet serve ./my-model --workers 2 --port 8123
    """
    loaded = _load(model, config, flags)
    from .launcher import serve

    raise typer.Exit(serve(loaded, _console()))


def _config(model: Model = None, config: ConfigFile = None, **flags: Any) -> None:
    """Print every option of `serve` as it would be in force, and where its value came from."""
    from rich.table import Table

    grid = Table("option", "value", "from")
    for name, value, origin in _load(model, config, flags).rows():
        grid.add_row(name, value, origin, style="dim" if origin == "default" else "")
    _console().print(grid)


app.command("serve", epilog=EPILOG)(with_flags(_serve, _serve_flags()))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="what to answer")],
    model: Annotated[str, typer.Option(help="built-in name, folder, .gguf file, or hub id")] = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate", min=1, metavar="<int>")] = 256,
    temperature: Annotated[
        float,
        typer.Option(help="0 takes the likeliest token, larger is more varied", min=0.0, metavar="<float>"),
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="sample among the likeliest tokens whose probabilities sum up to this")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="makes sampling repeatable; random if not given")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="continue the text instead of answering in a chat")
    ] = False,
) -> None:
    """Answer one prompt here in the terminal, without a server."""
    from decodefleet.worker.assets.resolve import resolve_model
    from decodefleet.worker.sampling_params import SamplingParams

    from .terminal import FileProgress

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    # standard output is for the answer alone
    console = _console(stderr=True)
    with FileProgress(console) as progress:
        folder = resolve_model(model, progress=progress).folder
    with console.status(f"loading {model}"):
        from decodefleet.worker.llm import LLM

        pieces = LLM(str(folder)).stream(prompt, params, chat=not raw)
        piece = next(pieces, "")
    while piece:
        print(piece, end="", flush=True)
        piece = next(pieces, "")
    print()


def _plan_flags() -> list[Flag]:
    """Those options of `serve` that decide how much memory is needed."""
    deciding = {"dtype", "max_model_len", "max_num_batched_tokens", "tensor_parallel_size"}
    deciding |= {"block_size", "gpu_memory_utilization", "cpu_kv_cache_gib", "kv_cache_dtype"}
    deciding |= {"window", "attention_sinks", "cpu_kv_gib", "nvme_kv_path", "nvme_kv_gib"}
    return [flag for flag in _serve_flags() if flag.name in deciding]


def _plan(
    model: Annotated[
        str | None, typer.Argument(help="as for serve, or a bare config.json", show_default=False)
    ] = None,
    gpu_memory_gib: Annotated[
        float | None,
        typer.Option(
            help="memory of one GPU in GiB; this machine's if not given", min=0.1, metavar="<float>"
        ),
    ] = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Show what a model takes of the memory: weights, KV cache, and how many tokens fit.

    Its config.json is enough, and no GPU need be there.

    Example: decodefleet plan ./config.json --gpu-memory-gib 80 --tensor-parallel-size 8
    """
    from .plan_view import PlanOptions, advice, find_model, make_plan, measured, plan_table
    from .terminal import FileProgress

    console, told = _console(), _load(model, config, flags).config
    ranks = told.runner.tensor_parallel_size
    wanted = PlanOptions(told.weights, ranks, gpu_memory_gib, told.cache, told.batch)
    with FileProgress(console) as progress:
        folder = find_model(told.model, progress)
    made = measured(make_plan(folder, wanted), wanted.cache)
    console.print(plan_table(told.model, made))
    if not made.fits:
        console.print(f"[red]{advice(made)}[/]")
        raise typer.Exit(1)


app.command("plan", epilog=EPILOG)(with_flags(_plan, _plan_flags()))
app.command("config", epilog=EPILOG)(with_flags(_config, _serve_flags()))


@app.command()
def models(
    json_: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """List the built-in models, and the architectures that can be served."""
    import json

    from .models_view import OTHERS, models_json, models_tables

    if json_:
        print(json.dumps(models_json(), indent=2))
        return
    console = _console()
    console.print(*models_tables(), OTHERS, sep="\n")


def _simulate(**flags: Any) -> None:
    """Replay a trace of requests against a fleet that does not exist, through the real scheduler.

    Policies of ours: cost, round-robin, least-load, prefix-only, and cost:WEIGHT, which weighs load.

    Policies of other routers, with their defaults: sglang, dynamo, llm-d.

    Example: decodefleet simulate --trace conversation_trace.jsonl --policy cost,least-load,dynamo

    With --max-workers the fleet's size follows the load, beside a planner that knows what comes.
    """
    from .simulate.command import simulate

    simulate(flags, _console())


app.command("simulate")(with_flags(_simulate, flags_of(SimulateOptions)))


app.command()(directory)
app.command()(top)
app.command()(health)
app.command("drain-node", hidden=True)(drain_node)


def _bench_serve(**flags: Any) -> None:
    """Load any OpenAI-compatible server and report what its clients feel.

    Without options: three closed-loop runs with 1, 8 and 32 clients, 128 tokens in and 128 out.
    """
    from .bench.command import bench_serve

    raise typer.Exit(bench_serve(flags, _console()))


bench.command("serve")(with_flags(_bench_serve, flags_of(BenchOptions)))


@bench.command("kernels")
def _bench_kernels(
    op: Annotated[
        list[str] | None, typer.Option(help="only this operation; may be repeated", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="write what was compiled: a row per kernel, variant and target"),
    ] = None,
    timings: Annotated[Path | None, typer.Option(help="write what was timed, and the limits")] = None,
    compile_: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="compile for every target; if not given, where there is no GPU or with --json",
            show_default=False,
        ),
    ] = None,
    time_: Annotated[bool, typer.Option("--time/--no-time", help="time on this machine")] = True,
) -> None:
    """Time every kernel against what this machine allows; compile them for every target."""
    from decodefleet.kernels.bench.run import bench_rows, compiled_rows, has_gpu, operations

    from .bench.kernels_view import compiled_table, timed_table, write_rows
    from .bench.machine import provenance
    from .bench.options import BenchError

    wanted = op or operations()
    if unknown := set(wanted) - set(operations()):
        raise BenchError(f"--op {unknown.pop()} is none of {', '.join(operations())}.")
    console = _console()
    if not console.is_terminal:
        # a file has room for whole lines
        console.width = 120
    if compile_ or (compile_ is None and (json_file is not None or not has_gpu())):
        with console.status("compiling"):
            compiled = compiled_rows(wanted)
        console.print(compiled_table(compiled))
        if json_file is not None:
            write_rows(json_file, compiled)
    if time_:
        with console.status("timing") as status:
            limits, timed = bench_rows(wanted, status.update)
        console.print(timed_table(limits, timed))
        if timings is not None:
            write_rows(timings, {**provenance(), "limits": limits, "rows": timed})


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def main() -> None:
    """Entry point of the `decodefleet` script."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    try:
        app(arguments)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # whoever read the output has had enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        if debug:
            raise
        _explain(error)
        raise SystemExit(1) from None


def _explain(error: Exception) -> None:
    from decodefleet.worker.assets.errors import ModelError
    from decodefleet.worker.sampling_params import InvalidRequest
    from decodefleet.worker.text.chat import ChatTemplateError

    from .bench.options import BenchError
    from .config import ConfigError
    from .debug_client import ServerUnavailable
    from .directory.survey import DirectoryUnavailable
    from .simulate.options import SimulateError
    from .terminal import print_error

    console = _console(stderr=True)
    ours = ConfigError | ModelError | BenchError | SimulateError | DirectoryUnavailable | ServerUnavailable
    if isinstance(error, ours | InvalidRequest | ChatTemplateError):
        print_error(console, str(error))
        return
    print_error(console, f"{type(error).__name__}: {error}")
    console.print("This is a bug in decodefleet. The same command with --debug shows the traceback.")
