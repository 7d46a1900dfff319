"""What language models of today add to attention: sinks, gates, norms, biases by content."""

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
NOT_TRIED = "Longer training and larger models were not tried."


def against(left: str, right: str, *lengths: int) -> tuple[Contrast, ...]:
    """The one against the other at each length."""
    return tuple(Contrast(f"dot/{left}", n, f"dot/{right}", n) for n in lengths)


STUDY = Study(
    title="What models have today",
    question=(
        "Language models of 2025 and 2026 add to attention a norm of queries and keys (QK- "
        "norm), per-head sinks, output gates, forget gates, query-dependent biases and RoPE "
        "scaling. Which of these lower the loss of a small language model, at the training "
        "length and beyond?"
    ),
    answer=(
        "Only one difference is significant with three seeds: the forget gate has a lower loss "
        "than ALiBi, by the same gate that RoPE with a forget gate uses to reach the lowest "
        "means (1.723 at 128 bytes and 1.708 at 512; RoPE alone has 1.762 and 2.244). QK-norm, "
        "sinks, output gates, query-dependent biases and YaRN are not distinguishable from RoPE "
        "alone. Longer training and larger models, for which several of them were designed, are "
        "not covered."
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
            "A norm of queries and keys lowers the loss of RoPE, at the training length and "
            "beyond.",
            against("rope+qk_norm", "rope", SHORT, 256, LONG),
            why=(
                "Beyond the training length it does, though the loss still rises there: from "
                "1.773 at 128 to 1.970 at 512, without the norm from 1.762 to 2.244. At the "
                "training length it is higher with each of the three seeds, by 0.003 to 0.022. "
                + NOT_TRIED
            ),
        ),
        Claim(
            "A sink lowers the loss of RoPE and of ALiBi, at the training length and beyond.",
            (
                *against("rope+sink", "rope", SHORT, LONG),
                *against("alibi+sink", "alibi", SHORT, LONG),
            ),
            why=(
                "With the sink the loss is higher with each of the three seeds in all four rows, "
                "by 0.002 to 0.132 with RoPE and by 0.006 to 0.020 with ALiBi. " + NOT_TRIED
            ),
        ),
        Claim(
            "A gate of the output lowers the loss of RoPE, at the training length and beyond.",
            against("rope+gate", "rope", SHORT, LONG),
            why=(
                "At the training length two of three seeds are lower with the gate, at 512 one "
                "is, by 0.112, and the others are higher, by 0.011 and 0.069. " + NOT_TRIED
            ),
        ),
        Claim(
            "The forget gate is better than ALiBi, whose slopes do not depend on the content.",
            against("forget", "alibi", SHORT, LONG),
        ),
        Claim(
            "RoPE lowers the loss of the forget gate.",
            against("rope+forget", "forget", SHORT, LONG),
            why=(
                "The loss is lower with each of the three seeds, by 0.010 to 0.031 at both "
                "lengths, which three seeds cannot tell from chance; more were not run."
            ),
        ),
        Claim(
            "RoPE with a forget gate has a lower loss than RoPE, and than RoPE with a learned "
            "HyPE bias, at the training length and beyond.",
            (
                *against("rope+forget", "rope", SHORT, LONG),
                *against("rope+forget", HYPE, SHORT, LONG),
            ),
        ),
        Claim(
            "A bias that the query reads off the distance is better than RoPE.",
            against("content_bias", "rope", SHORT, LONG),
        ),
        Claim(
            "YaRN has a lower loss than RoPE beyond the training length.",
            against(YARN, "rope", LONG),
            why=(
                "At 512 the loss with YaRN is higher with each of the three seeds, by 0.092 to "
                "0.309. YaRN is meant for a model that was trained without it; here it is there "
                "from the start. A model that is given it after training was not measured."
            ),
        ),
        Claim(
            "YaRN loses nothing against RoPE at the training length.",
            against(YARN, "rope", SHORT),
            left_is="not worse",
        ),
    ),
    limits=(
        "The models are small (four layers of 128 columns), read bytes and are trained for 600 "
        "steps of 16 windows: what stabilises long runs of large models, as norms and sinks are "
        "said to, has little to do here. One learning rate was used for all."
    ),
    sources=(
        "QK-norm: Henry et al. 2020; Dehghani et al. 2023. Sinks: Xiao et al. 2024; OpenAI 2025, "
        "GPT-OSS. Gated output: Qiu et al. 2025. Forget: Lin et al. 2025, Forgetting Transformer. "
        "Content bias: Inkling, 2026. YaRN: Peng et al. 2024. RoPE: Su et al. 2021. ALiBi: Press "
        "et al. 2022. HyPE: Angelotti 2023."
    ),
)
