"""A LightningModule as anyone writes it, and a quick fit of it."""

import lightning.pytorch as pl
import torch
from adapters import EPOCHS, TERMS, order, sgd
from problems import CLASSES, SAMPLES, dataset, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from saltflat import with_index
from saltflat.integrations.lightning import MESACallback, SAFCallback


class Module(pl.LightningModule):
    """As anyone writes it; it knows nothing of SAF."""

    def __init__(self, optimizer=None):
        super().__init__()
        self.net = network()
        self.make_optimizer = optimizer or (lambda module: sgd(module.net))
        self.losses, self.metrics = [], []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("cross_entropy", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"])
        self.metrics.append(float(self.trainer.callback_metrics.get("trajectory_loss", -1)))
        assert len(batch) == 2

    def configure_optimizers(self):
        return self.make_optimizer(self)


def loader(indexed=True, data=None, cls=DataLoader, batch_size=8, **kwargs):
    data = dataset() if data is None else data
    return cls(with_index(data) if indexed else data, batch_size, sampler=order(), **kwargs)


def rows(epochs=EPOCHS):
    """The samples of each batch of `loader`."""
    return [row for epoch in range(epochs) for row in torch.tensor(list(order(epoch))).split(8)]


class ResumableLoader(DataLoader):
    """Says where it is, as torchdata's StatefulDataLoader does."""

    done = start = 0

    def __iter__(self):
        skip, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                self.done = number + 1
                yield batch

    def state_dict(self):
        return {"done": self.done % len(self)}

    def load_state_dict(self, state):
        self.start = state["done"]


def fit(module, callbacks, *data, epochs=EPOCHS, ckpt_path=None, datamodule=None, **kwargs):
    quiet = {
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
        "enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
    }
    settings = {"accelerator": "cpu", "max_epochs": epochs, "callbacks": callbacks, **quiet}
    trainer = pl.Trainer(**settings, **kwargs)
    trainer.fit(module, *data, datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer


def callback(method, **kwargs):
    """With the settings of `TERMS`."""
    if method == "saf":
        return SAFCallback(SAMPLES, CLASSES, lag=1, start_epoch=1, **kwargs)
    return MESACallback(decay=0.9, start_epoch=1, **kwargs)


__all__ = ["TERMS", "Module", "ResumableLoader", "callback", "fit", "loader", "rows", "sgd"]
