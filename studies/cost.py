"""What a similarity costs in the training of a whole model."""

from study import Comparison, Study

SIMILARITIES = "dot,laplacian,gaussian,umbral,penumbral,hyperbolic,hyperbolic:model=ball,entailment"
MNIST = (
    *("gnomon", "data", "OUT"),
    "train.images=mnist/train-images-idx3-ubyte.gz",
    "train.labels=mnist/train-labels-idx1-ubyte.gz",
    "valid.images=mnist/t10k-images-idx3-ubyte.gz",
    "valid.labels=mnist/t10k-labels-idx1-ubyte.gz",
)


def comparison(
    name: str,
    title: str,
    data: str,
    arguments: tuple[str, ...],
    made_by: tuple[str, ...] = (),
    position: str = "rope",
) -> Comparison:
    return Comparison(
        name,
        title,
        data,
        (
            *arguments,
            *("--similarity", SIMILARITIES),
            *("--position", position),
            *("--steps", "30"),
            *("--seeds", "3"),
        ),
        made_by,
    )


STUDY = Study(
    title="What a similarity costs",
    question=(
        "Tseng et al. 2023 report that a model with cones trains at 0.9% to 21.9% less "
        "throughput than one with dot products, on a V100. How much longer does a step of "
        "training take on a processor, in each task?"
    ),
    comparisons=(
        comparison(
            "text",
            "Text, windows of 128 bytes",
            "tinyshakespeare",
            ("--lengths", "128", "--evaluation-bytes", "8192"),
        ),
        comparison(
            "long-text",
            "Text, windows of 1024 bytes",
            "tinyshakespeare",
            ("--lengths", "1024", "--batch", "4", "--evaluation-bytes", "8192"),
        ),
        comparison(
            "images",
            "Images of 50 tokens",
            "mnist.safetensors",
            ("--task", "images", "--evaluation-examples", "100"),
            MNIST,
            "rope:shape=grid",
        ),
        comparison(
            "diffusion",
            "Diffusion",
            "mnist.safetensors",
            ("--task", "diffusion", "--evaluation-images", "100"),
            MNIST,
            "sinusoidal:shape=grid",
        ),
        comparison(
            "speech",
            "Speech",
            "fsdd.safetensors",
            ("--task", "speech", "--utterances", "3", "--evaluation-utterances", "12"),
            (
                *("gnomon", "data", "OUT"),
                r"train.audio=fsdd/fsdd-recordings.tar:(?P<labels>\d)_(?P<speakers>[a-z]+)_"
                r"(\d\d|[5-9])\.wav",
                r"valid.audio=fsdd/fsdd-recordings.tar:(?P<labels>\d)_(?P<speakers>[a-z]+)_"
                r"[0-4]\.wav",
            ),
        ),
        comparison(
            "translation",
            "Translation",
            "multi30k",
            (
                *("--task", "translation"),
                *("--source-language", "de"),
                *("--dim", "128"),
                *("--depth", "2"),
                *("--vocabulary", "4000"),
                *("--evaluation-sentences", "8"),
            ),
        ),
        comparison(
            "graphs",
            "Graphs",
            "cora.safetensors",
            ("--task", "graphs"),
            (
                *("gnomon", "data", "OUT"),
                "graph.edges=cora/edges.txt",
                "graph.words=cora/features.txt",
                "graph.labels=cora/labels.txt",
                "train.nodes=cora/train.index",
                "valid.nodes=cora/val.index",
                "test.nodes=cora/test.index",
            ),
            "none",
        ),
    ),
    claims=(),
    limits=(
        "Small models, in which what is not attention takes its share of each step: a longer "
        "sequence or a narrower MLP has more of what differs. After 30 steps measures of quality "
        "tell nothing, and none are shown."
    ),
    sources="Tseng et al. 2023, Coneheads, the table of throughput.",
    of_time=True,
)
