"""`torch.autocast("npu")`: which operators run in the low precision, which in float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import fallthrough_kernel

from npu.simulator import devices

_KEY = "AutocastPrivateUse1"
_OWN_KEY = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

# torch's lists for accelerators, as far as they name operators with one tensor policy.
_LOW_PRECISION = """
    _convolution addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input einsum linalg_multi_dot linalg_vecdot linear matmul mm mv prelu
    scaled_dot_product_attention
"""
_FLOAT32 = """
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cumprod cumsum dist
    erfinv exp expm1 group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log log10 log1p log2
    log_softmax.int logsumexp margin_ranking_loss mse_loss multilabel_margin_loss nll_loss nll_loss2d norm.Scalar pdist
    poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod prod.dim_int reciprocal renorm rsqrt sinh
    smooth_l1_loss soft_margin_loss softmax.int softplus sum sum.dim_IntList tan triplet_margin_loss
"""


def register(everything: Any, aten: Any) -> None:
    """Registers the lists in the library `aten`, and in `everything` that all other operators pass through."""
    everything.fallback(fallthrough_kernel, _KEY)
    for names, dtype in ((_LOW_PRECISION, None), (_FLOAT32, torch.float32)):
        for name in names.split():
            aten.impl(name, _casting(name, dtype), _KEY)


def _casting(name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    """The operator with its tensors cast to `dtype`, None for what the `torch.autocast` block asks for."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        wanted = torch.get_autocast_dtype(devices.TYPE) if dtype is None else dtype
        with torch._C._ExcludeDispatchKeyGuard(_OWN_KEY):
            return op(*_cast(args, wanted), **{key: _cast(value, wanted) for key, value in kwargs.items()})

    return kernel


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        # As in torch: float64 is a wish for precision and stays.
        eligible = value.is_floating_point() and value.device.type == devices.TYPE and value.dtype is not torch.float64
        return value.to(dtype) if eligible else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(each, dtype) for each in value)
    return value
