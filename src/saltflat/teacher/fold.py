"""FoldedTwin: a copy of a module for inference, with each BatchNorm folded into its convolution.

With gamma, beta, mean and var of the BatchNorm after it, a convolution's weight and bias become

    weight * scale  and  (bias - mean) * scale + beta,  scale = gamma / sqrt(var + eps).
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import fuse_conv_bn_eval

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class FoldedTwin(nn.Module):
    """A copy of a module in which each convolution includes the BatchNorm after it.

    A pair is a Conv1d, Conv2d or Conv3d whose output goes to one BatchNorm and nowhere else. Each
    of the two is called once. The twin has its own folded weights, and shares all other parameters
    and buffers with the module. Call `refresh` when the module's values have changed. Build a new
    twin when its tensors were replaced, as `.to()` and `load_state_dict(assign=True)` do.

    What the module's `forward` reads from plain attributes is read once, here. A `forward` that
    switches autocast has no right twin: the trace leaves the switch out.

    Args:
        module: In eval mode, without hooks. Is not changed.

    Raises:
        ValueError: If torch.fx cannot trace the module, or there is nothing to fold.

    Example:
        >>> module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)).eval()
        >>> for value in module.parameters():
        ...     _ = value.data.fill_(3.0)
        >>> twin = FoldedTwin(module)
        >>> _ = module[1].running_mean.fill_(1.0)
        >>> twin.refresh()
        >>> round(twin(torch.ones(1, 1, 1, 1)).item(), 3)  # 3 (3 + 3 - 1) + 3
        18.0
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._graph = _traced(module)
        self._shared = [*module.parameters(), *module.buffers()]
        self._folded: list[Any] = []
        """The folded convolutions."""
        self._sources: list[tuple[Tensor, ...]] = []
        """For each: weight, bias, gamma, beta, mean and var that it is made from."""
        self._eps: list[float] = []
        for conv, norm in _pairs(self._graph):
            self._fold(conv, norm)
        if not self._folded:
            raise ValueError("module has no BatchNorm that alone uses a convolution's output")
        self._graph.recompile()
        self._graph.delete_all_unused_submodules()
        self.refresh()

    def forward(self, *inputs: Any) -> Any:
        """The module's outputs, to rounding."""
        return self._graph(*inputs)

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold the module's tensors as they are now, in place; a CUDA graph can capture it."""
        weights, biases, gammas, betas, means, variances = (
            _widened(kind) for kind in zip(*self._sources, strict=True)
        )
        scales = torch._foreach_add(variances, self._eps)
        torch._foreach_sqrt_(scales)
        scales = torch._foreach_div(gammas, scales)
        for conv, weight, scale in zip(self._folded, weights, scales, strict=True):
            torch.mul(weight, scale.view(-1, *[1] * (weight.dim() - 1)), out=conv.weight)
        shifts = torch._foreach_sub(biases, means)
        torch._foreach_mul_(shifts, scales)
        torch._foreach_add_(shifts, betas)
        torch._foreach_copy_([conv.bias for conv in self._folded], shifts)

    def shares(self, module: nn.Module) -> bool:
        """Whether the module's tensors still are those of which this is the twin."""
        tensors = [*module.parameters(), *module.buffers()]
        return list(map(id, tensors)) == list(map(id, self._shared))

    @property
    def nbytes(self) -> int:
        """Bytes of the folded weights."""
        return sum(tensor.nbytes for conv in self._folded for tensor in conv.parameters())

    def _fold(self, conv_call: fx.Node, norm_call: fx.Node) -> None:
        conv, norm = (_called(self._graph, node) for node in (conv_call, norm_call))
        folded = fuse_conv_bn_eval(conv, norm).requires_grad_(False)
        # Under a new name: forward may also read the convolution's own weight.
        name = f"folded_{len(self._folded)}"
        self._graph.add_module(name, folded)
        conv_call.target = name
        norm_call.replace_all_uses_with(conv_call)
        self._graph.graph.erase_node(norm_call)
        zeros, ones = torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_mean)
        given = (
            conv.weight,
            conv.bias,
            norm.weight,
            norm.bias,
            norm.running_mean,
            norm.running_var,
        )
        absent = (zeros, zeros, ones, zeros, zeros, ones)
        self._sources.append(
            tuple(other if t is None else t for t, other in zip(given, absent, strict=True))
        )
        self._folded.append(folded)
        self._eps.append(norm.eps)


def _widened(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Half-precision tensors in float32."""
    return [t if t.dtype == torch.float64 else t.float() for t in tensors]


def _pairs(graph: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Calls of a convolution and of the BatchNorm that alone uses its output."""
    nodes = graph.graph.nodes
    calls = Counter(node.target for node in nodes)
    pairs = [(node.args[0], node) for node in nodes if node.args]
    return [
        (conv, norm)
        for conv, norm in pairs
        if isinstance(conv, fx.Node)
        and _is_plain(_called(graph, norm), _NORMS)
        and _is_plain(_called(graph, conv), _CONVS)
        and _called(graph, norm).running_mean is not None
        and len(conv.users) == calls[conv.target] == calls[norm.target] == 1
    ]


def _called(graph: fx.GraphModule, node: fx.Node) -> Any:
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def _is_plain(module: Any, types: tuple[type, ...]) -> bool:
    """Whether it is of exactly one of the types, and runs that type's forward."""
    return type(module) in types and "forward" not in vars(module)


def _traced(module: nn.Module) -> fx.GraphModule:
    """The module as a graph, over a copy that shares its tensors: tracing may leave marks."""
    if any(m.training or m._forward_hooks or m._forward_pre_hooks for m in module.modules()):
        raise ValueError("module must be in eval mode and without hooks to be folded")
    tensors = [*module.parameters(), *module.buffers()]
    try:
        twin = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
        arguments = inspect.signature(twin.forward).parameters.values()
        defaults = {a.name: a.default for a in arguments if a.default is not a.empty}
        with torch.no_grad():  # as the twin runs: a forward may ask
            graph = fx.GraphModule(twin, _Tracer().trace(twin, defaults))
    except Exception as error:  # anything: the module's own code ran, on proxies
        raise ValueError(f"torch.fx cannot trace module: {error}") from error
    made = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
    if any(str(name).startswith("_tensor_constant") for name in made):
        raise ValueError("module cannot be folded: its forward makes tensors of its own")
    return graph


def _in_place(operation: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda x, y: x.tracer.create_proxy("call_function", operation, (x, y), {})


class _Proxy(fx.Proxy):
    """Records x += y as a change of x in place. fx itself would record x + y."""

    __iadd__, __isub__ = _in_place(operator.iadd), _in_place(operator.isub)
    __imul__, __itruediv__ = _in_place(operator.imul), _in_place(operator.itruediv)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # or operations on buffers would run now, once

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)
