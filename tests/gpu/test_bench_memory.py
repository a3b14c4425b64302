from dataclasses import replace

from saltflat.train import Config, DataConfig, MethodConfig
from saltflat.train.bench import bench

BASE = Config(
    data=DataConfig("synthetic:32:10:64", batch_size=16), model="cifar_resnet18", device="cuda"
)


def test_peak_memory_is_the_methods_own():
    configs = {"base": BASE, "twin": BASE, "mesa": replace(BASE, method=MethodConfig("mesa"))}
    base, twin, mesa = bench(configs, rounds=1, steps=2)
    weights = 4 * 11_173_962
    assert base.peak_bytes > 3 * weights  # and their gradients and momentum
    # Whichever was built first; cuDNN chooses by time, and workspaces are not all of one size.
    assert abs(twin.peak_bytes - base.peak_bytes) < 0.05 * base.peak_bytes
    assert mesa.peak_bytes - base.peak_bytes > 0.99 * mesa.extra_bytes
