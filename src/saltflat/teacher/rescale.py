"""scale_factor: how much larger or smaller a teacher's logits should be to fit the model's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat.core.distributed import world


def scale_factor(
    reference: Tensor, logits: Tensor, process_group: dist.ProcessGroup | None = None
) -> Tensor:
    r"""The least-squares factor that scales a reference to the logits, clipped at 0.

    .. math:: c = \max(0, \sum z v / \sum v v)

    Here z are the logits and v the reference, each less its mean over the classes of a row. The
    sums run over all rows of all processes in which both are finite. The factor is a constant to
    the gradient.

    Args:
        reference: Outputs of shape (rows, classes).
        logits: Others for the same rows.
        process_group: The processes whose rows are one batch, and which all call this; the default
            group unless given.

    Returns:
        A scalar, in float32 or float64; 1 if no row of the reference varies over the classes.

    Example:
        >>> reference, logits = torch.tensor([[0.0, 2.0, 4.0]]), torch.tensor([[2.0, 0.0, 4.0]])
        >>> scale_factor(reference, logits)
        tensor(0.5000)
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    z, v = (outputs.detach().to(dtype) for outputs in (logits, reference))
    z, v = (outputs - outputs.mean(-1, keepdim=True) for outputs in (z, v))
    rows = torch.stack([(z * v).sum(-1), (v * v).sum(-1)])
    sums = torch.where(rows.isfinite().all(0), rows, 0.0).sum(-1)
    if world(process_group)[1] > 1:
        dist.all_reduce(sums, group=process_group)
    factor = sums[0] / sums[1]
    return torch.where(factor.isfinite(), factor, 1.0).clamp(min=0)
