"""What is particular to Lightning: where logits and batches come from, closures, datamodules."""

import pickle
import re

import lightning.pytorch as pl
import pytest
import torch
from adapters import INDEXED, TERMS, plain
from lightning_fits import Module, ResumableLoader, callback, fit, loader, rows, sgd
from problems import network, same
from torch.nn.functional import cross_entropy

from saltflat import Batch, sam
from saltflat.integrations.lightning import (
    SharpnessCallback,
    TrajectoryCallback,
    indexed_datamodule,
)
from saltflat.sharpness import sam_sharpness

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
both = pytest.mark.parametrize("method", ["saf", "mesa"])


class Inner(Module):
    """Calls the network itself, and returns a dictionary."""

    def training_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return {"loss": cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float()}


def nets_are_equal(one, other):
    return same(dict(one.state_dict()), dict(other.state_dict()))


@pytest.mark.parametrize("method", TERMS)
@pytest.mark.parametrize("kind", [Module, Inner])
def test_a_fit_equals_the_plain_loop(method, kind):
    net, _, losses = plain(TERMS[method], rows())
    module, where = kind(), {"network": "net" if kind is Inner else ""}
    added = TrajectoryCallback(TERMS[method], **where)
    if method in ("saf", "mesa"):
        added = callback(method, **where)
    fit(module, [added], loader(indexed=method in INDEXED))
    assert nets_are_equal(module.net, net)
    assert same(module.losses, losses)
    assert added.term.epoch == 3
    assert min(module.metrics[3:]) > 0
    assert "training_step" not in vars(module) and "on_before_batch_transfer" not in vars(module)


@both
def test_updates_follow_optimizer_steps(method):
    """Of five batches an epoch, two make a step, and the last one alone."""
    module, added = Inner(), callback(method, network="net")
    batches = loader(indexed=method == "saf", batch_size=5)
    fit(module, [added], batches, accumulate_grad_batches=2)
    if method == "mesa":
        assert added.term.teacher.updates == 12
    assert len(module.losses) == 20


def test_a_term_itself_serves_one_fit():
    added = TrajectoryCallback(TERMS["saf"](None))
    fit(Module(), [added], loader())
    with pytest.raises(ValueError, match=r"term has trained before, up to epoch 3.*a new one"):
        fit(Module(), [added], loader())


def test_labels_are_where_the_user_says():
    class Reversed(Module):
        def training_step(self, batch):
            y, x = batch
            return cross_entropy(self(x), y)

    class Keyed(Module):
        def training_step(self, batch):
            return cross_entropy(self(batch["x"]), batch["y"])

    turned = [
        (y, x) for x, y in torch.utils.data.DataLoader(loader(False).dataset, batch_size=None)
    ]
    net, _, _ = plain(TERMS["smooth"], rows())
    module = Reversed()
    added = TrajectoryCallback(TERMS["smooth"], labels=lambda batch: batch[0])
    fit(module, [added], loader(False, turned))
    assert nets_are_equal(module.net, net)
    with pytest.raises(ValueError, match=r"no labels in a batch of type dict.*labels=lambda"):
        fit(Keyed(), [TrajectoryCallback(TERMS["smooth"])], loader(False, collate_fn=pairs))


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


@pytest.mark.parametrize("as_term", [False, True])
def test_a_datamodule_needs_a_word_and_the_module_none(as_term):
    net, _, losses = plain(TERMS["saf"], rows())
    added = TrajectoryCallback(TERMS["saf"](None)) if as_term else callback("saf")

    class Asks(Module):
        def configure_optimizers(self):  # which loads the data before the fit starts
            assert self.trainer.estimated_stepping_batches == 12
            return super().configure_optimizers()

    module, data = Asks(), Data()
    fit(module, [added], datamodule=indexed_datamodule(data))
    assert nets_are_equal(module.net, net)
    assert same(module.losses, losses)
    assert data.seen == [["x", "y"]] * 12


def test_a_batch_without_an_index():
    module = Module()
    with pytest.raises(ValueError, match=r"no index in a batch of type list.*with_index"):
        fit(module, [callback("saf")], loader(indexed=False))
    assert "training_step" not in vars(module), "it is unwrapped"


def test_a_network_that_is_not_called():
    with pytest.raises(RuntimeError, match=r"self\(...\) once, called it 0.*network='model'"):
        fit(Inner(), [callback("mesa")], loader(indexed=False))


@both
@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (lambda logits, y: {"scores": logits}, "a dict"),
        (lambda logits, y: (logits, y), "a tuple"),
        (cross_entropy, "a Tensor of shape ()"),
    ],
)
def test_a_network_whose_output_is_not_logits(method, outputs, found):
    class Other(Module):
        def forward(self, x, y):
            return outputs(self.net(x), y)

        def training_step(self, batch, batch_idx):
            self(*batch)
            return next(self.parameters()).sum()

    message = rf"self\(...\) must return logits.*got {re.escape(found)}.*network='model'"
    with pytest.raises(ValueError, match=message):
        fit(Other(), [callback(method)], loader(method == "saf"))


def test_manual_optimization_is_refused():
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"SAFCallback.*automatic_optimization=False.*yourself"):
        fit(module, [callback("saf")], loader())


@pytest.mark.parametrize("added", [callback("saf"), callback("mesa"), SharpnessCallback()])
def test_a_step_that_fetches_its_own_batches_is_refused(added):
    class Fetches(Module):
        def training_step(self, dataloader_iter):
            (x, y), _, _ = next(dataloader_iter)
            return cross_entropy(self(x), y)

    with pytest.raises(ValueError, match=r"Callback needs .*write training_step\(self, batch"):
        fit(Fetches(), [added], loader(indexed=False))


def test_one_term_is_enough():
    with pytest.raises(ValueError, match=r"callbacks must hold one trajectory term.*several"):
        fit(Module(), [callback("saf"), callback("mesa")], loader())


@both
def test_a_callback_can_be_pickled_for_spawned_processes(method):
    copy = pickle.loads(pickle.dumps(callback(method)))
    fit(Module(), [copy], loader(method == "saf"), epochs=2)
    assert copy.term.epoch == 1


@pytest.mark.parametrize("name", ["SAM", "ASAM", "GSAM", "LookSAM", "MSAM"])
@pytest.mark.parametrize("method", [None, "saf", "mesa"])
def test_the_sam_family_by_lightnings_own_closure(name, method, tmp_path):
    """With SAF, every pass of a step has the same reference."""

    def wrapped(net):
        return getattr(sam, name)(sgd(net), model=net)

    net = network()
    term, optimizer = TERMS[method](net) if method else None, wrapped(net)
    for number, row in enumerate(rows(3)):
        x, y = (tensor[row] for tensor in loader(False).dataset.tensors)
        if term is not None:
            term.set_epoch(number // 3)

        def closure(row=row, x=x, y=y):
            optimizer.zero_grad()
            logits = net(x)
            loss = cross_entropy(logits, y)
            if term is not None:
                loss = loss + term(logits, Batch(row, ((x,), {})))
            loss.backward()
            return loss

        optimizer.step(closure)
        if term is not None:
            term.update(net)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    modules = [Module(lambda module: wrapped(module.net)) for _ in range(2)]
    added = [[callback(method)] if method else [] for _ in range(2)]
    fit(modules[0], [*added[0], saver], loader(method == "saf"), epochs=2)
    fit(modules[1], added[1], loader(method == "saf"), epochs=3, ckpt_path=saver.last_model_path)
    assert nets_are_equal(modules[1].net, net)  # BatchNorm's statistics too


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
    net, _, _ = plain(TERMS["saf"], rows())
    assert nets_are_equal(module.net, net)
