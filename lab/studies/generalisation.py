"""Tests which positions generalise to lengths beyond the training length."""

from collections.abc import Callable

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
# With random positions, the tokens of a row get sorted random positions below this number.
AT_RANDOM = ("--random-positions", "2048")
LENGTHS = "40,100,200,500"


def repeats(symbols: int) -> Callable[[str], tuple[str, str, dict[int, float]]]:
    """Returns a baseline for sorting that repeats the previous symbol, which the models also see.

    It is wrong once per distinct symbol. The expected number of distinct symbols in n draws from
    V symbols is V (1 - (1 - 1/V)^n).
    """

    def baseline(lengths: str) -> tuple[str, str, dict[int, float]]:
        scores = {}
        for n in map(int, lengths.split(",")):
            scores[n] = 1 - symbols * (1 - (1 - 1 / symbols) ** n) / n
        return "repeating the previous symbol", "accuracy", scores

    return baseline


# Baselines for problems with their default numbers of symbols.
REPEATS = {"sort": repeats(100), "bucket-sort": repeats(5)}


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
        f"{title}, random positions" if at_random else title,
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
        baseline=REPEATS[problem](lengths) if problem in REPEATS else None,
    )


# With this many symbols, most occur only a few times in an input, so a symbol usually determines
# the next one, as in text. With two symbols, it does not, and 1500 steps are too few to learn
# copying.
MANY_SYMBOLS = ("--symbols", "32")
# Enough keys for an input of 120 symbols.
KEYS = ("--symbols", "64")
# Problems that some positions learn at the training lengths, and the longer lengths at which they
# are compared.
LEARNED = {
    "copy": (100, 500),
    "reverse": (100, 500),
    "sort": (100, 500),
    "bucket-sort": (100, 500),
    "recall": (80, 120),
}
AT_RANDOM_TOO = ("copy", "reverse", "sort", "bucket-sort")


def contrasts(left: str, right: str) -> tuple[Contrast, ...]:
    return tuple(
        Contrast(left, at, right, at, left_in=problem, right_in=problem)
        for problem, lengths in LEARNED.items()
        for at in lengths
    )


def at_random(right: str) -> tuple[Contrast, ...]:
    """Compares RoPE and sinusoids with random positions to `right` or, if `right` is empty, to the
    same encoding without random positions."""
    return tuple(
        Contrast(
            *(position, at, right or position, at),
            left_in=f"{problem}-at-random",
            right_in=problem,
        )
        for position in ("dot/rope", "dot/sinusoidal")
        for problem in AT_RANDOM_TOO
        for at in LEARNED[problem]
    )


STUDY = Study(
    title="Synthetic problems beyond the training length",
    question=(
        "Decoders are trained on problems of 1 to 40 symbols and evaluated on up to 500 symbols "
        "(120 in the recall problem). In the literature, positions drawn at random from a longer "
        "range perform best (Ruoss et al. 2023). Models without positions are better than models "
        "with ALiBi, which are better than models with RoPE or absolute positions (Kazemnejad et "
        "al. 2023). Does this order hold here, and where do learned HyPE biases and forget gates "
        "fall in it?"
    ),
    answer=(
        "With three seeds, the published order is not reproduced. Only three of 108 differences "
        "are significant; in one of them, the model without positions is better than the model "
        "with RoPE. At 500 symbols, no model sorts better than a predictor that repeats the "
        "previous symbol. Except in bucket sort, where that predictor has an accuracy of 0.99, "
        "every model has a lower accuracy at 500 symbols than at 40."
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
            "Models without positions are better than models with RoPE at both longer lengths.",
            contrasts("dot/none", "dot/rope"),
            why=(
                "Both models learn to sort 40 symbols (with a mean accuracy of 0.84), and the "
                "results on 100 symbols confirm the claim. In bucket sort, the means also agree "
                "with the claim; at 500 symbols, RoPE's accuracy varies from 0.79 to 0.99 between "
                "seeds. Without positions, copying and reversing are hardly learned: the mean "
                "accuracies at 40 symbols are 0.18 and 0.11. The rows for these problems at 100 "
                "symbols therefore compare learning rather than generalisation. At 500 symbols, "
                "both models are near chance (0.03) in copying and reversing. No run learns recall "
                "without positions; with RoPE, two of three runs do."
            ),
        ),
        Claim(
            (
                "Models without positions are better than models with sinusoids at both longer "
                "lengths."
            ),
            contrasts("dot/none", "dot/sinusoidal"),
            why=(
                "At 40 symbols, both models have the same mean accuracy in sorting (0.84) and in "
                "bucket sort (0.99). At longer lengths, the accuracy with sinusoids varies more "
                "between seeds. On bucket sort with 500 symbols, it is 0.79 to 0.97 with "
                "sinusoids; without positions, it is 0.99 for every seed. At 40 symbols, copying "
                "and reversing are hardly learned without positions (mean accuracy at most 0.18) "
                "and partly learned with sinusoids (at most 0.54). At longer lengths, both models "
                "are near chance in these two problems. No run of either model learns recall."
            ),
        ),
        Claim(
            "ALiBi is better than RoPE at both longer lengths.",
            contrasts("dot/alibi", "dot/rope"),
            why=(
                "At 40 symbols, both models learn to copy and to sort, and at longer lengths ALiBi "
                "loses less accuracy. When copying 500 symbols, ALiBi has an accuracy of 0.27 for "
                "two seeds; for the third seed, it is near chance (0.03), as is RoPE for all "
                "seeds. When reversing 40 symbols, RoPE has a higher mean accuracy: 0.98, compared "
                "with 0.54 for ALiBi. When reversing 100 symbols, RoPE has no such advantage. On "
                "bucket sort with 500 symbols, ALiBi has a lower mean accuracy: 0.50, compared "
                "with 0.88 for RoPE. With either position, the model learns recall for the same "
                "two of three seeds. At 120 symbols, ALiBi has a higher accuracy than RoPE for "
                "both seeds."
            ),
        ),
        Claim(
            "Models without positions are better than models with ALiBi at both longer lengths.",
            contrasts("dot/none", "dot/alibi"),
            why=(
                "At 40 symbols, both models learn sorting and bucket sort. When sorting 100 "
                "symbols, the model without positions has a higher mean accuracy: 0.65, compared "
                "with 0.61 for ALiBi. When sorting 500 symbols, ALiBi has a higher mean accuracy: "
                "0.51, compared with 0.26 without positions. In bucket sort, the accuracy with "
                "ALiBi falls by half from 40 to 500 symbols. Copying and reversing are hardly "
                "learned without positions: the mean accuracies at 40 symbols are 0.18 and 0.11. "
                "No run learns recall without positions; with ALiBi, two of three runs do."
            ),
        ),
        Claim(
            "Random positions improve RoPE and sinusoids at both longer lengths.",
            at_random(""),
            why=(
                "With random positions, RoPE learns copying and reversing more slowly: at 40 "
                "symbols, its mean accuracy in copying is 0.83, compared with 0.99 without random "
                "positions. RoPE with random positions loses less accuracy at longer lengths: at "
                "100 symbols, its mean accuracy is higher by 0.15 in copying and by 0.10 in "
                "reversing. At 500 symbols, the accuracies in both problems are near chance (0.03) "
                "with and without random positions. On bucket sort with 500 symbols, random "
                "positions lower RoPE's mean accuracy and raise that of sinusoids to 0.99."
            ),
        ),
        Claim(
            "RoPE and sinusoids with random positions are better than no position at both longer "
            "lengths.",
            at_random("dot/none"),
            why=(
                "In copying and reversing, which are hardly learned without positions, random "
                "positions have higher mean accuracies. At 500 symbols, all three models are near "
                "chance in these two problems. In sorting, all three models have similar "
                "accuracies at 40 and 100 symbols; at 500 symbols, random positions have lower "
                "mean accuracies. In bucket sort, sinusoids with random positions are as accurate "
                "as the model without positions. With random positions, RoPE's accuracy on bucket "
                "sort with 500 symbols is 0.64 to 0.91, depending on the seed."
            ),
        ),
        Claim(
            "RoPE and sinusoids with random positions are better than ALiBi at both longer "
            "lengths.",
            at_random("dot/alibi"),
            why=(
                "In reversing and bucket sort, random positions have a higher mean accuracy in "
                "most rows. ALiBi has a higher mean accuracy when copying 100 symbols and when "
                "sorting 500 symbols. When copying 500 symbols, the models with random "
                "positions are near chance (mean accuracies of 0.08 for RoPE and 0.05 for "
                "sinusoids), and so is ALiBi for one of three seeds. When copying 40 symbols, "
                "ALiBi has a mean accuracy of 0.98, compared with 0.83 for RoPE with random "
                "positions. When reversing 40 symbols, ALiBi has a mean accuracy of 0.54, compared "
                "with 0.67 for RoPE with random positions."
            ),
        ),
        Claim(
            "A learned HyPE bias improves RoPE at both longer lengths.",
            contrasts("dot/rope+hype:tau=learned", "dot/rope"),
            why=(
                "At 40 symbols, the accuracies with and without the bias are similar. At 500 "
                "symbols, the bias lowers the mean accuracy in sorting and in bucket sort (from "
                "0.88 to 0.38 in bucket sort). In copying and reversing, the accuracies are near "
                "chance with and without the bias. With and without the bias, the model learns "
                "recall for the same two of three seeds; at 120 symbols, the accuracy is higher "
                "with the bias for both seeds. In these problems, the answer may depend on any "
                "part of the input, and a bias that grows with distance hides distant tokens. "
                "Whether this explains the lower accuracies was not tested. On texts, the bias "
                "keeps the loss low beyond the training length ([Beyond the training "
                "length](length.md))."
            ),
        ),
        Claim(
            "A forget gate is better than no position at both longer lengths.",
            contrasts("dot/forget", "dot/none"),
            why=(
                "With the gate, one of three runs learns to copy 40 symbols, two runs learn to "
                "reverse them, and two runs learn recall. Without positions, no run learns any of "
                "these three problems. The two runs that learn recall with the gate keep their "
                "accuracy up to 120 symbols. With RoPE, the accuracies of the two runs that learn "
                "recall fall to 0.39 and 0.32 (`lab/studies/generalisation/recall.json` contains "
                "all runs). At 500 symbols, the accuracies in copying and reversing are near "
                "chance with and without the gate. Both models learn sorting and bucket sort at 40 "
                "symbols. At 500 symbols, the model with the gate has a lower mean accuracy in "
                "both problems: in bucket sort, it is 0.37, compared with 0.99 without positions."
            ),
        ),
    ),
    limits=(
        "The models are decoders with two layers and a model dimension of 64. They are trained for "
        "a few thousand steps with one learning rate per problem; models in the literature are "
        "larger and are trained for a hundred times as long. The column for 40 symbols shows how "
        "well a problem is learned; if that accuracy is low, the accuracies at longer lengths are "
        "meaningless. Chance is 0.03 in copying and reversing (32 symbols) and 0.02 in recall (64 "
        "values). Recall is evaluated on at most 120 symbols, because 64 different keys allow at "
        "most 128 symbols. Random positions, which are drawn below 2048, were tried only in "
        "copying, reversing, sorting and bucket sort. At 40 symbols, the accuracies in parity and "
        "modular addition are at chance (1/2 and 1/5) with every position, and the accuracy in the "
        "stack problem is about two thirds, so no claim covers these three problems. Some runs "
        "learn recall and others do not, which explains the large spread of its accuracies. The "
        "accuracy is measured per symbol, and each symbol is predicted from the correct preceding "
        "symbols; a separate table shows the accuracy of whole answers."
    ),
    sources=(
        "Deletang et al. 2023, Neural Networks and the Chomsky Hierarchy; Ruoss et al. 2023, "
        "Randomized Positional Encodings Boost Length Generalization of Transformers; Kazemnejad "
        "et al. 2023, The Impact of Positional Encoding on Length Generalization in Transformers; "
        "Arora et al. 2023, Zoology."
    ),
)
