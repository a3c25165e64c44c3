#!/bin/sh
# Makes the links of a site bad, for as long as it runs: CHAOS is what netem is told, CHAOS_RATE limits what the site sends.
# It ends with 1 once the site's network is another one, after a restart of the site: started again, it finds the new one.
set -eu
netem=${CHAOS:-delay 80ms 10ms loss 0.5%}
rate=${CHAOS_RATE:-200mbit}
trap 'tc qdisc del dev eth0 root 2>/dev/null; exit 0' TERM INT

status=0
# shellcheck disable=SC2086 - several words
tc qdisc replace dev eth0 root netem $netem rate "$rate" || status=$?
if [ "$status" = 0 ]; then
    echo "links of this site: $netem, $rate"
elif [ "$status" = 2 ]; then                # the kernel's refusal; what tc itself does not understand is 1
    tc qdisc replace dev eth0 root tbf rate "$rate" burst 256kb latency 400ms
    echo "links of this site: $rate alone, as this kernel has no netem: no delay, no loss"
else
    echo "CHAOS=\"$netem\" or CHAOS_RATE=\"$rate\" is not what tc-netem takes: correct it" >&2
    exit 1
fi
while tc qdisc show dev eth0 >/dev/null 2>&1; do sleep 5 & wait $!; done
echo "the network of this site is gone" >&2
exit 1
