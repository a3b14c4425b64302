"""The trajectory loss: the KL divergence from where the outputs were to where they are.

Equation (9) of the paper for SAF and equation (13) for MESA are one function; they differ only in
where the reference comes from. Two choices the paper leaves open are settled as in its released
code: the weight is applied once (by the caller), and the loss is multiplied by the squared
temperature, so that its gradient does not shrink with the temperature (`tau_squared`).
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax


def trajectory_loss(
    logits: Tensor,
    reference: Tensor,
    *,
    temperature: float = 5.0,
    tau_squared: bool = True,
    valid: Tensor | None = None,
) -> Tensor:
    r"""Mean over the valid rows of KL(softmax(reference / T) || softmax(logits / T)).

    .. math:: L^{tra} = \frac{T^2}{|B|} \sum_{i \in B} KL(\hat y_i / T \,\|\, f_\theta(x_i) / T)
        \qquad \text{(9), (13)}

    The classes are the last dimension. Every other position is a row of its own and all valid rows
    weigh the same, so a token or a pixel counts as much as an image does: logits of shape
    (batch, length, classes) give the same loss as their (batch * length, classes) view. Outputs
    that keep the classes in dimension 1, as convolutions do, need `movedim(1, -1)` first.

    The arithmetic is float32 (float64 for float64 logits) whatever comes in. The gradient reaches
    `logits` only; it is exactly zero where logits and reference agree, and rows that are not
    valid may hold anything, NaN included; a valid row must be finite. Nothing waits for the device.

    Args:
        logits: The outputs now, of shape (batch, ..., classes).
        reference: The outputs they are pulled to, of the same shape; a constant.
        temperature: T, the softening of both distributions.
        tau_squared: Whether to multiply by T squared.
        valid: Booleans over the leading dimensions of `logits` or the first few of them:
            (batch,) speaks for whole samples, (batch, length) for single tokens. None: all.

    Returns:
        A scalar; 0 with zero gradient where no row is valid.

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
    if not (isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive, got {temperature}")
    if logits.dim() < 1 or logits.shape != reference.shape:
        raise ValueError(
            "logits and reference must have one shape (batch, ..., classes), got "
            f"{tuple(logits.shape)} and {tuple(reference.shape)}"
        )
    rows = logits.shape[:-1]
    if valid is None:
        count = torch.full((), max(rows.numel(), 1), device=logits.device)
    else:
        if valid.dtype != torch.bool or valid.shape != rows[: valid.dim()]:
            raise ValueError(
                f"valid must be boolean over the leading dimensions of {tuple(rows)}, got "
                f"{valid.dtype} of shape {tuple(valid.shape)}"
            )
        valid = valid.reshape(valid.shape + (1,) * (len(rows) - valid.dim())).expand(rows)
        count = valid.sum().clamp(min=1)
    log_p = _log_softmax(reference.detach(), temperature)
    scale = temperature**2 if tau_squared else 1.0
    loss: Tensor = _TemperedKL.apply(logits, log_p, valid, count, temperature, scale)[0]
    return loss


class _TemperedKL(torch.autograd.Function):
    """Mean of scale * KL(p || q) over the valid rows, with q = softmax(logits / T).

    Written with its own gradient, scale (q - p) / (T n): the two sides come from the same
    operations and cancel exactly where the outputs agree, which they do not on the way back
    through log_softmax. q is an output only so that second derivatives find it.
    """

    @staticmethod
    def forward(
        logits: Tensor,
        log_p: Tensor,
        valid: Tensor | None,
        count: Tensor,
        temperature: float,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_q = _log_softmax(logits, temperature)
        p = log_p.exp()
        rows = (p * (log_p - log_q)).sum(-1)
        if valid is not None:
            rows = torch.where(valid, rows, 0.0)
        return rows.sum() * scale / count, log_q.exp(), p

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, _, valid, count, temperature, scale = inputs
        _, q, p = output
        ctx.mark_non_differentiable(p)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, p, valid, count)
        ctx.temperature, ctx.scale, ctx.dtype = temperature, scale, logits.dtype

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_q: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        q, p, valid, count = ctx.saved_tensors
        pull = None
        if grad is not None:
            pull = q - p
            if valid is not None:
                pull = torch.where(valid[..., None], pull, 0.0)
            pull = pull * (grad * (ctx.scale / ctx.temperature) / count)
        if grad_q is not None:  # dq/dlogits, asked for by second derivatives alone
            through_q = q * (grad_q - (grad_q * q).sum(-1, keepdim=True)) / ctx.temperature
            pull = through_q if pull is None else pull + through_q
        return (None if pull is None else pull.to(ctx.dtype)), None, None, None, None, None


def _log_softmax(outputs: Tensor, temperature: float) -> Tensor:
    """log softmax(outputs / T) in at least float32."""
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    return log_softmax(outputs.to(dtype) / temperature, -1)
