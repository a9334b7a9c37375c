"""Answers a file of prompts with Ray Data: on a laptop's cores as it is, on a cluster unchanged.

    pip install 'turbojax[ray]'
    python examples/ray_batch.py                          # two actors on two cores, the embedded model, three questions
    python examples/ray_batch.py --input in.jsonl --output out/ --model Qwen/Qwen3-8B --num-actors 8 --num-gpus 1

On a cluster it runs where Ray runs (`ray job submit -- python examples/ray_batch.py ...`): `ray.init()` finds it, and
`--input`, `--output` and `--checkpoint` are then paths that every node reaches. Rows have a column `prompt`, `messages`
or `tokenized_prompt`, and where they like `sampling_params`; with `--checkpoint` also an `id` of their own, and a job
that was stopped goes on with the same command. Ray's own filter of rows that are done then takes a CPU besides those of
the actors: on a laptop of two cores, `--num-actors 1`.
"""

from __future__ import annotations

import argparse

import ray

from turbojax import EngineConfig, GenerationConfig
from turbojax.integrations.ray_data import generate

QUESTIONS = ("What is the capital of France?", "Name three colours.", "Why is the sky blue?")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", help="JSON lines or a folder of them; default: three questions")
    parser.add_argument("--output", help="folder for JSON lines; default: print the answers")
    parser.add_argument("--checkpoint", help="folder that says which rows are done; needs --input and --output")
    parser.add_argument("--model", help="folder, .gguf file or repo id; default: the embedded model")
    parser.add_argument("--num-actors", type=int, default=2)
    parser.add_argument("--num-cpus", type=int, default=1, help="of each actor")
    parser.add_argument("--num-gpus", type=int, default=0, help="of each actor")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="rows that an actor takes, and is given again, at once"
    )
    parser.add_argument("--session-len", type=int, default=2048)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    return parser.parse_args()


def dataset_of(args: argparse.Namespace) -> ray.data.Dataset:
    """The rows to answer."""
    if args.checkpoint:
        from ray.data.checkpoint import CheckpointConfig

        context = ray.data.DataContext.get_current()
        context.checkpoint_config = CheckpointConfig(id_column="id", checkpoint_path=args.checkpoint)
    if args.input:
        # Actors may take every CPU of a laptop: reading and writing then wait for one that never comes free.
        return ray.data.read_json(args.input, lines=True, num_cpus=0)
    rows = [{"id": i, "messages": [{"role": "user", "content": text}]} for i, text in enumerate(QUESTIONS)]
    return ray.data.from_items(rows, override_num_blocks=args.num_actors)


def main() -> None:
    args = arguments()
    ray.init(ignore_reinit_error=True)
    if args.checkpoint and ray.cluster_resources().get("CPU", 0) <= args.num_actors * args.num_cpus:
        raise SystemExit(f"--checkpoint needs a CPU besides those of the actors ({args.num_actors} x {args.num_cpus})")
    answers = generate(
        dataset_of(args),
        args.model,
        EngineConfig(session_len=args.session_len, max_batch_size=2 * args.batch_size),
        GenerationConfig(max_new_tokens=args.max_new_tokens),
        num_actors=args.num_actors,
        num_cpus=args.num_cpus,
        num_gpus=args.num_gpus,
        batch_size=args.batch_size,
        should_continue_on_error=True,
    )
    if args.output:
        answers.write_json(args.output, ray_remote_args={"num_cpus": 0})
        return
    for row in answers.iter_rows():
        print(f"{row['id']}: {row['generated_text'] or row['__inference_error__']}")


if __name__ == "__main__":
    main()
