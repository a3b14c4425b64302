"""What is particular to timm: targets that hold the index, heads, checkpoints, mixed images."""

import numpy as np
import pytest
import timm
import torch
from adapters import Smooth
from problems import same
from timm.data import Mixup, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.task import ClassificationTask, resume_task_checkpoint
from timm.utils import CheckpointSaver
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat import MESA, SAF
from saltflat.integrations.timm import TrajectoryTask, indexed_targets

SAMPLES, CLASSES, SIDE = 16, 4, 32
SAF_SETTINGS = {"lag": 1, "start_epoch": 1}
MESA_SETTINGS = {"decay": 0.9, "start_epoch": 1}


class Images(torch.utils.data.Dataset):
    """Images as timm's datasets give them: a transform that create_loader sets."""

    def __init__(self):
        self.transform = None
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (SAMPLES, 3, SIDE, SIDE), generator=generator).byte()
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator).tolist()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), self.labels[index]


def model(name="test_resnet", **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=CLASSES, **kwargs)


def term_for(method, net):
    return SAF(SAMPLES, CLASSES, **SAF_SETTINGS) if method == "saf" else MESA(net, **MESA_SETTINGS)


def task_for(method, net, criterion=cross_entropy):
    return TrajectoryTask(net, criterion, term_for(method, net), verbose=False)


def batches(indexed, epoch):
    """timm's own loader; the order is the epoch's."""
    data = indexed_targets(Images()) if indexed else Images()
    torch.manual_seed(epoch)
    loader = create_loader(
        data,
        (3, SIDE, SIDE),
        batch_size=8,
        is_training=True,
        no_aug=True,
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
        pin_memory=False,
    )
    # Its transform is for PIL images; these are tensors already.
    loader.dataset.transform = None
    return list(loader)


both = pytest.mark.parametrize("method", ["saf", "mesa"])


def test_timms_own_loader_carries_the_index():
    """And each part of the result is what it says."""
    task, net = task_for("saf", model()), model().train()
    term = term_for("saf", net)
    task.train()
    for epoch in range(2):
        term.set_epoch(epoch)
        task.set_epoch(epoch)
        both = zip(batches(True, epoch), batches(False, epoch), strict=True)
        for (x, target), (same_x, label) in both:
            assert torch.equal(x, same_x)
            index = target // 2**24 - 1
            assert torch.equal(torch.tensor(Images().labels)[index], label)
            result, logits = task(x, target), net(x)
            added, loss = term(logits, index), cross_entropy(logits, label)
            expected = {"loss": loss + added, "output": logits, "task_loss": loss}
            assert same(result, {**expected, "trajectory_loss": added})
            assert (added > 0) == (epoch > 0)


def test_a_replaced_loss_is_in_training_alone():
    task = TrajectoryTask(model(), cross_entropy, Smooth(), verbose=False)
    task.set_epoch(0)
    batch = batches(False, 0)[0]
    task.train()
    task(*batch)  # the labels are hard ones until then
    result = task(*batch)
    assert torch.equal(result["loss"], result["trajectory_loss"])
    assert not torch.equal(result["loss"], result["task_loss"])
    task.eval()
    assert torch.equal(task(*batch)["loss"], task(*batch)["task_loss"])
    task.train()
    with pytest.raises(ValueError, match=r"Smooth needs one whole number.*float32.*\(2, 4\)"):
        task(torch.rand(2, 3, SIDE, SIDE), torch.rand(2, CLASSES))


def test_targets_without_an_index():
    task = task_for("saf", model())
    task.set_epoch(0)
    with pytest.raises(ValueError, match=r"the targets hold no index.*indexed_targets\(dataset"):
        task(*batches(False, 0)[0])
    with pytest.raises(ValueError, match=r"float32 of shape \(2, 4\).*mixup.*MESA"):
        task(torch.rand(2, 3, SIDE, SIDE), torch.rand(2, CLASSES))


def test_timms_mixup_takes_no_indexed_targets():
    """So that nothing mixed reaches SAF; the pages quote the message."""
    x, target = batches(True, 0)[0]
    with pytest.raises(RuntimeError, match=r"index .* is out of bounds"):
        Mixup(mixup_alpha=0.8, num_classes=CLASSES)(x, target)


def test_plain_targets_in_evaluation():
    task = task_for("saf", model())
    task.set_epoch(0)
    x, label = batches(False, 0)[0]
    task.eval()
    result = task(x, label)
    assert torch.equal(result["task_loss"], cross_entropy(result["output"], label))
    assert result["trajectory_loss"] == 0


def test_numbers_as_numpy_has_them():
    data = [("image", np.int64(2))]
    assert indexed_targets(data)[0] == ("image", 2**24 + 2)


@pytest.mark.parametrize("sample", [("image", 2, "path"), ("image",), ("image", 1.7), ("x", -1)])
def test_samples_that_are_no_image_and_label(sample):
    with pytest.raises(ValueError, match=r"sample 0 must be \(image, label\)"):
        indexed_targets([sample])[0]


class TwoOutputs(nn.Module):
    """As a model with an auxiliary classifier."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, x):
        return self.net(x), self.net(x)


@both
def test_auxiliary_outputs_are_refused(method):
    task = task_for(method, TwoOutputs())
    task.set_epoch(0)
    with pytest.raises(ValueError, match="the model must return logits, got a tuple"):
        task(*batches(method == "saf", 0)[0])


def test_a_checkpoint_without_the_term(tmp_path):
    net = model()
    plain = ClassificationTask(net, cross_entropy, verbose=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saver = CheckpointSaver(net, optimizer, checkpoint_dir=str(tmp_path), task=plain)
    saver.save_checkpoint(3, metric=0.5)
    path = str(tmp_path / "last.pth.tar")
    with pytest.warns(UserWarning, match="no state of SAF"):
        assert resume_task_checkpoint(task_for("saf", model()), path, log_info=False) == 4
    with pytest.raises(ValueError, match=r"no state of MESA.*load the weights"):
        resume_task_checkpoint(task_for("mesa", model()), path, log_info=False)


VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "two_heads", "kwargs"),
    [
        ("vit_tiny_patch16_224", False, {**VIT, "drop_path_rate": 0.5, "drop_rate": 0.2}),
        ("deit_tiny_distilled_patch16_224", False, {**VIT, "drop_path_rate": 0.5}),
        ("deit_tiny_distilled_patch16_224", True, {**VIT, "drop_path_rate": 0.5}),
        ("levit_128s", True, {"img_size": 64}),
        ("convnext_atto", False, {"drop_path_rate": 0.5}),
    ],
)
def test_mesa_with_drop_path_and_distillation_heads(name, two_heads, kwargs):
    net = model(name, **kwargs)
    for parameter in net.parameters():  # some of which begin as zeros
        nn.init.normal_(parameter, std=0.1)
    if two_heads:
        net.set_distilled_training(True)
    task = task_for("mesa", net, SoftTargetCrossEntropy())
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=CLASSES)
    side = kwargs.get("img_size", SIDE)
    x, target = mixup(torch.rand(4, 3, side, side), torch.arange(4))
    assert torch.equal(task.term.teacher(x), net.eval()(x)), "the same function, to begin with"
    task.train()
    task.set_epoch(1)
    result = task(x, target)
    result["loss"].backward()
    assert result["output"].shape == (4, CLASSES)
    assert result["trajectory_loss"] > 0
    task.update_ema()
    assert torch.equal(task.term.teacher(x), task.term.teacher(x)), "the teacher drops no path"


def test_timms_own_average_goes_on(tmp_path):
    task = task_for("mesa", model())
    task.setup_ema(decay=0.5)
    task.set_epoch(0)
    with torch.no_grad():
        task.trainable_module.fc.weight.zero_()
    before = task.get_trainable_module(ema=True).module.fc.weight.clone()
    task.update_ema()
    torch.testing.assert_close(task.get_trainable_module(ema=True).module.fc.weight, before / 2)
    state = task.get_checkpoint_state(ema=True)
    assert "task_state_ema" not in state
    assert "trajectory" in task.get_checkpoint_state()["task_state"]
