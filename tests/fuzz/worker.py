"""Runs command lines in this process, one JSON line each way; the parent holds the clock."""

import contextlib
import io
import json
import sys
import traceback
from pathlib import Path

from chipwise import cli


def run(arguments: list[str]) -> dict:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except BaseException:
            code, _ = -1, err.write(traceback.format_exc())
    # Not ru_maxrss, which a process has from the one that forked it
    status = Path("/proc/self/status").read_text()
    rss = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    said = err.getvalue()
    said = said if len(said) < 5000 else f"{said[:1000]}\n{said[-4000:]}"
    return {"code": code, "out": out.getvalue()[-4000:], "err": said, "bytes": rss}


if __name__ == "__main__":
    answers = sys.stdout
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
