"""Read tokenizer, stop tokens and folder of a model without building the model.

Rollout workers need only this part of transformers and start seconds earlier without the models of transformers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from areal_rloo.config import Config, ModelConfig
from areal_rloo.errors import DecodeError, ModelError, first_line, shown
from areal_rloo.models.folder import INDEX, SINGLE, read_config, weight_files
from areal_rloo.models.hub import SMALL_FILES, complete_folder
from areal_rloo.models.served import check_served
from areal_rloo.models.trainable import check_trainable


def computation_dtype(model: ModelConfig) -> torch.dtype:
    """Convert `model.dtype` to a torch dtype of the same name."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    return dtype


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name.

    Raises ModelError if the folder is missing or unreadable, or the tokenizer has no end-of-sequence token.
    """
    folder = model_folder(path, weights=False)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"model.path: the tokenizer of {path} cannot be loaded: {first_line(error)}; download its files again "
            "(tokenizer.json, tokenizer_config.json)"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"model.path: the tokenizer of {path} has no end-of-sequence token, so no completion can end")
    return tokenizer


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a completion, from the tokenizer and from the generation config of the model.

    Raises ModelError if a file is unreadable, or names something else than tokens of the model.
    """
    stops: list[object] = [tokenizer.eos_token_id]
    folder = model_folder(path, weights=False)
    if (folder / "generation_config.json").is_file():
        with reading_model(path):
            eos = GenerationConfig.from_pretrained(folder).eos_token_id
        stops += eos if isinstance(eos, (list, tuple)) else [eos] if eos is not None else []
    vocab_size = read_config("model.path", folder).get("vocab_size")
    most = vocab_size if isinstance(vocab_size, int) else 2**31
    for stop in stops:
        if not isinstance(stop, int) or not 0 <= stop < most:
            raise ModelError(
                f"model.path: {path}: a completion ends at token {shown(stop)} (eos_token_id of generation_config.json "
                f"or of the tokenizer), expected an id below vocab_size={most}; {_cure(folder)}, or take another model"
            )
    return tuple(sorted({int(stop) for stop in stops if isinstance(stop, int)}))


def _cure(folder: Path) -> str:
    lacks = not (folder / "tokenizer_config.json").is_file()  # special tokens then get new ids
    return "copy the missing tokenizer_config.json into the folder" if lacks else "correct the file"


def check_tokens(path: str) -> None:
    """Load the tokenizer and the tokens that end a completion, as every process does; raises ModelError likewise.

    Also refuses the tokenizer of another model, and a template of chats that is no template. Added tokens beyond the
    vocabulary are usual, such as padding.
    """
    tokenizer = load_tokenizer(path)
    stop_token_ids(path, tokenizer)
    vocab_size = read_config("model.path", model_folder(path, weights=False)).get("vocab_size")
    if not isinstance(vocab_size, int):
        return
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    beyond = [token for token in vocabulary.keys() - added.keys() if vocabulary[token] >= vocab_size]
    if beyond or not vocabulary.keys() - added.keys():
        raise ModelError(
            f"model.path: {path}: {len(beyond)} of {len(vocabulary)} tokens of the tokenizer have ids beyond "
            f"vocab_size={vocab_size} of config.json; expected a tokenizer of this model; download the model again"
        )
    if isinstance(tokenizer.chat_template, str):
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
        except Exception as error:
            if type(error).__name__ == "TemplateSyntaxError":  # of jinja2; a template may refuse other things
                raise ModelError(
                    f"model.path: {path}: chat_template of the tokenizer is no template: {first_line(error)}; download "
                    "tokenizer_config.json again"
                ) from error


def policy_folder(path: str, config: Config) -> Path:
    """Return the local folder of the policy; refuse a wrong model before its weights are downloaded.

    A model that a host has not downloaded yet meets these checks of the launcher only here.

    Raises:
        ModelError: the learner cannot train the model, the engine does not serve the model, or no file can be read.
    """
    small = model_folder(path, weights=False)
    check_trainable("model.path", small, context_tokens=config.context_tokens)
    check_served("model.path", small, config.rollout.engine)
    return model_folder(path)


def model_folder(path: str, *, weights: bool = True) -> Path:
    """Return the local folder of a model, perhaps without the weights; raises ModelError if files cannot be had."""
    try:
        return snapshot(path, weights=weights)
    except (OSError, ValueError, DecodeError) as error:
        raise ModelError(unreadable(path, error)) from error


def snapshot(path: str, *, weights: bool = True) -> Path:
    """Return the local folder of a model; ask the hub only if the cache lacks files.

    transformers gets this folder, never a name: it would ask the hub for each optional file that a model does not have.
    Of the weights, only the files of the index, or model.safetensors: some models have a second copy in another form.

    Raises:
        OSError, ValueError: the hub refuses, or cannot be reached.
        DecodeError: the index of the weights has another structure.
    """
    if Path(path).is_dir():
        return Path(path)
    if (cached := complete_folder(path, os.environ, weights=weights)) is not None:
        return cached
    folder = Path(snapshot_download(path, allow_patterns=list(SMALL_FILES)))
    if not weights:
        return folder
    files = weight_files(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    return Path(snapshot_download(path, allow_patterns=files, revision=folder.name))


@contextmanager
def reading_model(path: str) -> Iterator[None]:
    """Raise a ModelError if the libraries that read the files of a model raise any error but a lack of memory."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(unreadable(path, error)) from error


def unreadable(path: str, error: Exception) -> str:
    """Explain why a model cannot be loaded, and the expected values."""
    reason = " ".join(str(error).split())[:300]
    return f"model.path: cannot load {path}: {reason}; expected a Hugging Face model folder, a hub name, or tiny"
