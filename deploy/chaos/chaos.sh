#!/bin/sh
# Makes the links of a site bad, for as long as it runs: CHAOS is what netem is told, CHAOS_RATE limits what the site sends.
set -eu
netem=${CHAOS:-delay 80ms 10ms loss 0.5%}
rate=${CHAOS_RATE:-200mbit}
trap 'tc qdisc del dev eth0 root 2>/dev/null; exit 0' TERM INT
# shellcheck disable=SC2086 - several words
if tc qdisc replace dev eth0 root netem $netem rate "$rate" 2>/dev/null; then
    echo "links of this site: $netem, $rate"
elif tc qdisc replace dev eth0 root tbf rate "$rate" burst 64kb latency 400ms; then
    echo "links of this site: $rate alone, as this kernel has no netem: no delay, no loss"
fi
while :; do sleep 3600 & wait $!; done
