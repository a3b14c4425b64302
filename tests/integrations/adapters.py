"""One small problem in the four frameworks, and in a plain loop that repeats what each did.

A framework's function trains `make(net)`, a term, up to an epoch, from a checkpoint or from the
start. It works on one process, and on several in the surroundings that torchrun makes.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
from problems import CLASSES, SAMPLES, dataset, network
from terms.thin_auto_saf import ThinAutoSAF
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from saltflat import (
    MESA,
    SAF,
    Batch,
    TrajectoryTerm,
    indexed_loader,
    with_index,
    with_index_column,
)
from saltflat.memory import Ring

EPOCHS, BATCHES = 4, 4
"""The latter of an epoch, on one process."""


def ranks():
    """Rank and world size, as torchrun tells them."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Near(TrajectoryTerm):
    """A foreign term that needs an index: the squared distance to the last epoch's outputs."""

    needs_index = True
    lag = 1

    def __init__(self, process_group=None):
        ring = Ring(SAMPLES, CLASSES, lag=1, storage="float32")
        super().__init__(weight=0.1, start_epoch=1, memory=ring, process_group=process_group)

    def reference(self, outputs, batch):
        return self.memory.read(batch.index, outputs.device)

    def loss(self, outputs, reference, valid, batch):
        return self.weight * ((outputs - reference).square().sum(1) * valid).mean()

    def record(self, outputs, batch, keep):
        self.memory.write(batch.index, outputs, keep)


class Past(TrajectoryTerm):
    """A foreign term that needs inputs: toward the outputs of the model one step ago."""

    needs_inputs = True

    def __init__(self, model):
        super().__init__(weight=0.5, start_epoch=1)
        self.past = copy.deepcopy(model).eval().requires_grad_(False)

    def reference(self, outputs, batch):
        args, kwargs = batch.inputs
        past = self.past.eval()(*args, **kwargs)
        return getattr(past, "logits", past), torch.ones(len(outputs), dtype=torch.bool)

    def update(self, model):
        self.past.load_state_dict(model.state_dict())


class Smooth(TrajectoryTerm):
    """A foreign term that needs labels and replaces the loss: online label smoothing."""

    needs_labels = replaces_loss = True
    accepts_mixed = False

    def __init__(self):
        super().__init__(weight=1.0)
        self.register_buffer("targets", torch.eye(CLASSES))

    def reference(self, outputs, batch):
        return self.targets[batch.labels], torch.ones(len(outputs), dtype=torch.bool)

    def loss(self, outputs, reference, valid, batch):
        return self.weight * cross_entropy(outputs, reference)

    def record(self, outputs, batch, keep):
        for label, row in zip(batch.labels, outputs.detach().softmax(-1), strict=True):
            self.targets[label].lerp_(row, 0.1)


TERMS = {
    "saf": lambda net, **kwargs: SAF(SAMPLES, CLASSES, lag=1, start_epoch=1, **kwargs),
    "mesa": lambda net, **kwargs: MESA(net, decay=0.9, start_epoch=1, **kwargs),
    "near": lambda net, **kwargs: Near(**kwargs),
    "past": lambda net: Past(net),
    "smooth": lambda net: Smooth(),
    "thin_auto_saf": lambda net, **kwargs: ThinAutoSAF(SAMPLES, CLASSES, **kwargs),
}
INDEXED = ("saf", "near", "thin_auto_saf")


class Watched:
    """A network that notes which samples it trains on (`rows`), and what became of it."""

    def __init__(self):
        self.net = smooth() if ranks()[1] > 1 else network()
        self.rows, self.losses, self.metrics = [], [], []
        self.net.register_forward_hook(self._note)

    def _note(self, net, inputs, output):
        if net is self.net and net.training:  # the hook is copied into a teacher, too
            known = dataset().tensors[0]
            self.rows.append((inputs[0][:, None] == known).all(-1).nonzero()[:, 1])

    def with_term(self, term):
        self.term = term
        return self


def smooth():
    """Without BatchNorm, whose statistics are each process's own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def batch_size():
    return 4 if ranks()[1] > 1 else SAMPLES // BATCHES


def order(epoch=0):
    """A sampler whose order depends on the epoch alone."""
    rank, size = ranks()
    sampler = DistributedSampler(range(SAMPLES), size, rank, seed=5)
    sampler.set_epoch(epoch)
    return sampler


class Rows:
    """The problem as dictionaries."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        x, y = dataset()[number]
        return {"x": x, "labels": y}


def collated(samples):
    """A collate function of one's own."""
    x, labels = map(torch.stack, zip(*samples, strict=True))
    return {"x": x, "labels": labels}


def loader(indexed, form="tuples", epoch=0):
    """Batches as tuples or dictionaries, with the index if it is asked for."""
    where = {"batch_size": batch_size(), "sampler": order(epoch)}
    if form == "dictionaries":
        return DataLoader(with_index_column(Rows()) if indexed else Rows(), **where)
    if form == "own collate":
        plain = DataLoader(dataset(), collate_fn=collated, **where)
        return indexed_loader(plain) if indexed else plain
    return DataLoader(with_index(dataset()) if indexed else dataset(), **where)


def unpacked(batch, indexed=False, form="tuples"):
    """Index (or None), x and y of a batch of `loader`."""
    index = None
    if form == "own collate" and indexed:
        index, batch = batch
    if form != "tuples":
        return batch.get("index", index), batch["x"], batch["labels"]
    return batch if indexed else (None, *batch)


def plain(make, rows, accumulate=1, model=network):
    """The plain loop over the same samples."""
    net = model().train()
    term, optimizer, losses = make(net), sgd(net), []
    for number, row in enumerate(rows):
        epoch, step = divmod(number, len(rows) // EPOCHS)
        term.set_epoch(epoch)
        x, y = (tensor[row] for tensor in dataset().tensors)
        logits = net(x)
        loss = term(logits, Batch(row, ((x,), {}), y))
        if not term.replaces_loss:
            loss = cross_entropy(logits, y) + loss
        (loss / accumulate).backward()
        losses.append(loss.detach())
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            term.update(net)
    return net, term, losses


def lightning(
    make, folder, *, until=EPOCHS, resume=False, accumulate=1, indexed=True, form="tuples"
):
    import lightning.pytorch as pl

    from saltflat.integrations.lightning import TrajectoryCallback

    watched, several = Watched(), ranks()[1] > 1

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = watched.net

        def training_step(self, batch):
            _, x, y = unpacked(batch, form=form)
            return cross_entropy(self.net(x), y)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            watched.losses.append(outputs["loss"] * accumulate)
            watched.metrics.append(dict(self.trainer.callback_metrics))

        def configure_optimizers(self):
            return sgd(self.net)

    saver = pl.callbacks.ModelCheckpoint(folder, save_last=True)
    callback = TrajectoryCallback(make, network="net")
    off = ("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if several else 1,
        strategy="ddp" if several else "auto",
        max_epochs=until,
        callbacks=[callback, saver],
        accumulate_grad_batches=accumulate,
        **dict.fromkeys(off, False),
    )
    path = str(Path(folder) / "last.ckpt") if resume else None
    trainer.fit(Module(), loader(indexed, form), ckpt_path=path)
    return watched.with_term(callback.term)


def transformers(
    make, folder, *, until=EPOCHS, resume=False, accumulate=1, indexed=True, form="dictionaries"
):
    from transformers import TrainerCallback, TrainingArguments
    from transformers.modeling_outputs import SequenceClassifierOutput

    from saltflat.integrations.transformers import TrajectoryTrainer

    watched = Watched()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = watched.net

        def forward(self, x, labels=None):
            logits = self.net(x)
            loss = None if labels is None else cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)

    class Noting(TrajectoryTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            watched.losses.append(loss * accumulate)
            return loss

        def log(self, logs, *args, **kwargs):
            super().log(logs, *args, **kwargs)
            watched.metrics.append(logs)

    class StopAt(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            control.should_training_stop = round(state.epoch) >= until

    args = TrainingArguments(
        str(folder),
        num_train_epochs=min(EPOCHS, until) if until < 2 else EPOCHS,
        per_device_train_batch_size=batch_size(),
        gradient_accumulation_steps=accumulate,
        save_strategy="epoch",
        lr_scheduler_type="constant",
        logging_steps=1,
        max_grad_norm=0.0,
        seed=3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = Model()
    trainer = Noting(
        model,
        args,
        train_dataset=Rows() if indexed else None,
        term=make(model),
        callbacks=[StopAt()],
        optimizers=(sgd(model), None),
    )
    if not indexed:  # set later, nobody adds the index
        trainer.train_dataset = Rows()
    trainer.train(resume_from_checkpoint=resume)
    return watched.with_term(trainer.term)


def accelerate(
    make, folder, *, until=EPOCHS, resume=False, accumulate=1, indexed=True, form="tuples"
):
    from accelerate import Accelerator
    from accelerate.state import GradientState

    from saltflat.integrations.accelerate import register

    watched = Watched()
    GradientState._reset_state()  # of another training in this process
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    term = register(accelerator, make(watched.net))
    model, optimizer = accelerator.prepare(watched.net, sgd(watched.net))
    first = 0
    if resume:
        accelerator.load_state(str(folder))
        first = term.epoch + 1
    for epoch in range(first, until):
        term.set_epoch(epoch)
        for batch in loader(indexed, form, epoch):
            index, x, y = unpacked(batch, indexed, form)
            with accelerator.accumulate(model):
                logits = model(x)
                loss = term(logits, Batch(index, ((x,), {}), y))
                if not term.replaces_loss:
                    loss = cross_entropy(logits, y) + loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                term.update(model)
            watched.losses.append(loss.detach())
    accelerator.save_state(str(folder))
    return watched.with_term(term)


def timm(make, folder, *, until=EPOCHS, resume=False, accumulate=1, indexed=True, form="tuples"):
    from timm.task import resume_task_checkpoint
    from timm.utils import CheckpointSaver

    from saltflat.integrations.timm import TrajectoryTask, indexed_targets

    if ranks()[1] > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    watched = Watched()
    term, net = make(watched.net), watched.net
    task = TrajectoryTask(net, cross_entropy, term, verbose=False)
    if ranks()[1] > 1:
        task.prepare_distributed()
    optimizer, first = sgd(net), 0
    if resume:
        first = resume_task_checkpoint(task, f"{folder}/last.pth.tar", optimizer, log_info=False)
    data = indexed_targets(dataset()) if indexed and term.needs_index else dataset()
    for epoch in range(first, until):
        task.train()
        task.set_epoch(epoch)
        for number, batch in enumerate(DataLoader(data, batch_size(), sampler=order(epoch)), 1):
            result = task(*batch)
            (result["loss"] / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                task.update_ema()
            watched.losses.append(result["loss"].detach())
    term.sync()
    if ranks()[0] == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        saver = CheckpointSaver(net, optimizer, checkpoint_dir=str(folder), task=task)
        saver.save_checkpoint(until - 1, metric=0.5)
    return watched.with_term(term)


FRAMEWORKS = {one.__name__: one for one in (lightning, transformers, accelerate, timm)}
