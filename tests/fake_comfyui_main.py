"""Stands in for ComfyUI's main.py: what a fleet asks, with faults from a file beside it."""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

port = int(sys.argv[sys.argv.index("--port") + 1])
faults = json.loads((Path(__file__).parent / "faults.json").read_text())
print("arguments", *sys.argv[1:], flush=True)
if "child" in faults:
    child = subprocess.Popen(["sleep", "600"], start_new_session=faults["child"] == "apart")
    print("child", child.pid, flush=True)
if "end" in faults:
    sys.exit("no such file: a model")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        faults = json.loads((Path(__file__).parent / "faults.json").read_text())
        queue = {"exec_info": {"queue_remaining": faults.get("left", 0)}}
        answers = {"/system_stats": {"system": {}}, "/prompt": queue}
        body = json.dumps(answers[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


host = sys.argv[sys.argv.index("--listen") + 1] if "--listen" in sys.argv else "127.0.0.1"
ThreadingHTTPServer((host, port), Handler).serve_forever()
