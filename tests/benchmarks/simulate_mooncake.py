"""What a whole recorded hour costs: `python tests/benchmarks/simulate_mooncake.py TRACE`.

TRACE is Mooncake's conversation_trace.jsonl.gz: 12,031 requests, 145 million prompt and 4.1
million output tokens. Aim: under 3 minutes of CPU and under 2 GB, with no figures drawn.
"""

import resource
import subprocess
import sys

SETTINGS = (
    "scheduler.max_num_seqs=256",
    "scheduler.max_num_batched_tokens=8192",
    "model.max_model_len=131072",
)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    command = [sys.executable, "-c", "from cluster.cli import main; main()", "simulate"]
    command += ["--trace", sys.argv[1], "--num-blocks", "40001", "--block-size", "16"]
    command += [part for setting in SETTINGS for part in ("--set", setting)]
    subprocess.run(command, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"CPU {used.ru_utime + used.ru_stime:.1f} s, of at most 180 s")
    print(f"peak memory {used.ru_maxrss / 1024:.0f} MB, of at most 2000 MB")


if __name__ == "__main__":
    main()
