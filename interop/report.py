"""Comparisons for people and programs: terminal lines and JSON."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.text import Text

from interop.encoder_comparison import MIN_COSINE_FLOAT32, EncoderComparison
from interop.verify import Line
from npu.device import device_name, is_simulated

_STYLES = {"pass": "green", "fail": "bold red", "refused": "yellow"}
_NAME_WIDTH = 44


def header() -> Text:
    """The names of the columns of `terminal_line`."""
    return Text(f"{'':7} {'case':{_NAME_WIDTH}} {'dtype':8} {'ulps':>5} {'of':>5} {'empty':5} lengths", style="bold")


def terminal_line(line: Line) -> Text:
    """One line: verdict, name, dtype, largest error in ulps of the output and what is allowed, emptiness, lengths."""
    text = Text(f"{line.verdict:7} ", style=_STYLES[line.verdict])
    text.append(f"{line.case[:_NAME_WIDTH]:{_NAME_WIDTH}} {line.dtype:8} ", style="not bold default")
    if line.eager is None or line.jit is None:
        text.append(line.refusal, style="not bold default")
        return text
    worst = max(line.eager, line.jit, key=lambda c: c.max_ulps)
    equal = line.eager.emptiness_equal and line.jit.emptiness_equal
    text.append(
        f"{worst.max_ulps:5.2f} {worst.allowed_ulps:5.2f} {'equal' if equal else 'DIFF':5} {line.lengths}",
        style="not bold default",
    )
    return text


def summary(lines: Sequence[Line]) -> Text:
    """What was run where, and how it ended."""
    counts = Counter(line.verdict for line in lines)
    text = Text.assemble(
        f"{len(lines)} lines: {counts['pass']} pass, {counts['refused']} refused by name, ",
        (f"{counts['fail']} fail", _STYLES["fail" if counts["fail"] else "pass"]),
        f". Ran on: {where()}.",
    )
    if far := [line.ulps_from_reference for line in lines if math.isfinite(line.ulps_from_reference)]:
        text.append(f" At most {max(far):.2f} ulps of the output from the JAX reference.")
    return text


def where() -> str:
    """The device that ran it; a simulated one is called so."""
    return f"{device_name()}. Nothing here ran on Ascend hardware" if is_simulated() else device_name()


def encoder_lines(result: EncoderComparison, seconds: float) -> list[Text]:
    """The encoder's comparison: the cosines, what packing saved, and a few sentences with their nearest neighbour."""

    def verdict(cosine: float, least: float) -> tuple[str, str]:
        name = "pass" if cosine >= least else "fail"
        return f"{name:7}", _STYLES[name]

    lines = [
        Text(
            f"{result.sentences} sentences, {result.tokens} tokens. A padded batch has {result.padded_slots} slots: "
            f"packing saved {result.slots_saved} of them ({result.percent_saved:.0f} %). {seconds:.0f} s."
        ),
        Text.assemble(
            verdict(result.cosine_reference, MIN_COSINE_FLOAT32),
            f" packed, JAX reference, float32, against padded float32: cosine >= {result.cosine_reference:.8f} "
            f"(due {MIN_COSINE_FLOAT32})",
        ),
        Text.assemble(
            verdict(result.cosine_given, result.min_cosine_given),
            f" packed, {'simulated ' if is_simulated() else ''}NPU, {result.attention_dtype}, against padded float32: "
            f"cosine >= {result.cosine_given:.8f} (due {result.min_cosine_given})",
        ),
        Text(f"Nearest neighbours ({result.nearest_kept} of {result.sentences} the same as in the padded run):"),
    ]
    for pair in result.closest(5):
        lines += [Text(f"  {pair.cosine:.3f}  {pair.sentence}"), Text(f"         {pair.nearest}")]
    return lines


def write_json(path: Path, lines: Sequence[Line], encoder: EncoderComparison | None = None) -> None:
    """Everything that was measured, as JSON. Infinities and NaN are written as strings."""
    content = {
        "npu": device_name(),
        "simulated": is_simulated(),
        "versions": {name: version(name) for name in ("jaxattn", "jax", "flax", "torch", "numpy")},
        "passed": all(line.verdict != "fail" for line in lines) and (encoder is None or encoder.passed),
        "lines": [{**asdict(line), "verdict": line.verdict, "problems": line.problems} for line in lines],
        "encoder": None if encoder is None else {**asdict(encoder), "passed": encoder.passed},
    }
    path.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
