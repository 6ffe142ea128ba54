"""Norm and rotation with their derivatives by hand: they are short, and autograd's take two to four times as long.

On a small model what stands between the matrices is an eighth of a step, and most of that is backward: autograd goes
through it operation by operation, and keeps the result of each. These keep their inputs.
Shapes: see transformer.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        x32_BLD = x_BLD.float()
        scale_BL1 = torch.rsqrt(x32_BLD.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x_BLD, weight_D, scale_BL1)
        return (x32_BLD * scale_BL1).to(x_BLD.dtype) * weight_D

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BLD, weight_D, scale_BL1 = ctx.saved_tensors
        gradient_BLD = gradients[0].float()
        normed_BLD = x_BLD.float() * scale_BL1
        of_weight_D = (gradient_BLD * normed_BLD).flatten(0, -2).sum(0).to(weight_D.dtype)
        of_x_BLD = gradient_BLD * weight_D.float()
        along_BL1 = torch.linalg.vecdot(of_x_BLD, normed_BLD).unsqueeze(-1) / x_BLD.shape[-1]
        of_x_BLD.addcmul_(normed_BLD, along_BL1, value=-1).mul_(scale_BL1)
        return of_x_BLD.to(x_BLD.dtype), of_weight_D, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLHE: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_LE, sin_LE)
        return _turn(x_BLHE, cos_LE, sin_LE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_LE, sin_LE = ctx.saved_tensors
        return _turn(gradients[0], cos_LE, -sin_LE), None, None  # by the angle back


def normalise(x_BLD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Scale to unit root mean square, in fp32 whatever the input's type, and multiply with the weight."""
    normed_BLD: Tensor = _Normalise.apply(x_BLD, weight_D, epsilon)
    return normed_BLD


def rotate(x_BLHE: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
    """Rotate the two halves of each head by the position's angles; tables as rotary_tables gives them."""
    turned_BLHE: Tensor = _Rotate.apply(x_BLHE, cos_LE, sin_LE)
    return turned_BLHE


def _turn(x_BLHE: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
    x32_BLHE = x_BLHE.float()
    swapped_BLHE = x32_BLHE.roll(x_BLHE.shape[-1] // 2, dims=-1)
    turned_BLHE = (x32_BLHE * cos_LE.unsqueeze(1)).addcmul_(swapped_BLHE, sin_LE.unsqueeze(1))
    return turned_BLHE.to(x_BLHE.dtype)
