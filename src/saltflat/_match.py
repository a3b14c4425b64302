"""How large the outputs of MESA's teacher are, against the model's.

A batch of a reference is multiplied by one number, by which it is about as large as the logits.
Size is what lies between the classes of a row, and counts over the rows in which it is finite;
which row says more than another stays as it was. The number is a constant to the gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat.core.distributed import world

MATCHES = ("none", "spread", "nearest")
"""By 1; so that it varies over the classes as much as the logits; the multiple at the least squared
distance from them, and never a negative one."""


def sums(
    reference: Tensor,
    logits: Tensor,
    match: str,
    process_group: dist.ProcessGroup | None = None,
    *,
    fused: bool = False,
) -> Tensor:
    """Two numbers, of whose ratio the multiple is made, each a sum over the rows.

    For "spread" the variances over the classes, of the logits and of the reference; for "nearest",
    with z the logits and v the reference less their means over the classes, z v and v v. In
    float32, or float64 for float64 logits.

    Args:
        reference: Outputs of shape (rows, classes); contiguous, if a kernel is to take them.
        logits: Others for the same rows.
        match: One of `MATCHES`, but for "none".
        process_group: The processes whose rows are one batch, and which all call this; the default
            group unless said.
        fused: Whether a GPU kernel does it, as it can for the logits.
    """
    if fused:
        from saltflat._fused import match_sums

        both = match_sums(reference, logits, match)
    else:
        both = _sums(reference, logits, match)
    if world(process_group)[1] > 1:
        dist.all_reduce(both, group=process_group)
    return both


def _sums(reference: Tensor, logits: Tensor, match: str) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits, reference = (outputs.detach().to(dtype) for outputs in (logits, reference))
    if match == "spread":
        want, have = (outputs.var(-1, correction=0) for outputs in (logits, reference))
    else:
        ours, theirs = (outputs - outputs.mean(-1, keepdim=True) for outputs in (logits, reference))
        want, have = (ours * theirs).sum(-1), (theirs * theirs).sum(-1)
    finite = want.isfinite() & have.isfinite()
    return torch.stack([torch.where(finite, rows, 0.0).sum() for rows in (want, have)])


def multiple(sums: Tensor, match: str) -> Tensor:
    """The number; 1 for a reference whose rows are constant, as far as squares can tell.

    Example:
        >>> import torch
        >>> reference, logits = torch.tensor([[0.0, 2.0, 4.0]]), torch.tensor([[2.0, 0.0, 4.0]])
        >>> [multiple(sums(reference, logits, match), match).item() for match in MATCHES[1:]]
        [1.0, 0.5]
    """
    ratio = sums[0] / sums[1]
    ratio = torch.where(ratio.isfinite(), ratio, 1.0).clamp(min=0)
    return ratio.sqrt() if match == "spread" else ratio
