"""Exit statuses of the training program: what a supervisor decides by (docs/resume.md has the table)."""

EXIT_FAULT = 1  # an error that nobody foresaw, with its traceback
EXIT_CONFIG = 2  # config, flags, data or checkpoint do not fit; also of absl and argparse
EXIT_GUARD = 3  # a guard, a callback or a full disk stopped the run; stopped.json says why
# EX_TEMPFAIL of sysexits.h: saved at a SIGTERM, a process lost, a stall, or an object store that does not answer; start
# the run again.
EXIT_AGAIN = 75
EXIT_INTERRUPTED = 130  # by Ctrl-C before training began
EXIT_TERMINATED = 143  # by SIGTERM, with nothing saved
