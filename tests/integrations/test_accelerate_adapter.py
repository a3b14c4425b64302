"""What is particular to Accelerate: its samplers, its own registration and its autocast."""

from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration
from adapters import TERMS, sgd
from problems import dataset, network, same
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from saltflat import MESA, Batch, indexed_loader, with_index
from saltflat.integrations.accelerate import register

pytestmark = pytest.mark.filterwarnings("ignore:::accelerate")


class Loop:
    """The loop of the documentation's page, which can be stopped and resumed anywhere."""

    def __init__(self, method, folder, registered=True, own_collate=False):
        self.accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4),
            project_config=ProjectConfiguration(str(folder)),
        )
        self.net = network()
        self.term = TERMS[method](self.net)
        if registered:
            register(self.accelerator, self.term)
        else:
            self.accelerator.register_for_checkpointing(self.term)
        data, collated = with_index(dataset()), indexed_loader(DataLoader(dataset(), 8, True))
        loader = collated if own_collate else DataLoader(data, 8, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.net, sgd(self.net), loader
        )
        self.losses = []

    def epoch(self, epoch, skip=0, stop=None):
        self.term.set_epoch(epoch)
        self.loader.set_epoch(epoch)
        batches = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for number, (index, *pair) in enumerate(batches, skip):
            if number == stop:
                return
            x, y = pair if len(pair) == 2 else pair[0]
            logits = self.model(x)
            loss = cross_entropy(logits, y) + self.term(logits, Batch(index, ((x,), {}), y))
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.term.update(self.model)
            self.losses.append(loss.detach())


@pytest.mark.parametrize("method", ["saf", "mesa"])
@pytest.mark.parametrize("registered", [True, False], ids=["register", "accelerates own"])
def test_a_loaded_state_continues_as_if_nothing_had_happened(method, registered, tmp_path):
    """In the middle of an epoch, too."""
    straight = Loop(method, tmp_path)
    for epoch in range(4):
        straight.epoch(epoch)
    first = Loop(method, tmp_path, registered=registered)
    for epoch in range(2):
        first.epoch(epoch)
    first.epoch(2, stop=2)
    first.accelerator.save_state(str(tmp_path / "state"))
    second = Loop(method, tmp_path, registered=registered)
    torch.nn.init.zeros_(second.net[0].weight)
    second.accelerator.load_state(str(tmp_path / "state"))
    second.epoch(2, skip=2)
    second.epoch(3)
    assert same(first.losses + second.losses, straight.losses)
    assert same(dict(second.net.state_dict()), dict(straight.net.state_dict()))
    assert same(dict(second.term.state_dict()), dict(straight.term.state_dict()))


def test_an_indexed_loader_can_be_prepared(tmp_path):
    one, other = Loop("saf", tmp_path), Loop("saf", tmp_path, own_collate=True)
    for epoch in range(2):
        one.epoch(epoch)
        other.epoch(epoch)
    assert same(one.losses, other.losses)


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
