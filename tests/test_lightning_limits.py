"""What else happens in a Lightning fit: validation, tuning, resuming, and what is refused."""

import pytest
import torch
from lightning_fits import Module, callback, fit, loader
from problems import dataset
from torch.nn.functional import cross_entropy

from saltflat.integrations.lightning import SharpnessCallback

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


@pytest.mark.parametrize("added", [callback("saf"), callback("mesa"), SharpnessCallback()])
def test_a_step_that_fetches_its_own_batches_is_refused(added):
    class Fetches(Module):
        def training_step(self, dataloader_iter):
            (x, y), _, _ = next(dataloader_iter)
            return cross_entropy(self(x), y)

    with pytest.raises(ValueError, match=r"Callback needs .*write training_step\(self, batch"):
        fit(Fetches(), [added], loader(indexed=False))
