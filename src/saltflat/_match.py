"""How large the outputs of MESA's teacher are, against the model's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat._ranks import world

MATCHES = ("none", "spread", "nearest")


def matched(
    reference: Tensor,
    logits: Tensor,
    match: str,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The reference times one number, by which it is about as large as the logits.

    Size is what lies between the classes of a row, and counts over the rows in which it is finite;
    which row says more than another stays as it was. A reference whose rows are constant, as far as
    squares can tell, stays, too. Computed in float32 (float64 for float64 logits), without a
    gradient.

    Args:
        reference: Outputs of shape (rows, classes).
        logits: Others for the same rows.
        match: "spread" has the reference vary over the classes as much as the logits; "nearest" is
            the multiple at the least squared distance from them, and never a negative one.
        process_group: The processes whose rows are one batch, and which all call this; the default
            group unless said.

    Example:
        >>> import torch
        >>> reference, logits = torch.tensor([[0.0, 2.0, 4.0]]), torch.tensor([[2.0, 0.0, 4.0]])
        >>> matched(reference, logits, "spread")
        tensor([[0., 2., 4.]])
        >>> matched(reference, logits, "nearest")
        tensor([[0., 1., 2.]])
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits, reference = (outputs.detach().to(dtype) for outputs in (logits, reference))
    spread = match == "spread"
    if spread:
        want, have = (outputs.var(-1, correction=0) for outputs in (logits, reference))
    else:
        ours, theirs = (outputs - outputs.mean(-1, keepdim=True) for outputs in (logits, reference))
        want, have = (ours * theirs).sum(-1), (theirs * theirs).sum(-1)
    finite = want.isfinite() & have.isfinite()
    sums = torch.stack([torch.where(finite, rows, 0.0).sum() for rows in (want, have)])
    if world(process_group)[1] > 1:
        dist.all_reduce(sums, group=process_group)
    ratio = sums[0] / sums[1]
    ratio = torch.where(ratio.isfinite(), ratio, 1.0).clamp(min=0)
    return reference * (ratio.sqrt() if spread else ratio)
