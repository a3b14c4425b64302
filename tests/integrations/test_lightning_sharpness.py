"""SharpnessCallback beside a module's own metrics, and where it has no loss to measure."""

import pytest
import torch
from lightning_fits import Module, fit, loader, sgd
from torch.nn.functional import cross_entropy
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from saltflat import sam
from saltflat.integrations.lightning import SharpnessCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


class Counted(Module):
    """With metrics that are called, updated, grouped, nested, and that keep a graph."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.mean_loss = MeanMetric()
        self.every = torch.nn.ModuleDict({"loss": CatMetric()})
        micro = {"num_classes": 4, "average": "micro"}
        self.several = MetricCollection([MulticlassAccuracy(**micro), MulticlassPrecision(**micro)])
        self.epochs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.mean_loss(loss)
        self.every["loss"].update(loss)
        self.several.update(logits, y)
        return loss

    def on_train_epoch_end(self):
        mean, every = self.mean_loss.compute().detach(), self.every["loss"].compute().detach()
        self.epochs.append((mean, every, self.mean_loss.update_count, self.several.compute()))
        self.mean_loss.reset()
        self.every["loss"].reset()
        self.several.reset()


def test_metrics_do_not_count_the_passes_of_the_measurement():
    without, beside = Counted(), Counted()
    expected = fit(without, [], loader(indexed=False)).callback_metrics
    found = fit(beside, [SharpnessCallback(rho=2.0)], loader(indexed=False)).callback_metrics
    assert found["sharpness"] != 0
    assert found["accuracy"] == expected["accuracy"]
    torch.testing.assert_close(beside.epochs, without.epochs, rtol=0, atol=0)


def test_a_batch_that_the_step_leaves_out():
    class LeavesOut(Module):
        def training_step(self, batch, batch_idx):
            return None if self.trainer.is_last_batch else super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            pass

    trainer = fit(LeavesOut(), [SharpnessCallback()], loader(indexed=False))
    assert "sharpness" not in trainer.callback_metrics
    assert trainer.current_epoch == 4


def test_manual_optimization_is_refused():
    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            x, y = batch

            def losses(rows):
                rows = slice(None) if rows is None else rows
                return cross_entropy(self(x[rows]), y[rows], reduction="none")

            self.optimizers(use_pl_optimizer=False).step(losses)

        def on_train_batch_end(self, *_):
            pass

    module = Manual(lambda module: sam.ESAM(sgd(module), model=module))
    with pytest.raises(ValueError, match=r"SharpnessCallback .* call .*sam_sharpness yourself"):
        fit(module, [SharpnessCallback()], loader(indexed=False))
