"""Train a small GPT on real text; any worker may die at any moment.

    perdure run --nproc-per-node 4 examples/train_gpt.py --steps 200 --sample
    python examples/train_gpt.py --steps 20           # the same script alone, as one worker

The text is Python's own standard library, or the file given by `--data`.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch

import perdure
from gpt import GPT, GPTConfig, load_text, loss_fn, make_optimizer, make_scheduler


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on bytes.")
    parser.add_argument("--data", type=Path, metavar="FILE", help="text to learn (default: Python's library)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer updates")
    parser.add_argument("--micro-batch", type=int, default=4, help="windows in one micro-batch")
    parser.add_argument("--per-step", type=int, default=16, help="micro-batches in a step, over all workers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=128, help="bytes the model sees at once")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak of the learning rate")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="autocast to it")
    parser.add_argument("--eval-every", type=int, default=50, metavar="STEPS", help="0: never")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes of each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", action="store_true", help="print generated text at the end")
    args = parser.parse_args()
    if args.data is not None and not args.data.is_file():
        parser.error(f"--data {args.data} is not a file; give one to learn, or leave it out")
    return args


def main() -> None:
    args = parse_args()
    job = perdure.join(seed=args.seed)
    config = GPTConfig(
        layers=args.layers, heads=args.heads, width=args.width, context=args.context, dropout=args.dropout
    )
    model = GPT(config).to(job.device)
    optimizer = make_optimizer(model, args.lr)
    scheduler = make_scheduler(optimizer, args.steps)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler)

    training, validation = load_text(args.data, args.context)
    batches = perdure.MicroBatches(
        training, batch_size=args.micro_batch, per_step=args.per_step, num_workers=args.num_workers
    )
    # A fixed, evenly spread part of the held-out text: one step's worth of micro-batches.
    wanted = min(len(validation), args.micro_batch * args.per_step)
    spread = range(0, wanted * (len(validation) // wanted), len(validation) // wanted)
    validation_batches = perdure.MicroBatches(
        torch.utils.data.Subset(validation, spread),
        batch_size=args.micro_batch,
        per_step=max(1, wanted // args.micro_batch),
        blocks=1,
        shuffle=False,
    )

    def forward(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, targets = (part.to(job.device) for part in batch)
        half = args.dtype == "bfloat16"
        with torch.autocast(job.device.type, dtype=torch.bfloat16) if half else nullcontext():
            return loss_fn(model(tokens), targets)

    def evaluate_batch(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
        model.eval()
        loss = forward(batch)
        model.train()
        return {"validation_loss": loss.item()}

    for step in job.steps(batches, until=args.steps):
        for batch in step:
            step.backward(forward(batch))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.log(lr=scheduler.get_last_lr()[0], grad_norm=norm.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if args.eval_every and (step.index + 1) % args.eval_every == 0:
            result = job.evaluate(evaluate_batch, validation_batches)
            step.log(**result)
            if job.leader:
                print(f"step {step.index}: loss {step.loss:.3f}, held out {result['validation_loss']:.3f}")

    if args.sample and job.leader:
        print(model.generate(b"def ", 400, seed=args.seed).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
