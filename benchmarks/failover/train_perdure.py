"""perdure's arm: the loop of examples/train_gpt.py with the benchmark's shapes."""

from __future__ import annotations

from diary import Diary
from gate import Gate
from workload import build, parser

import perdure


def main() -> None:
    args = parser("Train under perdure.").parse_args()
    job = perdure.join(seed=0)
    parts = build(args)
    job.protect(model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler)
    batches = perdure.MicroBatches(parts.data, batch_size=args.micro_batch, per_step=args.per_step)
    gate = Gate(args.gate, "perdure", args.segment) if args.gate else None
    diary = Diary(args.diary) if args.diary else None
    for step in job.steps(batches, until=args.steps):
        for batch in step:
            step.backward(parts.loss(parts.model, batch))
        parts.update()
        if diary:
            diary.committed(step.index)
        if gate:
            gate.passed(step.index)


if __name__ == "__main__":
    main()
