#!/bin/bash
# A training job seeds `random`, so that two runs draw the same data order and augmentations. A storage client in the same
# process breaks that: when botocore (under s3fs, boto3, smart_open) retries a request, it draws its pause from the
# module's own generator, not from one of its own. So a single 503 of the object store, which nobody sees as the retry
# succeeds, changes all later numbers of the run, and on that rank alone. The sources of gcsfs 2025.10.0 (retry.py) and of
# google-api-core 2.44.0 (retry) have the same call, not run here. Seen with botocore 1.42.4, CPython 3.11.
# The server is a loopback one that answers the first request with 503 or not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check botocore==1.42.4 2>/dev/null
cat > "$folder/look.py" <<'PY'
import http.server, random, sys, threading
import botocore.config, botocore.session

failures = int(sys.argv[1])


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global failures
        body = b"" if failures else b"weights"
        self.send_response(503 if failures else 200)
        failures = max(0, failures - 1)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = botocore.session.get_session().create_client(
    "s3", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{server.server_port}",
    aws_access_key_id="a", aws_secret_access_key="b",
    config=botocore.config.Config(s3={"addressing_style": "path"}, retries={"mode": sys.argv[2]}),
)
random.seed(0)
body = client.get_object(Bucket="bucket", Key="model")["Body"].read()
print(body.decode(), "the same numbers" if random.random() == random.Random(0).random() else "other numbers")
PY
for mode in legacy standard; do
    well=$("$folder/venv/bin/python" "$folder/look.py" 0 "$mode")
    retried=$("$folder/venv/bin/python" "$folder/look.py" 1 "$mode")
    echo "botocore 1.42.4, $mode: no failure: $well; one 503: $retried"
    [ "$well" = "weights the same numbers" ] || { echo "changed: $well"; exit 1; }
    [ "$retried" = "weights other numbers" ] || { echo "changed: $retried"; exit 1; }
done
