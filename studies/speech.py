"""Which position keeps its error rate on speech longer than that of the training."""

from study import FSDD, Claim, Comparison, Contrast, Study

POSITIONS = (
    "none",
    "sinusoidal",
    "cape",
    "cape:global_shift=60:global_scale=2",
    "conv",
    "rope",
    "alibi",
    "relative",
    "hype:tau=learned",
    "rope+hype:tau=learned",
)

STUDY = Study(
    title="Speech longer than in training",
    question=(
        "Encoders with CTC are trained on one to three spoken digits and evaluated on up to 24. "
        "Likhomanenko et al. 2021 report that continuous augmented positions (CAPE) keep their "
        "error rate on longer sounds where sinusoids do not. Is it so here, and what do "
        "convolutions, RoPE and biases by distance do?"
    ),
    comparisons=(
        Comparison(
            "digits",
            "Spoken digits",
            "fsdd.safetensors",
            (
                *("--task", "speech"),
                *("--position", ",".join(POSITIONS)),
                *("--utterances", "3,6,12,24"),
                *("--steps", "600"),
                *("--seeds", "3"),
            ),
            FSDD,
        ),
    ),
    claims=(
        Claim(
            "CAPE is better than sinusoids on eight times the length.",
            tuple(
                Contrast(f"dot/{cape}", 24, "dot/sinusoidal", 24, "error")
                for cape in ("cape", "cape:global_shift=60:global_scale=2")
            ),
        ),
        Claim(
            "Biases by distance are better than RoPE on eight times the length.",
            tuple(
                Contrast(f"dot/{bias}", 24, "dot/rope", 24, "error")
                for bias in ("alibi", "hype:tau=learned")
            ),
        ),
        Claim(
            "RoPE with a learned HyPE bias is as good as RoPE at the trained lengths.",
            (Contrast("dot/rope+hype:tau=learned", 3, "dot/rope", 3, "error"),),
            left_is="not worse",
        ),
        Claim(
            "RoPE with a learned HyPE bias is better than RoPE on eight times the length.",
            (Contrast("dot/rope+hype:tau=learned", 24, "dot/rope", 24, "error"),),
        ),
    ),
    limits=(
        "Ten words, six speakers who are all in the training, digits put one after the other "
        "without a pause of their own, and a model of a few minutes."
    ),
    sources=(
        "Likhomanenko et al. 2021, CAPE; Baevski et al. 2020, wav2vec 2.0; Graves et al. 2006, CTC."
    ),
)
