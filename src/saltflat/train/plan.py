"""What SAF would send and keep on many processes, computed rather than measured.

With W processes of B rows each, a step of `saltflat.exchange` is an all-gather of indices (`ask`),
an all-to-all of stored rows (`fetch`), an all-reduce of a count, and an all-gather of stored rows
(`give`), the last beside the backward pass. Messages have one size: a row for each row asked for.

A collective is taken to last its latency plus its bytes over the bandwidth of the narrowest link.
Within a machine that is the GPU's own link. Between machines it is the machine's network card: a
ring, as of an all-gather, passes it once, an all-to-all once for every process of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil, inf, isfinite

from saltflat.codecs import CODECS, codec_for
from saltflat.saf import SAF
from saltflat.train.config import nearest, require

_INDEX = 8
"""Bytes of an index, and of a count."""
_BACKWARD = 2 / 3
"""The part of a step that is its backward pass."""


@dataclass(frozen=True)
class Link:
    """What processes are connected by."""

    name: str
    bandwidth: float
    """Bytes a second, in one direction."""
    latency: float
    """Seconds before a collective's first byte arrives."""
    shared: bool
    """Whether the processes of a machine share it."""


LINKS = (
    Link("NVLink", 450e9, 20e-6, shared=False),
    Link("100 Gb/s Ethernet", 12.5e9, 100e-6, shared=True),
)


@dataclass(frozen=True)
class Plan:
    """A training set and the processes that share it."""

    samples: int = 1_281_167
    classes: int = 1000
    batch: int = 128
    """Of each process."""
    processes: int = 8
    per_machine: int = 8
    """Processes of a machine."""
    step_ms: float = 100.0
    """What a step takes without SAF, in milliseconds."""
    lag: int = 3
    parameters: int = 25_557_032
    """Of the model; ResNet-50's unless said."""
    buffers: int = 53_120
    """Numbers in its BatchNorm statistics, which MESA sends."""

    def __post_init__(self) -> None:
        sizes = ("samples", "classes", "batch", "processes", "per_machine", "lag", "parameters")
        for name in sizes:
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1, got {value}")
        require(self.buffers >= 0, f"buffers must be 0 or more, got {self.buffers}")
        require(0 < self.step_ms < inf, f"step_ms must be positive, got {self.step_ms}")

    def row_bytes(self, storage: str) -> int:
        """Of one stored row and its flag, as they are sent."""
        codec = codec_for(storage)
        return (codec.width(self.classes) + 1) * codec.dtype.itemsize

    def messages(self, storage: str) -> dict[str, int]:
        """Bytes that a process receives in each move of a step."""
        others = self.processes - 1
        rows = others * self.batch * self.row_bytes(storage)
        return {
            "ask": others * self.batch * _INDEX,
            "fetch": rows,
            "count": _INDEX * min(others, 1),
            "give": rows,
        }

    def connects(self, link: Link) -> bool:
        """Whether a link is in use: machines are connected only where there are several."""
        return not link.shared or self.processes > self.per_machine

    def seconds(self, storage: str, link: Link) -> float:
        """How much longer a step takes, if all traffic passes this kind of link.

        Giving is hidden by what the gradients' own all-reduce leaves of the backward pass.
        """
        if self.processes == 1:
            return 0.0
        spent = {
            move: link.latency + sent * self._crowd(move, link) / link.bandwidth
            for move, sent in self.messages(storage).items()
        }
        gradients = 2 * 4 * self.parameters / link.bandwidth
        hidden = max(0.0, self.step_ms / 1e3 * _BACKWARD - gradients)
        return spent["ask"] + spent["fetch"] + spent["count"] + max(0.0, spent["give"] - hidden)

    def _crowd(self, move: str, link: Link) -> float:
        """How many processes' messages of a move pass the same link, as a factor."""
        if not link.shared or move != "fetch" or self.processes == 1:
            return 1.0
        inside = min(self.per_machine, self.processes)
        return inside * (self.processes - inside) / (self.processes - 1)

    def share_bytes(self, storage: str) -> int:
        """Bytes of outputs that a process keeps."""
        own = ceil(self.samples / self.processes)
        return SAF.estimate_bytes(own, self.classes, lag=self.lag, storage=storage)

    def teacher_bytes(self) -> int:
        """Bytes of MESA's teacher, on every process, in float32."""
        return 4 * self.parameters

    def enough_processes(self, storage: str) -> int | None:
        """From how many processes on SAF keeps no more than MESA on each; None: never."""
        one = SAF.estimate_bytes(1, self.classes, lag=self.lag, storage=storage)
        if one > self.teacher_bytes():
            return None
        few, many = 0, self.samples
        while many - few > 1:
            middle = (few + many) // 2
            own = ceil(self.samples / middle)
            fits = (
                SAF.estimate_bytes(own, self.classes, lag=self.lag, storage=storage)
                <= self.teacher_bytes()
            )
            few, many = (few, middle) if fits else (middle, many)
        return many


def plan_of(numbers: Mapping[str, float]) -> Plan:
    """A plan of the user's numbers.

    Raises:
        ValueError: If there is no such number, or it is out of its range.
    """
    known = {field.name for field in fields(Plan)}
    for name, value in numbers.items():
        require(name in known, f"a plan has no {name!r}: {nearest(name, known)}")
        whole = name == "step_ms" or (isfinite(value) and value == int(value))
        require(whole, f"{name} must be a whole number, got {value}")
    return Plan(**{k: v if k == "step_ms" else int(v) for k, v in numbers.items()})  # type: ignore[arg-type]


def table(plan: Plan) -> list[list[str]]:
    """The header and a line for each storage, and MESA's."""
    header = [
        *("storage", "kept by each process", "received a step", "collectives"),
        *(f"of a step, {link.name}" for link in LINKS),
        "less than MESA keeps from",
    ]
    lines = [header]
    for storage in CODECS:
        received = sum(plan.messages(storage).values())
        enough = plan.enough_processes(storage)
        lines.append(
            [
                storage,
                _size(plan.share_bytes(storage)),
                _size(received),
                str(0 if plan.processes == 1 else 4),
                *(
                    f"{plan.seconds(storage, link) / plan.step_ms * 1e3:.2%}"
                    if plan.connects(link)
                    else "one machine"
                    for link in LINKS
                ),
                "never" if enough is None else f"{enough:,} processes",
            ]
        )
    several = plan.processes > 1
    # Two sums, by which the teacher's outputs are matched, and BatchNorm's statistics.
    received = 8 + 4 * plan.buffers if several else 0
    sends = (3 if plan.buffers else 1) if several else 0
    lines.append(["MESA", _size(plan.teacher_bytes()), _size(received), str(sends), *[""] * 3])
    return lines


def advice(plan: Plan) -> str:
    """What the table comes to, in a sentence."""
    most = plan.share_bytes("float16")
    used = [link for link in LINKS if plan.connects(link)]
    worst = max(plan.seconds("float16", link) for link in used) / plan.step_ms * 1e3
    if most > 40 * 2**30 or worst > 0.2:
        return (
            f"SAF would keep {_size(most)} on each process and take up to {worst:.0%} of a step: "
            "MESA is the right choice, or SAF with storage uint8, in host memory, and with "
            "StickySampler, which sends nothing"
        )
    return f"SAF fits: {_size(most)} on each process, up to {worst:.1%} of a step"


def _size(count: float) -> str:
    """A number of bytes, as people write it.

    Example:
        >>> _size(1536)
        '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
