"""The trajectory loss: how far the outputs now are from a reference.

Equation (9) of the paper (SAF) and equation (13) (MESA) are this function with different
references. The paper's equations have the weight twice and no squared temperature. The released
code applies the weight once and multiplies by the squared temperature; so does this library.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax


def trajectory_loss(
    logits: Tensor,
    reference: Tensor,
    *,
    temperature: float = 5.0,
    tau_squared: bool = True,
    valid: Tensor | None = None,
) -> Tensor:
    r"""KL(softmax(reference / T) || softmax(logits / T)), summed over the valid rows / all rows.

    .. math:: L^{tra} = \frac{T^2}{|B|} \sum_{i \in B} KL(\hat y_i / T \,\|\, f_\theta(x_i) / T)
        \qquad \text{(9), (13)}

    The classes are the last dimension; every other position is a row. The divisor counts all rows,
    valid or not, so that micro-batches and processes add up to the loss of the whole batch.

    The arithmetic is float32, or float64 for float64 logits. Only `logits` receives a gradient.
    Rows that are not valid may hold NaN: their loss and gradient are 0.

    Args:
        logits: The outputs now, of shape (batch, ..., classes).
        reference: The outputs to stay near, of the same shape. A constant.
        temperature: T, which softens both distributions.
        tau_squared: Whether to multiply by T squared.
        valid: Booleans over the first dimensions of `logits`: (batch,) for samples,
            (batch, length) for tokens. Default: all rows.

    Returns:
        A scalar.

    Raises:
        ValueError: If the shapes do not fit or the temperature is not positive.

    Example:
        >>> import torch
        >>> past, now = torch.tensor([[0.0, 0.0]]), torch.log(torch.tensor([[1.0, 3.0]]))
        >>> trajectory_loss(now, past, temperature=1.0)  # 1/2 log(2/1) + 1/2 log(2/3)
        tensor(0.1438)
        >>> trajectory_loss(now, past, temperature=1.0, valid=torch.tensor([False]))
        tensor(0.)

    References:
        Du et al., Sharpness-Aware Training for Free, NeurIPS 2022.
    """
    if not (isinstance(temperature, (int, float)) and 0 < temperature < inf):
        raise ValueError(f"temperature must be positive, got {temperature!r}")
    if logits.dim() < 1 or logits.shape != reference.shape:
        raise ValueError(
            "logits and reference must have one shape (batch, ..., classes), got "
            f"{tuple(logits.shape)} and {tuple(reference.shape)}"
        )
    shape = logits.shape[:-1]
    if valid is not None:
        kind = getattr(valid, "dtype", type(valid).__name__)
        if kind != torch.bool or valid.shape != shape[: valid.dim()]:
            raise ValueError(
                f"valid must be a boolean tensor over the first dimensions of {tuple(shape)}, got "
                f"{kind} of shape {tuple(getattr(valid, 'shape', ()))}"
            )
        valid = valid.reshape(valid.shape + (1,) * (len(shape) - valid.dim())).expand(shape)
    factor = (temperature**2 if tau_squared else 1.0) / max(shape.numel(), 1)
    loss: Tensor = _TemperedKL.apply(logits, reference.detach(), valid, temperature, factor)[0]
    return loss


class _TemperedKL(torch.autograd.Function):
    """factor * sum of KL(p || q) over the valid rows.

    Here q = softmax(logits / T) and p = softmax(reference / T). The gradient by the logits is
    factor * (q - p) / T. The forward pass makes q - p in place: autograd would keep twice as many
    tensors of the logits' size.
    """

    @staticmethod
    def forward(
        logits: Tensor, reference: Tensor, valid: Tensor | None, temperature: float, factor: float
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        both = []
        for outputs in (logits, reference):
            log = outputs.to(dtype, copy=True).div_(temperature)
            soft = log.sub_(log.amax(-1, keepdim=True)).exp()
            total = soft.sum(-1, keepdim=True)
            both += [log.sub_(total.log()), soft.div_(total)]  # one exponential for the two
        log_q, q, log_p, p = both
        rows = log_p.sub_(log_q).mul_(p).sum(-1)
        pull = q.sub_(p)
        if valid is not None:
            rows = torch.where(valid, rows, 0.0)
            pull.masked_fill_(~valid[..., None], 0.0)  # a masked row may be NaN
        return rows.sum() * factor, pull

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, _, valid, ctx.temperature, factor = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or zeros are made for the second output
        ctx.save_for_backward(output[1], logits, valid)
        ctx.factor = factor / ctx.temperature

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        pull, logits, valid = ctx.saved_tensors
        if (
            torch.is_grad_enabled()
        ):  # for a second derivative: the value is unchanged, but depends on the logits
            z = logits if valid is None else torch.where(valid[..., None], logits, 0.0)
            q = softmax(z.to(pull.dtype) / ctx.temperature, -1)
            pull = pull + (q - q.detach())
        return (pull * (grad * ctx.factor)).to(logits.dtype), None, None, None, None
