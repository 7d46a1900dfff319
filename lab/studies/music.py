"""Tests which positions suit music, which repeats itself at many distances."""

from study import CHORALES, Claim, Comparison, Contrast, Study

RELATIVE = "relative:far=zero"
HYPE = "hype:tau=learned"
BOTH = f"rope+{HYPE}"
TRAINED, LONG = 256, 1024


def against(right: str, *lefts: str) -> tuple[Contrast, ...]:
    return tuple(Contrast(f"dot/{left}", TRAINED, f"dot/{right}", TRAINED) for left in lefts)


STUDY = Study(
    title="Chorales",
    question=(
        "Huang et al. 2019 report that relative keys (Music Transformer) predict chorales "
        "better than sinusoids, because music repeats itself at a distance. Does this hold here? "
        "Are RoPE and distance biases also better than sinusoids? What happens on windows longer "
        "than those in training?"
    ),
    answer=(
        "Relative keys, RoPE and distance biases are all better than sinusoids: their mean losses "
        "are lower by 0.4 to 0.65 nats per event. RoPE, alone or with a learned HyPE bias, and "
        "Transformer-XL are better than relative keys. The losses of Transformer-XL, relative keys "
        "and all distance biases are lower on windows four times as long as in training."
    ),
    comparisons=(
        Comparison(
            "chorales",
            "JSB chorales in sixteenth notes",
            "jsb.safetensors",
            (
                *("--task", "music"),
                *(
                    "--position",
                    f"none,sinusoidal,relative,{RELATIVE},transformer_xl,rope,alibi,t5,{HYPE},"
                    f"rope+{HYPE}",
                ),
                *("--lengths", "256,512,1024"),
                *("--dim", "96"),
                *("--depth", "3"),
                *("--mlp", "384"),
                *("--steps", "300"),
                *("--seeds", "3"),
            ),
            CHORALES,
        ),
    ),
    claims=(
        Claim(
            "Relative keys are better than sinusoids.",
            against("sinusoidal", "relative", RELATIVE, "transformer_xl"),
        ),
        Claim(
            "RoPE and distance biases are better than sinusoids.",
            against("sinusoidal", "rope", "alibi", HYPE),
        ),
        Claim(
            "RoPE, alone or with a learned HyPE bias, and Transformer-XL are better than "
            "relative keys.",
            against("relative", "rope", BOTH, "transformer_xl"),
        ),
        Claim(
            "RoPE with a learned HyPE bias is not worse than RoPE.",
            tuple(Contrast(f"dot/{BOTH}", n, "dot/rope", n) for n in (TRAINED, LONG)),
            left_is="not worse",
            why=(
                "On windows of 1024 events, RoPE with a learned HyPE bias has a lower loss than "
                "RoPE alone for all three seeds, by 0.26 to 0.76 nats. However, the loss of RoPE "
                "alone varies from 0.88 to 1.37 between seeds."
            ),
        ),
        Claim(
            "RoPE with a learned HyPE bias is not worse than Transformer-XL.",
            tuple(Contrast(f"dot/{BOTH}", n, "dot/transformer_xl", n) for n in (TRAINED, LONG)),
            left_is="not worse",
        ),
        Claim(
            (
                "With relative keys, Transformer-XL and distance biases, alone or with RoPE, the "
                "loss falls on windows four times the training length."
            ),
            tuple(
                Contrast(f"dot/{position}", LONG, f"dot/{position}", TRAINED)
                for position in ("relative", RELATIVE, "transformer_xl", "alibi", HYPE, BOTH)
            ),
            why=(
                "With relative keys limited to offsets of 128 (`far=zero`), the loss is also lower "
                "on the longer windows for all three seeds, by at most 0.022 nats, but the "
                "difference is not significant."
            ),
        ),
        Claim(
            "With RoPE, the loss rises on windows four times the training length.",
            (Contrast("dot/rope", LONG, "dot/rope", TRAINED),),
            left_is="worse",
            why=(
                "RoPE's loss rises for all three seeds, by 0.21 to 0.70 nats. The spread between "
                "seeds is too large for significance. On windows of 512 events, the loss rises by "
                "0.02 to 0.13 nats."
            ),
        ),
    ),
    limits=(
        "The data contains only 229 chorales for four voices. The model has a third of a million "
        "parameters, and training takes a few minutes. Longer training on so few pieces would test "
        "regularisation rather than positions."
    ),
    sources=(
        "Huang et al. 2019, Music Transformer; Dai et al. 2019; Shaw et al. 2018; Allan and "
        "Williams 2005, the chorales."
    ),
)
