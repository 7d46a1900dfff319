"""Which positions answer at lengths beyond those of the training."""

from study import Claim, Comparison, Contrast, Study

POSITIONS = (
    "none",
    "sinusoidal",
    "learned:length=1100",
    "rope",
    "alibi",
    "t5",
    "hype:tau=learned",
    "rope+hype:tau=learned",
    "kerple",
    "forget",
)
PROBLEMS = ("copy", "reverse", "sort", "parity", "modular-addition", "recall")


def comparison(problem: str) -> Comparison:
    return Comparison(
        problem,
        problem.replace("-", " ").capitalize(),
        "",
        (
            *("--task", "generated"),
            *("--problem", problem),
            *("--position", ",".join(POSITIONS)),
            *("--lengths", "40,100,200,500"),
            *("--seeds", "3"),
        ),
    )


STUDY = Study(
    title="Problems at lengths beyond the training's",
    question=(
        "Decoders are trained on problems of 1 to 40 symbols and asked for answers to 500. The "
        "literature's order is that no position at all is better than RoPE and absolute positions "
        "(Kazemnejad et al. 2023), and that ALiBi lies between. Does it come out, and where do "
        "learned HyPE biases and forget gates stand?"
    ),
    comparisons=tuple(comparison(problem) for problem in PROBLEMS),
    claims=(
        Claim(
            "No position is better than RoPE at more than twice the length.",
            (Contrast("dot/none", 100, "dot/rope", 100),),
        ),
        Claim(
            "ALiBi is better than RoPE at more than twice the length.",
            (Contrast("dot/alibi", 100, "dot/rope", 100),),
        ),
        Claim(
            "A learned HyPE bias makes RoPE better at more than twice the length.",
            (Contrast("dot/rope+hype:tau=learned", 100, "dot/rope", 100),),
        ),
    ),
    limits=(
        "Small decoders and few steps, one learning rate; where an answer is not learned at the "
        "trained lengths (the table says so) its length tells nothing. Randomised positions (Ruoss "
        "et al. 2023; --random-positions) are not in it."
    ),
    sources=(
        "Deletang et al. 2023, Neural Networks and the Chomsky Hierarchy; Ruoss et al. 2023, "
        "Randomized Positional Encodings Boost Length Generalization of Transformers; Kazemnejad "
        "et al. 2023, The Impact of Positional Encoding on Length Generalization in Transformers; "
        "Arora et al. 2023, Zoology."
    ),
)
