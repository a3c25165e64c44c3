import numpy as np
import pytest
import torch

from geomesh_p2p.config import ModelSection
from geomesh_p2p.core.canonical import digest
from geomesh_p2p.engine import model as models
from geomesh_p2p.errors import ConfigError, DataError

TINY = ModelSection(hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1, sequence_length=16)
VOCABULARY = 50


def named(flat):
    return {name: parameter.detach() for name, parameter in flat.module.named_parameters()}


def test_parameters_and_gradients_are_views_of_one_vector():
    flat = models.build(TINY, VOCABULARY, seed=1)
    start = 0
    for tensor, (name, parameter) in zip(flat.layout.tensors, flat.module.named_parameters(), strict=True):
        assert (tensor.name, tensor.size) == (name, parameter.numel())
        assert parameter.data_ptr() == flat.flat[start:].data_ptr()
        assert parameter.grad.data_ptr() == flat.grad[start:].data_ptr()
        start += tensor.size
    assert start == flat.flat.numel() == flat.layout.parameters
    flat.logits(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    assert flat.grad.abs().sum() > 0


def test_weights_are_shared_with_numpy_and_can_be_set():
    flat = models.build(TINY, VOCABULARY, seed=1)
    flat.weights()[:] = 0.25
    assert all(bool((parameter == 0.25).all()) for parameter in flat.module.parameters())
    flat.set_weights(np.full(flat.layout.parameters, 2, np.float32))
    assert float(flat.flat.min()) == 2
    with pytest.raises(ValueError, match="shape"):
        flat.set_weights(np.zeros(3, np.float32))


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_count_is_known_without_weights(tied):
    section = TINY.model_copy(update={"tie_embeddings": tied})
    built = models.build(section, VOCABULARY, seed=1)
    assert models.parameter_count(section, VOCABULARY) == built.layout.parameters
    assert ("lm_head.weight" in named(built)) is not tied


def test_only_embeddings_have_a_magnitude_per_row():
    untied = models.build(TINY.model_copy(update={"tie_embeddings": False}), VOCABULARY, seed=1)
    rows = {tensor.name: tensor.rows for tensor in untied.layout.tensors}
    assert rows.pop("model.embed_tokens.weight") == VOCABULARY
    assert set(rows.values()) == {1}
    by_row = models.build(TINY, VOCABULARY, seed=1, granularity="row")
    rows = {tensor.name: tensor.rows for tensor in by_row.layout.tensors}
    assert rows["model.layers.0.self_attn.k_proj.weight"] == 16
    assert rows["model.norm.weight"] == 1


def test_initial_weights_depend_on_seed_and_configuration_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = models.build(TINY, VOCABULARY, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    again = models.build(TINY, VOCABULARY, seed=1)
    assert first.weights_digest == again.weights_digest
    assert models.build(TINY, VOCABULARY, seed=2).weights_digest != first.weights_digest
    # A parameter's values hang on its own name: another layer changes none of the others' (but for their scale).
    deeper = models.build(TINY.model_copy(update={"layers": 3}), VOCABULARY, seed=1)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(named(first)[name], named(deeper)[name])


def test_initial_weights_have_the_standard_scale():
    parameters = named(models.build(TINY, VOCABULARY, seed=1))
    assert bool((parameters["model.norm.weight"] == 1).all())
    assert float(parameters["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(parameters["model.layers.0.mlp.up_proj.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(parameters["model.layers.0.mlp.down_proj.weight"].std()) == pytest.approx(0.01, rel=0.1)


def test_draws_are_the_same_bytes_everywhere():
    values = models.draw(digest("a seed"), 200_000, 0.5)
    assert values.dtype == np.float32
    assert abs(float(values.mean())) < 0.005
    assert float(values.std()) == pytest.approx(0.5, rel=0.01)
    assert float(np.abs(values).max()) < 3.5 * 0.5
    # Written down once: a change here means that runs begun before cannot be joined.
    assert models.draw(digest("a seed"), 4, 0.5).tobytes().hex() == GOLDEN_DRAW


GOLDEN_DRAW = "5121dabcdfec913d9a0d143ff67b0bbe"


def test_frozen_parameters_are_left_out():
    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    module[1].bias.requires_grad_(False)
    flat = models.flatten(module, 5)
    assert [(tensor.name, tensor.rows) for tensor in flat.layout.tensors] == [("0.weight", 5), ("1.weight", 1)]
    with pytest.raises(DataError, match="no trainable parameter"):
        models.flatten(module.requires_grad_(False), 5)


def test_vectors_are_apart_for_weight_decay():
    flat = models.build(TINY, VOCABULARY, seed=1)
    assert [start for start, _, _ in flat.segments[1:]] == [stop for _, stop, _ in flat.segments[:-1]]
    assert sum(stop - start for start, stop, decays in flat.segments if not decays) == 5 * 32  # two norms a layer, and the last


@pytest.mark.case("C087")
def test_a_model_folder_gives_its_shape_and_if_asked_its_weights(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    source = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    source.save_pretrained(tmp_path)
    section = TINY.model_copy(update={"path": str(tmp_path)})
    fresh = models.build(section, VOCABULARY, seed=1)
    assert fresh.vocabulary == 60
    assert models.build(section, VOCABULARY, seed=1).weights_digest == fresh.weights_digest
    assert models.parameter_count(section, VOCABULARY) == fresh.layout.parameters
    loaded = models.build(section.model_copy(update={"pretrained": True}), VOCABULARY, seed=1)
    assert torch.equal(named(loaded)["transformer.wte.weight"], source.transformer.wte.weight)
    assert not torch.equal(named(fresh)["transformer.wte.weight"], source.transformer.wte.weight)

    with pytest.raises(DataError, match=r"vocabulary of 60, .*highest id is 99"):
        models.build(section, 100, seed=1)
    with pytest.raises(ConfigError, match=r"sequence_length is 64, .* 32 positions"):
        models.build(section.model_copy(update={"sequence_length": 64}), VOCABULARY, seed=1)


@pytest.mark.case("C114")
def test_pickled_weights_are_not_read(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    source = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    source.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match="safetensors"):
        models.build(TINY.model_copy(update={"path": str(tmp_path), "pretrained": True}), VOCABULARY, seed=1)


@pytest.mark.parametrize("path", ["/no/such/folder", "./no-such-folder", "too/many/parts"])
def test_a_path_that_does_not_exist_is_named_in_one_line(path):
    with pytest.raises(DataError, match="no such file or folder") as caught:
        models.build(TINY.model_copy(update={"path": path}), VOCABULARY, seed=1)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_named_in_one_line(tmp_path):
    with pytest.raises(DataError, match="cannot be used") as caught:
        models.build(TINY.model_copy(update={"path": str(tmp_path)}), VOCABULARY, seed=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"hidden_size": 30}, {"heads": 3}, {"kv_heads": 3}, {"hidden_size": 34}])
def test_sizes_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ConfigError, match="multiple of"):
        models.parameter_count(TINY.model_copy(update={"heads": 4, "hidden_size": 32} | wrong), VOCABULARY)


@pytest.mark.case("C096")
def test_tied_weights_are_there_once_in_sync_and_saves_and_tied_again_after_a_load(tmp_path):
    """The flat vector has the embedding once, in every save, and the head is that same memory."""
    from geomesh_p2p.core.log import LogState
    from geomesh_p2p.engine.snapshots import Snapshots

    tied = models.build(TINY.model_copy(update={"tie_embeddings": True}), VOCABULARY, seed=1)
    loose = models.build(TINY.model_copy(update={"tie_embeddings": False}), VOCABULARY, seed=1)
    embedding = VOCABULARY * TINY.hidden_size
    assert loose.layout.parameters - tied.layout.parameters == embedding
    assert sum("embed_tokens" in tensor.name or "lm_head" in tensor.name for tensor in tied.layout.tensors) == 1

    state = LogState(b"r" * 32, 0, b"d" * 32, ("a",), (), 0)
    saved = Snapshots(tmp_path).write(state, tied.weights(), np.zeros(tied.layout.parameters, np.float32))
    assert saved.parameters == tied.layout.parameters
    again = models.build(TINY.model_copy(update={"tie_embeddings": True}), VOCABULARY, seed=2)
    again.set_weights(Snapshots(tmp_path).read_state(0)[0])
    head, table = again.module.lm_head.weight, again.module.model.embed_tokens.weight
    assert head.data_ptr() == table.data_ptr()
    assert torch.equal(head, tied.module.lm_head.weight)
