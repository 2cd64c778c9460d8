"""What several steps in flight are worth: `python -m tests.benchmarks.pipeline_window`.

Three pipeline stages of sleeping threads, 20 ms each, decoding only. One step in flight leaves
two of three stages idle; the aim with four is at least 2.5 times its steps a second.
"""

from tests.support.sleeping_workers import steps_per_second


def main() -> None:
    one = steps_per_second(1)
    print(f"1 in flight  {one:5.1f} steps/s")
    for steps_in_flight in (2, 3, 4):
        several = steps_per_second(steps_in_flight, num_steps=90)
        print(f"{steps_in_flight} in flight  {several:5.1f} steps/s  {several / one:.2f} x")


if __name__ == "__main__":
    main()
