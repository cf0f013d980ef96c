"""Plants each mistake that `check_server` names in a small server with ten seeds, and checks right servers a hundred times.

    python -m tests.tools.check_servers

It takes about three minutes on one core. It prints a line for each right server that fails, and for each mistake that is
not seen and named first; then the smallest p-value of right servers.
"""

from specdecode.checking import check_server
from tests.support.served import MISTAKES, Model, serving


def main():
    smallest, right = 1.0, 0
    for mistake, seed in [(mistake, seed) for mistake in MISTAKES for seed in range(10)] + [
        ("", n) for n in range(100)
    ]:
        with serving(Model(seed, mistake, again=seed)) as url:
            report = check_server(url, "table")
        p_values = {check.name: check.p_value for check in report.checks}
        if report.passed == bool(mistake) or report.suspects[:1] != ([mistake] if mistake else []):
            print(mistake or "right", seed, report.suspects, p_values, flush=True)
        if not mistake:
            right += report.passed
            smallest = min(smallest, *p_values.values())
    print(f"{right} of 100 right servers pass; their smallest p-value: {smallest:.2g}")


if __name__ == "__main__":
    main()
