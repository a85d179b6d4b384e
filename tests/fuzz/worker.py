"""Runs command lines in this process, one JSON line each way; the parent holds the clock."""

import contextlib
import io
import json
import resource
import sys
import traceback

from chipwise import cli


def run(arguments: list[str]) -> dict:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except BaseException:
            code, _ = -1, err.write(traceback.format_exc())
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"code": code, "out": out.getvalue()[-4000:], "err": err.getvalue()[-4000:], "bytes": rss}


if __name__ == "__main__":
    answers = sys.stdout
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
