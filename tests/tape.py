"""A CUDA graph's stand-in on the CPU: operations recorded once, and repeated on the same tensors.

As in a graph, what Python computed while it was recorded is fixed, every tensor keeps its memory,
and recording leaves no trace. So a step that reads a counter of Python's, or replaces a tensor that
it should change in place, goes wrong here as it would there.
"""

from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from saltflat.core import cuda_graph
from saltflat.core.cuda_graph import GraphedStep


def record(body, pool=None):
    """What `saltflat.core.cuda_graph.record` does."""
    recording = _Recording()
    with recording:
        body()
    for storage, copy in recording.before.values():
        storage.copy_(copy)

    @torch.no_grad()
    def replay():
        for func, args, kwargs, made in recording.operations:
            out = tree_leaves(func(*args, **kwargs))
            for number, tensor in made:
                tensor.copy_(out[number])

    return replay


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []
        self.before = {}
        """Storages that were there before and have changed, and copies of what they were."""
        self._new = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._new:
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        old = {_place(tensor) for tensor in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        made = [
            (number, tensor)
            for number, tensor in enumerate(tree_leaves(out))
            # A view, or an argument that was changed in place, needs no copy.
            if isinstance(tensor, torch.Tensor) and _place(tensor) not in old
        ]
        self._new |= {_place(tensor) for _, tensor in made}
        self.operations.append((func, args, kwargs, made))
        return out


def _written(func, args, kwargs):
    """The arguments that an operation changes."""
    known = torch._C._SchemaInfo(func._schema)
    for number, argument in enumerate(func._schema.arguments):
        # That BatchNorm changes its statistics is not in its schema.
        if known.is_mutable(argument.name) or argument.name in ("running_mean", "running_var"):
            yield from _tensors(args[number] if number < len(args) else kwargs.get(argument.name))


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _place(tensor):
    return tensor.untyped_storage().data_ptr()


class TapedStep(GraphedStep):
    """A GraphedStep that captures on the CPU, with the tape."""

    def __init__(self, step, parts=(), *, warmup=3):
        super().__init__(step, parts, warmup=warmup)
        self.captures = []

    def _can_capture(self, inputs):
        return True

    def _side_stream(self):
        return nullcontext()

    def _capture(self, inputs):
        buffers, outputs = [x.clone() for x in inputs], []
        replay = record(lambda: outputs.append(self._step(*buffers)))
        self.captures.append(tuple(x.shape for x in inputs))
        return cuda_graph._Graph(buffers, outputs[0], replay)
