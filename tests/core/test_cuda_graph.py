import re
from pathlib import Path

import pytest
import torch
from tape import TapedStep

import saltflat
from saltflat.core import cuda_graph
from saltflat.core.cuda_graph import GraphedStep, random_state, set_random_state


class Counter:
    """A part of a step: what Python decides, and how often it was told of a step."""

    nbytes = 0

    def __init__(self, mode="a"):
        self.mode, self.ticks = mode, 0

    def graph_key(self):
        return self.mode

    def tick(self):
        self.ticks += 1


def adding(part, warmup=3, kind=TapedStep):
    """A step that adds its input to a tensor, and how often Python ran it."""
    total, runs = torch.zeros(2), []

    def step(x):
        runs.append(part.mode)
        total.add_(x.sum())
        cuda_graph.tick(part)
        return total.clone()

    return kind(step, [part], warmup=warmup), runs


def test_warms_up_captures_once_and_replays():
    part = Counter()
    step, runs = adding(part, warmup=2)
    seen = [step(torch.tensor([float(number)]))[0].item() for number in range(1, 8)]
    assert seen == [1, 3, 6, 10, 15, 21, 28]  # warm-ups are real steps
    assert len(runs) == 3  # two warm-ups and the capture
    assert len(step.captures) == 1
    assert part.ticks == 7


def test_each_key_is_warmed_up_and_captured_once():
    """A key is what the parts decide and the shapes of the inputs."""
    part = Counter()
    step, runs = adding(part, warmup=1)
    for mode in "aaabbbaab":
        part.mode = mode
        step(torch.ones(3))
    assert runs == ["a", "a", "b", "b"]
    step(torch.ones(2)), step(torch.ones(2)), step(torch.ones(3))  # a last smaller batch
    assert runs == ["a", "a", "b", "b", "b", "b"]
    assert step.captures == [((3,),), ((3,),), ((2,),)]
    total = step(torch.zeros(3))
    assert total[0] == 9 * 3 + 2 * 2 + 3
    assert part.ticks == 13


def test_without_a_gpu_every_step_runs_eagerly():
    part = Counter()
    step, runs = adding(part, kind=GraphedStep)
    for _ in range(6):
        step(torch.ones(1))
    assert len(runs) == part.ticks == 6


def test_a_part_does_not_tick_itself_inside():
    part = Counter()
    cuda_graph.tick(part)
    with cuda_graph.withhold_ticks():
        cuda_graph.tick(part)
        assert not cuda_graph.eager()
    assert part.ticks == 1 and cuda_graph.eager()


@pytest.mark.parametrize("fails_at", ["warm-up", "capture"])
def test_an_exception_leaves_nothing_behind(fails_at):
    part, broken = Counter(), [True]
    done = torch.zeros(1)

    def step(x):
        done.add_(x)
        if broken:
            raise KeyError("the data are gone")
        return done.clone()

    graphed = TapedStep(step, [part], warmup=1)
    if fails_at == "capture":
        broken.clear()
        graphed(torch.ones(1))
        broken.append(True)
    ticks = part.ticks
    with pytest.raises(KeyError):
        graphed(torch.ones(1))
    assert cuda_graph.eager() and part.ticks == ticks
    broken.clear()
    before = done.item()
    for number in range(1, 5):
        assert graphed(torch.ones(1)).item() == before + number
    assert part.ticks == ticks + 4


def test_a_learning_rate_that_is_a_float_is_refused():
    w = torch.ones(1, requires_grad=True)

    def step(x):
        raise AssertionError("no step was to be taken")

    optimizer = torch.optim.SGD([w], lr=0.25)
    with pytest.raises(ValueError, match=r"lr.*got 0\.25"):
        TapedStep(step, [optimizer])(torch.ones(1))
    optimizer = torch.optim.SGD([w], lr=torch.tensor(0.25))
    with pytest.raises(AssertionError):
        TapedStep(step, [optimizer])(torch.ones(1))


def test_warmup_must_be_a_step():
    with pytest.raises(ValueError, match=r"warmup.*got 0"):
        GraphedStep(lambda: None, warmup=0)


def test_random_states_are_taken_and_set():
    state = random_state([torch.zeros(1)])
    first = torch.rand(3)
    set_random_state({**state, "cuda:7": state["cpu"]} if not torch.cuda.is_available() else state)
    assert torch.equal(torch.rand(3), first)


def test_only_one_file_asks_whether_a_step_is_captured_or_compiled():
    source = Path(saltflat.__file__).parent
    asks = re.compile(r"is_current_stream_capturing|is_compiling")
    files = [file for file in source.glob("*/**/*.py") if asks.search(file.read_text())]
    assert files == [source / "core" / "cuda_graph.py"]
