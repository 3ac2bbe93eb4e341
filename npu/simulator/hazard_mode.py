"""Whether the simulated operators do what the real ones do where nothing is promised."""

from types import TracebackType

_on = True


def is_on() -> bool:
    """Whether hazard mode is on in this process."""
    return _on


class hazards:  # noqa: N801  (used like a function, as torch.no_grad is)
    """Turns hazard mode on or off: from now on, or for the length of a `with` block.

        simulator.hazards(False)

        with simulator.hazards(False):
            out, lse = torch.ops.npu.npu_fused_infer_attention_score(...)

    On, which is where the simulator starts: memory that a real operator would leave unwritten holds NaN, and calls
    that the real operators answer wrongly without an error are answered wrongly. The table in `npu.simulator.operators`
    lists them. Off: such calls are refused, or answered as the documents say. Valid calls give the same either way.

    One mode for the whole process, since operators are also called from threads that their user did not start.
    """

    def __init__(self, on: bool) -> None:
        global _on
        if not isinstance(on, bool):
            raise ValueError(f"`on`: {on!r}. It must be True or False. Pass a Python bool.")
        self._before, _on = _on, on

    def __enter__(self) -> None:
        """The mode is set already."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _on
        _on = self._before
