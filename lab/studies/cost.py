"""Measures the cost of a similarity when training a whole model."""

from study import ADRENAL, CHORALES, CORA, FSDD, MAMMALS, MNIST, Comparison, Study

SIMILARITIES = "dot,laplacian,gaussian,umbral,penumbral,hyperbolic,hyperbolic:model=ball,entailment"


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
    title="The cost of a similarity",
    question=(
        "Tseng et al. 2023 report that on a V100, the training throughput with cones is 0.9% to "
        "21.9% lower than with dot products. On a CPU, how much longer does a training step take "
        "with cones and with other similarities?"
    ),
    answer=(
        "In transformer models, a training step takes 3 to 16% longer with cones than with the dot "
        "product. The paper's throughputs correspond to steps that take 1 to 28% longer. In the "
        "graph and hierarchy tasks, which spend most of a step on scores, a step with cones takes "
        "1.23 to 1.27 times as long as one with the dot product. Over all tasks, the step time "
        "relative to the dot product is 0.85 to 1.10 for the Laplacian and Gaussian similarities. "
        "For hyperbolic distances and entailment cones, it is 1.06 to 2.55, depending on the task "
        "and the processor."
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
            FSDD,
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
            CORA,
            "none",
        ),
        comparison(
            "volumes",
            "Volumes of 65 tokens",
            "adrenal.safetensors",
            ("--task", "volumes", "--evaluation-examples", "50"),
            ADRENAL,
            "rope:shape=grid",
        ),
        comparison(
            "music",
            "Music, windows of 256 events",
            "jsb.safetensors",
            ("--task", "music", "--lengths", "256"),
            CHORALES,
        ),
        comparison(
            "hierarchy",
            "Hierarchies in 16 dimensions",
            "mammals.safetensors",
            ("--task", "hierarchy", "--dim", "16"),
            MAMMALS,
            "none",
        ),
        comparison(
            "generated",
            "Generated problems, up to 40 symbols",
            "",
            ("--task", "generated", "--problem", "copy", "--lengths", "40"),
        ),
    ),
    claims=(),
    limits=(
        "The models are small, so the layers outside attention account for much of each step; "
        "longer sequences or narrower MLPs would show larger differences. Quality is not compared, "
        "because training stops after 30 steps. The hierarchy task has no attention; its steps "
        "only compute scores of pairs of points. Ratios with a wide range over the seeds (volumes, "
        "music, graphs) are unreliable, because other programs were running. Cosine, additive and "
        "Lorentz similarities and hyperbolic distances in the half-space and Klein models are not "
        "timed. The timings come from two machines."
    ),
    sources="Tseng et al. 2023, Coneheads, throughput table.",
    of_time=True,
)
