"""Layouts of one process: clipping and unscaling, compiling, recomputing; no ranks needed."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.layouts.layouts import CONFIG, CPU, Layout, Run, batch_of
from paceline.config import TrainingSettings
from paceline.errors import InvalidInput
from paceline.models import (
    Pretrained,
    attention,
    config_for,
    load_model,
    new_model,
    read_index,
    save_model,
)
from paceline.training.loop import Inputs, TransformerWorkload, load_weights
from paceline.training.parallel import Mesh, MeshSpec, parallelise, recompute_blocks
from tests.support.hugging_face import write_model


def fresh(**changes: object) -> Run:
    settings = TrainingSettings.model_validate({"ranks": 1, "batch_sequences": 8} | changes)
    workload = TransformerWorkload(CONFIG)
    parallel = parallelise(workload.build(), Mesh(MeshSpec()), settings, workload)
    return Run(Layout("one"), settings, MeshSpec(), workload, parallel)


def gradients(run: Run) -> torch.Tensor:
    (module,) = run.parallel.modules
    return torch.cat([each.grad.flatten() for each in module.parameters()])


def test_gradients_are_those_of_one_call_and_no_other() -> None:
    run = fresh()
    run.parallel.accumulate(run.parts(0), 1.0)
    run.parallel.accumulate(run.parts(1), 1.0)
    again = fresh()
    again.parallel.accumulate(again.parts(1), 1.0)
    assert torch.equal(gradients(run), gradients(again))


def test_the_norm_is_returned_and_only_longer_gradients_are_shortened() -> None:
    run = fresh()
    run.parallel.accumulate(run.parts(0), 1.0)
    before = gradients(run)
    norm = run.parallel.clip(1e9)
    assert norm == pytest.approx(float(before.double().norm()), rel=1e-6)
    assert torch.equal(gradients(run), before)
    assert run.parallel.clip(norm / 4) == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(gradients(run), before / 4)


def test_a_scaled_loss_gives_the_same_gradients_once_unscaled() -> None:
    plain, scaled = fresh(), fresh()
    plain.parallel.accumulate(plain.parts(0), 1.0)
    scaled.parallel.accumulate(scaled.parts(0), 1024.0)
    assert plain.parallel.clip(3.0) == scaled.parallel.clip(3.0, unscale=1 / 1024)
    torch.testing.assert_close(gradients(plain), gradients(scaled), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_no_numbers_are_reported_and_left_alone(bad: float) -> None:
    run = fresh()
    run.parallel.accumulate(run.parts(0), 1.0)
    (module,) = run.parallel.modules
    module.get_parameter("model.norm.weight").grad[0] = bad
    before = gradients(run)
    assert not torch.isfinite(torch.tensor(run.parallel.clip(1e-3)))
    assert torch.equal(gradients(run).nan_to_num(1.0), before.nan_to_num(1.0))


@pytest.mark.nightly
# torch's tracer looks at .grad of everything and hides the warning in a way that "error" undoes.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_has_equal_losses_from_one_graph_for_all_blocks(monkeypatch) -> None:
    graphs: list[int] = []

    def counting(graph, _inputs):
        graphs.append(len(list(graph.graph.nodes)))
        return graph.forward

    plain = fresh().train(2)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", functools.partial(real, backend=counting))
    compiled = fresh(compile=True)
    assert compiled.train(2) == pytest.approx(plain, rel=1e-5)
    assert len(graphs) == 2  # a block and the loss; four blocks share theirs
    names = [name for name, _ in compiled.parallel.modules[0].named_parameters()]
    assert names == [name for name, _ in new_model(CONFIG, 0).named_parameters()]
    # Attention to documents one by one stays outside: their lengths are others in each batch.
    monkeypatch.setitem(attention.CALL_PAIRS, "cpu", 16)
    apart = fresh(compile=True)
    first = apart.train(1)
    made = len(graphs)
    assert first == pytest.approx(plain[:1], rel=1e-5)
    apart.train(3)
    assert len(graphs) == made, "other documents, and no graph more"


# torch's tracer looks at .grad of everything and hides the warning in a way that "error" undoes.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.nightly)])
def test_a_compiled_model_of_transformers_has_equal_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """A stand-in for the compiler's backend runs what was traced as it is."""
    graphs: list[int] = []

    def counting(graph, _inputs):
        graphs.append(len(list(graph.graph.nodes)))
        return graph.forward

    pretrained = Pretrained.open(write_model(family, tmp_path))

    def losses(**changes: object) -> list[float]:
        settings = TrainingSettings.model_validate({"ranks": 1, "batch_sequences": 8} | changes)
        workload = TransformerWorkload(pretrained)
        parallel = parallelise(workload.build(), Mesh(MeshSpec()), settings, workload)
        load_weights(pretrained, parallel)
        found: list[float] = Run(Layout("one"), settings, MeshSpec(), workload, parallel).train(2)
        return found

    plain = losses()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", functools.partial(real, backend=counting))
    assert losses(compile=True) == pytest.approx(plain, rel=1e-5)
    assert max(graphs) > 20, "blocks were traced, not only the loss"


def test_recomputed_blocks_keep_less_and_their_names() -> None:
    def kept(model: nn.Module) -> int:
        held = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal held
            held += tensor.numel()
            return tensor

        inputs = TransformerWorkload(CONFIG).inputs(batch_of(0), CPU)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(*inputs.args, **inputs.kwargs)
        return held

    plain, recomputed = new_model(CONFIG, 0), new_model(CONFIG, 0)
    recompute_blocks(recomputed)
    assert kept(recomputed) < kept(plain) / 3
    assert list(recomputed.state_dict()) == list(plain.state_dict())


def test_a_model_of_the_users_own_is_driven_alike() -> None:
    class Doubling:
        def build(self) -> nn.Module:
            return nn.Linear(1, 1, bias=False)

        def inputs(self, batch, device) -> Inputs:
            raise NotImplementedError

        def loss_sum(self, outputs, *targets):
            return (outputs - targets[0]).square().sum()

    parallel = parallelise(
        Doubling().build(), Mesh(MeshSpec()), TrainingSettings(ranks=1), Doubling()
    )
    x = torch.tensor([[1.0], [2.0], [3.0]])
    optimizer = torch.optim.SGD(parallel.modules[0].parameters(), lr=0.02)
    for _ in range(60):
        sums = parallel.accumulate([Inputs((x,), (2 * x,), 3.0)], 1.0)
        optimizer.step()
    assert float(sums.loss) < 1e-6
    assert parallel.modules[0].weight.item() == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_base_that_is_not_finite_is_named_before_the_first_step(
    tmp_path: Path, bad: float
) -> None:
    """Of transformers each rank checks its own parts as they arrive; ours are read whole."""
    directory = write_model("llama", tmp_path / "theirs")
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(weights, file, metadata={"format": "pt"})
    pretrained = Pretrained.open(directory)
    workload, settings = TransformerWorkload(pretrained), TrainingSettings(ranks=1)
    parallel = parallelise(workload.build(), Mesh(MeshSpec()), settings, workload)
    with pytest.raises(InvalidInput, match=r"not finite.*layers\.1\.mlp\.up_proj"):
        load_weights(pretrained, parallel)
    config = config_for(20_000, 32)
    save_model(new_model(config, 0), config, tmp_path / "ours")
    file = tmp_path / "ours" / read_index(tmp_path / "ours")["model.norm.weight"]
    weights = load_file(file)
    weights["model.norm.weight"][0] = bad
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"not finite.*model\.norm\.weight"):
        load_model(tmp_path / "ours")
