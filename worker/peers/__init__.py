"""KV blocks from one worker's memory to another's: fetched where that is faster than computing them."""
