"""Which positions serve music, which repeats itself at many distances."""

from study import Claim, Comparison, Contrast, Study

RELATIVE = "relative:far=zero"
HYPE = "hype:tau=learned"

STUDY = Study(
    title="Chorales",
    question=(
        "Huang et al. 2019 report that relative keys (Music Transformer) predict chorales better "
        "than sinusoids: a piece repeats itself, and what repeats is a distance. Is it so here, do "
        "RoPE and biases by distance do the same, and what happens on windows longer than those "
        "of the training?"
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
            (
                *("gnomon", "data", "OUT"),
                "train.pieces=jsb-chorales/jsb-chorales-16th.json:train",
                "valid.pieces=jsb-chorales/jsb-chorales-16th.json:valid",
                "test.pieces=jsb-chorales/jsb-chorales-16th.json:test",
            ),
        ),
    ),
    claims=(
        Claim(
            "Relative keys are better than sinusoids.",
            tuple(
                Contrast(f"dot/{position}", 256, "dot/sinusoidal", 256)
                for position in ("relative", RELATIVE, "transformer_xl")
            ),
        ),
        Claim(
            "RoPE is as good as relative keys.",
            (Contrast("dot/rope", 256, "dot/relative", 256),),
            left_is="not worse",
        ),
        Claim(
            "RoPE with a learned HyPE bias is at least as good as RoPE.",
            tuple(Contrast(f"dot/rope+{HYPE}", n, "dot/rope", n) for n in (256, 1024)),
            left_is="not worse",
        ),
        Claim(
            "RoPE with a learned HyPE bias gains from windows longer than those of the training.",
            (Contrast(f"dot/rope+{HYPE}", 1024, f"dot/rope+{HYPE}", 256),),
        ),
    ),
    limits=(
        "229 chorales of four voices, a model of a third of a million parameters and a few "
        "minutes of training: longer training on so few pieces is a question of regularisation "
        "rather than of positions."
    ),
    sources=(
        "Huang et al. 2019, Music Transformer; Dai et al. 2019; Shaw et al. 2018; Allan and "
        "Williams 2005, the chorales."
    ),
)
