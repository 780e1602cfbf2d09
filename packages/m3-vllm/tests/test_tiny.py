from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from m3_core.errors import ConfigurationError, RefusalError
from m3_vllm.cli import main
from m3_vllm.cli.tiny import MARKER, write
from m3_vllm.tiny_checkpoint import TinyModel

SMALL = TinyModel(hidden=64, heads=2, kv_heads=2, experts=4, top_k=2, intermediate=128, dense_intermediate=64, vocabulary=384)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write(folder, SMALL)
    return folder


def test_published_names_shapes_and_types(written: Path) -> None:
    tensors = load_file(written / "model.safetensors")
    layer = "language_model.model.layers.3."
    expected = {
        "language_model.model.embed_tokens.weight": (384, 64),
        "language_model.lm_head.weight": (384, 64),
        f"{layer}self_attn.q_proj.weight": (256, 64),
        f"{layer}self_attn.index_q_proj.weight": (256, 64),
        f"{layer}self_attn.index_k_proj.weight": (128, 64),
        f"{layer}self_attn.index_k_norm.weight": (128,),
        f"{layer}block_sparse_moe.gate.weight": (4, 64),
        f"{layer}block_sparse_moe.e_score_correction_bias": (4,),
        f"{layer}block_sparse_moe.experts.3.w1.weight": (128, 64),
        f"{layer}block_sparse_moe.experts.3.w2.weight": (64, 128),
        f"{layer}block_sparse_moe.shared_experts.down_proj.weight": (64, 128),
        "language_model.model.layers.2.mlp.gate_proj.weight": (64, 64),
    }
    for name, shape in expected.items():
        assert tuple(tensors[name].shape) == shape, name
        full = "gate.weight" in name or "bias" in name
        assert tensors[name].dtype == (torch.float32 if full else torch.bfloat16), name
    assert "language_model.model.layers.2.self_attn.index_q_proj.weight" not in tensors
    # Special tokens are never the best ones.
    assert (tensors["language_model.lm_head.weight"][:3] == 0).all()
    # Norms and projections of attention; then the network, or index branch, router with bias, experts and the shared one.
    dense, sparse = 8 + 3, 8 + 4 + 2 + 3 * 4 + 3
    assert len(tensors) == 3 + 3 * dense + 3 * sparse


def test_configuration_is_the_wrapper(written: Path) -> None:
    config = json.loads((written / "config.json").read_text())
    assert config["model_type"] == "minimax_m3_vl"
    assert config["architectures"] == ["MiniMaxM3SparseForCausalLM"]
    text = config["text_config"]
    assert text["moe_layer_freq"] == text["sparse_attention_config"]["sparse_attention_freq"] == [0, 0, 0, 1, 1, 1]
    assert text["shared_intermediate_size"] == text["intermediate_size"] == 128


def test_every_token_id_decodes(written: Path) -> None:
    tokenizer = Tokenizer.from_file(str(written / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SMALL.vocabulary
    assert sorted(tokenizer.get_vocab().values()) == list(range(SMALL.vocabulary))
    text = "Hello world, 12 € — naïve"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_seed_gives_the_same_weights() -> None:
    first, second = SMALL.tensors(), SMALL.tensors()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = attrs.evolve(SMALL, seed=1).tensors()
    assert not torch.equal(other["language_model.model.norm.weight"], first["language_model.model.norm.weight"])


def test_replaces_its_own_and_refuses_a_foreign_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own"
    own.mkdir()
    write(own, SMALL)
    write(own, SMALL)
    assert (own / MARKER).exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    with pytest.raises(ConfigurationError, match=r"thesis\.tex"):
        write(foreign, SMALL)
    assert main(["tiny", str(foreign)]) == 1
    assert "name another folder" in capsys.readouterr().err
    assert [entry.name for entry in foreign.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigurationError, match="is a file"):
        write(foreign / "thesis.tex", SMALL)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["foreign", "own"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    write(folder, SMALL)
    before = (folder / MARKER).read_bytes()

    def fail(self: TinyModel) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(TinyModel, "tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        write(folder, SMALL)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]
    assert (folder / MARKER).read_bytes() == before


@pytest.mark.parametrize(
    ("sizes", "fragments"),
    [
        ({"layers": 3}, ["layers=3 is below 4"]),
        ({"hidden": 100}, ["hidden=100"]),
        ({"intermediate": 64}, ["intermediate=64", "128"]),
        ({"heads": 3}, ["heads=3 is no multiple of tensor parallelism 2", "heads=3 is no multiple of kv_heads=2"]),
        ({"top_k": 17}, ["top_k=17 is above experts=16"]),
        ({"kv_heads": 0, "heads": 0}, ["kv_heads=0 is below 1", "heads=0 is below 1"]),
        ({"vocabulary": 200}, ["vocabulary=200 is below 259"]),
        ({"seed": -1}, ["seed=-1 is below 0"]),
    ],
)
def test_impossible_sizes_are_refused_with_every_reason(sizes: dict[str, int], fragments: list[str]) -> None:
    with pytest.raises(RefusalError) as caught:
        TinyModel(**sizes)
    for fragment in fragments:
        assert any(fragment in reason for reason in caught.value.reasons), fragment
