import inspect
import io
from dataclasses import dataclass

import pytest
import torch
from problems import CLASSES, SAMPLES, WRAPPERS, batches, network, same
from torch import nn

from saltflat import MESA, SAF, TrajectoryTerm, sam, terms, trajectory_loss
from saltflat.teacher import EMATeacher
from saltflat.train.augment import Batch, Mixed
from saltflat.train.config import Config, MethodConfig, OptimizerConfig
from saltflat.train.methods import METHODS, Setting, Training, check_method
from saltflat.train.optim import build_optimizer
from saltflat.train.step import build_step

# So that a term is at work in epoch 1.
EARLY = {
    "saf": {"lag": 1, "start_epoch": 1},
    "saf_shuffled": {"lag": 1, "start_epoch": 1},
    "saf_uniform": {"start_epoch": 1},
    "mesa": {"start_epoch": 1, "decay": 0.9},
    "ema": {"decay": 0.9},
}
CLASS_OF = {name.lower(): getattr(sam, name) for name in sam.__all__} | {
    "saf": SAF,
    "saf_shuffled": SAF,
    "mesa": MESA,
    "ema": EMATeacher,
}


def build(name, model, *, samples=SAMPLES, classes=CLASSES, seed=0, **settings) -> Training:
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
    method = check_method(MethodConfig(name, settings))
    return method.build(Setting(model, optimizer, samples, classes, seed), **settings)


@dataclass
class Trained:
    """A small run by the loop's own step."""

    model: nn.Module
    training: Training
    config: Config

    @classmethod
    def by(cls, name, config=None, **settings):
        model = network()
        training = build(name, model, **{**EARLY.get(name, {}), **settings})
        return cls(model, training, config or Config())

    def epoch(self, epoch, skip=0, stop=None):
        sums = torch.zeros(3)
        step = build_step(self.config, self.training, self.model, sums)
        self.training.set_epoch(epoch)
        self.model.train()
        figures = []
        for index, x, y in list(batches(epoch))[skip:stop]:
            sums.zero_()
            step(Batch(index, x, y, None))
            figures.append(sums.clone())
            self.training.after_step(self.model)
        return torch.stack(figures)

    def state(self):
        return {"model": self.model.state_dict(), "training": self.training.state_dict()}

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.training.load_state_dict(state["training"])


def called(training, logits, index, labels=None):
    """The term's loss, as a step asks for it."""
    return training.term(logits, terms.Batch(index, ((logits,), {}), labels))


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", METHODS)
def test_two_steps_with_the_defaults(name):
    run = Trained(model := network(), build(name, model), Config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert run.epoch(0, stop=2).isfinite().all()
    for key, tensor in model.state_dict().items():
        assert tensor.isfinite().all()
        assert not torch.equal(tensor, before[key]), key
    assert model[1].num_batches_tracked == 2  # the first passes alone


@pytest.mark.parametrize("stop", [0, 1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_a_run_goes_on_bit_for_bit_from_its_state(name, stop):
    whole = Trained.by(name)
    for epoch in range(3):
        last = whole.epoch(epoch)
    begun, rest = Trained.by(name), Trained.by(name)
    begun.epoch(0)
    begun.epoch(1, stop=stop) if stop else None
    saved = through_a_file(begun.state())
    begun.epoch(1, skip=stop)  # whatever comes after must not be in what was saved
    rest.load(saved)
    rest.epoch(1, skip=stop)
    assert torch.equal(rest.epoch(2), last)
    assert same(rest.state(), whole.state())
    if whole.training.teacher is not None:
        ours, theirs = (run.training.teacher.state_dict() for run in (rest, whole))
        assert same(ours, theirs)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "base"])
def test_it_does_something(name):
    """All train otherwise than the base; the moving average alone trains just as it."""
    base, run = Trained.by("base"), Trained.by(name)
    for epoch in range(2):
        base.epoch(epoch)
        figures = run.epoch(epoch)
    assert same(run.state()["model"], base.state()["model"]) == (name == "ema")
    has_term = name in ("saf", "saf_shuffled", "saf_uniform", "mesa")
    assert (run.training.term is not None) == has_term
    assert bool((figures[1:, 1] > 0).all()) == has_term  # the extra loss of epoch 1
    assert (run.training.teacher is not None) == (name in ("mesa", "ema"))


def test_the_average_is_the_teachers_own():
    run, twin = Trained.by("ema"), Trained.by("base")
    teacher = EMATeacher(twin.model, decay=0.9)
    run.epoch(0)
    for skip in range(3):
        twin.epoch(0, skip=skip, stop=skip + 1)
        teacher.update(twin.model)
    assert same(run.training.teacher.state_dict(), teacher.state_dict())


@pytest.mark.parametrize("name", METHODS)
def test_the_passes_are_those_that_a_step_takes(name):
    forward, backward = map(float, METHODS[name].passes.split(" + "))
    run = Trained.by(name)
    run.epoch(0)
    rows = {"forward": 0, "backward": 0}

    def count(module, inputs, output):
        rows["forward"] += len(output)
        if output.requires_grad:
            output.register_hook(lambda g: rows.update(backward=rows["backward"] + len(g)))

    run.model.register_forward_hook(count)
    if run.training.teacher is not None:
        run.training.teacher.module.register_forward_hook(count)
    for _ in range(5):  # of three steps: LookSAM's cycle has five
        run.epoch(1)
    assert rows == {"forward": forward * 15 * 8, "backward": backward * 15 * 8}
    if name in WRAPPERS:
        assert (WRAPPERS[name].forwards, WRAPPERS[name].backwards) == (forward, backward)


@pytest.mark.parametrize("name", METHODS)
def test_settings_are_those_of_the_signature(name):
    settings = METHODS[name].settings()
    if name in CLASS_OF:
        given = {"base_optimizer", "model", "m_sharpness", "process_group"}
        given |= {"num_samples", "num_classes", "output", "class_dim"}
        parameters = inspect.signature(CLASS_OF[name]).parameters
        expected = {p.name: p.default for p in parameters.values() if p.name not in given}
        # How the runner makes the batches is its own.
        assert settings == expected | ({"another_view": False} if name == "mesa" else {})
    assert inspect.Parameter.empty not in settings.values()
    build(name, network(), **settings)  # all of them are taken


def test_settings_of_the_rest():
    assert METHODS["base"].settings() == {}
    assert METHODS["label_smoothing"].settings() == {"smoothing": 0.1}
    saf = METHODS["saf"].settings()
    uniform = METHODS["saf_uniform"].settings()
    assert uniform == {key: saf[key] for key in uniform}  # a control has what it controls for
    assert set(saf) - set(uniform) == {"lag", "storage", "device"}


def test_settings_reach_the_method():
    assert build("sam", network(), rho=0.7).optimizer.rho == 0.7
    assert build("saf", network(), weight=0.7).term.weight == 0.7
    assert build("mesa", network(), decay=0.7).teacher.decay == 0.7
    assert build("label_smoothing", network(), smoothing=0.2).label_smoothing == 0.2
    with pytest.raises(ValueError, match=r"rho.*got -1"):
        build("sam", network(), rho=-1)
    with pytest.raises(ValueError, match=r"smoothing must be within \[0, 1\), got 1.0"):
        build("label_smoothing", network(), smoothing=1.0)


def test_errors_suggest():
    with pytest.raises(ValueError, match=r"unknown method 'safe': did you mean 'saf'\?"):
        check_method(MethodConfig("safe"))
    with pytest.raises(ValueError, match=r"sam has no setting 'roh': did you mean 'rho'\?"):
        check_method(MethodConfig("sam", {"rho": 0.1, "roh": 0.1}))
    with pytest.raises(ValueError, match="base has no setting 'rho': it has none"):
        check_method(MethodConfig("base", {"rho": 0.1}))
    for name in ("model", "num_samples", "m_sharpness"):
        with pytest.raises(ValueError, match=f"no setting '{name}'"):
            check_method(MethodConfig("saf", {name: 1}))
    assert check_method(MethodConfig("saf", {"lag": 1})) is METHODS["saf"]


def test_the_table_says_all_and_is_read_only():
    with pytest.raises(TypeError):
        METHODS["mine"] = METHODS["base"]
    for name, method in METHODS.items():
        assert method.summary and (method.citation or name == "base")
        training = build(name, network())
        mixes = training.term is None or training.term.accepts_mixed
        assert mixes == (method.signature is not SAF)
        assert training.per_row == (name == "esam")
        assert method.judged_by_teacher == (name == "ema")


def who_is_read(training, samples, epochs):
    """For each epoch, whose outputs of the epoch before each sample is pulled to.

    Sample i puts out 10 at i and 0 elsewhere, so the gradient is least where its reference is.
    """
    everyone = torch.arange(samples)
    for epoch in range(epochs):
        training.set_epoch(epoch)
        logits = (10.0 * torch.eye(samples)).requires_grad_()
        loss = called(training, logits, everyone)
        if epoch:
            (gradient,) = torch.autograd.grad(loss, logits)
            itself = (gradient == 0).all(1)
            yield torch.where(itself, everyone, gradient.argmin(1))


def test_shuffled_saf_reads_other_samples_outputs():
    samples, epochs = 60, 61
    settings = {"samples": samples, "classes": samples, "temperature": 1.0, **EARLY["saf"]}
    everyone = torch.arange(samples)
    for read in who_is_read(build("saf", network(), **settings), samples, 4):
        assert torch.equal(read, everyone)
    right, seen = 0, set()
    for read in who_is_read(build("saf_shuffled", network(), **settings), samples, epochs):
        assert torch.equal(read.sort().values, everyone)  # as many references as ever, once each
        right += int((read == everyone).sum())
        seen.add(tuple(read.tolist()))
    assert len(seen) == epochs - 1
    # Of a random permutation one is right on average: 60 of 60 epochs, give or take 4 sigma.
    assert 29 <= right <= 91
    other = build("saf_shuffled", network(), seed=1, **settings)
    assert not seen & {tuple(read.tolist()) for read in who_is_read(other, samples, 5)}


@pytest.mark.parametrize("tau_squared", [True, False])
def test_uniform_saf_pulls_to_the_uniform_distribution(tau_squared):
    settings = {"weight": 0.7, "temperature": 2.0, "tau_squared": tau_squared, "start_epoch": 1}
    training = build("saf_uniform", network(), **settings)
    logits = torch.randn(8, CLASSES, dtype=torch.float64, requires_grad=True)
    index = torch.arange(8)
    training.set_epoch(0)
    assert called(training, logits, index) == 0
    training.set_epoch(1)
    loss = called(training, logits, index)
    loss_fn_settings = {"temperature": 2.0, "tau_squared": tau_squared}
    expected = 0.7 * trajectory_loss(logits, torch.zeros_like(logits), **loss_fn_settings)
    assert torch.equal(loss, expected)
    log_q = torch.log_softmax(logits / 2, -1)
    closed = 0.7 * (4 if tau_squared else 1) * (-log_q.mean(-1) - torch.log(torch.tensor(CLASSES)))
    torch.testing.assert_close(loss, closed.mean(), rtol=1e-6, atol=0)


def test_a_row_that_is_not_finite_does_not_spoil_uniform_safs_loss():
    training = build("saf_uniform", network(), start_epoch=0)
    training.set_epoch(0)
    logits = torch.randn(3, CLASSES)
    expected = called(training, logits[:2], torch.arange(2)) * 2 / 3  # of all rows
    logits[2, 0] = float("nan")
    torch.testing.assert_close(called(training, logits, torch.arange(3)), expected)
    assert training.term.nonfinite_rows == 1


def test_smoothing_is_instead_of_the_configs():
    ours = Trained.by("label_smoothing", Config(label_smoothing=0.5), smoothing=0.2)
    twin = Trained.by("base", Config(label_smoothing=0.2))
    assert torch.equal(ours.epoch(0), twin.epoch(0))
    assert same(ours.state(), twin.state())


class OwnLoss(TrajectoryTerm):
    """A term that replaces the loss: the labels' negative log-likelihood, twice."""

    needs_labels = replaces_loss = True

    def __init__(self):
        super().__init__(weight=2.0)

    def reference(self, outputs, batch):
        return torch.zeros_like(outputs), torch.ones_like(outputs[:, 0], dtype=torch.bool)

    def loss(self, outputs, reference, valid, batch):
        return self.weight * nn.functional.cross_entropy(outputs, batch.labels)


def test_a_term_may_replace_the_loss():
    smoothed = Config(label_smoothing=0.5)
    model = network()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.05))
    ours = Trained(model, Training(optimizer, OwnLoss()), smoothed)
    twin = network()
    theirs = Trained(twin, Training(build_optimizer(twin, OptimizerConfig(lr=0.1))), Config())
    optimizer.param_groups[0]["weight_decay"] *= 2  # a step moves by lr times it
    (loss, extra, right), (plain, *_) = ours.epoch(0, stop=1)[0], theirs.epoch(0, stop=1)[0]
    torch.testing.assert_close(loss, plain)  # without label smoothing
    torch.testing.assert_close(extra, 2 * plain)
    assert 0 <= right <= 8
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("name", "there"), [("saf", False), ("mesa", True)])
def test_a_mixed_batch_has_the_terms_that_accept_it(name, there):
    run = Trained.by(name, **({"lag": 1} if name == "saf" else {}))
    run.epoch(0)
    run.epoch(1, stop=1)
    sums = torch.zeros(3)
    step = build_step(run.config, run.training, run.model, sums)
    index, x, y = list(batches(1))[1]
    step(Batch(index, x, y, Mixed(torch.arange(8).flip(0), 0.5, y.flip(0))))
    assert (sums[1] != 0) == there


def test_extra_bytes():
    model = network()
    weights = sum(p.nbytes for p in model.parameters())
    everything = sum(tensor.nbytes for tensor in model.state_dict().values())
    extra = {}
    for name in METHODS:
        run = Trained.by(name)
        run.epoch(0)
        extra[name] = run.training.extra_bytes()
    table = SAF.estimate_bytes(SAMPLES, CLASSES, lag=1)
    for name in METHODS:
        expected = {"looksam": weights, "saf": table, "saf_shuffled": table}.get(name, 0)
        if name in ("ema", "mesa"):  # and a counter and a flag for each tensor
            assert everything <= extra[name] <= everything + 8 * 32
        else:
            assert extra[name] == expected, name


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sam", {"rho": "abc"}, "sam's rho must be of the type float, as 0.05 is, got 'abc'"),
        ("saf", {"lag": 1.5}, "saf's lag must be of the type int, as 3 is, got 1.5"),
        ("mesa", {"warmup": 1}, "mesa's warmup must be of the type bool, as False is, got 1"),
    ],
)
def test_a_setting_of_another_kind(name, settings, message):
    with pytest.raises(ValueError, match=message):
        check_method(MethodConfig(name, settings))


def test_whole_numbers_will_do_for_fractions():
    assert check_method(MethodConfig("sam", {"rho": 1})) is METHODS["sam"]
