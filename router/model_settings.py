"""Settings of models: what is known of each beforehand. Layer 0."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from router.strict import Strict


class KvSettings(Strict):
    """What a model keeps of a token: the shape of its keys and values, from its config.json."""

    layers: int = Field(ge=1, le=10_000, description="num_hidden_layers.")
    kv_heads: int = Field(ge=1, le=10_000, description="num_key_value_heads; with MLA 1.")
    head_dim: int = Field(
        ge=1,
        le=100_000,
        description="head_dim; with MLA half of kv_lora_rank + qk_rope_head_dim.",
    )
    value_bytes: float = Field(
        2.0, ge=0.125, le=8, description="Bytes of one number: 2 as bfloat16, 1 as FP8."
    )

    @property
    def bytes_per_token(self) -> float:
        """KV memory of a token, in bytes over all GPUs of an engine.

        2 (a key and a value) x layers x kv_heads x head_dim x value_bytes: 131,072 for Llama 3.1
        8B, with 32 layers and 8 heads of 128 numbers in bfloat16.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes


class ModelSettings(Strict):
    """What is known beforehand about one model."""

    aliases: tuple[str, ...] = Field((), max_length=64, description="Other names for it.")
    bytes_per_token: float = Field(
        4.0, gt=0.1, le=64, description="First guess of prompt bytes per token; usage corrects it."
    )
    output_tokens_default: int = Field(
        512, ge=1, le=1_000_000, description="Expected output before any history exists."
    )
    context_tokens: int | None = Field(
        None, ge=1, le=100_000_000, description="Longest prompt plus output, when known."
    )
    kv: KvSettings | None = Field(
        None,
        description="layers, kv_heads, head_dim and value_bytes (2): the size of a token in KV "
        "memory; empty: asked from its workers.",
    )
    fallback: str | None = Field(
        None, min_length=1, max_length=512, description="A smaller model for times of overload."
    )
    cost_factor: float = Field(
        1.0,
        gt=0,
        le=1e4,
        description="What its tokens cost beside other models': 1 for 7B, 10 for 70B.",
    )


def kv_bytes_by_name(models: Mapping[str, ModelSettings]) -> dict[str, float]:
    """KV memory of a token in bytes, by every name of each model whose settings say it."""
    return {
        name: settings.kv.bytes_per_token
        for model, settings in models.items()
        if settings.kv is not None
        for name in (model, *settings.aliases)
    }
