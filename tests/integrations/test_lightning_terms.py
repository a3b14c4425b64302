"""Which term a Lightning fit has: its own, unless it continues; and what its teacher knows."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning_fits import TERMS, Module, ResumableLoader, callback, fit, loader, sgd
from problems import same
from torch.nn.functional import cross_entropy

from saltflat import trajectory_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*adds no loss"),
]
both = pytest.mark.parametrize("method", ["saf", "mesa"])


def other():
    """A module of other weights."""
    module = Module()
    torch.nn.init.ones_(module.net[0].weight)
    return module


@both
@pytest.mark.parametrize("before", [{"fast_dev_run": True}, {"epochs": 1}, {"epochs": 3}])
@pytest.mark.parametrize("again", [False, True])
def test_a_callback_that_is_used_again_does_what_a_new_one_does(method, before, again):
    used, first = callback(method), other()
    fit(first, [used], loader(method == "saf"), **before)
    module = first if again else Module()
    twin, new = copy.deepcopy(module), callback(method)
    fit(twin, [new], loader(method == "saf"))
    fit(module, [used], loader(method == "saf"))
    assert same(module.losses[-12:], twin.losses[-12:])
    assert same(dict(used.state_dict()), dict(new.state_dict()))


@both
def test_a_fit_does_not_begin_with_what_was_loaded_to_validate(method, tmp_path):
    class Validated(Module):
        def validation_step(self, batch, batch_idx):
            self.log("loss", self(batch[0]).sum())

    trainer = fit(other(), [callback(method)], loader(method == "saf"), epochs=1)
    trainer.save_checkpoint(tmp_path / "one")
    expected, new = Validated(), callback(method)
    fit(expected, [new], loader(method == "saf"))
    used = callback(method)
    trainer = fit(Validated(), [used], loader(method == "saf"), epochs=0)
    trainer.validate(Validated(), loader(False), ckpt_path=tmp_path / "one", verbose=False)
    module = Validated()
    fit(module, [used], loader(method == "saf"))
    assert same(module.losses, expected.losses)
    assert same(dict(used.state_dict()), dict(new.state_dict()))


def plain(module):
    """An optimizer without a state, for Lightning makes a new one when it fits on."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


@both
def test_a_trainer_that_fits_on_keeps_the_term_of_the_same_module_alone(method):
    straight, whole = Module(plain), callback(method)
    fit(straight, [whole], loader(method == "saf"))
    module, added = Module(plain), callback(method)
    trainer = fit(module, [added], loader(method == "saf"), epochs=2)
    term, trainer.fit_loop.max_epochs = added.term, 4
    trainer.fit(module, loader(method == "saf"))
    assert added.term is term
    assert same(module.losses, straight.losses)
    assert same(dict(added.state_dict()), dict(whole.state_dict()))
    trainer.fit_loop.max_epochs = 5
    trainer.fit(other(), loader(method == "saf"))
    assert added.term is not term
    if method == "mesa":
        assert added.term.teacher.updates == 3


@both
@pytest.mark.filterwarnings("ignore:Be aware")
def test_a_checkpoint_without_the_term_in_the_middle_of_an_epoch(method, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit(Module(), [saver], loader(indexed=False, cls=ResumableLoader), epochs=2)
    batches = loader(method == "saf", cls=ResumableLoader)
    module, added, path = Module(), callback(method), tmp_path / "epoch=1-step=4.ckpt"
    with pytest.warns(UserWarning, match="no state of .*Callback"):
        fit(module, [added], batches, epochs=3, ckpt_path=path)
    assert added.term.epoch == 2 and len(module.losses) == 5  # of three steps an epoch
    assert max(module.metrics[-3:]) > 0
    if method == "mesa":
        assert added.term.teacher.updates == 5


class Scheduled(Module):
    """Sharpens its logits as the epochs go."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(self.trainer.current_epoch)
        return self.net(x) * (1 + self.current_epoch)


class Logs(Scheduled):
    """Logs from `forward`."""

    def forward(self, x):
        self.log("one", float(self.training))
        self.log_dict({"another": float(self.training)})
        return super().forward(x)


class Around(Module):
    """Whose network is a LightningModule of its own."""

    def __init__(self):
        super().__init__()
        self.inner = Scheduled()
        self.net = self.inner.net

    def forward(self, x):
        return self.inner(x)


class Copies(pl.Callback):
    """Takes copies of the teacher while the fit runs."""

    def __init__(self, mesa):
        self.mesa, self.copies = mesa, []

    def on_train_epoch_end(self, trainer, pl_module):
        self.copies.append(copy.deepcopy(self.mesa.term.teacher.module))


def by_hand(epochs=4):
    """The losses of a fit of `Scheduled`, without Lightning."""
    net = Module().net
    optimizer, mesa, batches, losses = sgd(net), TERMS["mesa"](net), loader(False), []
    for epoch in range(epochs):
        mesa.set_epoch(epoch)
        batches.sampler.set_epoch(epoch)
        for x, y in batches:
            scale = 1 + epoch
            logits = net(x) * scale
            loss = cross_entropy(logits, y)
            if epoch >= mesa.start_epoch:
                reference = mesa.teacher(x) * scale
                loss = loss + mesa.weight * trajectory_loss(logits, reference)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mesa.update(net)
            losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(("kind", "name"), [(Logs, ""), (Around, ""), (Around, "inner")])
def test_the_teacher_knows_the_epoch_while_the_fit_runs(kind, name):
    module, mesa = kind(), callback("mesa", network=name)
    copies = Copies(mesa)
    trainer = fit(module, [mesa, copies], loader(indexed=False))
    torch.testing.assert_close(module.losses, by_hand())
    teacher = mesa.term.teacher.module
    nested = teacher.inner if (kind, name) == (Around, "") else teacher
    assert nested.seen == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]  # tried once on the first batch
    if kind is Logs:  # and what the teacher would log is not logged
        assert trainer.callback_metrics["one"] == trainer.callback_metrics["another"] == 1
    assert module.trainer is trainer
    assert [each._trainer for each in (teacher, nested, *copies.copies)] == [None] * 6
    assert "log" not in vars(teacher)


def test_the_teacher_forgets_the_trainer_after_an_exception():
    class Stops(Scheduled):
        def on_train_epoch_end(self):
            raise ValueError("enough")

    mesa = callback("mesa")
    with pytest.raises(ValueError, match="enough"):
        fit(Stops(), [mesa], loader(indexed=False))
    assert mesa.term.teacher.module._trainer is None
