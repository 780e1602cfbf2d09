"""``m3 tiny``: write a tiny random MiniMax-M3 checkpoint, ready for ``vllm serve`` on a CPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

from attrs import asdict, fields

from m3_core.errors import ConfigurationError, RefusalError
from m3_vllm.tiny_checkpoint import TinyModel

MARKER = "m3-tiny.json"
"""Names the arguments; a folder that holds it was written here and may be replaced."""
NEEDED = ("torch", "safetensors", "tokenizers")
HELP = {
    "layers": "decoder layers; the first 3 are dense",
    "hidden": "width of the residual stream",
    "heads": "query heads of 128",
    "kv_heads": "key-value heads (and index heads) of 128",
    "experts": "routed experts of a sparse layer",
    "top_k": "routed experts a token takes",
    "intermediate": "width of one expert over all ranks",
    "dense_intermediate": "width of a dense layer's network",
    "topk_blocks": "blocks of 128 tokens a query attends to",
    "vocabulary": "token ids",
    "positions": "longest sequence",
    "tensor_parallel": "widest tensor parallelism that the sizes must divide by",
    "seed": "seed of every random value",
}
CORPUS = """
A router reads the hidden state of a token and names the experts that shall work on it. Each expert is a small network, and every
token also visits the shared one. What the experts return is weighed, added in a fixed order and rounded, then summed over ranks.
Sparse attention looks at a few blocks of the past. An index branch scores the blocks, the best ones are kept, the own block always.
The quick brown fox jumps over the lazy dog while the server streams one token after another to whoever asked for them.
def main(prompt: str, tokens: int = 64) -> list[str]: return [step(prompt, position) for position in range(tokens)]
Once upon a time there was a mailbox; two ranks wrote pairs into it, a value and a tag, and whoever saw the tag had the value.
What is the answer to this question? Please explain it in simple words, list the reasons, and give an example with numbers.
""" + " ".join(str(number) for number in range(0, 2000, 7))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``m3 tiny``."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="folder to write; absent, empty, or an earlier tiny checkpoint")
    for attribute in fields(TinyModel):
        parser.add_argument(
            f"--{attribute.name.replace('_', '-')}",
            type=int,
            default=attribute.default,
            metavar="N",
            help=f"{HELP[attribute.name]} (default {attribute.default})",
        )


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint and print what it is."""
    model = TinyModel(**{attribute.name: getattr(arguments, attribute.name) for attribute in fields(TinyModel)})
    parameters = write(arguments.directory, model)
    print(f"{arguments.directory}: MiniMax-M3 with {model.layers} layers, {parameters / 1e6:.1f} M parameters, seed {model.seed}")
    return 0


def write(directory: Path, model: TinyModel) -> int:
    """Write a checkpoint of ``model`` to ``directory``: all of it or nothing.

    Returns:
        Number of parameters.

    Raises:
        ConfigurationError: ``directory`` holds something else, or a package that writing needs is missing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RefusalError([f"package {name} is not installed (python -m pip install {name})" for name in missing], "to write a checkpoint")
    directory = directory.absolute()
    replaces = _may_replace(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        parameters = _write_files(staging, model)
        # mkdtemp and safetensors write for the owner alone; the checkpoint gets the rights of ordinary files.
        rights = ~_umask()
        staging.chmod(0o777 & rights)
        for file in staging.iterdir():
            file.chmod(0o666 & rights)
        if replaces:
            retired = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
            os.rename(directory, retired)
            os.rename(staging, directory)
            shutil.rmtree(retired)
        else:
            os.rename(staging, directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return parameters


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _may_replace(directory: Path) -> bool:
    """Whether ``directory`` holds an earlier tiny checkpoint; absent and empty folders need no replacement."""
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is a file; name a folder")
    content = sorted(entry.name for entry in directory.iterdir())
    if not content:
        return False
    if MARKER not in content:
        shown = ", ".join(content[:3]) + (", ..." if len(content) > 3 else "")
        raise ConfigurationError(f"{directory} holds {shown} and no {MARKER}: not a tiny checkpoint; name another folder, or empty it")
    return True


def _write_files(folder: Path, model: TinyModel) -> int:
    from safetensors.torch import save_file

    _write_tokenizer(folder, model)
    tensors = model.tensors()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", model.config())
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write_json(folder / MARKER, asdict(model))
    return sum(tensor.numel() for tensor in tensors.values())


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path, model: TinyModel) -> None:
    """A byte-level tokenizer with exactly one token for every id of the model, so that every sampled id can be decoded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=model.vocabulary,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    tokenizer.add_tokens([AddedToken(f"<unused{number}>") for number in range(tokenizer.get_vocab_size(), model.vocabulary)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}assistant:"
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": specials[0],
            "bos_token": specials[1],
            "eos_token": specials[2],
            "model_max_length": model.positions,
            "chat_template": template,
        },
    )
