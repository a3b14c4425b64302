"""A module as a graph of operations, in which convolutions have taken in what follows them.

In eval mode, BatchNorm multiplies each channel by a number and adds another, and a convolution's
weight and bias can do that themselves. Here is found where; `_convolution` makes the tensors.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

Norm = nn.BatchNorm2d | nn.SyncBatchNorm


@dataclass(frozen=True)
class Pair:
    """A convolution and the normalisation of its outputs."""

    conv: nn.Conv2d
    norm: Norm


@dataclass(frozen=True)
class Site:
    """A place where a pair is called, and whether a ReLU ends it."""

    pair: Pair
    relu: bool
    summand: int | None = None
    """The site whose outputs are added here and used nowhere else: its bias can be added too."""


class Program:
    """A module's forward pass, from one tensor, with calls of folded convolutions.

    Whatever is not folded is looked up in the module when it runs.

    Args:
        module: In eval mode.

    Raises:
        ValueError: If the module cannot be traced, or has nothing to fold; says which.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tree = _tree(module)
        self._modules = [m for m in self._tree if m is not None]
        if not self.describes(module):
            raise ValueError("a part of it is in train mode or has hooks")
        self._root = SimpleNamespace(inner=module)
        graph, self.sites = _folded_graph(module)
        code = graph.python_code("self")
        exec(code.src, code.globals)
        self._forward: Callable[..., Any] = code.globals["forward"]

    def __call__(self, convolutions: list[Callable[..., Tensor]], x: Tensor) -> Any:
        """The module's outputs, with a convolution for each of the sites."""
        return self._forward(self._root, convolutions, x)

    def describes(self, module: nn.Module) -> bool:
        """Whether this is what calling the module does now: no part was replaced, or hooked."""
        # Modules compare as objects: two lists are equal if they hold the same ones.
        if _tree(module) != self._tree or nn.modules.module._has_any_global_hook():
            return False
        return not any(
            m.training or m._forward_hooks or m._forward_pre_hooks for m in self._modules
        )


def call(convolutions: list[Callable[..., Tensor]], site: int, *inputs: Tensor) -> Tensor:
    """What stands in the graph for a folded convolution."""
    return convolutions[site](*inputs)


def _tree(module: nn.Module) -> list[nn.Module | None]:
    """Every module inside, quicker than modules(); one that is shared, each time."""
    found: list[nn.Module | None] = [module]
    for parent in found:
        if parent is not None and parent._modules:
            found.extend(parent._modules.values())
    return found


class _Wrapper(nn.Module):
    """Makes one input of any signature: the other arguments keep their defaults."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def change(operation: str, x: Any, y: Any) -> Any:
    """What stands in the graph for x += y and its like."""
    return getattr(operator, operation)(x, y)


def _recorded(operation: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda x, y: x.tracer.create_proxy("call_function", change, (operation, x, y), {})


class _Proxy(fx.Proxy):
    """Knows that x += y changes x, also where it has another name; fx takes it for x + y."""

    __iadd__, __isub__ = _recorded("iadd"), _recorded("isub")
    __imul__, __itruediv__ = _recorded("imul"), _recorded("itruediv")
    __ifloordiv__, __imod__, __ipow__ = map(_recorded, ("ifloordiv", "imod", "ipow"))
    __iand__, __ior__, __ixor__ = map(_recorded, ("iand", "ior", "ixor"))
    __ilshift__, __irshift__ = _recorded("ilshift"), _recorded("irshift")


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # or operations on buffers would run now, once

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        # A graph cannot hold `with torch.autocast(...)`; it would silently be left out.
        if _autocast_depth() != self._depth:
            raise ValueError("its forward changes autocast")
        return super().create_node(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        self._depth = _autocast_depth()
        return super().trace(*args, **kwargs)


def _autocast_depth() -> int:
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth


def _trace(module: nn.Module) -> fx.Graph:
    """The graph of a module, or of a copy of it, which shares the tensors: tracing may leave marks.

    Raises:
        ValueError: If there is none that does the same.
    """
    tensors = [*module.parameters(), *module.buffers()]
    wrapper = _Wrapper(copy.deepcopy(module, {id(t): t for t in tensors}))
    before = [(m, dict(vars(m))) for m in wrapper.modules()]
    try:
        graph = _Tracer().trace(wrapper)
    except Exception as error:  # the module's own code ran, on what is no tensor
        raise ValueError(f"it cannot be traced: {error}") from error
    for changed, attributes in before:
        now = vars(changed)
        if any(now[key] is not attributes.get(key) for key in now):
            raise ValueError("its forward makes tensors of its own, or changes the module")
    return graph


def _folded_graph(module: nn.Module) -> tuple[fx.Graph, list[Site]]:
    graph = _trace(module)
    modules = {f"inner.{name}": m for name, m in module.named_modules(remove_duplicate=False)}
    _drop_identities(graph, modules)
    sites: list[Site] = []
    with graph.inserting_before(next(iter(graph.nodes))):
        convolutions = graph.placeholder("convolutions")
    # Of two convolutions that are added, the later takes the sum in, and stays where it was.
    for norm in reversed(list(graph.nodes)):
        pair = _pair(norm, modules)
        if pair is not None:
            end, other = _ending(norm, modules)
            _replace(graph, convolutions, len(sites), norm, end, other)
            sites.append(Site(pair, relu=end is not norm))
    if not sites:
        raise ValueError("it has no BatchNorm2d that follows a Conv2d and nothing else does")
    graph.lint()
    return graph, _with_summands(graph, sites)


def _with_summands(graph: fx.Graph, sites: list[Site]) -> list[Site]:
    """Find the sites that add another's outputs, of pairs that are each called in one place."""
    calls = Counter(site.pair for site in sites)
    found = list(sites)
    for node in graph.nodes:
        if node.target is call and len(node.args) == 4:
            (_, number, _, other) = node.args
            if other.target is call and len(other.users) == 1 and not sites[other.args[1]].relu:
                added = other.args[1]
                if calls[sites[number].pair] == calls[sites[added].pair] == 1:
                    found[number] = replace(sites[number], summand=added)
    return found


def _replace(
    graph: fx.Graph,
    convolutions: fx.Node,
    site: int,
    norm: fx.Node,
    end: fx.Node,
    other: fx.Node | None,
) -> None:
    """Put one call in the place of all from a convolution to the end."""
    conv = _input(norm)
    total = None if other is None else _input(end)
    # Reads its input when the convolution did, or when both summands are there.
    with graph.inserting_before(conv if total is None else total):
        inputs = (conv.args[0],) if other is None else (conv.args[0], other)
        node = graph.call_function(call, (convolutions, site, *inputs))
    end.replace_all_uses_with(node)
    for gone in dict.fromkeys(n for n in (end, total, norm, conv) if n is not None):
        graph.erase_node(gone)


def _drop_identities(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    for node in list(graph.nodes):
        if node.op == "call_module" and type(modules.get(node.target)) is nn.Identity:
            node.replace_all_uses_with(_input(node))
            graph.erase_node(node)


def _pair(norm: fx.Node, modules: dict[str, nn.Module]) -> Pair | None:
    """The pair that ends in this node, if it is one."""
    normalises = _called(norm, modules, (nn.BatchNorm2d, nn.SyncBatchNorm))
    if normalises is None or not isinstance(conv := norm.args[0], fx.Node):
        return None
    convolves = _called(conv, modules, (nn.Conv2d,))
    if convolves is None or len(conv.users) > 1:
        return None
    pair = Pair(convolves, normalises)
    return pair if can_fold(pair) else None


def can_fold(pair: Pair) -> bool:
    """Whether the pair multiplies and adds fixed numbers, all on one device."""
    mean, var = pair.norm.running_mean, pair.norm.running_var
    return (
        isinstance(mean, Tensor)
        and isinstance(var, Tensor)
        and pair.conv.padding_mode == "zeros"
        and pair.conv.out_channels == pair.norm.num_features
        and pair.conv.weight.device == mean.device == var.device
    )


def _called(node: fx.Node, modules: dict[str, nn.Module], types: tuple[type, ...]) -> Any:
    """The module that a node calls with one input, if it is exactly of one of the types."""
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    plain = type(module) in types and "forward" not in vars(module)
    return module if plain and len(node.args) == 1 and not node.kwargs else None


def _ending(norm: fx.Node, modules: dict[str, nn.Module]) -> tuple[fx.Node, fx.Node | None]:
    """The last node that a folded convolution can do as well, and what it adds before."""
    after = _only_user(norm)
    if after is None:
        return norm, None
    if _is_relu(after, modules):
        return after, None
    other = _summand(after, norm)
    last = _only_user(after)
    if other is None or last is None or not _is_relu(last, modules):
        return norm, None
    # The convolution moves to where the sum is; its input must still be the same there.
    node = _input(norm)
    while node is not after:
        if _mutates(node, modules):
            return norm, None
        node = node.next
    return last, other


def _summand(node: fx.Node, norm: fx.Node) -> fx.Node | None:
    """What a node adds to the outputs of `norm`, if that is what it does."""
    adds = node.target in (operator.add, torch.add, "add")
    changes = node.target == "add_" or (node.target is change and node.args[0] == "iadd")
    if not (adds or changes) or len(node.args[-2:]) != 2 or node.kwargs:
        return None
    first, second = node.args[-2:]
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return None
    if first is norm:
        return second
    return first if adds else None  # in place, it is changed, and others may see that


def _is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if len(node.args) != 1 or node.kwargs.keys() - {"inplace"}:
        return False
    if node.op == "call_function":
        return node.target in (F.relu, torch.relu, torch.relu_)
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return _called(node, modules, (nn.ReLU,)) is not None


def _mutates(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node may change one of its inputs."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    name = getattr(node.target, "__name__", str(node.target))
    says_so = bool(node.kwargs.get("inplace")) or "out" in node.kwargs
    return says_so or name.endswith("_") or node.target in (change, operator.setitem)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _input(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]
