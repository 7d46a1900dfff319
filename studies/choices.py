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
NOT_TRIED = "Longer training and larger models were not tried."


def against(left: str, right: str, *lengths: int) -> tuple[Contrast, ...]:
    """The one against the other at each length."""
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
        Claim(
            "A norm of queries and keys lowers the loss.",
            against("rope+qk_norm", "rope", SHORT),
            why=(
                "The claim is tested at the training length. Beyond it the table below has a lower "
                "mean with the norm, which no row tests. " + NOT_TRIED
            ),
        ),
        Claim(
            "A sink lowers the loss.",
            (*against("rope+sink", "rope", SHORT), *against("alibi+sink", "alibi", SHORT, LONG)),
            why=NOT_TRIED,
        ),
        Claim(
            "A gate of the output lowers the loss.",
            against("rope+gate", "rope", SHORT),
            why=NOT_TRIED,
        ),
        Claim(
            "The forget gate is better than ALiBi, whose slopes do not depend on the content.",
            against("forget", "alibi", SHORT, LONG),
        ),
        Claim(
            "RoPE lowers the loss of the forget gate.",
            against("rope+forget", "forget", SHORT, LONG),
            why=(
                "The mean is lower by 0.020 at both lengths, which three seeds cannot tell from "
                "chance; more were not run."
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
                "YaRN is meant for a model that was trained without it; here it is there from the "
                "start. A model that is given it after training was not measured."
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
