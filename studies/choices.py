"""What language models of today add to attention: sinks, gates, norms, biases by content."""

from study import Claim, Comparison, Contrast, Study

YARN = "rope:scaling=yarn:factor=4:original_max_position_embeddings=128"
POSITIONS = (
    "rope",
    YARN,
    "rope+qk_norm",
    "rope+sink",
    "rope+gate",
    "rope+hype:tau=learned",
    "forget",
    "rope+forget",
    "content_bias",
    "alibi",
    "alibi+sink",
)
SHORT, LONG = 128, 512


def better(left: str, right: str, *lengths: int) -> tuple[Contrast, ...]:
    """That the one has a lower loss than the other."""
    return tuple(Contrast(f"dot/{left}", n, f"dot/{right}", n) for n in lengths)


STUDY = Study(
    title="What models have today",
    question=(
        "Language models of 2025 and 2026 add to attention: a norm of queries and keys, a sink for "
        "each head, a gate of the output or of what came before, a bias that the query reads off "
        "the distance, a rotation that is scaled for longer texts. Which of them lower the loss "
        "of a small model, at the length of its training and beyond?"
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
        Claim("A norm of queries and keys lowers the loss.", better("rope+qk_norm", "rope", SHORT)),
        Claim(
            "A sink lowers the loss.",
            (*better("rope+sink", "rope", SHORT), *better("alibi+sink", "alibi", SHORT, LONG)),
        ),
        Claim("A gate of the output lowers the loss.", better("rope+gate", "rope", SHORT)),
        Claim(
            "The forget gate is better than ALiBi, whose slopes do not depend on the content.",
            better("forget", "alibi", SHORT, LONG),
        ),
        Claim("RoPE adds to the forget gate.", better("rope+forget", "forget", SHORT, LONG)),
        Claim(
            "A bias that the query reads off the distance is better than RoPE.",
            better("content_bias", "rope", SHORT, LONG),
        ),
        Claim(
            "YaRN loses less than RoPE beyond the training length, and nothing at it.",
            (
                *better(YARN, "rope", LONG),
                Contrast("dot/rope", SHORT, f"dot/{YARN}", SHORT),
            ),
        ),
    ),
    limits=(
        "The models are small (four layers of 128 columns), read bytes and are trained for 600 "
        "steps of 16 windows: what stabilises long runs of large models, as norms and sinks are "
        "said to, has little to do here. YaRN is meant for a model that was trained without it; "
        "here it is there from the start. One learning rate was used for all."
    ),
    sources=(
        "QK-norm: Henry et al. 2020; Dehghani et al. 2023. Sinks: Xiao et al. 2024; OpenAI 2025, "
        "GPT-OSS. Gated output: Qiu et al. 2025. Forget: Lin et al. 2025, Forgetting Transformer. "
        "Content bias: Inkling, 2026. YaRN: Peng et al. 2024. RoPE: Su et al. 2021. ALiBi: Press "
        "et al. 2022. HyPE: Angelotti 2023."
    ),
)
