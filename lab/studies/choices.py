"""Compares recent additions to attention in language models: sinks, gates, norms, biases."""

from study import Claim, Comparison, Contrast, Study

YARN = "rope:scaling=yarn:factor=4:original_max_position_embeddings=128"
HYPE = "rope+hype:tau=learned"
POSITIONS = (
    "rope",
    YARN,
    "rope+qk_norm",
    "rope+sink",
    "rope+gate",
    HYPE,
    "forget",
    "rope+forget",
    "content_bias",
    "alibi",
    "alibi+sink",
)
SHORT, LONG = 128, 512


def against(left: str, right: str, *lengths: int) -> tuple[Contrast, ...]:
    """Compares one combination with another at each length."""
    return tuple(Contrast(f"dot/{left}", n, f"dot/{right}", n) for n in lengths)


STUDY = Study(
    title="Recent additions to attention: QK-norm, sinks, gates, YaRN",
    question=(
        "Language models of 2025 and 2026 extend attention with normalised queries and keys "
        "(QK-norm), per-head sinks, output gates, forget gates, query-dependent biases and RoPE "
        "scaling. Which of these additions lower the loss of a small language model at the "
        "training length and at longer lengths?"
    ),
    answer=(
        "With three seeds, only one addition makes a significant difference: the forget gate has a "
        "lower loss than ALiBi. RoPE with a forget gate has the lowest mean loss at every length. "
        "At 512 bytes, its mean loss is 1.708, compared with 2.244 for RoPE alone. QK-norm, sinks, "
        "output gates, query-dependent biases and YaRN are not distinguishable from RoPE alone. "
        "Longer training and larger models, for which several of these additions were designed, "
        "were not tested."
    ),
    comparisons=(
        Comparison(
            "shakespeare",
            "Shakespeare's plays",
            "tinyshakespeare",
            (
                *("--position", ",".join(POSITIONS)),
                *("--lengths", f"{SHORT},256,{LONG}"),
                *("--steps", "600"),
                *("--seeds", "3"),
            ),
        ),
    ),
    claims=(
        Claim(
            "QK-norm lowers the loss of RoPE at the training length and beyond.",
            against("rope+qk_norm", "rope", SHORT, 256, LONG),
            why=(
                "Beyond the training length, QK-norm lowers the mean loss (from 2.244 to 1.970 at "
                "512 bytes), although the loss still rises with length. At the training length, "
                "QK-norm raises the loss for all three seeds, by 0.003 to 0.022. Longer training "
                "and larger models were not tried."
            ),
        ),
        Claim(
            "A sink lowers the loss of RoPE and of ALiBi at the training length and beyond.",
            (
                *against("rope+sink", "rope", SHORT, LONG),
                *against("alibi+sink", "alibi", SHORT, LONG),
            ),
            why=(
                "In all four rows, the sink raises the loss for all three seeds: by up to 0.132 "
                "with RoPE and by up to 0.020 with ALiBi. Longer training and larger models were "
                "not tried."
            ),
        ),
        Claim(
            "An output gate lowers the loss of RoPE at the training length and beyond.",
            against("rope+gate", "rope", SHORT, LONG),
            why=(
                "At the training length, the gate lowers the loss for two of three seeds. At 512 "
                "bytes, it lowers the loss for one seed and raises it for the other two. Longer "
                "training and larger models were not tried."
            ),
        ),
        Claim(
            "The forget gate is better than ALiBi, whose slopes do not depend on the content.",
            against("forget", "alibi", SHORT, LONG),
        ),
        Claim(
            "RoPE lowers the loss of a model with the forget gate.",
            against("rope+forget", "forget", SHORT, LONG),
            why=(
                "Adding RoPE lowers the loss for all three seeds at both lengths, by 0.010 to "
                "0.031, but three seeds are too few for significance."
            ),
        ),
        Claim(
            "RoPE with a forget gate has a lower loss than RoPE alone or with a learned HyPE "
            "bias, at and beyond the training length.",
            (
                *against("rope+forget", "rope", SHORT, LONG),
                *against("rope+forget", HYPE, SHORT, LONG),
            ),
        ),
        Claim(
            "A query-dependent distance bias is better than RoPE.",
            against("content_bias", "rope", SHORT, LONG),
        ),
        Claim(
            "YaRN has a lower loss than RoPE beyond the training length.",
            against(YARN, "rope", LONG),
            why=(
                "At 512 bytes, YaRN raises the loss for all three seeds, by 0.092 to 0.309. YaRN "
                "was designed to be added to a trained model, but here it is used from the start. "
                "Adding it after training was not measured."
            ),
        ),
        Claim(
            "YaRN is not worse than RoPE at the training length.",
            against(YARN, "rope", SHORT),
            left_is="not worse",
        ),
    ),
    limits=(
        "The models are small (four layers with a model dimension of 128), read bytes, and are "
        "trained for 600 steps of 16 windows. The literature reports that norms and sinks "
        "stabilise long training runs of large models, which this study does not test. All "
        "combinations use the same learning rate."
    ),
    sources=(
        "QK-norm: Henry et al. 2020; Dehghani et al. 2023. Sinks: Xiao et al. 2024; OpenAI 2025, "
        "GPT-OSS. Gated output: Qiu et al. 2025. Forget: Lin et al. 2025, Forgetting Transformer. "
        "Content bias: Inkling, 2026. YaRN: Peng et al. 2024. RoPE: Su et al. 2021. ALiBi: Press "
        "et al. 2022. HyPE: Angelotti 2023."
    ),
)
