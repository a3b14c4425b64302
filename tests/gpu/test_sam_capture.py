import pytest
import torch
from problems import WRAPPERS, dataset, network

from saltflat.core.cuda_graph import GraphedStep
from saltflat.sam import ESAM

CAPTURED = [name for name in WRAPPERS if not WRAPPERS[name].per_row]


def build(wrapper):
    model = network().cuda()
    lr = torch.tensor(0.1, device="cuda")
    base = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)
    optimizer = wrapper.make(base, model=model)

    def step(x, y):
        return optimizer.step(wrapper.closure(optimizer, model, x, y))

    return model, optimizer, step


@pytest.mark.parametrize("name", CAPTURED)
def test_steps_in_cuda_graphs_equal_eager_steps(name):
    """Those of a method that does not climb in each step are in two graphs."""
    model, optimizer, step = build(WRAPPERS[name])
    twin, eager, plain = build(WRAPPERS[name])
    graphed = GraphedStep(step, [optimizer])
    for seed in range(30):
        batch = [tensor[:16].cuda() for tensor in dataset(seed).tensors]
        loss = graphed(*batch)
        torch.testing.assert_close(loss, plain(*batch), rtol=1e-3, atol=1e-4)
    assert optimizer.steps == eager.steps == 30
    for mine, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_esam_refuses_a_cuda_graph():
    model, optimizer, step = build(WRAPPERS["esam"])
    assert isinstance(optimizer, ESAM)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"ESAM.*without a GraphedStep"):
        GraphedStep(step, [optimizer])(*(tensor[:16].cuda() for tensor in dataset().tensors))
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("name", WRAPPERS)
def test_random_numbers_of_the_gpu_are_those_of_one_pass(name):
    wrapper = WRAPPERS[name]
    model = torch.nn.Sequential(network(), torch.nn.Dropout(0.5)).cuda()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrapper.make(base, model=model)
    x, y = (tensor[:16].cuda() for tensor in dataset().tensors)
    torch.cuda.manual_seed(1)
    model(x)
    after = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(1)
    optimizer.step(wrapper.closure(optimizer, model, x, y))
    assert torch.equal(torch.cuda.get_rng_state(), after)
