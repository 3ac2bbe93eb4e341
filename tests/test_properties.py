"""What holds for every packing: the reference is the oracle, segments are independent, poison stays where it is seen."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn import Segments, pack, reference_attention, unpack
from jaxattn.testing import Case, Gradients, compare, cotangents, gradient_problems, oracle_attention, oracle_gradients
from jaxattn.testing.cases import Poison
from jaxattn.testing.strategies import lengths, options

TQ, TK, B = 12, 10, 4
"""One shape, so that every example runs a program that is compiled already."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "sinks": True},
    {"window_size": (2, 1), "softcap": 2.0},
]


def cases_with(options: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Case]:
    def case(q: list[int], k: list[int], seed: int, options: dict[str, Any]) -> Case:
        tails = TQ - sum(q), TK - sum(k)
        return Case("random", tuple(q), tuple(k), *tails, heads=(4, 2), widths=(4, 3), seed=seed, **options)

    return st.builds(case, lengths(B, TQ), lengths(B, TK), st.integers(0, 2**16), options)


cases = cases_with(st.sampled_from(OPTIONS))
examples = settings(deadline=None, derandomize=True)


@cache
def program(options: tuple[tuple[str, Any], ...]):
    @jax.jit
    def run(arrays, segments, cotangent):
        def attend(q, k, v, sinks):
            return reference_attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True, **dict(options))

        values, pull_back = jax.vjp(attend, *arrays)
        return values, pull_back(cotangent)

    return run


def run(case: Case, inputs=None):
    """The reference's values and gradients, as numpy."""
    inputs = case.inputs("float32") if inputs is None else inputs
    arrays = (inputs.q, inputs.k, inputs.v, inputs.sinks)
    got = program(tuple(case.options.items()))(arrays, case.segments, cotangents(case, "float32"))
    values, gradients = jax.tree.map(np.asarray, got)
    return values, Gradients(*gradients)


@examples
@given(cases)
def test_the_reference_is_the_oracle_in_values_and_gradients(case: Case) -> None:
    values, gradients = run(case)
    assert compare(case, "float32", *values).problems == ()
    assert gradient_problems(case, "float32", gradients) == []


poisons = st.builds(
    lambda array, row, head, value: Poison(array, row % {"q": TQ, "sinks": 1}.get(array, TK), head, value),
    st.sampled_from(["q", "k", "v", "sinks"]),
    st.integers(0, TQ - 1),
    st.integers(0, 1),
    st.sampled_from([np.nan, np.inf, -np.inf]),
)


@examples
@given(cases, poisons)
def test_poison_changes_no_bit_where_it_is_not_seen(case: Case, poison: Poison) -> None:
    if poison.array == "sinks" and not case.sinks:
        case = replace(case, **OPTIONS[1], window_size=None, softcap=None)
    poisoned = replace(case, poison=(poison,))
    clean = case.inputs("float32")
    at = poison.head if poison.array == "sinks" else (poison.row, poison.head, 0)
    getattr(clean, poison.array)[at] = 0
    want, want_gradients = run(case, clean)
    got, got_gradients = run(poisoned)
    assert compare(poisoned, "float32", *got).problems == ()
    assert gradient_problems(poisoned, "float32", got_gradients) == []

    inputs, offsets = poisoned.inputs("float32"), [cu.tolist() for cu in jax.tree.leaves(case.segments)]
    q, k, v = inputs.q, inputs.k, inputs.v
    specified = oracle_attention(q, k, v, *offsets, sinks=inputs.sinks, **case.options)
    for g, w, judge in zip(got, want, specified[:2], strict=True):
        assert g[~np.isnan(judge)].tobytes() == w[~np.isnan(judge)].tobytes()
    specified = oracle_gradients(q, k, v, *offsets, *cotangents(case, "float32"), sinks=inputs.sinks, **case.options)
    for g, w, judge in zip(got_gradients, want_gradients, specified, strict=True):
        if judge is not None:
            assert np.array_equal(g[~np.isnan(judge)], w[~np.isnan(judge)])


def parts(case: Case):
    """The arrays of every segment on its own."""
    inputs = case.inputs("float32")
    q = unpack(inputs.q, case.segments)
    k, v = (unpack(x, Segments.from_cu_seqlens(case.segments.cu_seqlens_k)) for x in (inputs.k, inputs.v))
    return list(zip(q, k, v, strict=True)), inputs.sinks


@examples
@given(cases_with(options(TQ)))
def test_packing_equals_separate_calls_bit_for_bit_in_the_oracle(case: Case) -> None:
    inputs, offsets = case.inputs("float32"), [cu.tolist() for cu in jax.tree.leaves(case.segments)]
    packed = oracle_attention(inputs.q, inputs.k, inputs.v, *offsets, **case.options)
    for (q, k, v), got in zip(parts(case)[0], unpack(packed.out, case.segments), strict=True):
        alone = oracle_attention(q, k, v, [0, len(q)], [0, len(k)], **case.options)
        assert got.tobytes() == alone.out.tobytes()


@examples
@given(cases, st.permutations(range(B)))
def test_permuting_segments_permutes_the_answer(case: Case, order: list[int]) -> None:
    segments, sinks = parts(case)
    moved = [pack([segments[b][side] for b in order], total=total) for side, total in enumerate((TQ, TK, TK))]
    (q, q_segments), (k, k_segments), (v, _) = moved
    there = Segments.from_cu_seqlens(q_segments.cu_seqlens_q, k_segments.cu_seqlens_q)
    out, _ = run(case)[0]
    shuffled, _ = program(tuple(case.options.items()))(
        (q, k, v, sinks), there, jax.tree.map(jnp.zeros_like, cotangents(case, "float32"))
    )[0]
    want = [unpack(out, case.segments)[b] for b in order]
    for got, wanted in zip(unpack(np.asarray(shuffled), there), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_packing_equals_separate_calls_in_the_reference() -> None:
    case = Case("", (3, 1, 0, 5), (2, 4, 1, 3), heads=(2, 1), widths=(4, 3), causal=True)
    inputs = case.inputs("float32")
    attend = jax.jit(lambda q, k, v, s: reference_attention(q, k, v, s, causal=True))
    packed = unpack(np.asarray(attend(inputs.q, inputs.k, inputs.v, case.segments)), case.segments)
    for (q, k, v), got in zip(parts(case)[0], packed, strict=True):
        alone = attend(q, k, v, Segments.from_lengths([len(q)], [len(k)]))
        np.testing.assert_allclose(got, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "found"),
    {
        "an empty segment": lambda n: 0 in n,
        "a tail": lambda n: sum(n) < 20,
        "no tail": lambda n: sum(n) == 20,
        "only single tokens": lambda n: set(n) == {1},
        "one huge among tiny ones": lambda n: max(n) >= 12 and sorted(n)[-2] <= 2 and sum(n) - max(n) > 2,
        "nothing": lambda n: sum(n) == 0,
    }.items(),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_strategy_reaches_every_kind_of_packing(kind: str, found) -> None:
    from hypothesis import find

    assert find(lengths(5, 20), found, settings=settings(max_examples=3000, database=None, derandomize=True)), kind
