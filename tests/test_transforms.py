"""npu_packed_attention under JAX's transforms: what each gives, and how many calls reach the NPU."""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from small_arrays import CAUSAL, LENGTHS, D, K, N, T, arrays, close, count_calls, loss, reference

from interop import CHECKPOINT_NAMES, npu_packed_attention
from jaxattn.testing import CASES, Case, Gradients, compare, cotangents, gradient_problems
from npu.simulator import counters


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many calls reached the NPU so far."""
    return count_calls(monkeypatch)


BACKWARD = ["npu", "jax"]
KERNEL_CASES = [
    "three segments of unequal length",
    "rows before the first key are empty",
    "segments empty on one side, causal",
    "tails of different length, causal",
    "window on both sides",
    "grouped heads, unequal lengths, causal",
    "values narrower than keys",
    "sinks in empty rows and tails",
]
TABLE = [(name, "npu") for name in KERNEL_CASES] + [(KERNEL_CASES[i], "jax") for i in (7,)]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("name", "backward"), TABLE)
def test_values_and_gradients_are_those_of_the_oracle(name: str, backward: str, dtype: str, jit: bool) -> None:
    case: Case = next(c for c in CASES if c.name == name)
    inputs = case.inputs(dtype)
    operands = [jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v, inputs.sinks) if x is not None]
    douts = tuple(jnp.asarray(x) for x in cotangents(case, dtype))

    def attend(q, k, v, sinks=None):
        return npu_packed_attention(
            q, k, v, case.segments, sinks=sinks, return_softmax_lse=True, backward=backward, **case.options
        )

    def value_and_gradients(operands, douts):
        results, pull = jax.vjp(attend, *operands)
        return results, pull(douts)

    run = jax.jit(value_and_gradients) if jit else value_and_gradients
    (out, lse), gradients = run(operands, douts)
    arithmetic = "accumulate" if dtype == "float32" else "kernel"
    assert not compare(case, dtype, np.asarray(out), np.asarray(lse), arithmetic=arithmetic).problems
    got = Gradients(*(*map(np.asarray, gradients), None)[:4])
    assert not gradient_problems(case, dtype, got, arithmetic="accumulate" if backward == "jax" else arithmetic)


def layers(attention, q, k, v):
    """Three layers by `lax.scan`."""

    def layer(x, _):
        return attention(x, k, v, LENGTHS), x.sum()

    x, sums = jax.lax.scan(layer, q, None, length=3)
    return (x**2).sum() + sums.sum()


def looped(attention, q, k, v):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, attention(c[1], k, v, LENGTHS)), (0, q))[1]


def chosen(attention, q, k, v):
    return jax.lax.cond(q[0, 0, 0] < 9, partial(loss, attention), lambda q, k, v: q.sum(), q, k, v)


def gradient_of(program, argument):
    return lambda attention, *x: jax.grad(partial(program, attention), argument)(*x)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "program",
    [looped, chosen, gradient_of(chosen, 1), layers, gradient_of(layers, (0, 1, 2))],
    ids=["while_loop", "cond", "gradient of cond", "scan", "gradient of scan"],
)
def test_control_flow(program, jit: bool) -> None:
    run = partial(program, CAUSAL)
    close((jax.jit(run) if jit else run)(*arrays()), reference(program, *arrays()))


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize(
    ("policy", "forward_calls"),
    [(None, 2), (jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES), 1)],
    ids=["recompute everything", "save what the policy names"],
)
def test_checkpoint_runs_the_forward_call_as_often_as_its_policy_says(
    policy, forward_calls: int, backward: str, calls: dict[str, int]
) -> None:
    def program(attention, x):
        def block(x):
            q, k, v = (x @ jnp.eye(D) for _ in range(3))
            out = jnp.sin(attention(q, k[:, :K], v[:, :K], LENGTHS))  # needs out again in its own backward pass
            return (out**2).sum()

        return jax.grad(jax.checkpoint(block, policy=policy))(x)

    # Eagerly: XLA merges two equal calls of one program where it can.
    got = jax.block_until_ready(program(partial(CAUSAL, backward=backward), arrays()[0]))
    assert calls == {"forward": forward_calls, "backward": int(backward == "npu")}
    close(got, reference(program, arrays()[0]))


def test_lse_is_fetched_only_when_it_is_wanted_or_needed() -> None:
    x = arrays()
    out = 4 * T * N * D
    lse = 4 * T * N
    kv = 2 * 4 * T * K * D
    for call, nbytes in [
        (lambda: CAUSAL(*x, LENGTHS), out),
        (lambda: CAUSAL(*x, LENGTHS, return_softmax_lse=True), out + lse),
        (lambda: jax.vjp(lambda *x: CAUSAL(*x, LENGTHS), *x)[0], out + lse),
        (lambda: jax.vjp(lambda *x: CAUSAL(*x, LENGTHS, backward="jax"), *x)[0], out),
        (lambda: jax.grad(lambda *x: CAUSAL(*x, LENGTHS).sum(), (0, 1, 2))(*x), out + lse + out + kv),
    ]:
        before = counters(0)
        jax.block_until_ready(call())
        assert (counters(0) - before).to_host.nbytes == nbytes


FORWARD_MODE = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jvp of vmap": lambda f, x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
}
SECOND_ORDER = {
    "hessian": lambda f, x: jax.hessian(f)(x),
    "grad of grad": lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
    "jit of grad of jit of grad": lambda f, x: jax.jit(jax.grad(lambda x: jax.jit(jax.grad(f))(x).sum()))(x),
}


@pytest.mark.parametrize(("backward", "argument"), [("npu", 0), ("npu", 1), ("jax", 2)])
@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_is_refused(name: str, backward: str, argument: int) -> None:
    def f(x):
        operands = arrays()
        operands[argument] = x
        return loss(partial(CAUSAL, backward=backward), *operands)

    with pytest.raises(TypeError) as caught:
        FORWARD_MODE[name](f, arrays()[argument])
    assert str(caught.value).splitlines()[0] == (
        "npu_packed_attention: a forward-mode derivative (jax.jvp, jacfwd, linearize). The kernels of the NPU have a "
        "reverse pass only. Use jax.grad, jax.vjp or jax.jacrev, or jaxattn.reference_attention, which has both."
    )


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("name", SECOND_ORDER)
def test_a_second_derivative_is_refused(name: str, backward: str) -> None:
    def f(q):
        return loss(partial(CAUSAL, backward=backward), q, *arrays()[1:])

    with pytest.raises(TypeError) as caught:
        SECOND_ORDER[name](f, arrays()[0])
    assert str(caught.value).splitlines()[0] == (
        "npu_packed_attention: a derivative of its derivative. The kernels of the NPU have none. Use "
        "jaxattn.reference_attention, which can be differentiated any number of times."
    )
    assert np.isfinite(f(arrays()[0]))


def test_a_gradient_that_does_not_go_through_attention_may_be_taken_twice() -> None:
    weight = jnp.ones(())
    fixed = CAUSAL(*arrays(), LENGTHS)
    second = jax.grad(jax.grad(lambda w: (w**2 * CAUSAL(*arrays(), LENGTHS)).sum()))(weight)
    np.testing.assert_allclose(second, 2 * fixed.sum(), rtol=1e-5)


def test_a_donated_buffer_and_one_array_in_three_roles() -> None:
    x = jnp.ones((T, 2, D)) * jnp.arange(T)[:, None, None]
    want = reference(lambda attention, x: attention(x, x, x, LENGTHS), x)
    close(CAUSAL(x, x, x, LENGTHS), want)
    close(jax.jit(lambda x: CAUSAL(x, x, x, LENGTHS))(x), want)
    step = jax.jit(lambda x: CAUSAL(x, x, x, LENGTHS), donate_argnums=0)
    given = x + 0
    close(step(given), want)
    assert given.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        CAUSAL(given, given, given, LENGTHS)


def test_inputs_are_not_written_and_no_result_is_the_memory_of_another() -> None:
    x = arrays()
    copies = [np.array(a) for a in x]
    run = jax.jit(lambda *x: CAUSAL(*x, LENGTHS))
    one, two = run(*x), run(*x)
    np.asarray(one)
    assert len({a.unsafe_buffer_pointer() for a in (*x, one, two)}) == 5
    for a, copy in zip(x, copies, strict=True):
        np.testing.assert_array_equal(a, copy)


def test_no_device_memory_outlives_a_call() -> None:
    from npu.simulator.counting import memory_in_use

    step = jax.jit(jax.grad(partial(loss, CAUSAL), (0, 1, 2)))
    kept = [step(*arrays())]
    jax.block_until_ready(kept)
    before = memory_in_use(0)  # the mask of causal calls
    for _ in range(3):
        _, pull = jax.vjp(partial(loss, CAUSAL), *arrays())
        kept += [pull(jnp.ones(())), step(*arrays())]
    jax.block_until_ready(kept)
    assert memory_in_use(0) == before


def test_several_threads_get_their_own_answers() -> None:
    run = jax.jit(CAUSAL)
    found: dict[int, bool] = {}

    def work(i: int) -> None:
        q, k, v = (x * (i + 1) for x in arrays())
        want = np.asarray(reference(lambda attention, *x: attention(*x, LENGTHS), q, k, v))
        with torch.npu.device(i):
            found[i] = all(np.allclose(run(q, k, v, LENGTHS), want, atol=1e-3) for _ in range(10))
            found[i] &= torch.npu.current_device() == i

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == dict.fromkeys(range(4), True)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_what_a_user_has_set_in_torch_changes_nothing(jit: bool) -> None:
    run = jax.jit(partial(CAUSAL, backward="npu")) if jit else CAUSAL
    want = np.asarray(run(*arrays(), LENGTHS))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.autocast("npu", torch.float16):
        np.testing.assert_array_equal(run(*arrays(), LENGTHS), want)
    with torch.enable_grad():
        gradient = jax.grad(partial(loss, CAUSAL))(*arrays())
    close(gradient, reference(gradient_of(loss, 0), *arrays()))


def test_two_eager_calls_lower_nothing_and_two_jitted_ones_once(caplog: pytest.LogCaptureFixture) -> None:
    def lowered() -> int:
        return sum("jaxpr to MLIR module" in record.getMessage() for record in caplog.records)

    q, k, v = arrays()
    jax.block_until_ready(CAUSAL(q, k, v, LENGTHS))
    with jax.log_compiles():
        jax.block_until_ready([CAUSAL(q, k, v, LENGTHS), CAUSAL(q, k, v, LENGTHS)])
        assert lowered() == 0
        run = jax.jit(lambda q: CAUSAL(q, k, v, LENGTHS))
        jax.block_until_ready([run(q), run(q)])
        assert lowered() == 1


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("program", [loss, gradient_of(loss, 0)], ids=["forward", "gradient"])
def test_a_program_for_another_platform_is_refused(program, platform: str) -> None:
    traced = jax.jit(partial(program, CAUSAL)).trace(*arrays())
    with pytest.raises(NotImplementedError) as caught:
        traced.lower(lowering_platforms=(platform,))
    assert str(caught.value).splitlines()[0] == (
        f"npu_packed_attention on platform {platform}. Arrays reach the NPU through host memory, from programs of JAX's CPU "
        'backend. Move the arguments first: jax.device_put(x, jax.devices("cpu")[0]).'
    )
