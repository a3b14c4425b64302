"""What cuDNN's fused convolutions, the kernel that folds and CUDA graphs make of a teacher."""

import copy

import pytest
import torch
from test_cuda import no_waiting
from test_folded import Block, shaken
from torch import nn

from saltflat import EMATeacher
from saltflat.train.models import build_model

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def network(layout=torch.channels_last):
    torch.manual_seed(0)
    model = shaken(build_model("cifar_resnet18", num_classes=10))
    return model.to("cuda", memory_format=layout)


def images(seed=0, layout=torch.channels_last):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 32, 32, generator=generator).to("cuda", memory_format=layout)


def outputs(teacher, x, dtype=torch.bfloat16):
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        return teacher(x)


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_the_modules(layout, dtype):
    model = network(layout)
    exact = copy.deepcopy(model).double().eval()(images(layout=layout).double())
    teacher, plain = EMATeacher(model), EMATeacher(model)
    assert teacher.fold()
    x = images(layout=layout)
    error = relative(outputs(teacher, x, dtype), exact)
    twin = teacher._folding._twin
    assert twin is not None and twin._refreshing is not None
    fused = [c._fused for c in twin._convolutions]
    assert sum(fused) == (0 if dtype == torch.float32 else 17)
    assert error < 2 * relative(outputs(plain, x, dtype), exact) + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_folds_as_torch_does(layout, dtype):
    teacher = EMATeacher(network(layout))
    teacher.fold()
    outputs(teacher, images(layout=layout), dtype)
    twin = teacher._folding._twin
    twin._refreshing()
    made = [(f.weight.clone(), f.bias.clone()) for f in twin._folded]
    for folded, (weight, bias) in zip(twin._folded, made, strict=True):
        folded.refresh()
        tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(weight, folded.weight, **tolerance)
        torch.testing.assert_close(bias, folded.bias, **tolerance)


def test_a_sum_that_is_broadcast_is_not_cudnns():
    model = shaken(Block(lambda y, x: y + x.mean((2, 3), keepdim=True))).cuda()
    teacher, plain = EMATeacher(model), EMATeacher(model)
    assert teacher.fold()
    x = images()
    assert relative(outputs(teacher, x), outputs(plain, x)) < 0.01


def test_grouped_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), nn.ReLU())
    teacher, plain = (EMATeacher(shaken(model).cuda()) for _ in range(2))
    assert teacher.fold()
    assert relative(outputs(teacher, images()), outputs(plain, images())) < 0.01


def test_a_cuda_graph_repeats_forward_update_and_refresh():
    model = network()
    teacher, plain = (EMATeacher(model, decay=0.5, warmup=False) for _ in range(2))
    assert teacher.fold()
    x = images()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            outputs(teacher, x), teacher.update(model), plain.update(model)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = outputs(teacher, x)
        teacher.update(model)
    seen = []
    for seed in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        x.copy_(images(seed))
        expected = outputs(plain, x)
        teacher.before_replay()
        graph.replay()
        plain.update(model)
        assert relative(got, expected) < 0.05
        seen.append(got.clone())
        # In another precision, the module itself; the graph's twin stays.
        assert relative(teacher(x), plain(x)) < 1e-3
        assert relative(outputs(teacher, x), outputs(plain, x)) < 0.05
    assert relative(seen[0], seen[-1]) > 0.1


def test_nothing_waits_for_the_device():
    model = network()
    teacher = EMATeacher(model)
    assert teacher.fold()
    x = images()
    outputs(teacher, x), teacher.update(model)
    with no_waiting():
        before = outputs(teacher, x)
        teacher.update(model)
        after = outputs(teacher, x)
    assert relative(after, before) < 0.1
