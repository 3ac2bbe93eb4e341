"""The `jaxattn` command."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from interop import report
from interop.attention import npu_packed_attention
from interop.encoder_comparison import EncoderComparison, compare_encoders
from interop.explain import explain
from interop.verify import DTYPES, Line, verify
from jaxattn.testing import CASES
from npu import simulator
from npu.contract import Profile
from npu.device import is_available, is_simulated

# The columns of a line need more than 80 characters; where nobody looks at a screen there is no reason to cut them.
_LOG_WIDTH = 130

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def main_help() -> None:
    """Packed attention for JAX on Ascend NPUs. Without an NPU every command runs on a simulated one, and says so."""


@app.command("verify", epilog="Example: jaxattn verify --encoder --json report.json")
def verify_command(
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Also run a pretrained sentence encoder on real sentences.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything that was measured to this file.")] = None,
) -> None:
    """Run the case table on the NPU path and hold it against the JAX specification and a float64 oracle.

    Exit status 0 only if every case agrees, 1 otherwise, 130 after Ctrl-C.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    if json is not None and not json.parent.is_dir():
        raise typer.BadParameter(f"{json.parent} is not a directory. Create it, or name another file.")
    lines: list[Line] = []
    embedded: EncoderComparison | None = None
    try:
        with _interruptible() as check:
            _start_npu(console)
            _run_cases(console, lines, check)
            if encoder:
                embedded = _run_encoder(console)
                check()
    except KeyboardInterrupt:
        console.print(f"Interrupted after {len(lines)} of {len(CASES) * len(DTYPES)} lines.", style="bold red")
        console.print(report.summary(lines))
        raise typer.Exit(130) from None
    console.print(report.summary(lines))
    if json is not None:
        report.write_json(json, lines, embedded)
        console.print(f"Written: {json}", highlight=False)
    if any(line.verdict == "fail" for line in lines) or (embedded is not None and not embedded.passed):
        raise typer.Exit(1)


@app.command("explain", epilog="Example: jaxattn explain --q 5,3,9 --heads 32/8 --head-dim 80 --causal")
def explain_command(
    q: Annotated[str, typer.Option(help="Lengths of the query segments, as 5,3,9.")],
    k: Annotated[str | None, typer.Option(help="Lengths of the key segments; the same as --q by default.")] = None,
    heads: Annotated[str, typer.Option(help="Query heads, or query/key heads as 32/8.")] = "8",
    head_dim: Annotated[str, typer.Option(help="Head width, or that of q and k, and of v, as 192/128.")] = "64",
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
    causal: Annotated[bool, typer.Option("--causal", help="Hide keys after the query.")] = False,
    window: Annotated[str | None, typer.Option(help="Reach as left,right, both inclusive; -1 is unlimited.")] = None,
    gradient: Annotated[bool, typer.Option("--gradient", help="Plan for the training operator.")] = False,
    chip: Annotated[str, typer.Option(help="A2 or A3.")] = "A2",
    cann: Annotated[str, typer.Option(help="The CANN release.")] = "8.5",
) -> None:
    """Print what a call would do and why: mask, kernel calls, work, and the limits that decided.

    Needs no NPU. Exit status 2 for a call that is wrong or that no kernel takes.
    """
    try:
        explanation = explain(
            _integers("--q", q),
            None if k is None else _integers("--k", k),
            heads=_pair("--heads", heads),
            widths=_pair("--head-dim", head_dim),
            dtype=dtype,
            causal=causal,
            window_size=None if window is None else _window(window),
            gradient=gradient,
            profile=Profile(chip, cann),
        )
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(str(explanation))


def main() -> None:
    """The console script."""
    app()


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: {text!r}. It takes integers between commas. Use {option} 5,3,9.") from None


def _pair(option: str, text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{option}: {text!r}. It takes one number, or two as 32/8. Use {option} 32/8.")
    return int(parts[0]), int(parts[-1])


def _window(text: str) -> tuple[int, int]:
    reach = _integers("--window", text)
    if len(reach) != 2:
        raise ValueError(f"--window: {text!r}. It takes the reach to the left and right. Use --window 4,0.")
    return reach[0], reach[1]


def _start_npu(console: Console) -> None:
    """Start the simulated NPU where there is no real one, and say so."""
    try:
        if not is_available():
            simulator.enable()
    except (simulator.Unavailable, ValueError) as error:
        console.print(f"No NPU: {error}", style="bold red", highlight=False)
        raise typer.Exit(1) from error
    if is_simulated():
        console.print("No Ascend NPU here: everything below runs on a simulated NPU.", style="bold yellow")


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C is not lost: the function that this gives raises again what was raised where nobody hears it.

    An exception that comes up in a finaliser, or in a callback from C, is printed by Python and forgotten.
    """
    interrupted = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread listen
        yield check
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _run_cases(console: Console, lines: list[Line], check: Callable[[], None]) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console.print(report.header(), no_wrap=True, overflow="ellipsis")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("cases", total=len(CASES) * len(DTYPES))
        for line in verify():
            lines.append(line)
            progress.console.print(report.terminal_line(line), no_wrap=True, overflow="ellipsis")
            for problem in line.problems:
                progress.console.print(f"        {problem}", style="red", highlight=False)
            progress.advance(task)
            check()


def _run_encoder(console: Console) -> EncoderComparison:
    console.print("\nA pretrained sentence encoder (MiniLM, 6 layers, 12 heads of width 32)", style="bold")
    start = time.perf_counter()
    with console.status("embedding real sentences three ways"):
        result = compare_encoders(npu_packed_attention)
    for text in report.encoder_lines(result, time.perf_counter() - start):
        console.print(text, highlight=False)
    console.print(Text())
    return result
