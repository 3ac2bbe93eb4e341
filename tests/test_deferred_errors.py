"""Mistakes in values reach the user with our words, now or as soon as it is safe, and JAX goes on."""

import ast
import traceback
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from processes import finish, start

import interop
from interop import npu_packed_attention, pending, raise_pending
from jaxattn import Segments

ROOT = Path(__file__).parents[1]
GOOD = Segments.from_lengths([3, 5])
BAD = jax.tree.map(lambda cu: jnp.asarray(cu) + 2, GOOD)
LINE = "`cu_seqlens_q`: the first offset is 2. Offsets start with 0. Prepend 0 to the running sums."
X = jnp.ones((8, 2, 16))
# A program that has run before goes a faster way through jax, which gives what a callback raises another type.
RAISED_IN_A_PROGRAM = (jax.errors.JaxRuntimeError, ValueError)


def attend(x, segments, **options):
    return npu_packed_attention(x, x, x, segments, causal=True, **options)


def test_a_static_mistake_shows_the_users_line() -> None:
    @jax.jit
    def model(x):
        return npu_packed_attention(x, x, x[:, :, :8], GOOD, softmax_scale="large")

    with pytest.raises(ValueError, match=r"^`softmax_scale`: 'large'") as caught:
        model(X)
    lines = [frame.line for frame in traceback.extract_tb(caught.tb)]
    assert any("x[:, :, :8], GOOD" in (line or "") for line in lines)


@pytest.mark.parametrize("device", [7, "cpu"])
def test_mistakes_of_an_option_come_with_all_the_others(device) -> None:
    with pytest.raises(ValueError, match="`backward`") as caught:
        npu_packed_attention(X, X[:, :, :8], X, GOOD, backward="torch", device=device)
    assert str(caught.value).splitlines()[1:] == [
        '`backward`: \'torch\'. It must be "npu" or "jax". Use backward="jax" for gradients by JAX.',
    ]


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_an_error_inside_a_scan_surfaces_and_the_process_goes_on(where: str) -> None:
    at = {"first": 0, "middle": 4, "last": 8}[where]
    packings = jax.tree.map(lambda good, bad: jnp.stack([good] * 9).at[at].set(bad), GOOD, BAD)

    @jax.jit
    def layers(x, packings):
        return jax.lax.scan(lambda x, segments: (attend(x, segments), None), x, packings)[0]

    for _ in range(2):
        with pytest.raises(RAISED_IN_A_PROGRAM) as caught:
            jax.block_until_ready(layers(X, packings))
        assert LINE in str(caught.value)
        good = jax.tree.map(lambda cu: jnp.stack([jnp.asarray(cu)] * 9), GOOD)
        np.testing.assert_allclose(layers(X, good), X, rtol=1e-5)
    raise_pending()  # nothing waits: it was raised


def test_an_error_of_the_backward_call_surfaces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from interop import operations

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    gradient = jax.jit(jax.grad(lambda x: attend(x, GOOD).sum()))
    want = gradient(X)
    monkeypatch.setattr(operations, "run_backward", fail)
    with pytest.raises(RAISED_IN_A_PROGRAM, match="the device is gone"):
        jax.block_until_ready(gradient(X))
    monkeypatch.undo()
    np.testing.assert_array_equal(gradient(X), want)


def test_a_batch_names_the_element_that_is_wrong() -> None:
    packings = jax.tree.map(lambda good, bad: jnp.stack([good, bad]), GOOD, BAD)
    with pytest.raises(RAISED_IN_A_PROGRAM) as caught:
        jax.block_until_ready(jax.jit(jax.vmap(attend))(jnp.stack([X, X]), packings))
    assert f"Element 1 of the batch: {LINE}" in str(caught.value)
    with pytest.raises(ValueError, match="Element 1 of the batch: `cu_seqlens_q`: the first offset is 2"):
        jax.vmap(attend)(jnp.stack([X, X]), packings)


@pytest.mark.parametrize("backward", ["npu", "jax"])
def test_while_a_mesh_is_active_errors_wait_with_their_type(backward: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    everywhere = PartitionSpec()
    step = jax.value_and_grad(lambda x, segments: attend(x, segments, backward=backward).sum())
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(everywhere, everywhere), out_specs=(everywhere, everywhere)))
    value, gradient = jax.block_until_ready(run(X, BAD))
    assert np.isnan(value)
    assert np.isnan(gradient).all()
    with pytest.raises(ValueError, match="`cu_seqlens_q`: the first offset is 2"):
        raise_pending()
    raise_pending()
    assert np.isfinite(run(X, GOOD)[1]).all()
    jax.block_until_ready(run(X, BAD))
    with pytest.raises(ValueError, match="`cu_seqlens_q`: the first offset is 2"):
        attend(X, GOOD)
    np.testing.assert_allclose(attend(X, GOOD), X, rtol=1e-5)


UNTOLD = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from interop import npu_packed_attention
from jaxattn import Segments
from npu import simulator

simulator.enable()
x = jnp.ones((8, 2, 16))
call = jax.shard_map(
    lambda x, s: npu_packed_attention(x, x, x, s), mesh=Mesh(np.array(jax.devices()), ("x",)), in_specs=P(), out_specs=P()
)
run = jax.jit(call)
bad = jax.tree.map(lambda cu: jnp.asarray(cu) + 2, Segments.from_lengths([3, 3]))
print(jnp.isnan(run(x, bad)).all(), jnp.isnan(run(x, bad)).all())
"""


def test_at_exit_one_line_names_what_was_never_raised() -> None:
    printed = finish(start("-c", UNTOLD))
    first, line = printed.splitlines()
    assert first == "True True"
    assert line == (
        f"npu_packed_attention: an error was never raised (and 1 more): ValueError: {LINE} "
        f"{LINE.replace('_q', '_k')} Call interop.raise_pending() when results are there."
    )


def test_what_waits_is_kept_without_frames() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        pending.keep(error)
    (kept,) = pending._kept
    assert kept.__traceback__ is None
    assert kept.__cause__ is not None
    assert kept.__cause__.__traceback__ is None
    with pytest.raises(ValueError, match="outer"):
        raise_pending()


def test_the_body_of_the_callback_calls_no_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    # What runs inside XLA is in these modules, and they cannot call what they do not import.
    for path in (ROOT / "interop/operations.py", ROOT / "interop/packs.py", *(ROOT / "npu").rglob("*.py")):
        tree = ast.walk(ast.parse(path.read_text()))
        names = [alias.name for node in tree if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        assert not {"jax", "jnp"} & {name.split(".")[0] for name in names}, path
    run = jax.jit(partial(attend, segments=GOOD))
    want = np.asarray(run(X))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("JAX was called inside the callback")

    for module, name in ((jax, "device_put"), (jax, "jit"), (jnp, "asarray"), (jnp, "array"), (jnp, "from_dlpack")):
        monkeypatch.setattr(module, name, refuse)
    np.testing.assert_array_equal(np.asarray(run(X)), want)
    monkeypatch.setattr(interop.operations, "view", lambda x: refuse() if x is None else jnp.asarray(x))
    with pytest.raises(RAISED_IN_A_PROGRAM, match="JAX was called inside the callback"):
        jax.block_until_ready(run(X))
