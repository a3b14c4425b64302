"""The Lightning callbacks against Lightning itself, and against the plain loop."""

import lightning.pytorch as pl
import pytest
import torch
from lightning_fits import (
    MESA_SETTINGS,
    SAF_SETTINGS,
    Module,
    ResumableLoader,
    callback,
    fit,
    loader,
    sgd,
)
from problems import CLASSES, SAMPLES, network, same
from torch.nn.functional import cross_entropy

from saltflat import MESA, SAF, sam
from saltflat.integrations.lightning import SharpnessCallback, indexed_datamodule
from saltflat.sharpness import sam_sharpness

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


class Inner(Module):
    """Calls the network itself, and returns a dictionary."""

    def training_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return {"loss": cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float()}


def plain(method, *, epochs=4, accumulate=1, batch_size=8, optimizer=sgd):
    """The loop by hand: the network, the term and all losses."""
    net = network()
    step_with = optimizer(net)
    term = SAF(SAMPLES, CLASSES, **SAF_SETTINGS) if method == "saf" else None
    term = MESA(net, **MESA_SETTINGS) if method == "mesa" else term
    batches, losses = loader(batch_size=batch_size), []
    for epoch in range(epochs):
        batches.sampler.set_epoch(epoch)
        if term is not None:
            term.set_epoch(epoch)
        for number, (index, x, y) in enumerate(batches):
            logits = net(x)
            loss = cross_entropy(logits, y)
            if method == "saf":
                loss = loss + term(logits, index)
            elif method == "mesa":
                loss = loss + term(logits, x)
            (loss / accumulate).backward()
            losses.append(loss.detach() / accumulate)
            if (number + 1) % accumulate == 0 or number + 1 == len(batches):
                step_with.step()
                step_with.zero_grad()
                if method == "mesa":
                    term.update(net)
    return net, term, losses


both = pytest.mark.parametrize("method", ["saf", "mesa"])


def nets_are_equal(one, other):
    return same(dict(one.state_dict()), dict(other.state_dict()))


@both
@pytest.mark.parametrize("kind", [Module, Inner])
def test_a_fit_equals_the_plain_loop(method, kind):
    net, term, losses = plain(method)
    module, added = kind(), callback(method, network="net" if kind is Inner else "")
    batches = loader(indexed=method == "saf")
    trainer = fit(module, [added], batches)
    assert nets_are_equal(module.net, net)
    assert same(module.losses, losses)
    assert added.term.epoch == 3
    assert module.metrics[:3] == [0, 0, 0] and min(module.metrics[3:]) > 0
    assert "training_step" not in vars(module) and "on_before_batch_transfer" not in vars(module)
    if kind is Inner:  # whose own copy is the teacher, and not the LightningModule
        assert trainer.callback_metrics["trajectory_loss"] > 0
        assert same(dict(added.term.state_dict()), dict(term.state_dict()))


@both
def test_accumulated_gradients_equal_the_plain_loop(method):
    net, term, losses = plain(method, accumulate=2, batch_size=5)  # of five, and the last alone
    module, added = Inner(), callback(method, network="net")
    batches = loader(indexed=method == "saf", batch_size=5)
    fit(module, [added], batches, accumulate_grad_batches=2)
    assert nets_are_equal(module.net, net)
    assert same(module.losses, losses)
    if method == "mesa":
        assert added.term.teacher.updates == term.teacher.updates == 12


@both
def test_a_fit_that_is_resumed_equals_one_straight_through(method, tmp_path):
    straight, whole = Module(), callback(method)
    fit(straight, [whole], loader(indexed=method == "saf"))
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    first = Module()
    fit(first, [callback(method), saver], loader(indexed=method == "saf"), epochs=2)
    second, resumed = Module(), callback(method)
    torch.nn.init.zeros_(second.net[0].weight)
    batches = loader(indexed=method == "saf")
    fit(second, [resumed], batches, ckpt_path=saver.last_model_path)
    assert same(first.losses + second.losses, straight.losses)
    assert nets_are_equal(second, straight)
    assert same(dict(resumed.state_dict()), dict(whole.state_dict()))


@both
@pytest.mark.parametrize("steps", [5, 6])  # of three an epoch
def test_a_fit_that_is_resumed_after_any_step(method, steps, tmp_path):
    indexed = method == "saf"
    straight, whole = Module(), callback(method)
    fit(straight, [whole], loader(indexed, cls=ResumableLoader))
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=steps, save_top_k=-1)
    first = Module()
    fit(first, [callback(method), saver], loader(indexed, cls=ResumableLoader), epochs=2)
    second, resumed = Module(), callback(method)
    path = tmp_path / f"epoch=1-step={steps}.ckpt"
    fit(second, [resumed], loader(indexed, cls=ResumableLoader), ckpt_path=path)
    assert same(first.losses[:steps] + second.losses, straight.losses)
    assert nets_are_equal(second, straight)
    assert same(dict(resumed.state_dict()), dict(whole.state_dict()))


def pairs(samples):
    """A collate function of one's own."""
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])}


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.seen = []

    def train_dataloader(self):
        return loader(indexed=False, collate_fn=pairs)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.seen.append(sorted(batch))
        return batch["x"], batch["y"]


def test_a_datamodule_needs_a_word_and_the_module_none():
    net, _, losses = plain("saf")
    module, data = Module(), Data()
    fit(module, [callback("saf")], datamodule=indexed_datamodule(data))
    assert nets_are_equal(module.net, net)
    assert same(module.losses, losses)
    assert data.seen == [["x", "y"]] * 12


def test_a_batch_without_an_index():
    module = Module()
    with pytest.raises(ValueError, match=r"no index in a batch of type list.*load with_index"):
        fit(module, [callback("saf")], loader(indexed=False))
    assert "training_step" not in vars(module), "it stands before the step no longer"


def test_a_network_that_is_not_called():
    with pytest.raises(RuntimeError, match=r"called self\(...\) 0 times.*network='model'"):
        fit(Inner(), [callback("mesa")], loader(indexed=False))


def test_manual_optimization_is_refused():
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"call saltflat\.SAF or saltflat.MESA yourself"):
        fit(module, [callback("saf")], loader())


def test_one_term_is_enough():
    with pytest.raises(ValueError, match="takes one SAFCallback or MESACallback"):
        fit(Module(), [callback("saf"), callback("mesa")], loader())


@pytest.mark.parametrize("name", ["SAM", "ASAM", "GSAM", "LookSAM", "MSAM"])
def test_the_sam_family_by_lightnings_own_closure(name, tmp_path):
    def wrapped(net):
        return getattr(sam, name)(sgd(net), model=net)

    net = network()
    optimizer, batches, losses = wrapped(net), loader(), []
    for epoch in range(3):
        batches.sampler.set_epoch(epoch)
        for _, x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = cross_entropy(net(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    module = Module(lambda module: wrapped(module.net))
    fit(module, [saver], loader(indexed=False), epochs=2)
    again = Module(lambda module: wrapped(module.net))
    fit(again, [], loader(indexed=False), epochs=3, ckpt_path=saver.last_model_path)
    assert nets_are_equal(again.net, net)  # BatchNorm's statistics too
    assert len(module.losses + again.losses) == len(losses)


def test_saf_records_once_and_so_refuses_a_step_that_runs_twice():
    module = Module(lambda module: sam.SAM(sgd(module.net), model=module.net))
    with pytest.raises(RuntimeError, match=r"ran twice on one batch.*MESACallback"):
        fit(module, [callback("saf")], loader())
    fit(module, [callback("mesa")], loader(indexed=False))


def test_sharpness_is_logged_and_changes_nothing():
    measured = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            measured.append(float(trainer.callback_metrics["sharpness"]))

    class LastBatch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.is_last_batch:
                expected.append(sam_sharpness(pl_module.net, cross_entropy, [batch], rho=0.1))

    expected = []
    module = Module()
    fit(module, [callback("saf"), LastBatch(), SharpnessCallback(rho=0.1), Watch()], loader())
    assert measured == pytest.approx(expected, rel=1e-4)
    assert len(measured) == 4 and min(measured) > 0
    net, _, _ = plain("saf")
    assert nets_are_equal(module.net, net)
