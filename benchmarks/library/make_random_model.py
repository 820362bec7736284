"""Writes a model folder with random weights in a published shape, in the files that a server loads.

    python -m benchmarks.library.make_random_model llama-3.2-1b /tmp/llama-3.2-1b

Safetensors shards with an index, config.json, generation_config.json, and a byte-level tokenizer with a word for every
id. The weights are drawn on the GPU if there is one. A shape with an image encoder takes images, and
one with a head has its weights for --draft mtp.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from benchmarks.library.models import CONFIGS, head_of
from benchmarks.library.published_files import FileTensor, file_tensors, head_files, tower_files
from runtime.base.model.head_spec import HeadSpec
from runtime.loading.folder import INDEX_NAME
from runtime.models import load_spec
from runtime.models.weights import random_parameter
from runtime.text.pieces import BYTE_OF_CHAR

_SHARD_BYTES = 4 << 30
_SYLLABLES = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
_CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else 'IMAGE_MARK' }}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_folder(
    folder: Path,
    config: dict[str, Any],
    read: Callable[[str], torch.Tensor],
    generator: torch.Generator | None = None,  # draws quantized weights
    head: HeadSpec | None = None,  # drawn by the generator, too
) -> None:
    """A model folder with an invented tokenizer; `read` gives a parameter by its name in the config's DecoderSpec."""
    folder.mkdir(parents=True, exist_ok=True)
    ends, template = _ends(config), _CHAT_TEMPLATE
    bos, eos = (f"<|{_ids(token_id)[0]}|>" for token_id in ends.values())
    template = template.replace("IMAGE_MARK", f"<|{config.get('image_token_id')}|>")
    settings = {"bos_token": bos, "eos_token": eos, "chat_template": template}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", ends),
        ("tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (folder / name).write_text(json.dumps(content, indent=1))
    make_tokenizer(config).save(str(folder / "tokenizer.json"))
    files = [*file_tensors(config, read, generator), *tower_files(config, generator)]
    if head is not None:
        assert generator is not None
        files += head_files(config, head, generator)
    _write_weights(folder, files)


def _write_weights(folder: Path, files: list[FileTensor]) -> None:
    """Write the model's tensors in shards up to 4 GiB, and their index; two shards are written at a time."""
    shards: list[list[FileTensor]] = [[]]
    size = 0
    for tensor in files:
        if size and size + tensor.nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    weight_map, saved = {}, []
    with tqdm(total=len(files), unit="tensor") as bar, ThreadPoolExecutor(2) as pool:
        for i, shard in enumerate(shards, 1):
            if i > 2:
                saved[i - 3].result()  # otherwise more shards would be in memory
            tensors = {}
            for tensor in shard:
                tensors[tensor.name] = tensor.make()
                bar.update()
            file_name = f"model-{i:05}-of-{len(shards):05}.safetensors"
            saved.append(pool.submit(save_file, tensors, folder / file_name, metadata={"format": "pt"}))
            weight_map |= dict.fromkeys(tensors, file_name)
        for done in saved:
            done.result()
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))


def make_tokenizer(config: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE without merges: a text becomes its bytes; every other id of the vocabulary is an invented word."""
    marks = [config["image_token_id"]] if "image_token_id" in config else []
    special = {*chain.from_iterable(map(_ids, _ends(config).values())), *marks}
    vocab_size = _text_config(config)["vocab_size"]
    letters = iter(BYTE_OF_CHAR)
    words = (f"Ġ{''.join(syllables)}" for n in (2, 3) for syllables in product(_SYLLABLES, repeat=n))
    vocab = {f"<|{i}|>" if i in special else next(letters, None) or next(words): i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{i}|>", special=True) for i in sorted(special)])
    return tokenizer


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    return config | config.get("text_config", {})


def _ends(config: dict[str, Any]) -> dict[str, int | list[int]]:
    """The tokens that begin and end a text. A published shape without the former begins with the latter."""
    text = _text_config(config)
    return {
        "bos_token_id": text.get("bos_token_id", _ids(text["eos_token_id"])[0]),
        "eos_token_id": text["eos_token_id"],
    }


def _ids(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(CONFIGS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = CONFIGS[args.model] | {"torch_dtype": args.dtype}
    shapes = load_spec(config)[0].shapes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(args.seed)
    read, head = (lambda name: random_parameter(name, shapes[name], generator)), head_of(args.model)
    write_folder(args.folder, config, read, generator, head)


if __name__ == "__main__":
    main()
