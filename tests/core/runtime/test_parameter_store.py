import time

import pytest
import torch
from torch import nn

from core.runtime.parameter_store import ParameterStore
from tests.core.tapes import quick_processes


def make_model() -> nn.Module:
    torch.manual_seed(0)
    # the forward pass is never run
    return nn.Sequential(nn.Conv2d(4, 32, 8), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(300, 1500))


def set_all(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)


def test_a_pulled_model_equals_the_published_one_with_buffers():
    source, target = make_model(), make_model()
    set_all(target, 0.0)
    source[1].running_mean.uniform_()
    store = ParameterStore(ParameterStore.size_of(source))
    assert store.version == 0 and store.pull(target, 0) == 0
    assert store.publish(source) == 1 and store.pull(target, 0) == 1
    for name, tensor in source.state_dict().items():
        if tensor.is_floating_point():
            assert tensor.equal(target.state_dict()[name])


@pytest.mark.parametrize("publisher_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("reader_format", [torch.contiguous_format, torch.channels_last])
def test_memory_formats_of_both_sides_may_differ(publisher_format, reader_format):
    source, target = make_model().to(memory_format=publisher_format), make_model().to(memory_format=reader_format)
    with torch.no_grad():
        source[0].weight.copy_(torch.arange(source[0].weight.numel()).view(source[0].weight.shape))
    store = ParameterStore(ParameterStore.size_of(source))
    store.publish(source)
    store.pull(target, 0)
    assert target[0].weight.equal(source[0].weight)
    assert target[0].weight.is_contiguous(memory_format=reader_format)


def test_a_known_version_is_not_copied_again():
    model = make_model()
    store = ParameterStore(ParameterStore.size_of(model))
    store.publish(model)
    set_all(model, 3.0)
    assert store.pull(model, 1) == 1 and (model[3].bias == 3.0).all()
    set_all(model, 4.0)
    store.publish(model)
    set_all(model, 0.0)
    assert store.pull(model, 1) == 2 and (model[3].bias == 4.0).all()


def test_versions_continue_after_a_resume():
    model = make_model()
    store = ParameterStore(ParameterStore.size_of(model))
    assert store.publish(model, version=500) == 500 and store.publish(model) == 501


def test_a_reader_that_was_overtaken_copies_again():
    model, reader = make_model(), make_model()
    store = ParameterStore(ParameterStore.size_of(model))
    set_all(model, 1.0)
    store.publish(model)
    halves = store._arrays["buffers"]

    class Lapping:  # two publications happen while the reader copies
        def __getitem__(self, half):
            store._arrays["buffers"] = halves
            set_all(model, 2.0)
            store.publish(model)
            set_all(model, 3.0)
            store.publish(model)
            torn = halves[half].copy()
            torn[: len(torn) // 2] = 1.0
            return torn

    store._arrays["buffers"] = Lapping()
    assert store.pull(reader, 0) == 3
    assert (reader[3].weight == 3.0).all() and (reader[0].weight == 3.0).all()


def publish_fast(store: ParameterStore, running) -> None:
    torch.set_num_threads(1)
    model = make_model().to(memory_format=torch.channels_last)
    while running.value:
        set_all(model, float(store.version + 1))
        store.publish(model)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("reader_format", [torch.contiguous_format, torch.channels_last])
def test_no_read_is_torn_under_a_fast_publisher(reader_format):
    context = quick_processes()
    reader = make_model().to(memory_format=reader_format)
    store = ParameterStore(ParameterStore.size_of(reader))
    running = context.Value("i", 1)
    process = context.Process(target=publish_fast, args=(store, running), daemon=True)
    process.start()
    reads, version, end = 0, 0, None
    try:
        while reads <= 20 or time.monotonic() < end:
            newer = store.pull(reader, version)
            if newer != version:
                end = end or time.monotonic() + 0.5
                values = {
                    float(extreme)
                    for tensor in reader.state_dict().values()
                    if tensor.is_floating_point()
                    for extreme in (tensor.min(), tensor.max())
                }
                assert values == {float(newer)} and newer > version
                version, reads = newer, reads + 1
    finally:
        running.value = 0
        process.join(10)
        process.kill()
