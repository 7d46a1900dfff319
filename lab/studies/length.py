"""Tests which positions are best at the training length, and which extrapolate beyond it."""

import dataclasses

from study import Claim, Comparison, Contrast, Study

POSITIONS = (
    "none",
    "sinusoidal",
    "learned",
    "rope",
    "alibi",
    "alibi:slopes=learned",
    "t5",
    "kerple",
    "hype",
    "hype:tau=learned",
    "hype:tau=learned:mu=learned",
    "rope+alibi",
    "rope+hype:tau=learned",
    "transformer_xl",
    "relative",
)
LONGEST = 2048
# The combinations that are best up to LONGEST, and those needed to explain their results, are also
# evaluated beyond it.
BEST = (
    "hype:tau=learned:mu=learned",
    "rope+alibi:slopes=learned",
    "rope+hype:tau=learned",
    "rope+hype:tau=learned:mu=learned",
    "rope+forget",
    "transformer_xl",
)
FURTHER = 8192
HYPE = "dot/rope+hype:tau=learned"
HYPE_WITH_MU = "dot/rope+hype:tau=learned:mu=learned"
ROPE = "dot/rope"


@dataclasses.dataclass(frozen=True)
class Text:
    name: str
    title: str
    data: str
    made_by: tuple[str, ...] = ()
    data_from: str = ""


SHAKESPEARE = Text("shakespeare", "Shakespeare's plays", "tinyshakespeare")
BOOKS = Text(
    "books",
    "Novels",
    "classic-books",
    data_from=(
        "The data consists of files from github.com/mlschmitt/classic-books-markdown at commit "
        "9448827. `train` contains The Wealth of Nations, Framley Parsonage, Little Dorrit, The "
        "Pickwick Papers, Wives and Daughters, The Mill on the Floss, Demonology and Devil-lore, "
        "Le Morte d'Arthur and Vanity Fair; `valid` contains The Octopus, Ben-Hur and The Headless "
        "Horseman; and `test`, which is not used, contains three other books."
    ),
)
PYTHON = Text("python", "Python's sources", "python.txt", ("-m", "gnomon.demo", "--text", "OUT"))


def comparison(
    text: Text,
    positions: tuple[str, ...],
    lengths: tuple[int, ...],
    seeds: int,
    more: tuple[str, ...] = (),
) -> Comparison:
    arguments = (
        *("--position", ",".join(positions)),
        *("--lengths", ",".join(map(str, lengths))),
        *more,
        *("--steps", "600"),
        *("--seeds", str(seeds)),
    )
    return Comparison(text.name, text.title, text.data, arguments, text.made_by, text.data_from)


def beyond(text: Text, seeds: int) -> Comparison:
    return comparison(text, POSITIONS, (128, 256, 512, 1024, LONGEST), seeds)


def further(text: Text) -> Comparison:
    named = dataclasses.replace(
        text, name=f"{text.name}-{FURTHER}", title=f"{text.title}, long windows"
    )
    # Longer windows leave fewer last bytes per text, so more of the text is evaluated.
    more = ("--evaluation-bytes", "131072")
    return comparison(named, BEST, (128, LONGEST, FURTHER), 3, more)


STUDY = Study(
    title="Beyond the training length",
    question=(
        "Small language models are trained on windows of 128 bytes and evaluated on windows of up "
        "to 2048 bytes (some of them up to 8192 bytes). Which position has the lowest loss at the "
        "training length? With which positions does the loss stay the same beyond that length, or "
        "fall because of the longer context?"
    ),
    answer=(
        "Learning the bias matters most: on every text and at every length, a learned HyPE bias "
        "has a lower mean loss than fixed HyPE or ALiBi. The difference is significant on two of "
        "three texts. With RoPE, a learned HyPE bias is equivalent to ALiBi with learned slopes in "
        "four of six comparisons. On windows of up to 8192 bytes, RoPE with a forget gate has the "
        "lowest loss of six positions for every seed and at every length, but only one of "
        "twelve differences is significant after Holm's correction. Most other claims are "
        "undecided with three to five seeds, including the claim that RoPE with a learned HyPE "
        "bias does not get worse beyond the training length."
    ),
    comparisons=(
        beyond(SHAKESPEARE, 5),
        beyond(BOOKS, 3),
        beyond(PYTHON, 3),
        further(BOOKS),
        further(PYTHON),
    ),
    claims=(
        Claim(
            "RoPE with a learned HyPE bias is not worse than RoPE at the training length.",
            (Contrast(HYPE, 128, ROPE, 128),),
            left_is="not worse",
        ),
        Claim(
            "RoPE with a learned HyPE bias does not get worse beyond the training length.",
            tuple(Contrast(HYPE, n, HYPE, 128, "last") for n in (256, 1024, LONGEST, FURTHER)),
            left_is="not worse",
            why=(
                "The mean loss over all bytes is at most 0.002 higher at 2048 bytes than at 128. "
                "The rows above use only the last 32 bytes of each window, which have the most "
                "context. If the windows are longer, a text has fewer such bytes, and they come "
                "from other parts of the text. In the comparisons without windows of 8192 bytes, "
                "the loss on these bytes rises from 128 to 2048 bytes on all three texts, by at "
                "most 0.081. With fixed ALiBi and Transformer-XL, it rises by at most 0.068. With "
                "RoPE alone, it rises by 1.6 to 1.8. From 128 to 8192 bytes, the mean loss rises "
                "in only one of six runs, by 0.027. RoPE with learned ALiBi slopes behaves in the "
                "same way. With a learned `mu`, the mean loss falls in all six runs."
            ),
        ),
        Claim(
            "Transformer-XL is better than RoPE with a learned HyPE bias.",
            tuple(
                Contrast("dot/transformer_xl", n, other, n)
                for other in (HYPE, HYPE_WITH_MU)
                for n in (128, LONGEST, FURTHER)
            ),
            why=(
                "Compared with RoPE and a HyPE bias whose `mu` is also learned, Transformer-XL has "
                "a lower loss on Python source code up to 2048 bytes. On novels at 8192 bytes, it "
                "has a higher loss. These differences are 0.004 to 0.009. From 2048 to 8192 bytes, "
                "the loss of Transformer-XL rises in all six runs, by at most 0.0065. The losses "
                "of the other positions fall or stay the same. The exception is one seed on "
                "novels, for which the loss rises with `rope+alibi:slopes=learned` and "
                "`rope+hype:tau=learned`."
            ),
        ),
        Claim(
            "RoPE with a forget gate is better than RoPE with a learned HyPE bias.",
            tuple(
                Contrast("dot/rope+forget", n, other, n)
                for other in (HYPE, HYPE_WITH_MU)
                for n in (128, LONGEST, FURTHER)
            ),
            why=(
                "RoPE with a forget gate has the lowest loss of the six positions for every seed "
                "and at every length, on both texts."
            ),
        ),
        Claim(
            "A learned HyPE bias alone is not worse than ALiBi and KERPLE.",
            tuple(
                Contrast("dot/hype:tau=learned", n, other, n)
                for other in ("dot/alibi", "dot/kerple")
                for n in (128, LONGEST)
            ),
            left_is="not worse",
            why=(
                "With the default `mu`, HyPE differs little from ALiBi, whether fixed or learned, "
                "so the advantage of a learned HyPE bias over fixed ALiBi comes from learning. On "
                "each text, the mean loss of a learned HyPE bias is 0.004 to 0.017 higher than "
                "KERPLE's."
            ),
        ),
        Claim(
            "With RoPE, learning HyPE's tau and mu is better than learning tau alone.",
            tuple(Contrast(HYPE_WITH_MU, n, HYPE, n) for n in (128, LONGEST, FURTHER)),
            why=(
                "On novels, also learning `mu` lowers the loss for all three seeds, by at most "
                "0.040 (at 8192 bytes). The difference is largest for the seed whose loss rises if "
                "only tau is learned."
            ),
        ),
        Claim(
            "A HyPE bias with a learned tau, alone or with a learned mu, is better than a fixed "
            "HyPE bias.",
            tuple(
                Contrast(left, n, "dot/hype", n)
                for left in ("dot/hype:tau=learned", "dot/hype:tau=learned:mu=learned")
                for n in (128, LONGEST)
            ),
        ),
        Claim(
            "With RoPE, a learned HyPE bias is better than ALiBi.",
            tuple(
                Contrast(HYPE, n, other, n)
                for other in ("dot/rope+alibi", "dot/rope+alibi:slopes=learned")
                for n in (128, LONGEST, FURTHER)
            ),
            why=(
                "ALiBi's slopes are fixed in `rope+alibi`. With learned slopes, ALiBi's mean loss "
                "differs by less than 0.002 from that of a learned HyPE bias with the default "
                "`mu`, so the advantage over fixed slopes comes from learning."
            ),
        ),
    ),
    limits=(
        "The models are small, with four layers and a model dimension of 128. They read bytes and "
        "are trained for 600 steps of 16 windows, so they are far from convergence. At other model "
        "sizes, the order of the positions may differ. In the literature, larger models also break "
        "down beyond their training length. All combinations use the same learning rate. "
        "Shakespeare's plays are not evaluated at 8192 bytes, because their validation split "
        "contains only thirteen windows of that length."
    ),
    sources=(
        "RoPE: Su et al. 2021. ALiBi: Press et al. 2022. T5: Raffel et al. 2020. KERPLE: Chi et "
        "al. 2022. HyPE: Angelotti 2023. Transformer-XL: Dai et al. 2019. Relative keys: Shaw et "
        "al. 2018."
    ),
)
