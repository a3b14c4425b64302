import pytest
import torch
from problems import WRAPPERS, dataset, network

from saltflat.sam import LookSAM

CAPTURED = ["sam", "asam", "gsam", "esam", "msam", "msam, adaptive"]


@pytest.mark.parametrize("name", CAPTURED)
def test_a_whole_step_in_a_cuda_graph_equals_eager_steps(name):
    wrapper = WRAPPERS[name]

    def build():
        model = network().cuda()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, wrapper.make(base, model=model)

    model, optimizer = build()
    twin, eager = build()
    x, y = (tensor[:16].cuda() for tensor in dataset().tensors)
    batches = [[t[:16].cuda() for t in dataset(seed).tensors] for seed in range(8)]
    closure = wrapper.closure(optimizer, model, x, y)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for new_x, new_y in batches[:3]:
            x.copy_(new_x), y.copy_(new_y)
            optimizer.step(closure)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = optimizer.step(closure)

    for new_x, new_y in batches[:3]:
        eager.step(wrapper.closure(eager, twin, new_x, new_y))
    for new_x, new_y in batches[3:]:
        x.copy_(new_x), y.copy_(new_y)
        optimizer.before_replay()
        graph.replay()
        expected = eager.step(wrapper.closure(eager, twin, new_x, new_y))
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
    for mine, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_looksam_as_one_graph_of_each_kind_of_step():
    def build():
        model = network().cuda()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, LookSAM(base, model=model, interval=3)

    model, optimizer = build()
    twin, eager = build()
    wrapper = WRAPPERS["looksam"]
    x, y = (tensor[:16].cuda() for tensor in dataset().tensors)
    batches = [[t[:16].cuda() for t in dataset(seed).tensors] for seed in range(9)]
    closure = wrapper.closure(optimizer, model, x, y)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for new_x, new_y in batches[:3]:
            x.copy_(new_x), y.copy_(new_y)
            optimizer.step(closure)
    torch.cuda.current_stream().wait_stream(side)
    climbing, between = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    assert optimizer.climbs
    with torch.cuda.graph(climbing):
        optimizer.step(closure)
    optimizer.before_replay()
    assert not optimizer.climbs
    with torch.cuda.graph(between):
        optimizer.step(closure)
    for new_x, new_y in batches[:3]:
        eager.step(wrapper.closure(eager, twin, new_x, new_y))
    for step, (new_x, new_y) in enumerate(batches[3:]):
        x.copy_(new_x), y.copy_(new_y)
        (between if step % 3 else climbing).replay()
        eager.step(wrapper.closure(eager, twin, new_x, new_y))
    for mine, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


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
