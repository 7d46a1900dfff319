"""Which positions answer at lengths beyond those of the training."""

from study import Claim, Comparison, Contrast, Study

POSITIONS = (
    "none",
    "sinusoidal",
    "rope",
    "alibi",
    "t5",
    "hype:tau=learned",
    "rope+hype:tau=learned",
    "forget",
)
# The tokens of a row stand at as many of the positions below this, drawn at random and sorted.
AT_RANDOM = ("--random-positions", "2048")
LENGTHS = "40,100,200,500"


def comparison(
    problem: str,
    arguments: tuple[str, ...] = (),
    *,
    lengths: str = LENGTHS,
    learning_rate: str = "0.003",
    steps: str = "1500",
    at_random: bool = False,
) -> Comparison:
    title = problem.replace("-", " ").capitalize()
    return Comparison(
        f"{problem}-at-random" if at_random else problem,
        f"{title}, positions at random" if at_random else title,
        "",
        (
            *("--task", "generated"),
            *("--problem", problem),
            *arguments,
            *("--position", "sinusoidal,rope" if at_random else ",".join(POSITIONS)),
            *(AT_RANDOM if at_random else ()),
            *("--lengths", lengths),
            *("--depth", "2"),
            *("--learning-rate", learning_rate),
            *("--steps", steps),
            *("--seeds", "3"),
        ),
    )


# Of so many symbols most stand in an input only a few times: what stands before one tells which
# comes next, as in texts. Of two symbols nothing does, and 1500 steps do not teach to copy them.
MANY_SYMBOLS = ("--symbols", "32")
# As many keys as an input of 120 symbols needs, with room.
KEYS = ("--symbols", "64")
# What is learned at the trained lengths, and at which longer one it is compared.
LEARNED = {"copy": 100, "reverse": 100, "sort": 100, "bucket-sort": 100, "recall": 80}
AT_RANDOM_TOO = ("copy", "reverse", "sort", "bucket-sort")


def contrasts(left: str, right: str) -> tuple[Contrast, ...]:
    return tuple(
        Contrast(left, at, right, at, left_in=problem, right_in=problem)
        for problem, at in LEARNED.items()
    )


STUDY = Study(
    title="Problems at lengths beyond the training's",
    question=(
        "Decoders are trained on problems of 1 to 40 symbols and asked for answers to 500. The "
        "literature's order is that positions drawn at random from a longer range are best (Ruoss "
        "et al. 2023), that no position at all is better than RoPE and absolute positions "
        "(Kazemnejad et al. 2023), and that ALiBi lies between. Does it come out, and where do "
        "learned HyPE biases and forget gates stand?"
    ),
    comparisons=(
        comparison("copy", MANY_SYMBOLS),
        comparison("copy", MANY_SYMBOLS, at_random=True),
        comparison("reverse", MANY_SYMBOLS),
        comparison("reverse", MANY_SYMBOLS, at_random=True),
        comparison("sort"),
        comparison("sort", at_random=True),
        comparison("bucket-sort"),
        comparison("bucket-sort", at_random=True),
        comparison("stack"),
        comparison("parity"),
        comparison("modular-addition"),
        comparison("recall", KEYS, lengths="40,60,80,120", learning_rate="0.001", steps="3000"),
    ),
    claims=(
        Claim(
            "No position is better than RoPE at twice the length and more.",
            contrasts("dot/none", "dot/rope"),
            why=(
                "Without positions two layers have hardly begun to copy or to reverse at the "
                "trained lengths after these steps (the tables), which the literature's longer "
                "training does teach. That says more of how fast than of how far. Sorting needs "
                "no order of what is read, and is where the literature's order comes out."
            ),
        ),
        Claim(
            "No position is better than sinusoids at twice the length and more.",
            contrasts("dot/none", "dot/sinusoidal"),
        ),
        Claim(
            "ALiBi is better than RoPE at twice the length and more.",
            contrasts("dot/alibi", "dot/rope"),
        ),
        Claim(
            "No position is better than ALiBi at twice the length and more.",
            contrasts("dot/none", "dot/alibi"),
        ),
        Claim(
            "Positions at random make RoPE and sinusoids better at twice the length and more.",
            tuple(
                Contrast(
                    *(position, LEARNED[problem], position, LEARNED[problem]),
                    left_in=f"{problem}-at-random",
                    right_in=problem,
                )
                for position in ("dot/rope", "dot/sinusoidal")
                for problem in AT_RANDOM_TOO
            ),
        ),
        Claim(
            "A learned HyPE bias makes RoPE better at twice the length and more.",
            contrasts("dot/rope+hype:tau=learned", "dot/rope"),
            why=(
                "What an answer needs may stand anywhere in the input, and a bias that grows with "
                "the distance hides what is far; whether that is the reason was not measured. In "
                "texts, where most of what helps is near, it does ([Beyond the training "
                "length](length.md))."
            ),
        ),
        Claim(
            "A forget gate is better than no position at twice the length and more.",
            contrasts("dot/forget", "dot/none"),
            why=(
                "Recall, where it is learned, holds best with what decays: of three seeds two "
                "learn it with a forget gate and one with a learned HyPE bias alone, and these "
                "lose nothing up to three times the length. RoPE, which two learn it with, falls "
                "to 0.39 and 0.32 (`studies/generalisation/recall.json` has each run). Three "
                "seeds, some of which learn nothing, are no proof."
            ),
        ),
    ),
    limits=(
        "Decoders of two layers and 64 columns, a few thousand steps, and one learning rate for "
        "all positions of a problem: the literature trains larger ones for a hundred times as "
        "long. What a table shows at the trained lengths says how far an answer is learned there; "
        "where it is not, the longer lengths tell nothing. No claim is made of parity and modular "
        "addition, which no position learns so soon: all are at chance at the trained lengths, "
        "1/2 and 1/5; nor of stacks, of which they tell two thirds. Recall is learned with some "
        "seeds and not with others, whence its spread. Accuracy is of "
        "single symbols, each after what is right; whole answers are in a table of their own."
    ),
    sources=(
        "Deletang et al. 2023, Neural Networks and the Chomsky Hierarchy; Ruoss et al. 2023, "
        "Randomized Positional Encodings Boost Length Generalization of Transformers; Kazemnejad "
        "et al. 2023, The Impact of Positional Encoding on Length Generalization in Transformers; "
        "Arora et al. 2023, Zoology."
    ),
)
