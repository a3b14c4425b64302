"""AutoSAF as far as it shows what a term may need: labels, the whole loss, a change at an epoch.

It judges the labels once, at a fixed epoch, from one running average of outputs a sample.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy, log_softmax

from saltflat.memory import Average
from saltflat.terms import TrajectoryTerm


class ThinAutoSAF(TrajectoryTerm):
    """Before `judge_epoch` the cross-entropy of all but the witnesses; then that of the believed
    labels, and a pull to the average."""

    needs_index = needs_labels = replaces_loss = True
    accepts_mixed = False
    lag = 1  # a sample's first average is read in the next epoch

    def __init__(self, num_samples, num_classes, *, judge_epoch=2, weight=0.8, temperature=5.0,
                 decay=0.9, storage="float32", device=None, process_group=None):  # fmt: skip
        memory = Average(num_samples, num_classes, decay=decay, storage=storage, device=device)
        super().__init__(
            weight=weight, temperature=temperature, memory=memory, process_group=process_group
        )
        self.judge_epoch = judge_epoch
        self.noise_rate = None
        self._witness = torch.arange(num_samples + 1) % 3 == 0
        self._mixing = torch.eye(num_classes)  # [c, y]: how likely class c is labelled y

    def reference(self, outputs, batch):
        return self.memory.read(batch.index, outputs.device)

    def loss(self, outputs, reference, valid, batch):
        if self._witness.device != outputs.device:
            self._witness = self._witness.to(outputs.device)
            self._mixing = self._mixing.to(outputs.device)
        if self.noise_rate is None:
            rows = cross_entropy(outputs, batch.labels, reduction="none")
            return torch.where(self._witness[batch.index], 0.0, rows).mean()
        prior = self._mixing[:, batch.labels].T.log()
        belief = (torch.where(valid[:, None], reference, 0.0) + prior).softmax(-1)
        pull = self.divergence(outputs, reference, valid=valid)
        return -(belief * log_softmax(outputs, -1)).sum(-1).mean() + self.weight * pull

    def record(self, outputs, batch, keep):
        self.memory.write(batch.index, outputs, keep, batch.labels)

    def graph_key(self):
        return super().graph_key(), self.noise_rate is None

    def _begin(self, epoch):
        super()._begin(epoch)
        if self.noise_rate is None and epoch >= self.judge_epoch:
            state = {name: tensor[0] for name, tensor in self.memory.state().items()}
            witness = self._witness[:-1].to(state["visits"].device) & (state["visits"] > 0)
            wrong = state["table"].argmax(-1) != state["labels"]
            self._believe((wrong & witness).sum().item() / max(witness.sum().item(), 1))

    def _believe(self, noise_rate):
        self.noise_rate = noise_rate
        eye = torch.eye(len(self._mixing))
        off = (1 - eye) / (len(eye) - 1)
        self._mixing.copy_((1 - noise_rate) * eye + noise_rate * off)

    def plain_state(self):
        rate = -1.0 if self.noise_rate is None else self.noise_rate
        return {**super().plain_state(), "noise_rate": torch.tensor(rate)}

    def take_plain_state(self, state):
        if state["noise_rate"] >= 0:  # it has judged
            self._believe(state["noise_rate"].item())
        super().take_plain_state(state)
