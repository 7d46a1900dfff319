"""Tests which position keeps its error rate on speech that is longer than in training."""

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

CAPES = ("cape", "cape:global_shift=60:global_scale=2")
BIASES = ("alibi", "hype:tau=learned")
BOTH = "rope+hype:tau=learned"


def against(left: str, right: str, digits: int = 24) -> Contrast:
    return Contrast(f"dot/{left}", digits, f"dot/{right}", digits, "error")


def against_itself(position: str) -> Contrast:
    return Contrast(f"dot/{position}", 24, f"dot/{position}", 3, "error")


STUDY = Study(
    title="Speech longer than in training",
    question=(
        "Encoders are trained with CTC on recordings of one to three spoken digits and evaluated "
        "on recordings of up to 24 digits. Likhomanenko et al. 2021 report that continuous "
        "augmented positions (CAPE) keep their error rate on longer recordings, whereas sinusoids "
        "do not. Does this hold here, and how do convolutions, RoPE and distance biases behave?"
    ),
    answer=(
        "With three seeds, all claims are undecided, because the error rates on long recordings "
        "vary too much between seeds. RoPE with a learned HyPE bias has the lowest mean error rate "
        "on 3 digits (2.3%) and on 24 digits (2.4%). With RoPE alone, the mean error rate rises "
        "from 2.9% to 18%. On 24 digits, the mean error rate is 20% with CAPE and 24% with "
        "sinusoids."
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
            "CAPE is better than sinusoids at eight times the training length.",
            tuple(against(cape, "sinusoidal") for cape in CAPES),
            why=(
                "With its defaults, CAPE has a lower error rate than sinusoids for all three "
                "seeds, by 1.3 to 6.9 percentage points. On 3 digits, the mean error rates are "
                "similar: 7.8% with CAPE and 7.2% with sinusoids. With a wider shift and scale, "
                "CAPE has a lower error rate than sinusoids for two seeds, but it learns more "
                "slowly: its mean error rate on 3 digits is 12.8%."
            ),
        ),
        Claim(
            "CAPE's error rate on 24 digits is not worse than on 3.",
            tuple(against_itself(cape) for cape in CAPES),
            left_is="not worse",
            why=(
                "With the defaults, CAPE's mean error rate rises from 7.8% to 19.8%, and it rises "
                "for all three seeds. With a wider shift and scale, it rises from 12.8% to 20.7%, "
                "also for all three seeds. The mean error rates with sinusoids and without a "
                "position rise as well."
            ),
        ),
        Claim(
            (
                "The error rates of distance biases, alone or with RoPE, are not worse on 24 "
                "digits than on 3."
            ),
            tuple(against_itself(position) for position in (*BIASES, BOTH)),
            left_is="not worse",
        ),
        Claim(
            "Convolutions are better than sinusoids at eight times the training length.",
            (against("conv", "sinusoidal"),),
        ),
        Claim(
            "Distance biases are better than RoPE at eight times the training length.",
            tuple(against(bias, "rope") for bias in BIASES),
            why=(
                "Distance biases have lower error rates than RoPE for all three seeds, by 6.8 to "
                "21.3 percentage points. However, RoPE's error rates on 24 digits vary widely, "
                "from 10.6% to 26.6%. On 3 digits, RoPE has a lower mean error rate: 2.9%, "
                "compared with 5.1% for a learned HyPE bias."
            ),
        ),
        Claim(
            "RoPE with a learned HyPE bias is not worse than RoPE at the training lengths.",
            (against(BOTH, "rope", 3),),
            left_is="not worse",
        ),
        Claim(
            (
                "RoPE with a learned HyPE bias is better than sinusoids, CAPE, convolutions, "
                "relative keys and no position at eight times the training length."
            ),
            tuple(
                against(BOTH, other) for other in ("sinusoidal", *CAPES, "conv", "relative", "none")
            ),
        ),
        Claim(
            (
                "RoPE with a learned HyPE bias is better than RoPE or distance biases alone at "
                "eight times the training length."
            ),
            tuple(against(BOTH, other) for other in ("rope", *BIASES)),
            why=(
                "RoPE with a learned HyPE bias has the lowest error rate for all three seeds, from "
                "1.8% to 3.2%. The error rates of the other three positions vary more between "
                "seeds."
            ),
        ),
    ),
    limits=(
        "The data contains ten words, spoken by six speakers who are all in the training set. "
        "Digits are joined without pauses, and the model is trained for a few minutes. The "
        "variation between seeds is so large that three seeds reveal only large differences. All "
        "claims are about the error rate."
    ),
    sources=(
        "Likhomanenko et al. 2021, CAPE; Baevski et al. 2020, wav2vec 2.0; Graves et al. 2006, CTC."
    ),
)
