"""What else happens in a Lightning fit: validation, tuning, resuming, and what is refused."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from lightning_fits import Module, callback, fit, loader
from problems import CLASSES, SAMPLES, dataset, same
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from saltflat.integrations.lightning import SAFCallback, indexed_datamodule

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
both = pytest.mark.parametrize("method", ["saf", "mesa"])


class ValidatesByTraining(Module):
    """Has one step for both, as many modules do."""

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.training_step(batch=batch, batch_idx=batch_idx))


@both
def test_validation_by_the_training_step_has_the_loss_alone(method):
    module = ValidatesByTraining()
    # Lightning checks the validation before it trains, and so does this.
    trainer = fit(module, [callback(method)], loader(method == "saf"), loader(indexed=False))
    assert trainer.callback_metrics["trajectory_loss"] > 0
    x, y = dataset().tensors
    with torch.no_grad():
        expected = cross_entropy(module.eval()(x), y)
    torch.testing.assert_close(trainer.callback_metrics["validation_loss"], expected)


def nothing_added(added, **limits):
    """What a fit, of three batches an epoch, says of a term that never starts."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        batches = loader(isinstance(added, SAFCallback))
        trainer = fit(Module(), [added], batches, **limits)
    said = [str(each.message) for each in warned if "adds no loss" in str(each.message)]
    assert bool(said) == (not trainer.callback_metrics["trajectory_loss"])
    return said


@both
@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"epochs": None, "max_steps": 3}, "max_steps=3, of 3 an epoch"),
        ({"epochs": 9, "max_steps": 2, "accumulate_grad_batches": 2}, "max_steps=2, of 2"),
        ({"epochs": None, "max_steps": 1, "limit_train_batches": 1}, "max_steps=1, of 1 an epoch"),
        ({"epochs": 2}, ""),
        ({"epochs": -1, "max_steps": 4}, ""),
        ({"epochs": 2, "max_steps": 3, "accumulate_grad_batches": 2}, ""),
    ],
)
def test_a_term_that_never_starts_is_worth_a_warning(method, limits, said):
    (message,) = nothing_added(callback(method), **limits) or [""]
    assert said in message and bool(said) == bool(message)


@pytest.mark.filterwarnings("ignore:start_epoch")
@pytest.mark.parametrize(("epochs", "count"), [(2, 1), (3, 0)])
def test_saf_starts_after_its_lag(epochs, count):
    said = nothing_added(SAFCallback(SAMPLES, CLASSES, lag=2, start_epoch=1), epochs=epochs)
    assert len(said) == count and all("epoch 2" in each and "lag" in each for each in said)


@both
def test_how_many_batches_a_stream_has_is_not_known(method):
    class Stream(DataLoader):
        def __len__(self):
            raise TypeError("a stream has no length")

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        batches = loader(method == "saf", cls=Stream)
        fit(Module(), [callback(method)], batches, epochs=-1, max_steps=2)
    assert not [each for each in warned if "adds no loss" in str(each.message)]


@both
def test_a_checkpoint_without_the_term_is_worth_a_warning(method, tmp_path):
    fit(Module(), [], loader(indexed=False), epochs=2).save_checkpoint(tmp_path / "plain")
    added = callback(method)
    with pytest.warns(UserWarning, match=f"no state of {type(added).__name__}"):
        trainer = fit(Module(), [added], loader(method == "saf"), ckpt_path=tmp_path / "plain")
    assert added.term.epoch == 3
    trainer.save_checkpoint(tmp_path / "with")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        batches = loader(method == "saf")
        fit(Module(), [callback(method)], batches, epochs=5, ckpt_path=tmp_path / "with")
    assert not [each for each in warned if "no state" in str(each.message)]


class Data(pl.LightningDataModule):
    """Counts on nothing but its own loader."""

    def train_dataloader(self):
        return loader(indexed=False)


class Tuned(Module):
    """Whose learning rate a tuner may set."""

    lr = 0.1


@both
def test_a_datamodule_may_be_indexed_twice_and_used_with_either_term(method):
    expected = Module()
    fit(expected, [callback(method)], loader(method == "saf"))
    module, data = Module(), indexed_datamodule(indexed_datamodule(Data()))
    fit(module, [callback(method)], datamodule=data)
    assert same(module.losses, expected.losses)
    fit(module, [], datamodule=data)  # to whose step an index would be a third thing


@both
@pytest.mark.filterwarnings("ignore:.*weights_only")
def test_the_learning_rate_may_be_tuned(method, tmp_path):
    def trainer():
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        paths = {"default_root_dir": tmp_path, "enable_checkpointing": False}
        added = [callback(method)]
        return pl.Trainer(accelerator="cpu", max_epochs=4, callbacks=added, **quiet, **paths)

    def losses(module):
        return module.losses[-12:]  # of the fit, after those of the search

    expected, plain, whole = Tuned(), Tuned(), Tuned()
    trainer().fit(expected, loader(method == "saf"))
    by_loader, by_datamodule = trainer(), trainer()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        search = {"num_training": 5, "update_attr": False}
        Tuner(by_loader).lr_find(plain, loader(indexed=False), **search)
        Tuner(by_datamodule).lr_find(whole, datamodule=indexed_datamodule(Data()), **search)
    assert not [each for each in warned if "no state" in str(each.message)]
    by_loader.fit(plain, loader(method == "saf"))
    by_datamodule.fit(whole, datamodule=indexed_datamodule(Data()))
    assert same(losses(plain), losses(expected))
    assert same(losses(whole), losses(expected))


@pytest.mark.parametrize("several", [list, lambda two: dict(enumerate(two))])
def test_several_loaders_have_no_one_index(several):
    class Two(Data):
        def train_dataloader(self):
            return several([loader(indexed=False), loader(indexed=False)])

    with pytest.raises(ValueError, match=r"one training loader, got a (list|dict).*ConcatDataset"):
        fit(Module(), [callback("saf")], several([loader(), loader()]))
    with pytest.raises(TypeError, match=r"takes a DataLoader, got a (list|dict)"):
        fit(Module(), [callback("saf")], datamodule=indexed_datamodule(Two()))
