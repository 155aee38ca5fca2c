"""Rates as arithmetic: a bucket that fills steadily, holds a minute's worth, and may go into debt.

What a request takes is known in part when it begins (its prompt) and in part when it ends (its output). So it
may begin while the bucket holds anything at all; what it took beyond that is paid back by waiting. The same
arithmetic runs in Redis, as a script, where routers share their buckets. Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(frozen=True)
class Bucket:
    """level: what is left, below zero in debt. at: time of that level, in seconds."""

    level: float
    at: float


def full(per_minute: float, now: float) -> Bucket:
    return Bucket(per_minute, now)


def filled(bucket: Bucket, per_minute: float, now: float) -> Bucket:
    gained = max(0.0, now - bucket.at) * per_minute / MINUTE_S
    return Bucket(min(per_minute, bucket.level + gained), max(now, bucket.at))


def wait_s(bucket: Bucket, per_minute: float, needed: float) -> float:
    """Until `needed` is there, which may not exceed a full bucket; 0 where it is."""
    return max(0.0, min(needed, per_minute) - bucket.level) * MINUTE_S / per_minute


def taken(bucket: Bucket, amount: float) -> Bucket:
    return Bucket(bucket.level - amount, bucket.at)


# KEYS: one hash per bucket. ARGV: for each: per_minute, needed, amount. Takes from all or from none; answers
# how long to wait (as text, for Redis would round it; 0 where it took) and for which bucket.
SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local levels, longest, which = {}, 0, 0
for i, key in ipairs(KEYS) do
  local rate, needed = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1])
  local stored = redis.call('HMGET', key, 'level', 'at')
  local level, at = tonumber(stored[1] or rate), tonumber(stored[2] or now)
  level = math.min(rate, level + math.max(0, now - at) * rate / 60)
  levels[i] = level
  local wait = (math.min(needed, rate) - level) * 60 / rate
  if wait > longest then longest, which = wait, i end
end
if longest > 0 then return {tostring(longest), which} end
for i, key in ipairs(KEYS) do
  local rate, level = tonumber(ARGV[3 * i - 2]), levels[i] - tonumber(ARGV[3 * i])
  redis.call('HSET', key, 'level', tostring(level), 'at', tostring(now))
  redis.call('PEXPIRE', key, math.ceil((rate - level) * 60000 / rate) + 1000)
end
return {'0', 0}
"""
