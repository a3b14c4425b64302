"""The protocol of a term carries AutoSAF: its loss in the plain loop, resumed and compiled."""

import copy

import pytest
import torch
from problems import CLASSES, FEATURES, SAMPLES, batches, network, recomputing_backend
from terms.thin_auto_saf import ThinAutoSAF
from torch.nn.functional import kl_div

from saltflat import Batch


class Twin:
    """The same in float64, with a dictionary for a memory and a loop over the rows."""

    def __init__(self, judge_epoch=2, weight=0.8, temperature=5.0, decay=0.9):
        self.judge_epoch, self.weight, self.temperature = judge_epoch, weight, temperature
        self.decay, self.noise_rate = decay, None
        self.averages = {}

    def set_epoch(self, epoch):
        if epoch >= self.judge_epoch and self.noise_rate is None:
            seen = [(m.argmax() != y) for i, (m, _, y) in self.averages.items() if i % 3 == 0]
            self.noise_rate = sum(seen).item() / len(seen)

    def __call__(self, outputs, index, labels):
        total = torch.zeros((), dtype=torch.float64)
        for z, i, y in zip(outputs, index.tolist(), labels.tolist(), strict=True):
            log_q = z.log_softmax(-1)
            average, visits, _ = self.averages.get(i, (torch.zeros_like(z), 0, y))
            average = average.detach()
            if self.noise_rate is None:
                total = total - log_q[y] * (i % 3 != 0)
            else:
                rates = torch.full_like(z, self.noise_rate / (len(z) - 1))
                rates[y] = 1 - self.noise_rate
                total = total - (torch.softmax(average + rates.log(), -1) * log_q).sum()
                if visits:
                    soft = [v.div(self.temperature).log_softmax(-1) for v in (z, average)]
                    pull = kl_div(*soft, reduction="sum", log_target=True)
                    total = total + self.weight * self.temperature**2 * pull
            rate = max(1 / (visits + 1), 1 - self.decay)
            self.averages[i] = (average + rate * (z.detach() - average), visits + 1, y)
        return total / len(outputs)


def labels_of(y, index):
    """A quarter of the labels is wrong."""
    return torch.where(index % 4 == 0, (y + 1) % CLASSES, y)


def train(model, term, epochs, forward=None, skip=0, stop=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in epochs:
        term.set_epoch(epoch)
        for index, x, y in list(batches(epoch))[skip:stop]:
            y = labels_of(y, index)
            loss = forward(x, index, y) if forward else term(model(x), index, labels=y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses


def test_the_loss_and_its_gradient_are_those_of_the_twin():
    model = network().double()
    term, twin = ThinAutoSAF(SAMPLES, CLASSES), Twin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(6):
        term.set_epoch(epoch), twin.set_epoch(epoch)
        assert (term.noise_rate is None) == (epoch < 2)
        for index, x, y in list(batches(epoch))[: 2 if epoch == 0 else 3]:
            y = labels_of(y, index)
            logits = model(x.double())
            loss, expected = term(logits, index, labels=y), twin(logits, index, y)
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)  # float32 is kept
            got, wanted = (
                torch.autograd.grad(part, logits, retain_graph=True)[0] for part in (loss, expected)
            )
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert term.noise_rate == pytest.approx(twin.noise_rate) and term.noise_rate > 0


@pytest.mark.parametrize("stop", [(1, 1), (2, 1), (3, 2)])
def test_it_resumes_from_any_step(stop):
    epoch, step = stop
    models = [network() for _ in range(2)]
    terms = [ThinAutoSAF(SAMPLES, CLASSES) for _ in models]
    straight = train(models[0], terms[0], range(epoch)) + train(models[0], terms[0], [epoch])
    train(models[1], terms[1], range(epoch))
    train(models[1], terms[1], [epoch], stop=step)
    again = ThinAutoSAF(SAMPLES, CLASSES)
    again.load_state_dict(copy.deepcopy(terms[1].state_dict()))
    rest = train(copy.deepcopy(models[1]), again, [epoch], skip=step)
    goes_on = train(models[1], terms[1], [epoch], skip=step)
    assert rest == goes_on
    assert len(straight) == 3 * (epoch + 1)
    for name, tensor in terms[1].state_dict().items():
        assert torch.equal(
            again.state_dict()[name],
            tensor,
        ), name
    assert again.noise_rate == terms[1].noise_rate


def test_a_batch_in_place_of_arguments():
    one, other = (ThinAutoSAF(SAMPLES, CLASSES) for _ in range(2))
    index, x, y = next(batches(0))
    logits = network()(x)
    one.set_epoch(0), other.set_epoch(0)
    assert one(logits, index, labels=y) == other(logits, Batch(index=index, labels=y)) > 0
    with pytest.raises(ValueError, match=r"labels.*\(8,\).*got None"):
        one(logits, index)
    assert x.shape[1] == FEATURES


def test_compiled_it_trains_as_it_does_eagerly():
    """An average is read and written in one step. The default partitioner gathers rows again in
    the backward pass if nothing hinders it: the loss is right then, and the gradient wrong."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    models = [network() for _ in range(2)]
    eager, compiled = (ThinAutoSAF(SAMPLES, CLASSES, device="cpu") for _ in models)

    def plain(x, index, y):
        return compiled(models[1](x), index, labels=y)

    forward = torch.compile(plain, fullgraph=True, backend=recomputing_backend)
    expected = train(models[0], eager, range(6))
    got = train(models[1], compiled, range(6), forward)
    torch.testing.assert_close(got, expected)
    for mine, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # before and after it judged
