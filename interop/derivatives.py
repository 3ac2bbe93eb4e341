"""An identity that can be differentiated in reverse only, and says so when it is asked for more.

`jax.custom_vjp` refuses forward mode too, in words that cannot name what to use instead.
"""

from typing import Any, NoReturn

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_FORWARD_MODE = (
    "npu_packed_attention: a forward-mode derivative (jax.jvp, jacfwd, linearize). The kernels of the NPU have a reverse "
    "pass only. Use jax.grad, jax.vjp or jax.jacrev, or jaxattn.reference_attention, which has both."
)
SECOND_ORDER = (
    "npu_packed_attention: a derivative of its derivative. The kernels of the NPU have none. Use "
    "jaxattn.reference_attention, which can be differentiated any number of times."
)


def reverse_only(x: Any) -> Any:
    """`x`, whose forward-mode derivative raises TypeError, eagerly and under `jit`."""
    return _identity_p.bind(x)


def refuse_second_order(*_: Any, **__: Any) -> NoReturn:
    """The derivative of what has none: a JVP rule that raises TypeError."""
    raise TypeError(SECOND_ORDER)


def _refuse_forward(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(_FORWARD_MODE)


def _identity_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    return x, dx if isinstance(dx, ad.Zero) else _tangent_p.bind(dx)


# Reverse mode only ever transposes the tangent; forward mode has to compute it, and gets the sentence.
_tangent_p = Primitive("npu_packed_attention_tangent")
_tangent_p.def_abstract_eval(lambda dx: dx)
_tangent_p.def_impl(_refuse_forward)
mlir.register_lowering(_tangent_p, _refuse_forward)
ad.deflinear2(_tangent_p, lambda ct, _: [ct])
batching.defvectorized(_tangent_p)

_identity_p = Primitive("npu_packed_attention_input")
_identity_p.def_abstract_eval(lambda x: x)
_identity_p.def_impl(lambda x: x)
mlir.register_lowering(_identity_p, lambda _, x: [x])
ad.primitive_jvps[_identity_p] = _identity_jvp
batching.defvectorized(_identity_p)
