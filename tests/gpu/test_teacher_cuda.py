"""What CUDA graphs and layouts make of the moving average and its folded twin."""

import copy

import pytest
import torch
from test_cuda import no_waiting

from saltflat.core.cuda_graph import GraphedStep
from saltflat.teacher import EMATeacher, FoldedTwin
from saltflat.train.models import build_model

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def network(layout=torch.channels_last):
    torch.manual_seed(0)
    model = build_model("cifar_resnet18", num_classes=10).to("cuda", memory_format=layout)
    with torch.no_grad():
        for _ in range(3):  # so that the statistics are not what they start as
            model.train()(images())
    return model


def images(seed=0, layout=torch.channels_last):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 32, 32, generator=generator).to("cuda", memory_format=layout)


def outputs(teacher, x, dtype=torch.bfloat16):
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32, cache_enabled=False):
        return teacher(x)


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_folded_outputs_are_the_modules(layout, dtype):
    module = network(layout).eval().requires_grad_(False)
    exact = copy.deepcopy(module).double()(images(layout=layout).double())
    twin, x = FoldedTwin(module), images(layout=layout)
    error = relative(outputs(twin, x, dtype), exact)
    assert error < 2 * relative(outputs(module, x, dtype), exact) + 1e-6


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("average_std", [True, False])
def test_a_graphed_step_repeats_forward_update_and_refresh(warmup, average_std):
    model = network()
    settings = {"decay": 0.5, "warmup": warmup, "average_std": average_std}
    teacher, plain = (EMATeacher(model, **settings) for _ in range(2))
    assert teacher.fold()

    def step(x):
        got = outputs(teacher, x)
        teacher.update(model)
        return got

    graphed, seen = GraphedStep(step, [teacher]), []
    for seed in range(8):
        if seed == 6:
            teacher.frozen = plain.frozen = True
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        expected = outputs(plain, images(seed))
        got = graphed(images(seed))
        plain.update(model)
        assert relative(got, expected) < 0.05
        assert teacher.updates == plain.updates == seed + 1
        for name, tensor in plain.module.state_dict().items():
            torch.testing.assert_close(teacher.module.state_dict()[name], tensor)
        seen.append(got.clone())
    assert relative(seen[0], seen[5]) > 0.1


def test_nothing_waits_for_the_device():
    model = network()
    teacher = EMATeacher(model, warmup=True)
    assert teacher.fold()
    x = images()
    outputs(teacher, x), teacher.update(model)
    with no_waiting():
        before = outputs(teacher, x)
        teacher.update(model)
        after = outputs(teacher, x)
    assert relative(after, before) < 0.1
