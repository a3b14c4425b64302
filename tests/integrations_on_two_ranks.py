"""Each framework on two processes: what SAF and MESA do there, and after a checkpoint.

Run by test_integrations.py with a folder. Each framework trains four epochs straight through, and
again in two halves with a checkpoint between them, and every rank compares the two, and with one
process that has the batches of both. (The Trainer's own sampler makes other batches: there, the
ranks are compared alone.)
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from problems import CLASSES, SAMPLES, dataset, same
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from saltflat import MESA, SAF, with_index

EPOCHS, BATCH = 4, 4
SAF_SETTINGS = {"lag": 1, "start_epoch": 1, "storage": "float32"}
MESA_SETTINGS = {"decay": 0.9, "start_epoch": 1}


def smooth():
    """Without BatchNorm, whose statistics are each process's own."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, CLASSES))


def in_one_process(method, group):
    """The network after the same training with the batches of both ranks as one."""
    net = smooth()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if method == "saf":
        term = SAF(SAMPLES, CLASSES, process_group=group, **SAF_SETTINGS)
    else:
        term = MESA(net, process_group=group, **MESA_SETTINGS)
    x, y = dataset().tensors
    for epoch in range(EPOCHS):
        term.set_epoch(epoch)
        for index in zip(*(order(epoch, rank).split(BATCH) for rank in (0, 1)), strict=True):
            index = torch.cat(index)
            logits = net(x[index])
            added = term(logits, index) if method == "saf" else term(logits, x[index])
            optimizer.zero_grad()
            (cross_entropy(logits, y[index]) + added).backward()
            optimizer.step()
            if method == "mesa":
                term.update(net)
    return net


def sampler(rank=None):
    where = {} if rank is None else {"num_replicas": 2, "rank": rank}
    return DistributedSampler(range(SAMPLES), seed=7, **where)


def order(epoch, rank):
    chosen = sampler(rank)
    chosen.set_epoch(epoch)
    return torch.tensor(list(chosen))


def gathered(value):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def compare(method, straight, resumed, terms):
    """A straight run, a resumed one, and one process."""
    assert same(dict(resumed.state_dict()), dict(straight.state_dict()))
    assert same(dict(terms[0].state_dict()), dict(terms[1].state_dict()))
    for other in gathered(straight.state_dict()):
        assert same(dict(other), dict(straight.state_dict()))
    alone = [dist.new_group([rank]) for rank in (0, 1)][dist.get_rank()]
    expected = in_one_process(method, alone)
    for name, tensor in straight.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], msg=f"{method} {name}")
    if method == "saf":
        assert len(terms[0].memory.state_dict()["stamps"][0]) == SAMPLES // 2


def lightning(folder):
    import lightning.pytorch as pl

    from saltflat.integrations.lightning import MESACallback, SAFCallback, SharpnessCallback
    from saltflat.sharpness import sam_sharpness

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = smooth()

        def training_step(self, batch):
            x, y = batch
            return cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    class Sharpness(SharpnessCallback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self.own = sam_sharpness(pl_module.net, cross_entropy, [batch], rho=self.rho)

    def fit(method, epochs, ckpt_path=None, saver=None):
        module, sharpness = Module(), Sharpness()
        if method == "saf":
            callback = SAFCallback(SAMPLES, CLASSES, network="net", **SAF_SETTINGS)
        else:
            callback = MESACallback(network="net", **MESA_SETTINGS)
        data = with_index(dataset()) if method == "saf" else dataset()
        off = ("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=epochs,
            callbacks=[callback, sharpness, *([saver] if saver else [])],
            enable_checkpointing=saver is not None,
            **dict.fromkeys(off, False),
        )
        batches = DataLoader(data, BATCH, sampler=sampler(int(os.environ["RANK"])))
        trainer.fit(module, batches, ckpt_path=ckpt_path)
        one, other = gathered(sharpness.own)
        logged = float(trainer.callback_metrics["sharpness"])
        assert one != other and math.isclose(logged, (one + other) / 2, rel_tol=1e-4)
        return module.net, callback.term

    for method in ("saf", "mesa"):
        straight, term = fit(method, EPOCHS)
        saver = pl.callbacks.ModelCheckpoint(folder / method, save_last=True)
        fit(method, 2, saver=saver)
        resumed, again = fit(method, EPOCHS, ckpt_path=saver.last_model_path)
        compare(method, straight, resumed, (term, again))


def accelerate(folder):
    from accelerate import Accelerator

    from saltflat.integrations.accelerate import register

    class Loop:
        def __init__(self, method):
            self.method = method
            self.accelerator = Accelerator(cpu=True)
            self.net = smooth()
            if method == "saf":
                term = SAF(SAMPLES, CLASSES, **SAF_SETTINGS)
            else:
                term = MESA(self.net, **MESA_SETTINGS)
            self.term = register(self.accelerator, term)
            optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
            self.model, self.optimizer = self.accelerator.prepare(self.net, optimizer)

        def epochs(self, *epochs):
            for epoch in epochs:
                self.term.set_epoch(epoch)
                chosen = sampler(self.accelerator.process_index)
                chosen.set_epoch(epoch)
                for index, x, y in DataLoader(with_index(dataset()), BATCH, sampler=chosen):
                    logits = self.model(x)
                    about = index if self.method == "saf" else x
                    loss = cross_entropy(logits, y) + self.term(logits, about)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    if self.method == "mesa":
                        self.term.update(self.model)
            return self

    for method in ("saf", "mesa"):
        straight = Loop(method).epochs(0, 1, 2, 3)
        Loop(method).epochs(0, 1).accelerator.save_state(str(folder / method))
        resumed = Loop(method)
        resumed.accelerator.load_state(str(folder / method))
        resumed.epochs(2, 3)
        compare(method, straight.net, resumed.net, (straight.term, resumed.term))


def timm(folder):
    from timm.task import resume_task_checkpoint
    from timm.utils import CheckpointSaver

    from saltflat.integrations.timm import TrajectoryTask, indexed_targets

    dist.init_process_group("gloo")

    class Loop:
        def __init__(self, method):
            self.method = method
            self.net = smooth()
            if method == "saf":
                term = SAF(SAMPLES, CLASSES, **SAF_SETTINGS)
            else:
                term = MESA(self.net, **MESA_SETTINGS)
            self.task = TrajectoryTask(self.net, cross_entropy, term, verbose=False)
            self.task.prepare_distributed()
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

        def epochs(self, *epochs):
            data = dataset() if self.method == "mesa" else indexed_targets(dataset())
            for epoch in epochs:
                self.task.set_epoch(epoch)
                chosen = sampler()
                chosen.set_epoch(epoch)
                for x, target in DataLoader(data, BATCH, sampler=chosen):
                    self.optimizer.zero_grad()
                    self.task(x, target)["loss"].backward()
                    self.optimizer.step()
                    self.task.update_ema()
            return self

    for method in ("saf", "mesa"):
        straight = Loop(method).epochs(0, 1, 2, 3)
        first = Loop(method).epochs(0, 1)
        where = folder / method
        where.mkdir(exist_ok=True)
        saver = CheckpointSaver(
            first.net, first.optimizer, checkpoint_dir=str(where), task=first.task
        )
        if method == "saf" and dist.get_rank() == 0:
            try:
                saver.save_checkpoint(1)
            except RuntimeError as error:
                assert "call task.gather_state() on every rank" in str(error)
            else:
                raise AssertionError("half of the memory was saved")
        first.task.gather_state()
        if dist.get_rank() == 0:
            saver.save_checkpoint(1)
        dist.barrier()
        resumed = Loop(method)
        path = str(where / "last.pth.tar")
        assert resume_task_checkpoint(resumed.task, path, resumed.optimizer, log_info=False) == 2
        resumed.epochs(2, 3)
        terms = straight.task.term, resumed.task.term
        compare(method, straight.net, resumed.net, terms)


def transformers(folder):
    from transformers import TrainerCallback, TrainingArguments

    from saltflat.integrations.transformers import TrajectoryTrainer

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = smooth()

        def forward(self, x, labels=None):
            logits = self.net(x)
            loss = None if labels is None else cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits} if loss is not None else Logits(logits)

    class Logits(dict):
        def __init__(self, logits):
            super().__init__(logits=logits)
            self.logits = logits

    class StopAt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 6

    def trained(method, name, resume=None, stop=False):
        torch.manual_seed(0)
        args = TrainingArguments(
            str(folder / method / name),
            use_cpu=True,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            report_to="none",
            disable_tqdm=True,
            save_strategy="epoch",
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            seed=3,
            dataloader_pin_memory=False,
            logging_strategy="epoch",
        )
        model = Net()
        if method == "saf":
            term = SAF(SAMPLES, CLASSES, **SAF_SETTINGS)
        else:
            term = MESA(model, **MESA_SETTINGS)
        x, y = dataset().tensors
        trainer = TrajectoryTrainer(
            model,
            args,
            train_dataset=[{"x": x[i], "labels": int(y[i])} for i in range(SAMPLES)],
            term=term,
            callbacks=[StopAt()] if stop else [],
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None),
        )
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.log_history[-2]["trajectory_loss"] > 0 or stop
        return trainer.model, term

    for method in ("saf", "mesa"):
        straight, term = trained(method, "straight")
        trained(method, "halves", stop=True)
        resumed, again = trained(method, "halves", resume=True)
        assert same(dict(resumed.state_dict()), dict(straight.state_dict()))
        assert same(dict(term.state_dict()), dict(again.state_dict()))
        for other in gathered(straight.state_dict()):
            assert same(dict(other), dict(straight.state_dict()))


FRAMEWORKS = {one.__name__: one for one in (lightning, transformers, accelerate, timm)}


def rank_of(rank, name, port, folder):
    """One process, in the surroundings that torchrun makes."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({key: str(value) for key, value in {**ranks, **where}.items()})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    FRAMEWORKS[name](folder)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name in FRAMEWORKS:
        importlib.import_module(f"saltflat.integrations.{name}")  # once, before the processes fork
    for name in FRAMEWORKS:
        (folder / name).mkdir()
        mp.start_processes(
            rank_of, (name, free_port(), folder / name), nprocs=2, start_method="fork"
        )
        print(name)
