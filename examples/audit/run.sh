#!/usr/bin/env bash
# A run that anybody can audit: data with a manifest, workers with certificates, a record, a signed statement, claims and a page.
# Writes all of it to the current folder.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"

mkdir data && printf 'a sample\n' >data/part-0
ringfence record data data # data.manifest
ringfence certificate new site node-0
ringfence policy new site/policy.toml --admit certificate
ringfence secret new checkpoint.key

# The run. Every worker writes its log to the folder `record`.
export RINGFENCE_POLICY="$PWD/site/policy.toml"
export RINGFENCE_CERTIFICATE_FILE="$PWD/site/node-0.pem" RINGFENCE_KEY_FILE="$PWD/site/node-0.key"
ringfence run --nproc-per-node 2 --rdzv-id audited --record record "$here/train.py" data.manifest checkpoint.key

# What the owner claims. An auditor has these values from the owner, the code and the data, not from the record.
ringfence record statement record -o run.json >/dev/null
cat >claims.toml <<END
run = "audited"
complete = true
sealed = true
workers = "spiffe://ringfence.internal/worker/node-0"
scripts = "$(sha256sum <"$here/train.py" | cut -d ' ' -f 1)"
data = "$(tail -n 1 data.manifest | sed 's/.*"root":"//; s/".*//')"
END

# The audit needs neither torch nor a network.
ringfence audit run.json --key run.pem
ringfence audit record --claims claims.toml --page audit.html
