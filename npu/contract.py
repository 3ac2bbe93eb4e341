"""What the fused attention operators take in packed (TND) layout, as a table: operator, chip, CANN release, limit, source.

Nothing here was measured on a chip. The sources, in words, are the operator documents of torch_npu and CANN, and the
public tiling sources of CANN 8.3 to 8.5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Operator = Literal["npu_fused_infer_attention_score", "npu_fusion_attention"]

INFERENCE: Operator = "npu_fused_infer_attention_score"
TRAINING: Operator = "npu_fusion_attention"

CHIPS = ("A2", "A3", "950", "310P")
"""A2 is Atlas 800/900 A2 (910B), A3 is Atlas 900 A3 (910C), 950 is Ascend 950 (A5), 310P is Atlas inference."""
RELEASES = ("8.3", "8.5", "9.0")
"""The CANN releases that the sources describe, oldest first."""


@dataclass(frozen=True)
class Limit:
    """One row: what `operator` takes on `chips` since CANN release `since`, and who says so."""

    operator: Operator
    name: str
    value: int | tuple[str, ...] | tuple[tuple[int, int], ...]
    source: str
    chips: tuple[str, ...] = ("A2", "A3")
    since: str = "8.3"

    @property
    def number(self) -> int:
        """The value of a row that holds a number."""
        if not isinstance(self.value, int):
            raise TypeError(f"{self.name} of {self.operator} is {self.value}, not a number.")
        return self.value

    def __str__(self) -> str:
        return f"{self.operator}, {'/'.join(self.chips)}, CANN {self.since}: {self.name} = {self.value} ({self.source})"


LIMITS: tuple[Limit, ...] = (
    Limit(INFERENCE, "dtypes", ("float16", "bfloat16"), "operator documents; float32 is not in the list"),
    Limit(
        INFERENCE,
        "widths",
        ((64, 64), (128, 128), (192, 128)),
        "tiling sources: what every route takes, as (q and k, v); grouped heads take more on recent releases",
    ),
    Limit(INFERENCE, "most_segments", 4096, "operator documents and tiling sources: entries of actual_seq_lengths"),
    Limit(INFERENCE, "most_rows", 1_048_576, "operator documents; an older text of the first version says 65536"),
    Limit(INFERENCE, "most_heads", 256, "operator documents: query heads"),
    Limit(INFERENCE, "most_group", 64, "operator documents: query heads per key/value head"),
    Limit(INFERENCE, "contiguous", True, "operator documents; older releases computed garbage from other strides"),
    Limit(
        TRAINING,
        "products",
        ("training",),
        "operator documents: for training products; public issues show it in use on inference products too",
    ),
    Limit(TRAINING, "dtypes", ("float16", "bfloat16", "float32"), "operator documents"),
    Limit(TRAINING, "most_width", 768, "operator documents: 1 to 768, equal for q and k, v no wider"),
    Limit(TRAINING, "most_segments", 1024, "operator documents: 1024 to 20000 by release, the smallest is taken"),
    Limit(TRAINING, "most_rows", 1_048_576, "operator documents"),
    Limit(TRAINING, "most_heads", 256, "operator documents: query heads"),
    Limit(TRAINING, "softmax_layout", True, "tiling sources: statistics in true packed order, softmax_layout='TND'"),
)

# What is known of chips that the table has no limits for.
_REMARKS = {
    ("950", INFERENCE): "it has kernels of its own for this operator, whose limits no source that was read gives",
    ("950", TRAINING): "no source that was read says what it takes",
    ("310P", INFERENCE): "it has no packed layout (operator documents)",
    ("310P", TRAINING): "it is an inference product, and the operator is documented for training products",
}


@dataclass(frozen=True)
class Profile:
    """A chip and a CANN release. Queried by the planner, printed by `jaxattn explain`."""

    chip: str = "A2"
    cann: str = "8.5"

    def __post_init__(self) -> None:
        problems = []
        if self.chip not in CHIPS:
            problems.append(f"`chip`: {self.chip!r}. Known are {', '.join(CHIPS)}. Use one of these.")
        if self.cann not in RELEASES:
            problems.append(
                f"`cann`: {self.cann!r}. Known are {', '.join(RELEASES)}; of older ones only that documents named "
                f"bfloat16 alone and 65536 rows. Use the nearest known one below yours."
            )
        if problems:
            raise ValueError("\n".join(problems))

    def limits(self, operator: Operator) -> tuple[Limit, ...]:
        """The rows that hold for `operator` here.

        Raises:
            NotImplementedError: the table has none, with what is known instead.
        """
        rows = tuple(
            limit
            for limit in LIMITS
            if limit.operator == operator and self.chip in limit.chips and _order(limit.since) <= _order(self.cann)
        )
        if not rows:
            remark = _REMARKS[self.chip, operator]
            raise NotImplementedError(
                f"{operator} on {self.chip}: {remark}. Plans are made for {', '.join(_chips_of(operator))}. Use one of these "
                f"profiles, or jaxattn.packed_attention."
            )
        return rows

    def __getitem__(self, key: tuple[Operator, str]) -> Limit:
        """The row of an operator by its name: `Profile()[INFERENCE, "most_rows"]`."""
        return _row(self, *key)

    def __iter__(self) -> Iterator[Limit]:
        """All rows that hold here, of both operators."""
        yield from self.limits(INFERENCE)
        yield from self.limits(TRAINING)


DEFAULT = Profile()


@lru_cache(maxsize=256)
def _row(profile: Profile, operator: Operator, name: str) -> Limit:
    rows = [limit for limit in profile.limits(operator) if limit.name == name]
    if not rows:
        names = ", ".join(limit.name for limit in profile.limits(operator))
        raise KeyError(f"{operator} has no limit called {name!r}. It has {names}.")
    return max(rows, key=lambda limit: _order(limit.since))  # a later release may replace a limit


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _chips_of(operator: Operator) -> list[str]:
    return [chip for chip in CHIPS if any(limit.operator == operator and chip in limit.chips for limit in LIMITS)]
