"""SAF and MESA in an Accelerate loop."""

from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration
from problems import METHODS, SAMPLES, Run, dataset, network, same
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from saltflat import MESA, with_index
from saltflat.integrations.accelerate import register

pytestmark = pytest.mark.filterwarnings("ignore:::accelerate")


class Loop:
    """The loop of the documentation's page, which can be stopped and taken up anywhere."""

    def __init__(self, method, folder, accumulate=1, registered=True):
        self.method = METHODS[method]
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4),
            project_config=ProjectConfiguration(str(folder)),
        )
        self.net = network()
        term = self.method.make(self.net)
        if registered:
            self.term = register(self.accelerator, term)
        else:
            self.term = term
            self.accelerator.register_for_checkpointing(term)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.net,
            torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9),
            DataLoader(with_index(dataset()), 8, shuffle=True),
        )
        self.losses, self.batches = [], []

    def epoch(self, epoch, skip=0, stop=None):
        self.term.set_epoch(epoch)
        self.loader.set_epoch(epoch)
        batches = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for number, (index, x, y) in enumerate(batches, skip):
            if number == stop:
                return
            with self.accelerator.accumulate(self.model):
                logits = self.model(x)
                loss = cross_entropy(logits, y)
                loss = loss + self.method.loss(self.term, logits, index, x)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.method.after_step(self.term, self.model)
            self.losses.append(loss.detach())
            self.batches.append((epoch, index, x, y))


every_method = pytest.mark.parametrize("method", METHODS)


@every_method
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loop_equals_the_plain_one(method, accumulate, tmp_path):
    loop = Loop(method, tmp_path, accumulate)
    for epoch in range(4):
        loop.epoch(epoch)
    assert sorted(torch.cat([b[1] for b in loop.batches[:3]]).tolist()) == list(range(SAMPLES))
    run = Run(METHODS[method])
    for number, (epoch, index, x, y) in enumerate(loop.batches):
        run.term.set_epoch(epoch)
        logits = run.model(x)
        loss = cross_entropy(logits, y) + run.method.loss(run.term, logits, index, x)
        assert torch.equal(loss, loop.losses[number])
        assert (loss > cross_entropy(logits, y)) == (epoch >= 2)
        (loss / accumulate).backward()
        if (number % 3 + 1) % accumulate == 0 or number % 3 == 2:
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.method.after_step(run.term, run.model)
    assert same(dict(loop.net.state_dict()), dict(run.model.state_dict()))
    assert same(dict(loop.term.state_dict()), dict(run.term.state_dict()))


@every_method
@pytest.mark.parametrize("registered", [True, False], ids=["register", "accelerates own"])
def test_a_loaded_state_continues_as_if_nothing_had_happened(method, registered, tmp_path):
    straight = Loop(method, tmp_path)
    for epoch in range(5):
        straight.epoch(epoch)
    first = Loop(method, tmp_path, registered=registered)
    for epoch in range(3):
        first.epoch(epoch)
    first.epoch(3, stop=2)
    first.accelerator.save_state(str(tmp_path / "state"))
    second = Loop(method, tmp_path, registered=registered)
    torch.nn.init.zeros_(second.net[0].weight)
    second.accelerator.load_state(str(tmp_path / "state"))
    second.epoch(3, skip=2)
    second.epoch(4)
    assert same(first.losses + second.losses, straight.losses)
    assert same(dict(second.net.state_dict()), dict(straight.net.state_dict()))
    assert same(dict(second.term.state_dict()), dict(straight.term.state_dict()))


@pytest.mark.usefixtures("own_accelerator")
@pytest.mark.parametrize("built", ["after prepare", "before", "before, called in autocast"])
def test_the_teacher_runs_in_the_models_precision(built):
    """If it is a copy of the prepared model, or is told to: Accelerate wraps what it prepares."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    net, types = network().eval(), []  # with the statistics that the teacher has
    mesa = MESA(net, start_epoch=0)
    model = accelerator.prepare(net)
    if built == "after prepare":
        mesa = MESA(net, start_epoch=0)
    register(accelerator, mesa).set_epoch(0)
    for one in (net, mesa.teacher.module):
        one[0].register_forward_hook(lambda *call: types.append(call[-1].dtype))
    x = dataset().tensors[0]
    logits = model(x)
    with accelerator.autocast() if "autocast" in built else nullcontext():
        term = mesa(logits, x)
    teachers = torch.float32 if built == "before" else torch.bfloat16
    assert types == [torch.bfloat16, teachers] and term.dtype == torch.float32
    assert (term == 0) == (built != "before")
    outputs = mesa.teacher(x)
    torch.nn.init.zeros_(net[0].weight)
    assert torch.equal(mesa.teacher(x), outputs) and not torch.equal(model(x), logits)
