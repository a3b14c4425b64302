"""The methods that a run can be trained with: one table, from which everything else reads.

The loop knows no method by name. It sees a `Training`: an optimizer whose step takes a closure, a
term to add to the loss, a teacher to keep and evaluate. Settings and their defaults are those of
the class's signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from saltflat import sam
from saltflat.core.cuda_graph import all_parts
from saltflat.core.registry import Part
from saltflat.teacher import EMATeacher
from saltflat.terms import MESA, SAF, Shuffled, TrajectoryTerm, Uniform
from saltflat.train.config import MethodConfig, nearest


@dataclass
class Training:
    """A method at work: by default, the base optimizer and nothing else."""

    optimizer: Optimizer
    term: TrajectoryTerm | None = None
    """Added to the loss, or the whole loss."""
    teacher: EMATeacher | None = None
    """The moving average, evaluated beside the model: the term's, or one without a term."""
    label_smoothing: float | None = None
    """Instead of the config's."""
    per_row: bool = False
    """Whether the optimizer's closure takes rows and returns the loss of each."""
    another_view: bool = False
    """Whether the term sees the images augmented anew."""

    def __post_init__(self) -> None:
        own = self.term or self.teacher  # a term's teacher is in its own state
        self._stateful = {"optimizer": self.optimizer, **({} if own is None else {"method": own})}
        self._parts = all_parts(self._stateful.values())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""
        if self.term is not None:
            self.term.set_epoch(epoch)

    def after_step(self, model: nn.Module) -> None:
        """Let the term or the moving average follow the model."""
        follower = self.term or self.teacher
        if follower is not None:
            follower.update(model)

    def graph_key(self) -> Hashable:
        """What Python decides in the next step."""
        return tuple(part.graph_key() for part in self._parts)

    def tick(self) -> None:
        """Count a step that ran inside `withhold_ticks`."""
        for part in self._parts:
            part.tick()

    def sync(self) -> None:
        """Make the state whole; all processes call it before `state_dict`."""
        if self.term is not None:
            self.term.sync()

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer and of the method."""
        return {name: part.state_dict() for name, part in self._stateful.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        for name, part in self._stateful.items():
            part.load_state_dict(state[name])

    def extra_bytes(self) -> int:
        """Bytes that the method keeps between steps, beside the base optimizer's."""
        return sum(part.nbytes for part in self._stateful.values() if isinstance(part, Part))


@dataclass(frozen=True)
class Setting:
    """What a method is built from."""

    model: nn.Module
    optimizer: Optimizer
    num_samples: int
    num_classes: int
    seed: int


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    summary: str
    passes: str
    """Forward and backward passes a step."""
    build: Callable[..., Training]
    """From a `Setting` and the settings."""
    signature: Callable[..., Any] | None = None
    """Where settings' names and defaults are, beside those that `build` itself has."""
    citation: str = "Du et al., Sharpness-Aware Training for Free, NeurIPS 2022"
    judged_by_teacher: bool = False
    """Whether the moving average is what it is about."""

    def settings(self) -> dict[str, Any]:
        """The names of the settings and their defaults."""
        known = [self.signature, self.build] if self.signature else [self.build]
        parameters = [p for one in known for p in inspect.signature(one).parameters.values()]
        return {p.name: p.default for p in parameters if p.name not in _NOT_SETTINGS}


_NOT_SETTINGS = {
    *("self", "setting", "settings", "base_optimizer", "model", "m_sharpness"),
    *("num_samples", "num_classes", "process_group", "output", "class_dim"),
}


def _saf(setting: Setting, **settings: Any) -> Training:
    return Training(setting.optimizer, SAF(setting.num_samples, setting.num_classes, **settings))


def _shuffled(setting: Setting, **settings: Any) -> Training:
    sizes = setting.num_samples, setting.num_classes
    return Training(setting.optimizer, Shuffled(*sizes, seed=setting.seed, **settings))


def _uniform(setting: Setting, **settings: Any) -> Training:
    return Training(setting.optimizer, Uniform(**settings))


def _mesa(setting: Setting, another_view: bool = False, **settings: Any) -> Training:
    mesa = MESA(setting.model, **settings)
    return Training(setting.optimizer, mesa, mesa.teacher, another_view=another_view)


def _ema(setting: Setting, **settings: Any) -> Training:
    return Training(setting.optimizer, teacher=EMATeacher(setting.model, **settings))


def _smoothing(setting: Setting, smoothing: float = 0.1) -> Training:
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be within [0, 1), got {smoothing}")
    return Training(setting.optimizer, label_smoothing=smoothing)


def _wrapped(wrapper: type[Any], per_row: bool = False) -> Callable[..., Training]:
    def build(setting: Setting, **settings: Any) -> Training:
        optimizer = wrapper(setting.optimizer, model=setting.model, **settings)
        return Training(optimizer, per_row=per_row)

    return build


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "base": Method(
            "the base optimizer alone",
            "1 + 1",
            lambda setting: Training(setting.optimizer),
            citation="",
        ),
        "sam": Method(
            "step with the gradient at the worst point nearby",
            "2 + 2",
            _wrapped(sam.SAM),
            sam.SAM,
            "Foret et al., ICLR 2021",
        ),
        "asam": Method(
            "SAM in a neighbourhood that scales with the weights",
            "2 + 2",
            _wrapped(sam.ASAM),
            sam.ASAM,
            "Kwon et al., ICML 2021",
        ),
        "gsam": Method(
            "SAM that also lowers the loss at the weights themselves",
            "2 + 2",
            _wrapped(sam.GSAM),
            sam.GSAM,
            "Zhuang et al., ICLR 2022",
        ),
        "esam": Method(
            "SAM on part of the weights and part of the batch",
            "2.5 + 1.5",
            _wrapped(sam.ESAM, per_row=True),
            sam.ESAM,
            "Du et al., ICLR 2022",
        ),
        "looksam": Method(
            "SAM every few steps, its direction reused between",
            "1.2 + 1.2",
            _wrapped(sam.LookSAM),
            sam.LookSAM,
            "Liu et al., CVPR 2022",
        ),
        "msam": Method(
            "move against the momentum before the gradient is taken",
            "1 + 1",
            _wrapped(sam.MSAM),
            sam.MSAM,
            "Becker et al., 2024",
        ),
        "saf": Method(
            "stay near each sample's own outputs some epochs ago",
            "1 + 1",
            _saf,
            SAF,
        ),
        "mesa": Method("stay near the outputs of the moving average", "2 + 1", _mesa, MESA),
        "label_smoothing": Method(
            "control: smoothed labels", "1 + 1", _smoothing, citation="Szegedy et al., CVPR 2016"
        ),
        "ema": Method(
            "control: evaluate the moving average, train as the base",
            "1 + 1",
            _ema,
            EMATeacher,
            "Polyak and Juditsky, 1992",
            judged_by_teacher=True,
        ),
        "saf_shuffled": Method("control: SAF with other samples' outputs", "1 + 1", _shuffled, SAF),
        "saf_uniform": Method(
            "control: SAF toward the uniform distribution", "1 + 1", _uniform, Uniform
        ),
    }
)


def check_method(config: MethodConfig) -> Method:
    """The row that a config names.

    Raises:
        ValueError: If there is no such method, or it has no such setting.
    """
    if config.name not in METHODS:
        raise ValueError(f"unknown method {config.name!r}: {nearest(config.name, METHODS)}")
    method = METHODS[config.name]
    known = method.settings()
    for name in config.settings:
        if name not in known:
            hint = nearest(name, known) if known else "it has none"
            raise ValueError(f"{config.name} has no setting {name!r}: {hint}")
        check_kind(config.name, name, config.settings[name], known[name])
    return method


def check_kind(owner: str, name: str, value: Any, default: Any) -> None:
    """A setting must be of its default's kind; whole numbers will do for fractions."""
    kinds = (int, float) if type(default) is float else (type(default),)
    if default is not None and type(value) not in kinds:
        raise ValueError(
            f"{owner}'s {name} must be of the type {kinds[-1].__name__}, as {default!r} is, "
            f"got {value!r}"
        )
