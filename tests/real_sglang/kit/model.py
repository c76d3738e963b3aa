"""A tiny random-weight Llama, written as the four files SGLang wants to find.

The weights are dummies that the server makes up itself (`--load-format dummy`, the same on every
server). The tokenizer knows three special tokens and the 256 bytes and merges nothing, so a text
of n bytes is exactly n tokens, which makes token counts in the tests simple arithmetic.
"""

import json
from pathlib import Path
from typing import Final

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID: Final = SPECIAL.index("<|endoftext|>")
END_ID: Final = SPECIAL.index("<|im_end|>")
# SGLang pads the vocabulary to a multiple of 64 in any case.
VOCABULARY_SIZE: Final = 320
CONTEXT_TOKENS: Final = 4096
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> None:
    """Write configuration and tokenizer of the model into `folder`, making it if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": _config(),
        "generation_config.json": {
            "bos_token_id": PAD_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
        },
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT_TOKENS,
            "eos_token": SPECIAL[END_ID],
            "pad_token": SPECIAL[PAD_ID],
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": PAD_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
    }


def _tokenizer() -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    vocabulary = [*SPECIAL, *_byte_letters()]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": content,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for number, content in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(vocabulary)},
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """Return the letter by which byte-level BPE spells each byte, in the order of the bytes.

    Printable bytes stand for themselves and the others take the letters from U+0100 on (the
    alphabet of GPT-2's encoder.py).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters
